"""Ranks that act together: what fails on one fails on all, so that nobody waits for somebody who is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ckpt_tools import errors
from ckpt_tools.errors import CkptError

T = TypeVar("T")

Report = tuple[str, str, str | None, str | None]
"""Class, what, where and hint of an error: what can be sent to other ranks."""


def world_size() -> int:
    """Return the number of ranks that act together; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def this_rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def together(step: Callable[[], T]) -> T:
    """Run `step` on this rank and return its result when no rank failed.

    Collective. `step` must not itself wait for other ranks at a point that a failure would keep them from.

    Raises:
        CkptError: This rank's own error, or that of the lowest rank that failed.
        BaseException: This rank's own, of any other kind.
    """
    own: BaseException | None = None
    result: T | None = None
    try:
        result = step()
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - all of them travel
        own = error
    if world_size() > 1:
        reports: list[Report | None] = [None] * world_size()
        dist.all_gather_object(reports, None if own is None else _report(own))
        if own is None:
            for rank, report in enumerate(reports):
                if report is not None:
                    raise _rebuild(rank, report)
    if own is not None:
        if isinstance(own, CheckpointException):
            raise CkptError(_first_failure(own)) from own
        raise own
    return result  # type: ignore[return-value]


def share(value: T) -> T:
    """Return rank 0's `value` on every rank (a small, plain value). Collective."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _report(error: BaseException) -> Report:
    if isinstance(error, CkptError):
        return type(error).__name__, error.what, error.where, error.hint
    if isinstance(error, CheckpointException):
        return "CkptError", _first_failure(error), None, None
    return "CkptError", f"{type(error).__name__}: {error}", None, None


def _rebuild(rank: int, report: Report) -> CkptError:
    name, what, where, hint = report
    kind = getattr(errors, name, CkptError)
    return kind(what, where=f"rank {rank}" + (f", {where}" if where else ""), hint=hint)


def _first_failure(error: CheckpointException) -> str:
    if not error.failures:
        return str(error)
    rank, (cause, _) = min(error.failures.items())
    return f"saving failed on rank {rank}: {type(cause).__name__}: {cause}"
