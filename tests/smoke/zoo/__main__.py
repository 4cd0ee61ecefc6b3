"""Walk the zoo and print what smoke says of every model."""

from __future__ import annotations

import sys
import tempfile
import time

from smoke.farm import Farm
from smoke.zoo import CONFIGS, SPECS, lacks

chosen = sys.argv[1:] or [*SPECS, *CONFIGS]
alarms = skipped = 0
with Farm() as farm, tempfile.TemporaryDirectory() as directory:
    farm.call("smoke.makers:configs", directory, *[name for name in chosen if name in CONFIGS])
    for name in chosen:
        if library := lacks(name):
            print(f"-     {name:30} {library} is not installed")
            skipped += 1
            continue
        what = {"factory": SPECS[name]} if name in SPECS else {"model": f"{directory}/{name}"}
        start = time.monotonic()
        try:
            report = farm.smoke(steps=2, **what)
            said = [f"{found.severity}: {found.code}: {found.where}: {found.what}" for found in report.findings]
            said += [f"note: {text}" for text in report.notes if not text.startswith("no checkpoint is loaded")]
            alarms += bool(report.findings)
            worst = "-" if report.max_grad_error is None else f"{report.max_grad_error:.0e}"
            verdict = "ALARM" if report.findings else "ok"
        except Exception as error:
            alarms += 1
            verdict, worst, said = "ALARM", "-", [f"{type(error).__name__}: {error}"]
        print(f"{verdict:5} {name:30} {time.monotonic() - start:5.1f} s  gradients within {worst}", flush=True)
        for line in said[:5]:
            print("     ", line[:400], flush=True)
print(f"{len(chosen) - skipped} models, {alarms} alarms, {skipped} skipped")
