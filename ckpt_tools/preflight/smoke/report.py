"""What a smoke run found, as values and as the JSON document, and how what ranks have reported comes to that."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.errors import CkptError
from ckpt_tools.results import CheckedResult
from ckpt_tools.sandbox.journal import RankLog
from ckpt_tools.sandbox.ranks import RanksOutcome
from ckpt_tools.text import first_few
from ckpt_tools.units import format_number, format_size

if TYPE_CHECKING:
    from ckpt_tools.preflight.smoke.setting import SmokeSetting


PHASES = (
    "source", "start", "build", "shard", "load", "compare", "states", "forward", "loss", "backward", "gradients",
    "clip", "step", "save", "reload-same-world", "reload-other-world",
)  # fmt: skip
"""In the order in which they run. "source" checks the checkpoint itself while the ranks start."""
HOW_MEMORY = (
    "params, grads, optimizer: bytes of this rank's own tensors after the first step; "
    "peak: the process's resident memory (VmHWM, rank 0 with the reference) or, on GPUs, what PyTorch allocated"
)
"""How `RankMemory` was measured."""
HOW_HELD = (
    "of the rank that held the most: the process's resident memory when the phase had ended (rank 0 with the "
    "reference) or, on GPUs, the most that PyTorch allocated in the phase"
)
"""How `PhaseResult.memory_bytes` was measured."""
_NOT_REACHED = "not reached"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """One phase."""

    name: str
    ok: bool | None  # None: it did not run
    seconds: float  # Of the slowest rank
    what: str = ""  # What was done, found, or why it did not run
    memory_bytes: int | None = None  # `HOW_HELD`; None where the phase did not end, or nothing tells


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of one rank, in bytes (`HOW_MEMORY`)."""

    rank: int
    params: int
    grads: int
    optimizer: int
    peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadResult:
    """What came back from the checkpoint that was saved."""

    ok: bool
    mesh: str  # Of the ranks that loaded it
    loss: float
    saved_loss: float  # What the loss was when it was saved, for the same batch
    bitwise: bool  # The two are the same number


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherStrategy:
    """The same run with another strategy, as far as the two are compared."""

    strategy: str
    mesh: str
    ok: bool
    step_seconds: float | None
    memory: tuple[RankMemory, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SmokeReport(CheckedResult):
    """What `run_smoke` found."""

    source: str
    """What was tried."""
    model: str
    """Class of the model, and how it was built."""
    world_size: int
    mesh: str
    strategy: str
    device: str
    phases: tuple[PhaseResult, ...]
    findings: tuple[Finding, ...] = ()
    losses: tuple[float, ...] = ()
    """Mean over ranks, per step."""
    reference_losses: tuple[float, ...] = ()
    """The same without sharding; empty when there was no reference."""
    max_grad_error: float | None = None
    """Largest relative error of a parameter's gradient in the first step."""
    grad_errors: Mapping[str, float] = field(default_factory=dict)
    """Parameter → that error, of those that could be compared closely."""
    tolerances: Mapping[str, float] = field(default_factory=dict)
    """What losses and gradients were held to."""
    reload_same_world: ReloadResult | None = None
    reload_other_world: ReloadResult | None = None
    memory: tuple[RankMemory, ...] = ()
    step_seconds: float | None = None
    """Of a step after the first, on rank 0: the median; None with a single step."""
    compared: OtherStrategy | None = None
    """With `--compare`, what another strategy takes."""
    notes: tuple[str, ...] = ()
    """What was not tried, or tried on less than the whole model."""
    stacks: Mapping[int, str] = field(default_factory=dict)
    """Rank → where it hung, or the traceback of what it raised."""
    is_primary: bool = True
    """Under torchrun, only rank 0 speaks."""

    @property
    def failed(self) -> tuple[str, ...]:
        """The phases that failed."""
        return tuple(phase.name for phase in self.phases if phase.ok is False)

    @property
    def ok(self) -> bool:
        """True when no phase failed and nothing worse than a warning was found."""
        return not self.failed and not any(finding.severity == "error" for finding in self.findings)

    @property
    def title(self) -> str:
        """Its verdict, in a line."""
        return describe_verdict(self)

    def to_json(self) -> dict[str, object]:
        """Return it as JSON holds it."""
        values = asdict(self)
        values |= {
            "ok": self.ok,
            "reload": {"same_world": values["reload_same_world"], "other_world": values["reload_other_world"]},
            "memory_measured": HOW_MEMORY,
            "phase_memory_measured": HOW_HELD,
            "stacks": {str(rank): text for rank, text in self.stacks.items()},
        }
        return {key: values[key] for key in _KEYS}


_KEYS = (
    "ok", "source", "model", "world_size", "mesh", "strategy", "device", "losses", "reference_losses", "max_grad_error",
    "grad_errors", "tolerances", "phases", "reload", "memory", "memory_measured", "phase_memory_measured",
    "step_seconds", "compared", "notes", "findings", "stacks",
)  # fmt: skip
"""Of the JSON document, in its order."""


def first_error(logs: Mapping[int, RankLog]) -> CkptError | None:
    """Return what makes the run meaningless, as the lowest rank says it."""
    for rank in sorted(logs):
        for error in logs[rank].errors:
            return error
    return None


def assemble(
    setting: SmokeSetting, trained: RanksOutcome, reloaded: RanksOutcome | None = None, *, reload_skipped: str = ""
) -> SmokeReport:
    """Return the report of what trained and of the world that reloaded, or of why there is none."""
    logs = trained.logs
    reloaded = reloaded or RanksOutcome(logs={})
    facts, other = (world.logs.get(0) or RankLog(rank=0) for world in (trained, reloaded))
    results = [_phase(name, reloaded.logs if name == "reload-other-world" else logs) for name in PHASES]
    if reload_skipped:
        results[-1] = PhaseResult(name=PHASES[-1], ok=None, seconds=0.0, what=reload_skipped)
    every = [*logs.values(), *reloaded.logs.values()]
    told = [*trained.findings, *reloaded.findings, *of_ranks(log.findings for log in every)]
    return SmokeReport(
        source=setting.options.label,
        model=facts.fact("model", str) or setting.recipe.title,
        world_size=len(logs),
        mesh=str(setting.mesh),
        strategy=setting.policy.strategy,
        device=facts.fact("device", str) or setting.options.device,
        phases=tuple(results),
        findings=tuple(causes(told, has_lost_rank=trained.has_lost_rank or reloaded.has_lost_rank)),
        losses=facts.fact("losses", tuple[float, ...]) or (),
        reference_losses=facts.fact("reference_losses", tuple[float, ...]) or (),
        max_grad_error=facts.fact("max_grad_error", float),
        grad_errors=facts.fact("grad_errors", dict[str, float]) or {},
        tolerances=facts.fact("tolerances", dict[str, float]) or {},
        reload_same_world=facts.fact("reload_same_world", ReloadResult),
        reload_other_world=other.fact("reload_other_world", ReloadResult),
        step_seconds=facts.fact("step_seconds", float),
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
        what = f"{begun - len(done)} of {len(logs)} ranks did not finish it"
    held = [(log.fact("held", dict[str, int]) or {}).get(name) for log in logs.values()]
    most = max((each for each in held if each is not None), default=None)
    return PhaseResult(name=name, ok=ok, seconds=round(seconds, 3), what=what, memory_bytes=most)


def describe_compared(report: SmokeReport, other: OtherStrategy) -> str:
    """Return one line: the largest memory of a rank, and a step on rank 0, of both strategies."""
    parts = []
    for name in ("params", "grads", "optimizer"):
        own, full = (max((getattr(rank, name) for rank in ranks), default=0) for ranks in (report.memory, other.memory))
        parts.append(f"{name} {format_size(own)} / {format_size(full)}")
    if report.step_seconds is not None and other.step_seconds is not None:
        parts.append(f"a step {report.step_seconds:.3f} s / {other.step_seconds:.3f} s here")
    failed = "" if other.ok else f" ({other.strategy} NOT ok)"
    return f"{report.strategy} / {other.strategy}, per rank: {', '.join(parts)}{failed}"


def describe_verdict(report: SmokeReport) -> str:
    """Return what the report comes to, in a line."""
    if not report.ok:
        codes = dict.fromkeys(finding.code for finding in report.findings if finding.severity == "error")
        return f"NOT ok: {', '.join(report.failed or codes)}"
    parts = []
    if report.max_grad_error is not None:
        exact = report.max_grad_error == 0
        close = f"within {format_number(report.max_grad_error, 2)}"
        parts.append("gradients " + ("bitwise as the reference" if exact else close))
    parts += [
        f"reload on {result.mesh}{' bitwise' if result.bitwise else ''}"
        for result in (report.reload_same_world, report.reload_other_world)
        if isinstance(result, ReloadResult)
    ]
    return "ok: " + "; ".join(parts)


# One cause, one finding: what many ranks or many tensors say alike is said once, and what only follows is left out.

RANK_LOST = "rank-lost"  # Code of a rank that failed because another one was gone
_ECHOES = ("rank-died", "rank-skip", "hang", RANK_LOST)
"""What is also said of ranks that have lost one, or that gloo has aborted; the most telling first."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_MAX_ALIKE = 2
_MAX_OF_CODE = 5


def pattern_of(where: str) -> str:
    """Return an FQN with its numbers left open: "layers.*.mlp"."""
    return _NUMBER.sub("*", where)


def group_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings of one rank, those about many layers or many tensors as a few."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.code, finding.severity, pattern_of(finding.where)), []).append(finding)
    folded: dict[tuple[str, str], list[list[Finding]]] = {}
    for (code, severity, pattern), group in groups.items():
        is_layer = pattern != group[0].where and len(group) > _MAX_ALIKE
        folded.setdefault((code, severity), []).extend([group] if is_layer else [[each] for each in group])
    found = []
    for parts in folded.values():
        found += [_as_one(group) for group in parts[:_MAX_OF_CODE]]
        if rest := parts[_MAX_OF_CODE:]:
            names = [pattern_of(group[0].where) for group in rest]
            what = f"{sum(map(len, rest))} more like these: {first_few(names)}"
            found.append(replace(rest[0][0], where="…", what=what))
    return found


def _as_one(group: Sequence[Finding]) -> Finding:
    first = group[0]
    if len(group) == 1:
        return first
    return replace(first, what=f"{first.what}; and {len(group) - 1} more at {pattern_of(first.where)}")


def of_ranks(reported: Iterable[Sequence[Finding]]) -> list[Finding]:
    """Return what ranks report, in their order; of what several say about one thing, what the first one says."""
    told: set[tuple[str, str]] = set()
    found: list[Finding] = []
    for findings in map(list, map(dict.fromkeys, reported)):
        keys = [(finding.code, pattern_of(finding.where)) for finding in findings]
        found += [finding for finding, key in zip(findings, keys, strict=True) if key not in told]
        told.update(keys)
    return found


def causes(findings: Sequence[Finding], *, has_lost_rank: bool) -> list[Finding]:
    """Leave out what only follows from something else; once a rank is lost, the others had nobody to talk to."""
    echoes = [code for code in _ECHOES if code != ("rank-died" if has_lost_rank else "rank-skip")]
    codes = [finding.code for finding in findings if finding.severity == "error"]
    if all(code in echoes for code in codes):
        echoes = [code for code in echoes if code in codes][1:]
    kept = [finding for finding in findings if finding.code not in echoes]
    partings = [finding for finding in kept if finding.code == "rank-skip"]
    return [finding for finding in kept if finding not in partings[1:]]  # what comes after the first is no news
