"""Ranks as processes of this machine: a child imports torch once, forks them and watches them."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ckpt_tools.conversions.dtensor.rank import Job, describe, save_rank
from ckpt_tools.errors import CkptError
from ckpt_tools.processes.child import Child, Here
from ckpt_tools.processes.journal import Journal
from ckpt_tools.processes.ranks import Outcome, World

LAUNCH = "ckpt_tools.conversions.dtensor.launch:launch"
"""What runs in the child."""
_RELIEF = "try --engine stream"


def run_local_ranks(job: Job) -> None:
    """Run one process per rank on this machine; when one fails, end the others.

    Raises:
        CkptError: A rank failed.
    """
    with Child(LAUNCH, job, type(None), does="starts the ranks", relief=_RELIEF) as child:
        child.result(None)


def launch(job: Job, here: Here) -> None:
    """Run the ranks; what `run_local_ranks` calls in a child.

    Raises:
        CkptError: A rank failed.
    """
    rendezvous = os.path.join(here.directory, "rendezvous")

    def be_rank(rank: int, journal: Journal) -> bool:
        return _run_rank(job, rank, rendezvous, journal)

    with World(os.path.join(here.directory, "ranks"), job.mesh.world_size, be_rank, relief=_RELIEF) as world:
        failure = _failure(world.watch(here, timeout_s=None))
    if failure is not None:
        raise failure


def _failure(outcome: Outcome) -> CkptError | None:
    """Return the error of the rank that failed first; what the others say is mostly that it is gone."""
    for finding in outcome.findings:
        return CkptError(finding.what, where=finding.where, hint=finding.hint)
    told = [
        (event.time, rank, error)
        for rank, log in outcome.logs.items()
        for event, error in zip(log.of_kind("error"), log.errors, strict=True)
    ]
    if not told:
        return None
    _, rank, error = min(told, key=lambda one: one[:2])
    error.where = error.where or f"rank {rank}"
    return error


def _run_rank(job: Job, rank: int, rendezvous: str, journal: Journal) -> bool:
    """Be a rank; what is wrong is told in its journal."""
    journal.phase("save")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=job.mesh.world_size,
            timeout=timedelta(seconds=job.timeout_s),
        )
        save_rank(job)
        dist.destroy_process_group()
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - the journal is the only way out of here
        journal.error(error if isinstance(error, CkptError) else CkptError(describe(error)))
        return False
    return True
