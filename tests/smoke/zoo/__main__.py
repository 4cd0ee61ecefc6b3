"""Walk the zoo and print what smoke says of every model."""

from __future__ import annotations

import sys
import time

from smoke.farm import Farm
from smoke.zoo import SPECS

chosen = {name: spec for name, spec in SPECS.items() if not sys.argv[1:] or name in sys.argv[1:]}
alarms = 0
with Farm() as farm:
    for name, spec in chosen.items():
        start = time.monotonic()
        try:
            report = farm.smoke(factory=spec, steps=2)
            said = [f"{found.severity}: {found.code}: {found.where}: {found.what}" for found in report.findings]
            notes = [f"note: {text}" for text in report.notes if not text.startswith("there is no checkpoint")]
            alarms += bool(said)
            grad = "-" if report.max_grad_error is None else f"{report.max_grad_error:.0e}"
            print(f"{'ok' if report.ok else 'ALARM':5} {name:20} {time.monotonic() - start:4.1f} s  {grad}", flush=True)
            for line in said[:4] + notes:
                print("     ", line[:400])
            if not report.ok and len(chosen) < 4:
                print(*report.stacks.values(), sep="\n")
        except Exception as error:
            alarms += 1
            print(f"ALARM {name:20} {type(error).__name__}: {str(error)[:300]}", flush=True)
print(f"{len(chosen)} models, {alarms} alarms")
