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

import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, Self

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate as TorchReplicate, Shard as TorchShard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement as TorchPlacement, _StridedShard

from ckpt_tools.checkpoint.entries import Checkpoint, TensorEntry
from ckpt_tools.checkpoint.formats.safetensors import read_file
from ckpt_tools.checkpoint.layout import FSDP_AXIS, Fsdp, Mesh, Placement, Shard
from ckpt_tools.errors import CkptError, DestinationExistsError, UsageError
from ckpt_tools.sandbox.child import Child, Here
from ckpt_tools.sandbox.journal import Journal
from ckpt_tools.sandbox.ranks import RanksOutcome, World
from ckpt_tools.storage.locations import is_remote
from ckpt_tools.storage.source import LocalSource

_LAUNCH = "ckpt_tools.convert.dtensor:launch"
_RELIEF = "try --engine stream"
_FSDP_AXES = ("dp_replicate", FSDP_AXIS)
"""The axes of the mesh that `fully_shard` gets: its parameters live there, cut or not."""

Placements = Mapping[str, Mapping[str, Placement]]  # FQN → axis → placement


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """What every rank has to know."""

    source: Checkpoint
    destination: str
    mesh: Mesh
    placements: Placements
    timeout_s: float


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


# One rank: what it keeps, where it reads it, and how it saves


def save_rank(job: RankJob) -> None:
    """Read this rank's part and save it together with the other ranks."""
    axes = job.mesh.axes
    root = init_device_mesh("cpu", tuple(size for _, size in axes), mesh_dim_names=tuple(name for name, _ in axes))
    state: dict[str, torch.Tensor] = {}
    with ExitStack() as files:
        readers: dict[str, _RankReader] = {}
        for entry in job.source.tensors:
            file = entry.chunks[0].span.file
            if file not in readers:
                readers[file] = files.enter_context(_RankReader(job.source.root, file))
            state[entry.fqn] = _local_part(entry, readers[file], root, job.placements.get(entry.fqn, {}))
    _range_of.cache_clear()
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    save(state, storage_writer=_RankWriter(job.destination), planner=planner)


def _local_part(
    entry: TensorEntry, reader: _RankReader, root: DeviceMesh, placements: Mapping[str, Placement]
) -> torch.Tensor:
    """Return this rank's part as a DTensor; a plain tensor where no mesh axis has a say, as FSDP leaves scalars."""
    names = tuple(root.mesh_dim_names or ())
    used = tuple(name for name in names if name in _FSDP_AXES or isinstance(placements.get(name), Shard))
    shape = entry.shape
    if entry.dtype.pack > 1:
        shape = (*shape[:-1], shape[-1] // entry.dtype.pack)
    if not used or not shape:
        return reader.read(entry, shape, tuple(slice(0, length) for length in shape))
    mesh = root if used == names else root[used]
    torch_placements = _torch_placements(mesh, placements)
    along = [tuple(_on_first_dim(placement, dim) for placement in torch_placements) for dim in range(len(shape))]
    region = tuple(_range_of(length, mesh, placed) for length, placed in zip(shape, along, strict=True))
    return DTensor.from_local(
        reader.read(entry, shape, region),
        mesh,
        torch_placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))),
    )


def _torch_placements(mesh: DeviceMesh, placements: Mapping[str, Placement]) -> tuple[TorchPlacement, ...]:
    """Return the placements as FSDP2 states them.

    PyTorch applies placements from left to right. FSDP stands left of the axes that cut before it on the same
    dim, which it marks with `_StridedShard`; there is no public name for that.
    """
    names = tuple(mesh.mesh_dim_names or ())
    result: list[TorchPlacement] = []
    for i, name in enumerate(names):
        placement = placements.get(name)
        if not isinstance(placement, Shard):
            result.append(TorchReplicate())
            continue
        inside = [mesh.size(j) for j in range(i + 1, len(names)) if placements.get(names[j]) == placement]
        if name == FSDP_AXIS and inside:
            result.append(_StridedShard(placement.dim, split_factor=math.prod(inside)))
        else:
            result.append(TorchShard(placement.dim))
    return tuple(result)


@lru_cache(maxsize=4096)
def _range_of(length: int, mesh: DeviceMesh, placements: tuple[TorchPlacement, ...]) -> slice:
    """Return the elements of a dim that this rank keeps, as PyTorch cuts it; they must be one run."""
    indices = distribute_tensor(torch.arange(length), mesh, placements, src_data_rank=None)
    local = indices.to_local() if isinstance(indices, DTensor) else indices
    size = local.numel()
    if not size:
        return slice(length, length)
    start, last = int(local[0]), int(local[-1])
    if last - start + 1 != size:
        raise CkptError(f"a rank's part of a dim of {length} elements under {placements} is not one run")
    return slice(start, start + size)


def _on_first_dim(placement: TorchPlacement, dim: int) -> TorchPlacement:
    """Return what `placement` does to the indices of `dim` alone."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(0, split_factor=placement.split_factor) if placement.dim == dim else TorchReplicate()
    return TorchShard(0) if isinstance(placement, TorchShard) and placement.dim == dim else TorchReplicate()


class _RankWriter(FileSystemWriter):
    """The stock writer, without the path of this machine in `.metadata`.

    A pathlib object pickled by Python 3.13 cannot be loaded by 3.11, and nobody reads it.
    """

    def storage_meta(self) -> StorageMeta | None:
        """Return no identity of the checkpoint but the save's own."""
        return StorageMeta(save_id=self.save_id)


class _RankReader:
    """Reads parts of the tensors of one safetensors file."""

    def __init__(self, root: str, file: str) -> None:
        self._file: Any = safe_open(os.path.join(root, file), framework="pt")  # untyped upstream
        with LocalSource(root) as source:
            header = read_file(source, file).header
        # A description may have renamed its tensors; where the bytes lie says which one is meant.
        self._keys = {(t.chunks[0].span.offset, t.chunks[0].span.nbytes): t.fqn for t in header.tensors if t.nbytes}

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.__exit__(*exception)

    def read(self, entry: TensorEntry, shape: tuple[int, ...], region: tuple[slice, ...]) -> torch.Tensor:
        """Return the elements of `region` (torch's units) of a tensor of `shape`, row-major."""
        dtype = getattr(torch, entry.dtype.torch_name or "")
        sizes = tuple(part.stop - part.start for part in region)
        if 0 in sizes:
            return torch.empty(sizes, dtype=dtype)
        span = entry.chunks[0].span
        key = self._keys.get((span.offset, span.nbytes))
        if key is None:
            raise CkptError(f"{span.file} changed: tensor {entry.fqn!r} is not where it was", where=span.file)
        if not region:
            tensor: torch.Tensor = self._file.get_tensor(key)
            return tensor
        if entry.dtype.pack > 1:
            # safetensors 0.8 cannot slice packed types; bytes can be sliced.
            whole: torch.Tensor = self._file.get_tensor(key).view(torch.uint8).reshape(shape)
            return whole[region].clone(memory_format=torch.contiguous_format).view(dtype)
        part: torch.Tensor = self._file.get_slice(key)[region]
        return part.contiguous()


def describe(error: BaseException) -> str:
    """Return one line about a failure; of DCP's collective failures the first."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items())
        return f"saving failed on rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"
