"""The state of one rank, and how phases begin, end and fail together."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.errors import CkptError, RefusedConfigError, UnclearLossError, UsageError
from ckpt_tools.fsdp2 import ShardedPlan
from ckpt_tools.fsdp2.collective import gather
from ckpt_tools.fsdp2.diagnose import diagnose
from ckpt_tools.fsdp2.entry_methods import DOUBLE_WRAP, DoubleWrapError
from ckpt_tools.fsdp2.internals import collectives_of, groups_of_ranks
from ckpt_tools.fsdp2.watch import Watch
from ckpt_tools.memory import rss_bytes
from ckpt_tools.models.recipe import Batch
from ckpt_tools.preflight.smoke.blueprint import Blueprint
from ckpt_tools.preflight.smoke.messages import SavedWorld
from ckpt_tools.preflight.smoke.reference import Reference, failure_alone
from ckpt_tools.preflight.smoke.report import RANK_LOST, group_findings
from ckpt_tools.preflight.smoke.setting import SmokeSetting
from ckpt_tools.sandbox.journal import Journal

_ARGUMENT_PHASES = ("start", "build", "shard")
"""Phases in which a UsageError means the options, not the model's behaviour."""
_RUNS_MODEL = ("forward", "backward")  # Phases that may fail because of the model, or of what ckpt feeds it
_GLOO = re.compile(r"gloo/transport/|Connection (closed|reset) by peer")
_MAX_TRACE_CHARS = 20_000


class Stopped(Exception):  # noqa: N818 - not an error: what is wrong has been reported
    """A phase failed on some rank; every rank ends."""


class Skipped(Exception):  # noqa: N818 - not an error
    """A phase cannot run; all ranks decide this alike."""


@dataclass(slots=True)
class RankRun:
    """One rank. What a phase makes is there for those after it."""

    setting: SmokeSetting
    rank: int
    device: torch.device
    directory: str  # Private to the run, seen by all ranks
    journal: Journal
    resources: ExitStack  # Closed when the rank ends
    device_mesh: DeviceMesh
    mesh_groups: frozenset[ProcessGroup]  # What FSDP communicates over
    is_local: bool
    blueprint: Blueprint = field(init=False)  # What phase build decided
    model: nn.Module = field(init=False)  # What phase build made
    optimizer: torch.optim.Optimizer = field(init=False)  # What phase states made
    saved: SavedWorld = field(init=False)  # What phase save wrote
    plan: ShardedPlan | None = None
    reference: Reference | None = None  # On rank 0, when there is one; on every rank when forward communicates
    has_reference: bool = True  # Is there one on rank 0?
    watch: Watch | None = None
    batch: Batch = field(default_factory=dict)
    loss: torch.Tensor | None = None
    loss_at: str | None = None  # Where it is in what forward returns (`find_loss`)
    talks: bool = False  # Forward communicates, beside what FSDP does
    needs_gradients: bool = False  # Forward takes some itself, and fails where they are off
    has_drawn: bool = False  # Forward drew random numbers on this rank
    losses: list[float] = field(default_factory=list)  # Of this run, mean over ranks, by step
    reference_losses: list[float] = field(default_factory=list)  # The same without sharding, on rank 0
    num_layers: int | None = None  # Depth that the model was cut to; None for its own
    held: dict[str, int] = field(default_factory=dict)  # Phase → memory of this rank, in bytes (`HOW_HELD`)
    num_errors: int = 0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.setting.mesh.world_size

    @property
    def dp_index(self) -> int:
        """Which batch this rank gets."""
        return self.setting.dp_index(self.rank)

    def count_collectives(self) -> int:
        """Return how many collectives have begun that are not FSDP's."""
        return collectives_of(groups_of_ranks() - self.mesh_groups)

    def report(self, *findings: Finding) -> None:
        """Report findings, many alike as one; errors fail the phase on every rank."""
        for finding in group_findings(findings):
            self.journal.finding(finding)
            self.num_errors += finding.severity == "error"

    def error(self, code: str, where: str, what: str, hint: str | None = None) -> None:
        """Report an error of one's own."""
        self.report(Finding.error(code=code, where=where, what=what, hint=hint))

    def note(self, *texts: str) -> None:
        """Report, as rank 0, what was not tried."""
        for text in () if self.rank else texts:
            self.journal.note(text)

    def fact(self, name: str, value: object) -> None:
        """Report, as rank 0, a value that is the same on all ranks or known to this one."""
        if self.rank == 0:
            self.journal.fact(name, value)

    def phase(self, name: str, function: Callable[[RankRun], str]) -> None:
        """Run one phase on every rank until all have ended it; raise Stopped if something is wrong on some rank."""
        self.journal.phase(name)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        try:
            what = function(self)
        except Skipped as skipped:
            self.journal.skip(name, str(skipped))
            return
        except (Exception, CheckpointException) as error:  # whatever the model does wrong
            if isinstance(error, CkptError) and _is_argument(error, name):
                raise
            if name in _RUNS_MODEL and (alone := failure_alone(self.blueprint.recipe, self.rank)) is not None:
                raise alone from error
            self.report(explain(error, getattr(self, "model", None), name))
            self.journal.fact("trace", "".join(traceback.format_exception(error))[-_MAX_TRACE_CHARS:])
            self.journal.done(name, ok=False, seconds=time.perf_counter() - start)
            raise Stopped from error
        # Whoever found something tells the others, who would otherwise wait for it in the next phase.
        num_errors = sum(gather(self.num_errors))
        held = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else rss_bytes()
        if held is not None:
            self.held[name] = held
            self.journal.fact("held", self.held)
        self.journal.done(name, ok=not num_errors, seconds=time.perf_counter() - start, what=what)
        if num_errors:
            raise Stopped


def _is_argument(error: CkptError, phase: str) -> bool:
    if isinstance(error, (RefusedConfigError, UnclearLossError)):
        return True
    if phase not in _ARGUMENT_PHASES or isinstance(error, DoubleWrapError):
        return False
    return isinstance(error, UsageError) or error.exit_code != UsageError.exit_code


def _is_lost_connection(error: BaseException) -> bool:
    """Is it what a collective raises when another rank is gone? Gloo's errors have no class of their own."""
    return isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and bool(_GLOO.search(str(error)))
    )


def explain(error: BaseException, model: nn.Module | None, phase: str) -> Finding:
    """Return the finding that an exception of a phase comes to."""
    if isinstance(error, CkptError):
        code = DOUBLE_WRAP if isinstance(error, DoubleWrapError) else f"{phase}-failed"
        return Finding.error(
            code=code,
            where=error.where or f"phase {phase}",
            what=error.what.removeprefix(f"{DOUBLE_WRAP}: "),
            hint=error.hint,
        )
    found = diagnose(error, model=model, phase=phase)
    if found.id != "unknown":
        return found.to_finding()
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    text = f"{type(error).__name__}: {first}"
    if _is_lost_connection(error):
        return Finding.error(RANK_LOST, f"phase {phase}", f"another rank stopped responding: {text}")
    return Finding.error(code=f"{phase}-failed", where=found.module or found.call or f"phase {phase}", what=text)
