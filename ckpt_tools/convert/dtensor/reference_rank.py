"""One rank of the reference engine: what it keeps, where it reads it, and how it saves."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import torch
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
from ckpt_tools.checkpoint.layout import FSDP_AXIS, Mesh, Placement, Shard
from ckpt_tools.errors import CkptError
from ckpt_tools.storage.source import LocalSource

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
