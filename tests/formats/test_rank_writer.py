"""`reshard --for verl`: what ranks of another mesh would have saved themselves, as PyTorch unpickles it."""

from __future__ import annotations

import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from formats.saved import fake_rank, flat, read, save_ranks
from fsdp2.ranks import execute, run_ranks
from samples import files_of, small_blocks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt_tools import api
from ckpt_tools.checkpoint.formats._pickle_objects import parse_exactly
from ckpt_tools.checkpoint.formats._pickle_values import build_pickle
from ckpt_tools.checkpoint.formats.rank_writer import plan_rank_file
from ckpt_tools.cli import main
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.storage.source import LocalSource

ROOT = Path(__file__).parent
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
    planned = api.reshard(tmp_path / "run", tmp_path / "out", mesh=mesh, trainer="verl", dry_run=True)
    done = api.reshard(tmp_path / "run", tmp_path / "out", mesh=mesh, trainer="verl")
    assert done.verified
    assert done.files == planned.files
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


@pytest.mark.full
def test_parts_write_the_same_files_and_hold_replicas_against_each_other(tmp_path: Path) -> None:
    save(tmp_path / "run", {"ddp": 2, "fsdp": 2})
    options = {"mesh": "dp_replicate=2,dp_shard=3", "trainer": "verl"}
    with small_blocks(64):
        one = api.reshard(tmp_path / "run", tmp_path / "one", **options)
        results = [api.reshard(tmp_path / "run", tmp_path / "out", **options, part=f"{i}/5") for i in (3, 1, 4, 0, 2)]
    last = next(result for result in results if result.published)
    assert (last.not_checked, last.counts) == (one.not_checked, one.counts)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "one")


def test_a_whole_step_is_written_with_what_lies_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = tmp_path / "global_step_7"
    for role in ("actor", "critic"):
        save(step / role, {"fsdp": 2})
    torch.save({"sampler": 1}, step / "data.pt")
    out = tmp_path / "new" / "global_step_7"
    out.parent.mkdir()
    assert main(["reshard", str(step), str(out), "--mesh", "dp_shard=3", "--for", "verl"]) == 0
    assert "2 ranks become 3" in capsys.readouterr().err
    assert (out / "data.pt").read_bytes() == (step / "data.pt").read_bytes()
    for role in ("actor", "critic"):
        assert read(out / role) == read(step / role)
        for rank in range(3):
            own = (out / role / f"extra_state_world_size_3_rank_{rank}.pt").read_bytes()
            assert own == (step / role / f"extra_state_world_size_2_rank_{rank % 2}.pt").read_bytes()
    assert main(["verify", str(out), "--level", "data"]) == 0
    assert main(["gather", str(out), str(tmp_path / "hf")]) == 0
    back = tmp_path / "back"
    assert main(["reshard", str(out), str(back), "--mesh", "dp_shard=2", "--for", "verl"]) == 0
    for file in (step / "actor").glob("*_world_size_*.pt"):
        with fake_rank(int(file.stem[-1]), 2):
            one, other = (torch.load(path, weights_only=False) for path in (file, back / "actor" / file.name))
            assert alike(one, other), file.name


_TRAIN = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
rank, world, run, start, out = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
dist.init_process_group("gloo", init_method=f"file://{out}.store{world}", rank=rank, world_size=world)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3))
mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
name = f"world_size_{world}_rank_{rank}.pt"
if start != "-":
    model.load_state_dict(torch.load(f"{start}/model_{name}", weights_only=False))
    optimizer.load_state_dict(torch.load(f"{start}/optim_{name}", weights_only=False))
data = torch.Generator().manual_seed(1 if start == "-" else 2)
for _ in range(2):
    loss = model(torch.rand(4, 7, generator=data)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"{loss.item():.6f}")
if run != "-":
    torch.save(model.state_dict(), f"{run}/model_{name}")
    torch.save(optimizer.state_dict(), f"{run}/optim_{name}")
dist.barrier()
dist.destroy_process_group()
"""


def train(world: int, run: Path | None, start: Path | None, out: Path) -> list[float]:
    """Two steps on every rank; what rank 0 prints."""
    stated = [path if path is not None else "-" for path in (run, start)]
    told = run_ranks(world, execute, _TRAIN, *stated, out, backend=None, timeout=120)
    return [float(line) for line in told[0].split()]


@pytest.mark.full
def test_fsdp2_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    train(2, tmp_path / "run", None, tmp_path / "a")
    wanted = train(2, None, tmp_path / "run", tmp_path / "b")
    api.reshard(tmp_path / "run", tmp_path / "out", mesh="dp_shard=3", trainer="verl")
    assert train(3, None, tmp_path / "out", tmp_path / "c") == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"mesh": "dp_shard=2,tp=2"}, "a mesh of dp_shard"),
        ({"mesh": "dp_replicate=2"}, "a mesh of dp_shard"),
        ({"mesh": None}, "a mesh of dp_shard"),
        ({"mesh": "dp_shard=3", "dtype": "bf16"}, "--dtype is given"),
        ({"mesh": "dp_shard=3", "exclude": ["norm"]}, "--exclude is given"),
        ({"mesh": "dp_shard=3", "set": ["*=dp_shard:S(1)"]}, "--set is given"),
        ({"mesh": "dp_shard=3", "tp_plan": "auto"}, "--tp-plan is given"),
        ({"mesh": "dp_shard=3", "rules": "keep"}, "--rules is given"),
        ({"mesh": "dp_shard=3", "prefix": "auto"}, "--prefix is given"),
    ],
)
def test_what_verl_does_not_make_is_refused(options: dict[str, object], what: str, tmp_path: Path) -> None:
    save(tmp_path / "run", {"fsdp": 2})
    with pytest.raises(UsageError, match=what):
        api.reshard(tmp_path / "run", tmp_path / "out", trainer="verl", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("before", "mesh", "what"),
    [({"fsdp": 2}, "dp_shard=1", "whole tensors"), ({"ddp": 2, "fsdp": 2}, "dp_replicate=1,dp_shard=2", "groups")],
)
def test_what_fsdp1_does_not_load_is_refused(before: dict[str, int], mesh: str, what: str, tmp_path: Path) -> None:
    save(tmp_path / "run", before)
    (tmp_path / "run/fsdp_config.json").write_text('{"FSDP_version": 1, "world_size": 2}')
    with pytest.raises(UsageError, match=what):
        api.reshard(tmp_path / "run", tmp_path / "out", mesh=mesh, trainer="verl")


def test_a_mesh_of_other_dims_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "run", {"fsdp": 2})
    with pytest.raises(UnreadableError, match="mesh does not have"):
        api.reshard(tmp_path / "run", tmp_path / "out", mesh="dp_replicate=2,dp_shard=2", trainer="verl")


def test_a_mesh_that_is_a_part_of_another_is_refused(tmp_path: Path) -> None:
    for rank in range(2):
        with fake_rank(rank, 2):
            mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ddp", "fsdp"))["fsdp"]
            state = {"w": distribute_tensor(torch.rand(4, 2), mesh, [Shard(0)], src_data_rank=None)}
            torch.save(state, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    with pytest.raises(UnreadableError, match="its mesh"):
        api.reshard(tmp_path, tmp_path.parent / "out", mesh="dp_shard=4", trainer="verl")


def test_whole_tensors_of_one_rank_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.rand(4, 2)}, tmp_path / "model_world_size_1_rank_0.pt")
    with pytest.raises(UnreadableError, match="without a mesh"):
        api.reshard(tmp_path, tmp_path.parent / "out", mesh="dp_shard=4", trainer="verl")


def test_flat_parts_of_fsdp1_are_refused(tmp_path: Path) -> None:
    """A file of LOCAL_STATE_DICT's: of what is read of it nothing is written as it was."""
    save(tmp_path / "run", {"fsdp": 2})
    with pytest.raises(UnreadableError, match="read as a part of another"):
        plan_rank_file(
            LocalSource(str(tmp_path / "run")), "model_world_size_2_rank_0.pt", "x", rank=0, sizes=(2,), places={}
        )


def test_an_optimizer_that_is_not_read_is_said(tmp_path: Path) -> None:
    """FSDP1's: flat parts of parameters, of which every rank has its own."""
    save(tmp_path / "run", {"fsdp": 2})
    for rank in range(2):
        flat_state = {"state": {0: {"exp_avg": torch.rand(40)}}, "param_groups": [{"lr": 1e-3, "params": [0]}]}
        torch.save(flat_state, tmp_path / f"run/optim_world_size_2_rank_{rank}.pt")
    done = api.reshard(tmp_path / "run", tmp_path / "out", mesh="dp_shard=3", trainer="verl")
    assert any("without the optimizer" in warning for warning in done.warnings)
    assert not list((tmp_path / "out").glob("optim*"))


def test_tied_tensors_are_written_under_both_names(tmp_path: Path) -> None:
    whole = torch.rand(5, 3)
    for rank in range(2):
        with fake_rank(rank, 2):
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
            one = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
            state = {"embed": one, "head": one, "also": DTensor(one.to_local(), one._spec, requires_grad=False)}
            torch.save(state, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    out = tmp_path.parent / f"{tmp_path.name}-out"
    api.reshard(tmp_path, out, mesh="dp_shard=3", trainer="verl")
    assert read(out) == flat({"embed": whole, "head": whole, "also": whole})


def test_moments_that_share_one_storage_are_no_traceback(tmp_path: Path) -> None:
    save(tmp_path / "run", {"fsdp": 2})
    for rank in range(2):
        with fake_rank(rank, 2):
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
            made: dict[str, torch.Tensor] = {}

            def part_of(
                name: str, tensor: torch.Tensor, mesh: DeviceMesh = mesh, made: dict[str, torch.Tensor] = made
            ) -> torch.Tensor:
                placed = distribute_tensor(tensor, mesh, place({"fsdp": 2})(name), src_data_rank=None)
                return made.setdefault(name, placed)

            torch.save(adam(part_of), tmp_path / f"run/optim_world_size_2_rank_{rank}.pt")
    with pytest.raises(UsageError, match="share their memory"):
        api.reshard(tmp_path / "run", tmp_path / "out", mesh="dp_shard=3", trainer="verl")


def test_pickles_read_exactly_are_written_the_same_again(tmp_path: Path) -> None:
    save(tmp_path, {"fsdp": 2})
    for file in sorted(tmp_path.glob("*_rank_1.pt")):
        with zipfile.ZipFile(file) as archive:
            content = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
        ours = build_pickle(parse_exactly(content))
        assert len(ours) <= len(content)
        assert build_pickle(parse_exactly(ours)) == ours, file.name


OLDER = ROOT / "samples" / "ranks-of-older-torch.tar.xz"
"""What `save` above leaves of the model below with PyTorch 2.8.0 and 2.10.0, whose meshes have other attributes: on two
ranks, and on a mesh of two times two."""
OLDER_STATE = {"w": torch.arange(15.0).reshape(5, 3), "n": torch.arange(4).to(torch.bfloat16), "b": torch.arange(3)}


@pytest.mark.parametrize("release", ["2.8.0", "2.10.0"])
@pytest.mark.parametrize(("kind", "mesh"), [("", "dp_shard=3"), ("-hsdp", "dp_replicate=1,dp_shard=2")])
def test_ranks_of_older_releases_are_read_and_written(release: str, kind: str, mesh: str, tmp_path: Path) -> None:
    with tarfile.open(OLDER) as archive:
        archive.extractall(tmp_path, filter="data")
    run = tmp_path / f"torch-{release}{kind}"
    (run / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 2}')
    assert read(run) == flat(OLDER_STATE)
    api.reshard(run, tmp_path / "out", mesh=mesh, trainer="verl")
    assert read(tmp_path / "out") == flat(OLDER_STATE)
    for source, name in (
        (run, "one"),
        (tmp_path / "out", "other"),
    ):  # by way of the other mesh, or not: the same objects
        api.reshard(source, tmp_path / name, mesh="dp_replicate=2,dp_shard=2" if kind else "dp_shard=2", trainer="verl")
    for rank in range(2):
        name = f"model_world_size_{4 if kind else 2}_rank_{rank}.pt"
        assert _objects(tmp_path / "one" / name) == _objects(tmp_path / "other" / name)


def _objects(file: Path) -> bytes:
    """The pickle in a file, written anew: equal when it makes the same objects."""
    with zipfile.ZipFile(file) as archive:
        content = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
    return build_pickle(parse_exactly(content))
