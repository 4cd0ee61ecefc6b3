"""From what every rank has reported to one report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.errors import CkptError
from ckpt_tools.processes.journal import RankLog
from ckpt_tools.smoke.report import PHASES, PhaseResult, RankMemory, ReloadResult, SmokeReport

_NOT_REACHED = "not reached"


def first_error(logs: Mapping[int, RankLog]) -> CkptError | None:
    """Return what makes the run meaningless, as the lowest rank says it."""
    for rank in sorted(logs):
        for error in logs[rank].errors:
            return error
    return None


def assemble(
    logs: Mapping[int, RankLog],
    *,
    source: str,
    model: str,
    mesh: str,
    strategy: str,
    device: str,
    findings: Iterable[Finding] = (),
    stacks: Mapping[int, str] | None = None,
    reload_logs: Mapping[int, RankLog] | None = None,
    reload_skipped: str = "",
) -> SmokeReport:
    """Return the report of a run.

    Args:
        logs: Rank → log, of the world that trained.
        source: What was tried.
        model: Class of the model, where no rank knew more.
        mesh: Of that world.
        strategy: Of that world.
        device: Of that world.
        findings: What was found about the ranks themselves.
        stacks: Rank → stacks, after a hang.
        reload_logs: Rank → log, of the world that reloaded.
        reload_skipped: Why there is no such world.
    """
    facts = logs.get(0) or RankLog(rank=0)
    reload_logs = reload_logs or {}
    results = [_phase(name, reload_logs if name == "reload-other-world" else logs) for name in PHASES]
    if reload_skipped:
        results[-1] = PhaseResult(name=PHASES[-1], ok=None, seconds=0.0, what=reload_skipped)
    every = [*logs.values(), *reload_logs.values()]
    other = reload_logs.get(0) or RankLog(rank=0)
    return SmokeReport(
        source=source,
        model=facts.fact("model", str) or model,
        world_size=len(logs),
        mesh=mesh,
        strategy=strategy,
        device=device,
        phases=tuple(results),
        findings=merge(_without_echoes([*findings, *(found for log in every for found in log.findings)])),
        losses=facts.fact("losses", tuple[float, ...]) or (),
        reference_losses=facts.fact("reference_losses", tuple[float, ...]) or (),
        max_grad_error=facts.fact("max_grad_error", float),
        tolerances=facts.fact("tolerances", dict[str, float]) or {},
        reload_same_world=facts.fact("reload_same_world", ReloadResult),
        reload_other_world=other.fact("reload_other_world", ReloadResult),
        memory=tuple(found for log in logs.values() if (found := log.fact("memory", RankMemory)) is not None),
        notes=tuple(dict.fromkeys(event.what for log in every for event in log.of_kind("note"))),
        stacks={rank: text for rank, log in logs.items() if (text := log.fact("trace", str))} | dict(stacks or {}),
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


def _without_echoes(findings: list[Finding]) -> list[Finding]:
    """Leave out what the ranks say that have lost one: that it does nothing any more is known."""
    if not any(finding.code == "rank-died" and not is_abort(finding) for finding in findings):
        return findings
    return [finding for finding in findings if finding.code not in ("rank-skip", "hang")]


def is_abort(finding: Finding) -> bool:
    """Did a rank end itself? gloo does so when ranks send each other what does not fit together."""
    return finding.code == "rank-died" and "SIGABRT" in finding.what


def merge(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings in their order, each once: most are the same on every rank."""
    found: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        key = (finding.code, finding.where)
        found.setdefault(key if finding.code == "rank-skip" else (*key, finding.what), finding)
    return tuple(found.values())
