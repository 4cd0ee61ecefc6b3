"""State dicts as torch saves them: one file, or one for every rank. All are made by torch itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.transfer.box_reader import BytesReader

Flat = dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]


def raw(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor, row-major."""
    return (
        tensor.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).numpy().tobytes()
        if tensor.numel()
        else b""
    )


def flat(value: object, prefix: str = "") -> Flat:
    """Every tensor that keys and indices lead to, as bytes."""
    if isinstance(value, torch.Tensor):
        return {prefix.removesuffix("."): (value.dtype, tuple(value.shape), raw(value))}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    found: Flat = {}
    for key, child in items:
        found |= flat(child, f"{prefix}{key}.")
    return found


def read(path: Path, *, kind: str | None = None) -> Flat:
    """What ckpt reads of a checkpoint, as `--from` says."""
    with open_path(str(path), format=kind, as_part=True) as opened:
        reader = BytesReader(opened)
        return {
            entry.fqn: (getattr(torch, str(entry.dtype.torch_name)), entry.shape, bytes(reader.read(entry)))
            for entry in opened.checkpoint.tensors
        }


@contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a world in which nobody communicates."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def save_ranks(
    directory: Path,
    state: Mapping[str, torch.Tensor],
    sizes: Mapping[str, int],
    place: Callable[[str], object],
    *,
    name: str = "model_world_size_{world}_rank_{rank}.pt",
    **extra: object,
) -> None:
    """Save what each rank of a mesh has of a model, with DTensors for what `place` gives placements."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    directory.mkdir(parents=True, exist_ok=True)
    world = 1
    for size in sizes.values():
        world *= size
    for rank in range(world):
        with fake_rank(rank, world):
            mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
            local = {
                key: tensor
                if (placements := place(key)) is None
                else distribute_tensor(tensor, mesh, placements, src_data_rank=None)
                for key, tensor in state.items()
            }
            torch.save({**local, **extra}, directory / name.format(world=world, rank=rank))
