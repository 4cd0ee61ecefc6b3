"""Which box of a tensor this rank holds, and how to make the DTensor out of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import product

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate as TorchReplicate, Shard as TorchShard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.layout import Box, Placement, Shard
from ckpt_tools.errors import CkptError, UnreadableError
from ckpt_tools.fsdp2.internals import StridedShard


def local_box(tensor: torch.Tensor) -> Box:
    """Return which elements of the global tensor this rank holds; all of a plain tensor.

    Raises:
        CkptError: They are not one box; see `local_boxes`.
    """
    _, boxes = local_boxes(tensor)
    if len(boxes) > 1:
        raise CkptError(
            f"this rank's part of a tensor of shape {list(tensor.shape)} is not one box",
            hint="tp shards stacked matrices, or does not divide the tensor; use load_checkpoint, which supports this",
        )
    return boxes[0]


def local_boxes(tensor: torch.Tensor) -> tuple[int, tuple[Box, ...]]:
    """Return the boxes of the global tensor that this rank holds, and the dim along which they follow each other.

    There are several where transformers' tensor parallelism gives every rank a part of each of the matrices that lie
    side by side in a tensor, and where FSDP cuts a dim that tp has cut unevenly. Where a dim is cut, PyTorch itself is
    asked: its own cut of that dim's indices. Raise CkptError for boxes along two dims.
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return 0, (Box((0,) * len(shape), shape),)
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    runs = [
        _runs(length, mesh, tuple(_on_first_dim(placement, dim) for placement in placements))
        for dim, length in enumerate(shape)
    ]
    sizes = tuple(sum(size for _, size in parts) for parts in runs)
    if sizes != tuple(tensor.to_local().shape) and math.prod(sizes) != tensor.to_local().numel():
        raise CkptError(f"the local shape must be {sizes} by its placements, got {tuple(tensor.to_local().shape)}")
    several = [dim for dim, parts in enumerate(runs) if len(parts) > 1]
    if len(several) > 1:
        raise CkptError(f"this rank's part of a tensor of shape {list(shape)} is in several runs along two dims")
    boxes = tuple(
        Box(tuple(offset for offset, _ in parts), tuple(size for _, size in parts)) for parts in product(*runs)
    )
    return (several[0] if several else 0), boxes


def read_parts(tensor: torch.Tensor, read: Callable[[Box], torch.Tensor]) -> torch.Tensor:
    """Return what this rank holds of a tensor, put together from what `read` returns for each of its boxes."""
    dim, boxes = local_boxes(tensor)
    parts = [read(box) for box in boxes]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in order: of every dtype, and of NaN, which equals nothing."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


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
    """Return torch's type for a checkpoint's elements; raise UnreadableError if torch has none."""
    found = getattr(torch, dtype.torch_name or "", None)
    if not isinstance(found, torch.dtype):
        raise UnreadableError(f"torch has no type for {dtype.name} elements")
    return found


@lru_cache(maxsize=4096)
def _runs(length: int, mesh: DeviceMesh, placements: tuple[TorchPlacement, ...]) -> tuple[tuple[int, int], ...]:
    """Return offset and length of every run of this rank's indices of a dim, in the order in which it has them."""
    if all(isinstance(placement, TorchReplicate) for placement in placements):
        return ((0, length),)
    indices = distribute_tensor(
        torch.arange(length, device=mesh.device_type), mesh, placements, src_data_rank=None
    ).to_local()
    if not indices.numel():
        return ((length, 0),)
    ends = (indices.diff() != 1).nonzero().flatten() + 1
    return tuple((int(run[0]), run.numel()) for run in torch.tensor_split(indices, ends.cpu()))


def _on_first_dim(placement: TorchPlacement, dim: int) -> TorchPlacement:
    """Return what `placement` does to the indices of `dim` alone."""
    if isinstance(placement, StridedShard):
        return StridedShard(0, split_factor=placement.split_factor) if placement.dim == dim else TorchReplicate()
    return TorchShard(0) if isinstance(placement, TorchShard) and placement.dim == dim else TorchReplicate()
