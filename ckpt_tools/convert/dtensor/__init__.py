"""`--engine dtensor`: write a DCP checkpoint the way a training job does, with PyTorch's public API.

Every rank of the mesh is a process: it learns its part from `distribute_tensor(..., src_data_rank=None)`, reads that
part from the safetensors file, and takes part in `dcp.save`. It is slower than the streaming engine and holds a
rank's whole part in memory; it is the reference that the streaming engine is compared with.

`distribute_tensor` wants the whole tensor on every rank. What is distributed here is therefore not the tensor but, dim
by dim, the indices 0..L: PyTorch alone decides which of them a rank keeps, those elements are read, and
`DTensor.from_local` puts them together with the global shape. That also serves the types that gloo cannot
send (F8, F4, U16, …), since no element is ever communicated.

This module imports torch; import it lazily.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ckpt_tools.checkpoint.entries import Checkpoint
from ckpt_tools.checkpoint.layout import Fsdp, Mesh
from ckpt_tools.convert.dtensor.reference_rank import Placements, RankJob, describe, save_rank
from ckpt_tools.errors import CkptError, DestinationExistsError, UsageError
from ckpt_tools.sandbox.child import Child, Here
from ckpt_tools.sandbox.journal import Journal
from ckpt_tools.sandbox.ranks import RanksOutcome, World
from ckpt_tools.storage.locations import is_remote

_LAUNCH = "ckpt_tools.convert.dtensor:launch"
_RELIEF = "try --engine stream"


def save_with_dtensor(
    source: Checkpoint, destination: str, mesh: Mesh, placements: Placements, *, timeout_s: float = 1800.0
) -> None:
    """Save `source` as a DCP checkpoint for `mesh`, with one process per rank.

    Under torchrun with as many processes as the mesh has ranks, this process is one of them and every process must make
    the same call; otherwise the processes are started here, on this machine. Every rank holds its part of all tensors
    in memory at once. After a failure, `destination` may hold part of a checkpoint.
    """
    _check_source(source)
    if any(Fsdp() in cuts.values() for cuts in placements.values()):
        raise UsageError("--engine dtensor does not write F, a cut over several axes at once", hint=_RELIEF)
    job = RankJob(source=source, destination=destination, mesh=mesh, placements=placements, timeout_s=timeout_s)
    rank = torchrun_rank(mesh)
    if rank is None:
        _check_destination(destination)
        _run_local_ranks(job)
        return
    if rank == 0:
        _check_destination(destination)
    with join_ranks(mesh, timeout_s=timeout_s):
        try:
            save_rank(job)
        except (RuntimeError, CheckpointException) as error:
            # The latter is a BaseException, which nobody upstairs expects.
            raise CkptError(describe(error), where=f"rank {rank}") from error


def torchrun_rank(mesh: Mesh) -> int | None:
    """Return this process's rank when torchrun started one process per rank of `mesh`, None without torchrun."""
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or world_size is None:
        return None
    if world_size == str(mesh.world_size) and rank.isdecimal():
        return int(rank)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        # Schedulers set these two as well; only torchrun's own processes would all write one destination.
        return None
    what = f"torchrun started {world_size} processes, the mesh {mesh} has {mesh.world_size} ranks"
    raise UsageError(what, hint=f"use torchrun --nproc-per-node {mesh.world_size}, or run without torchrun")


def _check_source(source: Checkpoint) -> None:
    _check_local(source.root)
    if source.blobs:
        what = f"{source.blobs[0].fqn!r} is not a tensor, and --engine dtensor copies only tensors"
        raise UsageError(what, where=source.root, hint="use --engine stream")
    for entry in source.tensors:
        whole = len(entry.chunks) == 1 and entry.chunks[0].box.sizes == entry.shape
        if not whole or entry.chunks[0].encoding != "raw" or entry.chunks[0].strides is not None:
            what = f"--engine dtensor reads safetensors files, and {entry.fqn!r} is not in one"
            raise UsageError(what, where=source.root, hint="use --engine stream")
        if entry.dtype.torch_name is None:
            raise UsageError(f"torch has no dtype for {entry.dtype.name}, the type of {entry.fqn!r}", where=source.root)


def _check_local(path: str) -> None:
    if is_remote(path):
        what = "--engine dtensor reads and writes only this machine's disks"
        raise UsageError(what, where=path, hint="use --engine stream")


def _check_destination(destination: str) -> None:
    _check_local(destination)
    if os.path.lexists(destination) and not (os.path.isdir(destination) and not os.listdir(destination)):
        raise DestinationExistsError("the destination exists", where=destination, hint="choose another, or remove it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The processes that make the same call: those of torchrun, or this one alone."""

    rank: int
    """This process; rank 0 does what is done once."""
    world_size: int

    def share(self, text: str) -> str:
        """Return rank 0's `text` on every rank."""
        if self.world_size == 1:
            return text
        box = [text]
        dist.broadcast_object_list(box, src=0)
        return box[0]


@contextmanager
def join_ranks(mesh: Mesh, *, timeout_s: float = 1800.0) -> Iterator[Ranks]:
    """Yield who takes part; under torchrun, with a process group that lasts as long as the context."""
    rank = torchrun_rank(mesh)
    if rank is None:
        yield Ranks(rank=0, world_size=1)
        return
    is_ours = not dist.is_initialized()
    if is_ours:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    try:
        yield Ranks(rank=rank, world_size=mesh.world_size)
    finally:
        if is_ours:
            dist.destroy_process_group()


def _run_local_ranks(job: RankJob) -> None:
    """Run one process per rank on this machine; when one fails, end the others."""
    with Child(_LAUNCH, job, type(None), does="starts the ranks", relief=_RELIEF) as child:
        child.result(None)


def launch(job: RankJob, here: Here) -> None:
    """Run the ranks; what `_run_local_ranks` calls in a child."""
    rendezvous = os.path.join(here.directory, "rendezvous")

    def be_rank(rank: int, journal: Journal) -> bool:
        return _run_rank(job, rank, rendezvous, journal)

    with World(os.path.join(here.directory, "ranks"), job.mesh.world_size, be_rank, relief=_RELIEF) as world:
        failure = _failure(world.watch(here, timeout_s=None))
    if failure is not None:
        raise failure


def _failure(outcome: RanksOutcome) -> CkptError | None:
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


def _run_rank(job: RankJob, rank: int, rendezvous: str, journal: Journal) -> bool:
    """Be a rank; what is wrong is told in its journal."""
    journal.phase("save")
    start = time.perf_counter()
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
    journal.done("save", ok=True, seconds=round(time.perf_counter() - start, 3))
    return True
