"""What the process beside a training run does: it tends the folder until what was saved is settled."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.processes.child import Here
from ckpt_tools.tending.folder import BusyError, open_folder
from ckpt_tools.tending.retention import Rules
from ckpt_tools.tending.series import place_of
from ckpt_tools.tending.tend import Settings, Tended, Tender

_POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to tend."""

    path: str
    names: tuple[str, ...] = ()
    """What was saved, or is being saved."""
    rules: Rules
    level: Literal["data", "values"]
    settle_s: float
    patience_s: float
    """For so long nothing changes before a save counts as given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of it."""

    findings: tuple[Finding, ...] = ()
    failed: tuple[str, ...] = ()
    last_verified: str = ""
    """Path of the latest good one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportJob:
    """What to export at the end."""

    source: str
    destination: str
    config: Mapping[str, object] | None


def tend(job: Job, here: Here) -> Answer:
    """Tend the folder until everything that was saved is verified, or nothing more comes."""
    del here
    settings = Settings(rules=job.rules, level=job.level, quiet_s=job.settle_s, patience_s=math.inf)
    tender = Tender(open_folder(job.path), settings)
    findings: dict[Finding, None] = {}
    failed: tuple[str, ...] = ()
    before: object = None
    since = time.monotonic()
    while True:
        try:
            tended = tender.once(wait=False)
        except BusyError as error:  # a watch of somebody else's: it does the same
            if time.monotonic() - since > job.patience_s:
                return Answer(findings=tuple(findings), failed=(str(error),))
            time.sleep(_POLL_S)
            continue
        findings.update(dict.fromkeys(each for each in tended.findings if each.severity == "error"))
        failed = tended.failed
        waiting = _waiting(tended, job.names)
        now = [(each.name, each.state, each.nbytes) for each in tended.checkpoints]
        if now != before:
            before, since = now, time.monotonic()
        if not waiting or time.monotonic() - since > job.patience_s:
            for name, why in waiting.items():
                finding = Finding.error("unfinished-checkpoint", name, f"its save has not ended: {why}")
                findings[finding] = None
            last = os.path.join(tended.path, tended.last_fit) if tended.last_fit else ""
            return Answer(findings=tuple(findings), failed=failed, last_verified=last)
        time.sleep(_POLL_S)


def export(job: ExportJob, here: Here) -> Answer:
    """Write the adapter that a checkpoint holds."""
    from ckpt_tools.api import export_lora

    del here
    export_lora(job.source, job.destination, live_config=job.config)
    return Answer()


def _waiting(tended: Tended, names: Collection[str]) -> dict[str, str]:
    """Return the saves that have not come to an end: name → why. What something later follows is not waited for."""
    found = {}
    there = {each.name: each for each in tended.checkpoints}
    latest: dict[str, int] = {}
    for one in there.values():
        latest[one.series] = max(latest.get(one.series, -1), -1 if one.step is None else one.step)
    for name in {*names, *(name for name, one in there.items() if one.step == latest[one.series])}:
        place, candidate = place_of(name), there.get(name)
        if place is None or (place.step or 0) < latest.get(place.series, -1):
            continue
        if candidate is None or candidate.state not in ("verified", "unfit", "bad", "unsupported"):
            found[name] = "it is not there" if candidate is None else candidate.why or candidate.state
    return found
