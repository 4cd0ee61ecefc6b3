"""Prove, before a long run, that a model with its checkpoint, mesh and strategy trains correctly.

The process that calls `run_smoke` stays light: it starts a launcher, which imports torch once and forks the ranks.
Importing this package imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated

from ckpt_tools.options import Doc, takes
from ckpt_tools.preflight.smoke.options import SmokeOptions
from ckpt_tools.preflight.smoke.report import PhaseResult, RankMemory, ReloadResult, SmokeReport
from ckpt_tools.preflight.smoke.run import run_smoke

__all__ = ["PhaseResult", "RankMemory", "ReloadResult", "SmokeOptions", "SmokeReport", "run_smoke"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeCall(SmokeOptions):
    """The options of `smoke`, and who is told of its progress."""

    on_phase: Annotated[
        Callable[[str, str], None] | None, Doc('Called with each phase and "begun", "done" or "failed".')
    ] = None
    on_abandoned: Annotated[
        Callable[[SmokeReport], None] | None,
        Doc("Under torchrun, called with the report when ranks hang, before the process ends."),
    ] = None


@takes(SmokeCall, 'ckpt_tools.smoke("model", nproc=2, steps=1).failed', "()")
def smoke(options: SmokeCall) -> SmokeReport:
    """Build, shard, load, train, save and reload a model on several ranks, and compare it with one process.

    The ranks are processes of this machine, which end with the call, or those of torchrun. `factory` is explained in
    `ckpt_tools.models.builtin`.

    Raises:
        UsageError: Impossible options, mesh or model.
        UnreadableError: The source is not a complete checkpoint.
    """
    told = SmokeOptions(**{each.name: getattr(options, each.name) for each in fields(SmokeOptions)})
    return run_smoke(told, on_phase=options.on_phase, on_abandoned=options.on_abandoned)
