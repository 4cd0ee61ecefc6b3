"""What a smoke run found, as values and as the JSON document."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from ckpt_tools.description.checkpoint import Finding

PHASES = (
    "source",
    "start",
    "build",
    "shard",
    "load",
    "compare",
    "states",
    "forward",
    "loss",
    "backward",
    "gradients",
    "clip",
    "step",
    "save",
    "reload-same-world",
    "reload-other-world",
)
"""In the order in which they run. "source" checks the checkpoint itself while the ranks start."""
HOW_MEMORY = (
    "params, grads, optimizer: bytes of this rank's own tensors after the first step; "
    "peak: the process's resident memory (VmHWM, rank 0 with the reference) or, on GPUs, what PyTorch allocated"
)
"""How `RankMemory` was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """One phase."""

    name: str
    ok: bool | None
    """None: it did not run."""
    seconds: float
    """Of the slowest rank."""
    what: str = ""
    """What was done, found, or why it did not run."""


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
    mesh: str
    """Of the ranks that loaded it."""
    loss: float
    saved_loss: float
    """What the loss was when it was saved, for the same batch."""
    bitwise: bool
    """The two are the same number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeReport:
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
    tolerances: Mapping[str, float] = field(default_factory=dict)
    """What losses and gradients were held to."""
    reload_same_world: ReloadResult | None = None
    reload_other_world: ReloadResult | None = None
    memory: tuple[RankMemory, ...] = ()
    notes: tuple[str, ...] = ()
    """What was not tried, or tried on less than the whole model."""
    stacks: Mapping[int, str] = field(default_factory=dict)
    """Rank → where it hung, or the traceback of what it raised."""
    is_primary: bool = True
    """Under torchrun, only rank 0 speaks."""

    @property
    def ok(self) -> bool:
        """True when no phase failed and nothing worse than a warning was found."""
        failed = any(phase.ok is False for phase in self.phases)
        return not failed and not any(finding.severity == "error" for finding in self.findings)

    def to_json(self) -> dict[str, object]:
        """Return the JSON document (without the schema version)."""
        return {
            "ok": self.ok,
            "source": self.source,
            "model": self.model,
            "world_size": self.world_size,
            "mesh": self.mesh,
            "strategy": self.strategy,
            "device": self.device,
            "losses": [_number(loss) for loss in self.losses],
            "reference_losses": [_number(loss) for loss in self.reference_losses],
            "max_grad_error": _number(self.max_grad_error),
            "tolerances": dict(self.tolerances),
            "phases": [asdict(phase) for phase in self.phases],
            "reload": {
                "same_world": _json(self.reload_same_world),
                "other_world": _json(self.reload_other_world),
            },
            "memory": [asdict(memory) for memory in self.memory],
            "memory_measured": HOW_MEMORY,
            "notes": list(self.notes),
            "findings": [asdict(finding) for finding in self.findings],
            "stacks": {str(rank): text for rank, text in self.stacks.items()},
        }


def _json(reload: ReloadResult | None) -> dict[str, object] | None:
    if reload is None:
        return None
    return asdict(reload) | {"loss": _number(reload.loss), "saved_loss": _number(reload.saved_loss)}


def _number(value: float | None) -> float | None:
    """Return what JSON can hold: it has no NaN and no infinity."""
    return value if value is not None and math.isfinite(value) else None
