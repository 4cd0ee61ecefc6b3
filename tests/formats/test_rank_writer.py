"""`reshard --for verl`: what ranks of another mesh would have saved themselves, as PyTorch unpickles it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from formats.saved import fake_rank, read, save_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt_tools import api

STATE = {
    "embed.weight": torch.arange(60.0).reshape(10, 6),
    "up.weight": torch.arange(48).reshape(8, 6).to(torch.bfloat16),
    "down.weight": torch.arange(48.0).reshape(6, 8),
    "uneven": torch.arange(15.0).reshape(5, 3),
    "norm": torch.arange(3.0),
    "table": torch.arange(7),
}


def place(sizes: dict[str, int]):
    """What verl's FSDP2 does with parameters; `table` is a buffer, `down.weight` is cut along dim 1."""
    before = [Replicate()] * (len(sizes) - 1)
    return lambda fqn: None if fqn == "table" else [*before, Shard(1 if fqn == "down.weight" else 0)]


def adam(part_of: Callable[[str, torch.Tensor], torch.Tensor]) -> dict[str, object]:
    """State of an optimizer of all parameters, by number."""
    names = [name for name in STATE if name != "table"]
    return {
        "state": {
            index: {
                "step": torch.tensor(3.0),
                "exp_avg": part_of(name, STATE[name] * 2),
                "exp_avg_sq": part_of(name, STATE[name] * 3),
            }
            for index, name in enumerate(names)
        },
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "fused": None, "params": list(range(len(names)))}],
    }


def save(directory: Path, sizes: dict[str, int]) -> None:
    """What verl's ranks leave of a step."""
    world = int(torch.tensor(list(sizes.values())).prod())
    save_ranks(directory, STATE, sizes, place(sizes))
    for rank in range(world):
        with fake_rank(rank, world):
            mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))

            def part_of(name: str, tensor: torch.Tensor, mesh: DeviceMesh = mesh) -> torch.Tensor:
                return distribute_tensor(tensor, mesh, place(sizes)(name), src_data_rank=None)

            torch.save(adam(part_of), directory / f"optim_world_size_{world}_rank_{rank}.pt")
        extra = {"lr_scheduler": {"last_epoch": 3}, "rng": {"cpu": torch.get_rng_state(), "rank": rank}}
        torch.save(extra, directory / f"extra_state_world_size_{world}_rank_{rank}.pt")
    (directory / "huggingface").mkdir(exist_ok=True)
    (directory / "huggingface/generation_config.json").write_text("{}")
    (directory / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world}))


def alike(one: object, other: object) -> bool:
    """Are two loaded values the same, DTensors with their meshes and places?"""
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        specs = (one._spec, other._spec)
        is_there = one._spec == other._spec and hash(specs[0]) == hash(specs[1])
        is_there = is_there and one.device_mesh.get_coordinate() == other.device_mesh.get_coordinate()
        return is_there and alike(one.to_local(), other.to_local())
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return (one.dtype, one.stride()) == (other.dtype, other.stride()) and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return type(one) is type(other) and one == other


MESHES = [
    ({"fsdp": 2}, {"fsdp": 3}, "dp_shard=3"),
    ({"fsdp": 4}, {"fsdp": 2}, "dp_shard=2"),
    ({"fsdp": 2}, {"fsdp": 1}, "dp_shard=1"),
    ({"fsdp": 1}, {"fsdp": 2}, "dp_shard=2"),
    ({"ddp": 2, "fsdp": 2}, {"ddp": 1, "fsdp": 3}, "dp_replicate=1,dp_shard=3"),
    ({"ddp": 2, "fsdp": 2}, {"ddp": 2, "fsdp": 3}, "dp_replicate=2,dp_shard=3"),
]


@pytest.mark.parametrize(("before", "after", "mesh"), MESHES, ids=lambda value: value if isinstance(value, str) else "")
def test_files_are_those_that_the_ranks_would_have_saved(before, after, mesh: str, tmp_path: Path) -> None:
    save(tmp_path / "run", before)
    save(tmp_path / "wanted", after)
    done = api.reshard(tmp_path / "run", tmp_path / "out", mesh=mesh, trainer="verl")
    assert done.verified
    assert not done.warnings
    assert {file.name for file in (tmp_path / "out").iterdir()} - {"ckpt_manifest.json"} == {
        file.name for file in (tmp_path / "wanted").iterdir()
    }
    world = int(torch.tensor(list(after.values())).prod())
    for rank in range(world):
        with fake_rank(rank, world):
            for kind in ("model", "optim"):
                name = f"{kind}_world_size_{world}_rank_{rank}.pt"
                found, wanted = (torch.load(tmp_path / where / name, weights_only=False) for where in ("out", "wanted"))
                assert alike(found, wanted), name
            assert zipfile.ZipFile(tmp_path / "out" / name).testzip() is None
    config = json.loads((tmp_path / "out/fsdp_config.json").read_text())
    assert config == {"FSDP_version": 2, "world_size": world}
    assert (tmp_path / "out/huggingface/generation_config.json").read_text() == "{}"
    assert read(tmp_path / "out") == read(tmp_path / "run") == read(tmp_path / "wanted")
    assert api.verify(tmp_path / "out", level="data").ok
