"""Experts that real ranks cut otherwise than the rest of a model, as torchtitan does: read, gathered and written."""

from __future__ import annotations

import pytest
import toys
from fsdp2.ranks import run_ranks
from safetensors.torch import load_file

from ckpt_tools import api
from ckpt_tools.checkpoint.infer_mesh import rank_of_file
from ckpt_tools.cli import main

pytestmark = pytest.mark.filterwarnings("ignore")
RANKS = 4
CUT = ("--set", "**.experts.*=dp_shard:S(1)")


def build(**settings):
    """More ranks than experts: torchtitan cuts experts along dim 1 then."""
    return toys.build("qwen3-moe", num_experts=2, **settings)


def wrapped(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp_shard",))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.ndim == 3 else None)
    return model


def save_and_load(_rank, _world_size, saved, written):
    """Save a live model; load what ckpt wrote into another; return what was loaded otherwise than it was."""
    import torch
    import torch.distributed.checkpoint as dcp

    right, other = wrapped(build()), wrapped(build(seed=1))
    dcp.save(right.state_dict(), checkpoint_id=saved)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=written)
    return [n for n, t in right.state_dict().items() if not torch.equal(t.to_local(), state[n].to_local())]


@pytest.mark.full
def test_experts_cut_along_dim_1_gather_and_load_bitwise(tmp_path, capsys) -> None:
    hub, saved, written = (str(tmp_path / name) for name in ("hub", "saved", "written"))
    build().save_pretrained(hub)
    assert main(["shard", hub, written, "--mesh", f"dp_shard={RANKS}", *CUT, "-q"]) == 0
    assert run_ranks(RANKS, save_and_load, saved, written) == [[]] * RANKS
    capsys.readouterr()
    assert main(["inspect", saved]) == 0
    assert "dp_shard=4, 4 ranks (inferred from the chunks)" in capsys.readouterr().out
    assert main(["gather", saved, str(tmp_path / "back"), "--assets", hub, "-q"]) == 0
    wanted, found = (load_file(f"{path}/model.safetensors") for path in (hub, tmp_path / "back"))
    assert found.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not tensor.equal(found[name])] == []


def test_experts_cut_by_tensor_parallelism_are_refused_unless_a_manifest_says_how(tmp_path, capsys) -> None:
    hub, written = str(tmp_path / "hub"), tmp_path / "written"
    build().save_pretrained(hub)
    cuts = ("--set", "**.gate_up_proj=tp:S(1)", "--set", "**.experts.down_proj=tp:S(2)")
    assert main(["shard", hub, str(written), "--mesh", "tp=4", *cuts, "-q"]) == 0
    (written / "ckpt_manifest.json").unlink()
    assert main(["gather", str(written), str(tmp_path / "back"), "--assets", hub, "-q"]) == 2
    assert "several matrices in one tensor" in capsys.readouterr().err


INSIDE = ("--set", "**.experts.*=ep:S(0)", "--set", "**=ep:F")


def boxes_of(path):
    return {
        entry.fqn: [(rank_of_file(chunk.span.file), chunk.box) for chunk in entry.chunks]
        for entry in api.open_checkpoint(path).tensors
    }


def test_ep_inside_fsdp_cuts_the_rest_as_if_there_were_no_ep(tmp_path) -> None:
    toys.build("qwen3-moe").save_pretrained(tmp_path / "hub")
    hub, plain, inside = (str(tmp_path / name) for name in ("hub", "plain", "inside"))
    assert main(["shard", hub, plain, "--mesh", "dp_shard=4", "-q"]) == 0
    assert main(["shard", hub, inside, "--mesh", "dp_shard=2,ep=2", *INSIDE, "-q"]) == 0
    ours, theirs = boxes_of(inside), boxes_of(plain)
    assert {fqn for fqn, boxes in ours.items() if boxes != theirs[fqn]} == {f for f in ours if ".experts." in f}
    experts = [(rank, box.offsets[0]) for rank, box in ours["model.layers.0.mlp.experts.down_proj"]]
    assert sorted(experts) == [(0, 0), (1, 2), (2, 1), (3, 3)]  # ep first, FSDP inside what it has cut
    (tmp_path / "inside" / "ckpt_manifest.json").unlink()
    found = api.inspect(inside)
    assert (str(found.mesh), found.mesh_source) == ("dp_shard=2,ep=2", "inferred")
    assert main(["gather", inside, str(tmp_path / "back"), "--assets", hub, "-q"]) == 0
    assert main(["diff", hub, str(tmp_path / "back"), "-q"]) == 0


@pytest.mark.parametrize(
    ("mesh", "more", "what"),
    [
        ("dp_shard=2,ep=2", ("--set", "**=ep:F,dp_shard:R"), "but dp_shard does not cut it"),
        ("dp_shard=2,ep=2", ("--set", "lm_head.weight=ep:F", "--engine", "dtensor"), "dtensor does not write F"),
        ("dp_shard=3,ep=3", ("--set", "lm_head.weight=ep:F,dp_shard:S(1)"), "divisible by dp_shard×ep=9"),
    ],
)
def test_cut_over_two_axes_that_is_not_possible_is_refused(tmp_path, capsys, mesh, more, what) -> None:
    toys.build("llama").save_pretrained(tmp_path / "hub")
    assert main(["shard", str(tmp_path / "hub"), str(tmp_path / "out"), "--mesh", mesh, *more]) == 2
    assert what in capsys.readouterr().err
