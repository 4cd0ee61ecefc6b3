"""Files that every rank saved for itself, fitted together; what cannot be fitted is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from formats.saved import fake_rank, flat, read, save_ranks
from fsdp2.ranks import execute, run_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt_tools import api
from ckpt_tools.cli import main
from ckpt_tools.errors import UnreadableError, UsageError

STATE = {
    "embed.weight": torch.arange(60.0).reshape(10, 6),
    "up.weight": torch.arange(48).reshape(8, 6).to(torch.bfloat16),
    "down.weight": torch.arange(48.0).reshape(6, 8),
    "uneven": torch.arange(15.0).reshape(5, 3),
    "norm": torch.arange(3.0),
    "scale": torch.tensor(2.5),
    "table": torch.arange(7),
}
MESHES: dict[str, tuple[dict[str, int], dict[str, list[object]], list[object]]] = {
    "fsdp": ({"fsdp": 2}, {}, [Shard(0)]),
    "veomni": ({"dp_shard": 3}, {}, [Shard(0)]),
    "hsdp": ({"ddp": 2, "fsdp": 2}, {}, [Replicate(), Shard(0)]),
    "fsdp-tp": (
        {"dp": 2, "tp": 2},
        {"up.weight": [_StridedShard(0, split_factor=2), Shard(0)], "down.weight": [Shard(0), Shard(1)]},
        [Shard(0), Replicate()],
    ),
    "dim-1": ({"fsdp": 2}, {"down.weight": [Shard(1)]}, [Shard(0)]),
}


def save(directory: Path, mesh: str, state: dict[str, torch.Tensor] | None = None, **options) -> None:
    """Save a model as the ranks of one of `MESHES` would; `table` is a buffer, a plain tensor on every rank."""
    sizes, special, usual = MESHES[mesh]

    def place(fqn: str) -> object:
        if fqn == "scale":
            return [Replicate()] * len(sizes)
        return None if fqn == "table" else special.get(fqn, usual)

    save_ranks(directory, STATE if state is None else state, sizes, place, **options)


@pytest.mark.parametrize("mesh", MESHES)
def test_dtensors_of_all_ranks_are_the_whole_model(mesh: str, tmp_path: Path) -> None:
    save(tmp_path, mesh)
    assert read(tmp_path) == flat(STATE)
    result = api.verify(tmp_path)
    assert result.findings == ()
    assert not any("checksum" in text for text in result.not_checked)
    assert any("of one step" in text for text in result.not_checked)


def test_gather_reshard_and_diff_take_a_step_of_verls(tmp_path: Path, capsys) -> None:
    step = tmp_path / "global_step_7"
    for role in ("actor", "critic"):
        save(step / role, "fsdp", optimizer_note="kept")
        (step / role / "huggingface").mkdir()
        (step / role / "huggingface" / "generation_config.json").write_text("{}")
        torch.save({"state": {}}, step / role / "optim_world_size_2_rank_0.pt")
    torch.save({"sampler": 1}, step / "data.pt")
    assert main(["gather", str(step), str(tmp_path / "hf")]) == 0
    told = capsys.readouterr().err
    assert "reads actor of verl's step, and not critic, data.pt" in told
    assert "optim_world_size_2_rank*.pt" in told
    assert (tmp_path / "hf" / "generation_config.json").read_text() == "{}"
    assert main(["reshard", str(step), str(tmp_path / "dcp"), "--mesh", "dp_shard=3"]) == 0
    assert read(tmp_path / "hf") == read(tmp_path / "dcp") == read(step) == flat(STATE)
    assert main(["diff", str(step), str(tmp_path / "hf")]) == 0
    capsys.readouterr()
    assert main(["inspect", str(step), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [content["name"] for content in shown["contents"]][:2] == ["actor", "critic"]
    assert any("not critic" in text for text in api.verify(step).not_checked)
    with pytest.raises(UsageError, match="already sharded"):
        api.shard(step, tmp_path / "no", mesh="dp_shard=2")


def test_accelerates_names_are_ranks_too(tmp_path: Path) -> None:
    save(tmp_path, "fsdp", name="pytorch_model_fsdp_0_rank{rank}.bin")
    for rank in range(2):
        torch.save({}, tmp_path / f"optimizer_0_rank{rank}.bin")
    assert read(tmp_path) == flat(STATE)
    assert api.verify(tmp_path).findings == ()


def test_world_of_one_has_plain_tensors(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "model_world_size_1_rank_0.pt")
    assert read(tmp_path) == flat(STATE)


# Missing, foreign and mixed ranks


def rank_file(directory: Path, world: int, rank: int) -> Path:
    return directory / f"model_world_size_{world}_rank_{rank}.pt"


def test_missing_rank_is_refused_by_its_number(tmp_path: Path) -> None:
    save(tmp_path, "fsdp")
    rank_file(tmp_path, 2, 1).unlink()
    with pytest.raises(UnreadableError, match="1 of 2 ranks have no file here: 1"):
        read(tmp_path)


def test_missing_rank_is_survived_where_another_has_its_part(tmp_path: Path) -> None:
    save(tmp_path, "hsdp")
    rank_file(tmp_path, 4, 1).unlink()
    assert read(tmp_path) == flat(STATE)
    assert any("the others hold everything" in text for text in api.verify(tmp_path).not_checked)
    rank_file(tmp_path, 4, 3).unlink()
    with pytest.raises(UnreadableError, match="2 of 4 ranks have no file here: 1, 3"):
        read(tmp_path)


def test_files_that_changed_places_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "fsdp")
    one, other = rank_file(tmp_path, 2, 0), rank_file(tmp_path, 2, 1)
    one.rename(tmp_path / "x")
    other.rename(one)
    (tmp_path / "x").rename(other)
    with pytest.raises(UnreadableError, match="the file of rank 0 records rank 1 instead"):
        read(tmp_path)


def test_files_of_two_worlds_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "fsdp")
    save(tmp_path, "veomni")
    with pytest.raises(UnreadableError, match="rank files of 2 models or world sizes"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norm": torch.ones(4)}, "differ in the shape of tensor 'norm'"),
        ({"norm": torch.ones(3, dtype=torch.int64)}, "differ in the dtype of tensor 'norm'"),
        ({"more": torch.ones(3)}, "rank 1 has tensor 'more', and rank 0 does not"),
        ({"norm": None}, "'norm' is not in the files of all ranks"),
    ],
)
def test_rank_of_another_model_is_refused(change: dict[str, torch.Tensor | None], words: str, tmp_path: Path) -> None:
    save(tmp_path, "fsdp")
    save(tmp_path / "other", "fsdp", {k: v for k, v in (STATE | change).items() if v is not None})
    shutil.copy(rank_file(tmp_path / "other", 2, 1), tmp_path)
    with pytest.raises(UnreadableError, match=words):
        read(tmp_path)


def test_rank_with_another_placement_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "fsdp")
    save(tmp_path / "other", "dim-1")
    shutil.copy(rank_file(tmp_path / "other", 2, 1), tmp_path)
    with pytest.raises(UnreadableError, match="differ in the placement of tensor 'down"):
        read(tmp_path)


def test_ranks_of_different_steps_are_refused_where_their_schedulers_tell(tmp_path: Path) -> None:
    save(tmp_path, "fsdp")
    for rank, step in ((0, 7), (1, 7)):
        extra = {"lr_scheduler": {"last_epoch": step}, "rng": {"numpy": ("MT19937", [1, 2])}}
        torch.save(extra, tmp_path / f"extra_state_world_size_2_rank_{rank}.pt")
    assert read(tmp_path) == flat(STATE)
    torch.save({"lr_scheduler": {"last_epoch": 6}}, tmp_path / "extra_state_world_size_2_rank_1.pt")
    assert main(["verify", str(tmp_path)]) == 3
    with pytest.raises(UnreadableError, match=r"step 7 in extra_state_\w+_0.pt, the schedule is at step 6 in"):
        api.gather(tmp_path, tmp_path / "no")
    torch.save({"lr_scheduler": None}, tmp_path / "extra_state_world_size_2_rank_1.pt")
    assert read(tmp_path) == flat(STATE)


@pytest.mark.parametrize("fqn", ["down.weight", "table", "uneven"])
def test_replicas_that_differ_are_found_and_never_gathered(fqn: str, tmp_path: Path) -> None:
    save(tmp_path, "hsdp")
    save(tmp_path / "other", "hsdp", STATE | {fqn: STATE[fqn] + 1})
    shutil.copy(rank_file(tmp_path / "other", 4, 3), tmp_path)
    assert [finding.code for finding in api.verify(tmp_path).findings] == ["replicas-differ"]
    with pytest.raises(UnreadableError, match=f"tensor '{fqn}': ranks that should have the same part") as caught:
        api.gather(tmp_path, tmp_path.parent / "out")
    assert "rank_3.pt" in str(caught.value.where)
    api.gather(tmp_path, tmp_path.parent / f"{tmp_path.name}-out", exclude=[fqn])


# Lies


def lie(directory: Path, rank: int, **fields: object) -> None:
    """Save a rank's file again with other fields in its DTensors' specs."""
    path = rank_file(directory, 2, rank)
    with fake_rank(rank, 2):
        state = torch.load(path, weights_only=False)
        for name, value in fields.items():
            target = state["up.weight"]._spec
            for part in name.split("__")[:-1]:
                target = getattr(target, part)
            object.__setattr__(target, name.split("__")[-1], value)
        torch.save(state, path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mesh___rank": 0}, "the file of rank 1 records rank 0 instead"),
        ({"mesh___coordinate_on_dim": (0,)}, "a part of shape|is incomplete"),
        ({"mesh___coordinate_on_dim": (7,)}, "do not fit together"),
        ({"mesh___coordinate_on_dim": ()}, "do not fit together"),
        ({"placements": (Shard(1),)}, "a part of shape|another placement"),
        ({"placements": (Replicate(),)}, "a part of shape"),
        ({"placements": (Shard(5),)}, "a dim that it does not have"),
        ({"placements": (_StridedShard(0, split_factor=4),)}, "strided by 4"),
    ],
)
def test_rank_that_lies_about_its_part_is_refused(fields: dict[str, object], words: str, tmp_path: Path) -> None:
    save(tmp_path, "fsdp")
    lie(tmp_path, 1, **fields)
    with pytest.raises(UnreadableError, match=words):
        api.gather(tmp_path, tmp_path.parent / "out")


def test_meshes_of_older_torch_are_read(tmp_path: Path, monkeypatch) -> None:
    """Before 2.10 a mesh was pickled with the tensor of its ranks, before 2.8 without the rank itself."""
    monkeypatch.setattr(
        DeviceMesh,
        "__getstate__",
        lambda mesh: {
            "device_type": "cpu",
            "mesh": torch.arange(4).reshape(2, 2),
            "mesh_dim_names": ("dp", "tp"),
            "_coordinate_on_dim": list(mesh.get_coordinate()),
        },
        raising=False,
    )
    save(tmp_path, "fsdp-tp")
    assert read(tmp_path) == flat(STATE)
    rank_file(tmp_path, 4, 2).unlink()
    with pytest.raises(UnreadableError, match="1 of 4 ranks have no file here: 2"):
        read(tmp_path)


# Real ranks


WORLD = """
import os, sys, warnings
import torch, torch.distributed as dist, torch.nn as nn
warnings.simplefilter("ignore")
rank, world, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(10, 6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.norm, self.scale = nn.LayerNorm(6), nn.Parameter(torch.tensor([2.0]))
        self.register_buffer("table", torch.arange(7.0))

for mode in ("fsdp2", "hsdp", "tp", "fsdp1", "fsdp1-mesh", "fsdp1-hsdp"):
    torch.manual_seed(0)
    model = Model()
    if mode == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",)))
    elif mode == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp")))
    elif mode == "tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    else:
        mesh = {"fsdp1": None, "fsdp1-mesh": (4,), "fsdp1-hsdp": (2, 2)}[mode]
        names = ("ddp", "fsdp")[-len(mesh or ()):]
        mesh = None if mesh is None else init_device_mesh("cpu", mesh, mesh_dim_names=names)
        from torch.distributed.fsdp import ShardingStrategy
        strategy = ShardingStrategy.HYBRID_SHARD if mode == "fsdp1-hsdp" else ShardingStrategy.FULL_SHARD
        model = FSDP(model, device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=True,
                     sharding_strategy=strategy)
    if mode.startswith("fsdp1"):
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            own = model.state_dict()
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            whole = model.state_dict()
    else:
        own = model.state_dict()
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    os.makedirs(f"{out}/{mode}", exist_ok=True)
    torch.save(own, f"{out}/{mode}/model_world_size_4_rank_{rank}.pt")
    if rank == 0:
        torch.save(whole, f"{out}/{mode}.pt")
    dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.full
def test_ranks_of_fsdp_are_read_as_full_state_dict_gathers_them(tmp_path: Path) -> None:
    run_ranks(4, execute, WORLD, tmp_path, backend=None, timeout=120)
    for mode in ("fsdp2", "hsdp", "tp", "fsdp1", "fsdp1-mesh", "fsdp1-hsdp"):
        whole = torch.load(tmp_path / f"{mode}.pt", weights_only=True)
        assert len(whole) == 9
        assert read(tmp_path / mode) == flat(whole), mode
        assert api.verify(tmp_path / mode).findings == (), mode
