"""Which box of a tensor this rank holds, and how to make the DTensor out of it."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate as TorchReplicate, Shard as TorchShard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from ckpt_tools.description.dtypes import DType
from ckpt_tools.description.layout import Box, Placement, Shard
from ckpt_tools.errors import CkptError, UnreadableError
from ckpt_tools.fsdp2.internals import StridedShard


def local_box(tensor: torch.Tensor) -> Box:
    """Return which elements of the global tensor this rank holds; all of a plain tensor.

    Where a dim is cut, PyTorch itself is asked: its own cut of that dim's indices.

    Raises:
        CkptError: They are not a rectangle (FSDP over an uneven tensor-parallel cut of the same dim).
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box((0,) * len(shape), shape)
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    ranges = [
        _range(length, mesh, tuple(_on_first_dim(placement, dim) for placement in placements))
        for dim, length in enumerate(shape)
    ]
    sizes = tuple(size for _, size in ranges)
    if sizes != tuple(tensor.to_local().shape) and math.prod(sizes) != tensor.to_local().numel():
        raise CkptError(f"a rank holds {tuple(tensor.to_local().shape)} where its placements say {sizes}")
    return Box(tuple(offset for offset, _ in ranges), sizes)


def assemble(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor placed as `like` whose part on this rank is `local`; no data is exchanged."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def cut_dim(placement: TorchPlacement) -> int | None:
    """Return the dim that a placement cuts, None for none. FSDP's mark for "inside of tp" is a cut like any other."""
    return placement.dim if isinstance(placement, (TorchShard, StridedShard)) else None


def placements_of(tensor: object) -> dict[str, Placement]:
    """Return mesh axis → cut of a DTensor; axes that are not named replicate."""
    if not isinstance(tensor, DTensor):
        return {}
    names = tensor.device_mesh.mesh_dim_names or ()
    dims = zip(names, map(cut_dim, tensor.placements), strict=False)
    return {name: Shard(dim) for name, dim in dims if dim is not None}


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return torch's type for a checkpoint's elements.

    Raises:
        UnreadableError: It has none.
    """
    found = getattr(torch, dtype.torch_name or "", None)
    if not isinstance(found, torch.dtype):
        raise UnreadableError(f"torch has no type for {dtype.name} elements")
    return found


@lru_cache(maxsize=4096)
def _range(length: int, mesh: DeviceMesh, placements: tuple[TorchPlacement, ...]) -> tuple[int, int]:
    if all(isinstance(placement, TorchReplicate) for placement in placements):
        return 0, length
    indices = distribute_tensor(
        torch.arange(length, device=mesh.device_type), mesh, placements, src_data_rank=None
    ).to_local()
    size = indices.numel()
    if not size:
        return length, 0
    start, last = int(indices[0]), int(indices[-1])
    if last - start + 1 != size:
        raise CkptError(
            f"this rank's part of a dim of {length} elements is not one run",
            hint="the tensor-parallel cut of that dim is uneven; choose a tp that divides it",
        )
    return start, size


def _on_first_dim(placement: TorchPlacement, dim: int) -> TorchPlacement:
    """Return what `placement` does to the indices of `dim` alone."""
    if isinstance(placement, StridedShard):
        return StridedShard(0, split_factor=placement.split_factor) if placement.dim == dim else TorchReplicate()
    return TorchShard(0) if isinstance(placement, TorchShard) and placement.dim == dim else TorchReplicate()
