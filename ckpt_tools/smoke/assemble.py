"""From what every rank has reported to one report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.errors import CkptError
from ckpt_tools.processes.journal import RankLog
from ckpt_tools.processes.ranks import Outcome
from ckpt_tools.smoke.report import PHASES, PhaseResult, RankMemory, ReloadResult, SmokeReport

if TYPE_CHECKING:
    from ckpt_tools.smoke.setting import Setting

_NOT_REACHED = "not reached"
_ECHOES = ("rank-skip", "hang")
"""What ranks say that have lost one: that it does nothing any more is known."""


def first_error(logs: Mapping[int, RankLog]) -> CkptError | None:
    """Return what makes the run meaningless, as the lowest rank says it."""
    for rank in sorted(logs):
        for error in logs[rank].errors:
            return error
    return None


def assemble(
    setting: Setting, trained: Outcome, reloaded: Outcome | None = None, *, reload_skipped: str = ""
) -> SmokeReport:
    """Return the report of a run.

    Args:
        setting: Of the world that trained.
        trained: What became of it.
        reloaded: What became of the world that reloaded.
        reload_skipped: Why there is no such world.
    """
    logs = trained.logs
    reloaded = reloaded or Outcome(logs={})
    facts, other = (world.logs.get(0) or RankLog(rank=0) for world in (trained, reloaded))
    results = [_phase(name, reloaded.logs if name == "reload-other-world" else logs) for name in PHASES]
    if reload_skipped:
        results[-1] = PhaseResult(name=PHASES[-1], ok=None, seconds=0.0, what=reload_skipped)
    every = [*logs.values(), *reloaded.logs.values()]
    told = [*trained.findings, *reloaded.findings, *(found for log in every for found in log.findings)]
    # When a rank was ended from outside, the others had nobody to talk to any more.
    left_out = _ECHOES if trained.has_lost_rank or reloaded.has_lost_rank else ()
    return SmokeReport(
        source=setting.options.label,
        model=facts.fact("model", str) or setting.recipe.title,
        world_size=len(logs),
        mesh=str(setting.mesh),
        strategy=setting.policy.strategy,
        device=facts.fact("device", str) or setting.options.device,
        phases=tuple(results),
        findings=merge(found for found in told if found.code not in left_out),
        losses=facts.fact("losses", tuple[float, ...]) or (),
        reference_losses=facts.fact("reference_losses", tuple[float, ...]) or (),
        max_grad_error=facts.fact("max_grad_error", float),
        tolerances=facts.fact("tolerances", dict[str, float]) or {},
        reload_same_world=facts.fact("reload_same_world", ReloadResult),
        reload_other_world=other.fact("reload_other_world", ReloadResult),
        memory=tuple(found for log in logs.values() if (found := log.fact("memory", RankMemory)) is not None),
        notes=tuple(dict.fromkeys(event.what for log in every for event in log.of_kind("note"))),
        stacks={rank: text for rank, log in logs.items() if (text := log.fact("trace", str))}
        | (trained.stacks or reloaded.stacks),
    )


def _phase(name: str, logs: Mapping[int, RankLog]) -> PhaseResult:
    """Return what became of a phase: failed when it did on any rank, or when a rank never ended it."""
    done = []
    begun = 0
    for log in logs.values():
        begun += any(event.name == name for event in log.of_kind("phase"))
        skips = [event.what for event in log.of_kind("skip") if event.name == name]
        if skips:
            return PhaseResult(name=name, ok=None, seconds=0.0, what=skips[0])
        done += [event for event in log.of_kind("done") if event.name == name]
    if not begun:
        return PhaseResult(name=name, ok=None, seconds=0.0, what=_NOT_REACHED)
    ok = len(done) == len(logs) and all(event.ok for event in done)
    seconds = max((event.seconds for event in done), default=0.0)
    what = next((event.what for event in done if event.what), "")
    if not ok and len(done) < begun and not any(not event.ok for event in done):
        what = f"{begun - len(done)} of {len(logs)} ranks did not end it"
    return PhaseResult(name=name, ok=ok, seconds=round(seconds, 3), what=what)


def merge(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings in their order, each once: most are the same on every rank."""
    found: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        key = (finding.code, finding.where)
        found.setdefault(key if finding.code == "rank-skip" else (*key, finding.what), finding)
    return tuple(found.values())
