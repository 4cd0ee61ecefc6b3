"""What caller, launcher and ranks of a smoke run tell each other. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.processes.journal import RankLog
from ckpt_tools.smoke.options import SmokeOptions
from ckpt_tools.smoke.report import SmokeReport

WORLD_NAME = "world"
"""Directory of the ranks that train."""
RELOAD_NAME = "reload"
"""Directory of the ranks that reload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What one world has saved, for another to reload."""

    path: str
    loss: float
    """When it was saved."""
    source: str
    """Checkpoint of the base model."""
    num_layers: int | None
    """Depth that the model was cut to; None for its own."""
    is_exact: bool
    """Both worlds add partial sums in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What the launcher does."""

    options: SmokeOptions
    saved: Saved | None = None
    """Reload this and do nothing else: the ranks that trained are torchrun's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """What came of it."""

    report: SmokeReport | None = None
    """Of a whole run."""
    logs: Mapping[int, RankLog] = field(default_factory=dict)
    """Of ranks that only reloaded."""
    findings: tuple[Finding, ...] = ()
    """About those."""
    has_lost_rank: bool = False
    """One of those was ended from outside."""
