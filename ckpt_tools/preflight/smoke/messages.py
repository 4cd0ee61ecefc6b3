"""What caller, launcher and ranks of a smoke run tell each other. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckpt_tools.preflight.smoke.options import SmokeOptions
from ckpt_tools.preflight.smoke.report import SmokeReport
from ckpt_tools.sandbox.journal import Event
from ckpt_tools.sandbox.ranks import RanksOutcome

WORLD_NAME = "world"  # Directory of the ranks that train
RELOAD_NAME = "reload"  # Directory of the ranks that reload
RELIEF = "try fewer ranks, or a smaller model"  # What to do when the machine runs out of memory
OnPhase = Callable[[str, str], None]  # Told about progress: the phase, and "begun", "done" or "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedWorld:
    """What one world has saved, for another to reload."""

    path: str
    loss: float  # When it was saved
    source: str  # Checkpoint of the base model
    num_layers: int | None  # Depth that the model was cut to; None for its own
    tp: int  # Size of the axis: worlds of the same add partial sums in the same order
    loss_at: str | None  # Where the loss is in what forward returns
    on_cpu: bool  # The model is built there
    needs_gradients: bool  # Forward takes some itself
    talks: bool  # Forward communicates: its loss depends on the number of ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchJob:
    """What the launcher does."""

    options: SmokeOptions
    saved: SavedWorld | None = None  # Reload this and do nothing else: the ranks that trained are torchrun's


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """What came of it: a report, or what became of ranks that only reloaded."""

    report: SmokeReport | None = None
    reloaded: RanksOutcome | None = None


def tell(on_phase: OnPhase | None, event: Event) -> None:
    """Pass on that a phase begins or ends."""
    if on_phase is not None and event.kind in ("phase", "done"):
        on_phase(event.name, "begun" if event.kind == "phase" else "done" if event.ok else "failed")
