"""Ranks that act together: what fails on one fails on all, so that nobody waits for somebody who is gone."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ckpt_tools.errors import CkptError
from ckpt_tools.sandbox.wire import error_from_json, error_to_json

T = TypeVar("T")

_GROUP: ContextVar[dist.ProcessGroup | None] = ContextVar("group", default=None)


def talk_over(group: dist.ProcessGroup | None) -> None:
    """Let everything here, in this thread, use a group of its own, of all ranks: beside the training."""
    _GROUP.set(group)


def current_group() -> dist.ProcessGroup | None:
    """Return the group that ranks talk over; None is the default group."""
    return _GROUP.get()


def world_size() -> int:
    """Return the number of ranks that act together; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def this_rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def together(step: Callable[[], T]) -> T:
    """Run `step` on this rank and return its result when no rank failed.

    Collective. `step` must not itself wait for other ranks at a point that a failure would keep them from. Raise this
    rank's own error, or as a CkptError that of the lowest rank that failed.
    """
    own: BaseException | None = None
    result: T | None = None
    try:
        result = step()
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - all of them travel
        own = error
    reports = gather(None if own is None else error_to_json(_to_ckpt_error(own)))
    if own is not None:
        if isinstance(own, CheckpointException):
            raise _to_ckpt_error(own) from own
        raise own
    for rank, report in enumerate(reports):
        if report is not None:
            theirs = error_from_json(report)
            theirs.where = f"rank {rank}" + (f", {theirs.where}" if theirs.where else "")
            raise theirs
    return result  # type: ignore[return-value]


def share(value: T) -> T:
    """Return rank 0's `value` on every rank (a small, plain value). Collective."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=current_group())
    return box[0]


def from_rank0(step: Callable[[], T]) -> T:
    """Run `step` on rank 0 alone, and return its result (a small, plain value) on every rank. Collective."""
    return share(together(lambda: None if this_rank() else step()))  # type: ignore[return-value]


def gather(value: T) -> list[T]:
    """Return every rank's `value` (small and plain), in rank order. Collective."""
    values = [value] * world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value, group=current_group())
    return values


def _to_ckpt_error(error: BaseException) -> CkptError:
    """Return an error as other ranks are told it; PyTorch's own is about the lowest rank that failed."""
    if isinstance(error, CkptError):
        return error
    if not isinstance(error, CheckpointException):
        return CkptError(f"{type(error).__name__}: {error}")
    if not error.failures:
        return CkptError(str(error))
    rank, (cause, _) = min(error.failures.items())
    return CkptError(f"saving failed on rank {rank}: {type(cause).__name__}: {cause}")
