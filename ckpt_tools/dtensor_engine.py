"""`--engine dtensor`: write a DCP checkpoint the way a training job does, with PyTorch's public API.

Every rank of the mesh is a process: it learns its part from `distribute_tensor(..., src_data_rank=None)`, reads that
part from the safetensors file, and takes part in `dcp.save`. It is slower than the streaming engine and holds a
rank's whole part in memory; it is the reference that the streaming engine is held against.

`distribute_tensor` wants the whole tensor on every rank. What is distributed here is therefore not the tensor but, dim
by dim, the indices 0..L: PyTorch alone decides which of them a rank keeps, those elements are read, and
`DTensor.from_local` puts them together with the global shape. That also serves the types that gloo cannot
send (F8, F4, U16, …), since no element is ever communicated.

This module imports torch; import it lazily.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
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
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt_tools import errors
from ckpt_tools.checkpoint import Checkpoint, TensorEntry
from ckpt_tools.errors import CkptError, DestinationExistsError, UsageError
from ckpt_tools.formats.safetensors import LENGTH_BYTES, parse_header, parse_length
from ckpt_tools.layout import FSDP_AXIS, Mesh, Placement, Shard

_FSDP_AXES = ("dp_replicate", FSDP_AXIS)
"""The axes of the mesh that `fully_shard` gets: its parameters live there, cut or not."""
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

Placements = Mapping[str, Mapping[str, Placement]]
"""FQN → axis → placement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
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

    Under torchrun with as many processes as the mesh has ranks, this process is one of them and every process must
    make the same call; otherwise the processes are started here, on this machine. Every rank holds its part of
    all tensors in memory at once.

    Args:
        source: A safetensors file or an HF directory of them.
        destination: Directory for the checkpoint; absent or empty. After a failure it may hold part of one.
        mesh: The mesh.
        placements: FQN → axis → placement; axes and tensors that are not named replicate.
        timeout_s: Seconds that a rank waits for the others.

    Raises:
        UsageError: The source cannot be read this way, or torchrun started another number of processes.
        DestinationExistsError: The destination is not an empty directory.
        CkptError: A rank failed; the others are ended.
    """
    _check_source(source)
    job = _Job(source=source, destination=destination, mesh=mesh, placements=placements, timeout_s=timeout_s)
    rank = torchrun_rank(mesh)
    if rank is None:
        _check_destination(destination)
        _run_local_ranks(job)
        return
    if rank == 0:
        _check_destination(destination)
    is_ours = not dist.is_initialized()
    if is_ours:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    try:
        _save_rank(job)
    except (RuntimeError, CheckpointException) as error:
        # The latter is a BaseException, which nobody upstairs expects.
        raise CkptError(_describe(error), where=f"rank {rank}") from error
    finally:
        if is_ours:
            dist.destroy_process_group()


def torchrun_rank(mesh: Mesh) -> int | None:
    """Return this process's rank when torchrun started one process per rank of `mesh`, None without torchrun.

    Raises:
        UsageError: Torchrun started another number of processes.
    """
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or world_size is None:
        return None
    if world_size == str(mesh.world_size) and rank.isdecimal():
        return int(rank)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        # Schedulers set these two as well; only torchrun's own processes would all write one destination.
        return None
    raise UsageError(
        f"torchrun started {world_size} processes, the mesh {mesh} has {mesh.world_size} ranks",
        hint=f"use torchrun --nproc-per-node {mesh.world_size}, or run without torchrun",
    )


def _check_source(source: Checkpoint) -> None:
    if source.blobs:
        raise UsageError(
            f"{source.blobs[0].fqn!r} is not a tensor, and --engine dtensor copies tensors alone",
            where=source.root,
            hint="use --engine stream",
        )
    for entry in source.tensors:
        whole = len(entry.chunks) == 1 and entry.chunks[0].box.sizes == entry.shape
        if not whole or entry.chunks[0].encoding != "raw" or entry.chunks[0].strides is not None:
            raise UsageError(
                f"--engine dtensor reads safetensors files, and {entry.fqn!r} is not in one",
                where=source.root,
                hint="use --engine stream",
            )
        if entry.dtype.torch_name is None:
            raise UsageError(f"torch has no dtype for {entry.dtype.name}, the type of {entry.fqn!r}", where=source.root)


def _check_destination(destination: str) -> None:
    if os.path.lexists(destination) and not (os.path.isdir(destination) and not os.listdir(destination)):
        raise DestinationExistsError("the destination exists", where=destination, hint="choose another, or remove it")


# One rank


def _save_rank(job: _Job) -> None:
    """Read this rank's part and save it together with the other ranks."""
    axes = job.mesh.axes
    root = init_device_mesh("cpu", tuple(size for _, size in axes), mesh_dim_names=tuple(name for name, _ in axes))
    state: dict[str, torch.Tensor] = {}
    with ExitStack() as files:
        readers: dict[str, _Reader] = {}
        for entry in job.source.tensors:
            file = entry.chunks[0].span.file
            if file not in readers:
                readers[file] = files.enter_context(_Reader(os.path.join(job.source.root, file), file))
            state[entry.fqn] = _local_part(entry, readers[file], root, job.placements.get(entry.fqn, {}))
    _range_of.cache_clear()
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    save(state, storage_writer=_Writer(job.destination), planner=planner)


def _local_part(
    entry: TensorEntry, reader: _Reader, root: DeviceMesh, placements: Mapping[str, Placement]
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
    region = tuple(_local_range(length, dim, mesh, torch_placements) for dim, length in enumerate(shape))
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


def _local_range(length: int, dim: int, mesh: DeviceMesh, placements: tuple[TorchPlacement, ...]) -> slice:
    """Return the elements of a dim that this rank keeps, as PyTorch cuts it.

    Raises:
        CkptError: They are not one run, so that no chunk can describe them.
    """
    along = tuple(_on_first_dim(placement, dim) for placement in placements)
    return _range_of(length, mesh, along)


@lru_cache(maxsize=4096)
def _range_of(length: int, mesh: DeviceMesh, placements: tuple[TorchPlacement, ...]) -> slice:
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


class _Writer(FileSystemWriter):
    """The stock writer, without the path of this machine in `.metadata`.

    A pathlib object pickled by Python 3.13 cannot be loaded by 3.11, and nobody reads it.
    """

    def storage_meta(self) -> StorageMeta | None:
        """Return no identity of the checkpoint but the save's own."""
        return StorageMeta(save_id=self.save_id)


class _Reader:
    """Reads parts of the tensors of one safetensors file."""

    def __init__(self, path: str, file: str) -> None:
        self._file: Any = safe_open(path, framework="pt")  # untyped upstream
        with open(path, "rb") as raw:
            length = parse_length(raw.read(LENGTH_BYTES), where=file)
            header = parse_header(raw.read(length), file=file, file_nbytes=os.path.getsize(path))
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


# Local ranks


def _run_local_ranks(job: _Job) -> None:
    """Run one process per rank on this machine; when one fails, end the others.

    Raises:
        CkptError: A rank failed.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ckpt-ranks-") as private:
        ranks: list[BaseProcess] = [
            context.Process(target=_run_rank, args=(rank, private, job), daemon=True)
            for rank in range(job.mesh.world_size)
        ]
        try:
            for process in ranks:
                process.start()
            running = dict(enumerate(ranks))
            while running:
                wait([process.sentinel for process in running.values()])
                failed = {rank: p.exitcode for rank, p in running.items() if p.exitcode}
                if failed:
                    raise _failure(private, failed)
                running = {rank: p for rank, p in running.items() if p.exitcode is None}
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()


def _failure(private: str, failed: Mapping[int, int | None]) -> CkptError:
    """Return the error of the rank that failed first; what the others say is mostly that it is gone."""
    for rank, exitcode in failed.items():
        if exitcode is not None and exitcode < 0:
            name = signal.Signals(-exitcode).name
            hint = "most likely the machine ran out of memory" if name == "SIGKILL" else None
            return CkptError(f"rank {rank} was ended by {name}", hint=hint)
    reports = []
    for name in os.listdir(private):
        if name.endswith(".error.json"):
            with open(os.path.join(private, name), encoding="utf-8") as file:
                reports.append(json.load(file))
    if not reports:
        rank, exitcode = next(iter(failed.items()))
        return CkptError(
            f"rank {rank} ended with exit status {exitcode}",
            hint="a script that calls this needs `if __name__ == '__main__':` around what it runs",
        )
    first = min(reports, key=lambda report: report["time_ns"])
    kind = getattr(errors, first["class"], CkptError)
    return kind(first["what"], where=first["where"] or f"rank {first['rank']}", hint=first["hint"])


def _run_rank(rank: int, private: str, job: _Job) -> None:
    """Run one rank in its own process; leave a report in `private` when it fails."""
    # The terminal sends an interrupt to all; the parent answers it and ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings.simplefilter("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{private}/rendezvous",
            rank=rank,
            world_size=job.mesh.world_size,
            timeout=timedelta(seconds=job.timeout_s),
        )
        _save_rank(job)
        dist.destroy_process_group()
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - the report is the only way out of here
        time_ns = time.time_ns()
        report = {"rank": rank, "time_ns": time_ns, "class": "CkptError", "what": _describe(error), "where": None}
        report["hint"] = None
        if isinstance(error, CkptError):
            report |= {"class": type(error).__name__, "what": error.what, "where": error.where, "hint": error.hint}
        path = os.path.join(private, f"{rank}.error")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(report, file)
        os.replace(path, f"{path}.json")
        # Without a farewell to the group: the others may never answer.
        os._exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _describe(error: BaseException) -> str:
    """Return one line about a failure; of DCP's collective failures the first."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items())
        return f"saving failed on rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"
