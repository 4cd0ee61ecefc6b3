"""What the process beside a training run does: it manages the folder until what was saved is settled."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.runs.folder import BusyError, open_folder, place_of
from ckpt_tools.runs.manage import PruneResult, RunManager, Settings
from ckpt_tools.sandbox.child import Here

_POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TendingJob:
    """What to manage."""

    path: str
    names: tuple[str, ...] = ()  # What was saved, or is being saved
    settings: Settings
    patience_s: float  # For so long nothing changes before a save counts as given up


@dataclass(frozen=True, slots=True, kw_only=True)
class TendingAnswer:
    """What came of it."""

    findings: tuple[Finding, ...] = ()
    failed: tuple[str, ...] = ()
    last_verified: str = ""  # Path of the latest good one


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportJob:
    """What to export at the end."""

    source: str
    destination: str
    config: Mapping[str, object] | None


def tend(job: TendingJob, here: Here) -> TendingAnswer:
    """Manage the folder until everything that was saved is verified, or nothing more comes."""
    del here
    manager = RunManager(open_folder(job.path), job.settings)
    findings: dict[Finding, None] = {}
    before, since = None, time.monotonic()
    while True:
        try:
            pruned = manager.once(wait=False)
        except BusyError as error:  # a watch of somebody else's: it does the same
            if time.monotonic() - since > job.patience_s:
                return TendingAnswer(findings=tuple(findings), failed=(str(error),))
            time.sleep(_POLL_S)
            continue
        findings.update(dict.fromkeys(each for each in pruned.findings if each.severity == "error"))
        waiting = _waiting(pruned, job.names)
        now = [(each.name, each.state, each.nbytes) for each in pruned.checkpoints]
        if now != before:
            before, since = now, time.monotonic()
        if not waiting or time.monotonic() - since > job.patience_s:
            ends = (f"its save did not finish: {why}" for why in waiting.values())
            found = map(Finding.error, itertools.repeat("unfinished-checkpoint"), waiting, ends)
            last = os.path.join(pruned.path, pruned.last_fit) if pruned.last_fit else ""
            return TendingAnswer(findings=(*findings, *found), failed=pruned.failed, last_verified=last)
        time.sleep(_POLL_S)


def export(job: ExportJob, here: Here) -> TendingAnswer:
    """Write the adapter that a checkpoint holds."""
    from ckpt_tools.adapters.export import export_lora

    del here
    export_lora(job.source, job.destination, live_config=job.config)
    return TendingAnswer()


def _waiting(pruned: PruneResult, names: Collection[str]) -> dict[str, str]:
    """Return the saves that have not come to an end: name → why. What something later follows is not waited for."""
    found = {}
    there = {each.name: each for each in pruned.checkpoints}
    latest = {each.series: each for each in pruned.checkpoints}  # by step
    for name in {*names, *(each.name for each in latest.values())}:
        place, candidate = place_of(name), there.get(name)
        is_passed = place and place.series in latest and (place.step or 0) < (latest[place.series].step or -1)
        if place is None or is_passed:
            continue
        if candidate is None or candidate.state not in ("verified", "unfit", "bad", "unsupported"):
            found[name] = "no such checkpoint" if candidate is None else candidate.why or candidate.state
    return found
