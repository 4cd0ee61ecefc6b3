"""`reshard --names`: a sharded checkpoint by the names of another implementation, from whatever it has."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
import toys
from names.test_torchtitan import expected_of
from safetensors.torch import load_file

from ckpt_tools.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CONFIG = "config.json"


@pytest.fixture(scope="module", params=["llama-tied", "qwen3-moe"])
def model(request, tmp_path_factory):
    """(directory on the hub, its tensors, torchtitan's, the live model's)"""
    kind = request.param.removesuffix("-tied")
    directory = tmp_path_factory.mktemp("hub") / request.param
    live = toys.build(kind, tie_word_embeddings=request.param == "llama-tied")
    live.save_pretrained(directory)
    hub = load_file(directory / "model.safetensors")
    return directory, hub, expected_of(hub, kind), live.state_dict()


def loaded(path, expected, prefix=""):
    state = {prefix + name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(state, checkpoint_id=path)
    return [name for name, tensor in expected.items() if not torch.equal(tensor, state[prefix + name])]


def reshard(source, destination, *options):
    return main(["reshard", str(source), str(destination), "--mesh", "dp_shard=3", *options, "-q"])


@pytest.mark.full(but=["qwen3-moe-torchtitan"])
@pytest.mark.parametrize("first", ["live", "torchtitan", "hub"])
def test_named_again_loads_there_and_the_files_come_back(model, tmp_path, first) -> None:
    directory, hub, titan, live = model
    args = ["shard", str(directory), str(tmp_path / "dcp"), "--mesh", "dp_shard=2", "--names", first, "-q"]
    assert main(args) == 0
    for names, expected in (("torchtitan", titan), ("live", live), ("hub", hub)):
        assert reshard(tmp_path / "dcp", tmp_path / names, "--names", names) == 0
        assert loaded(tmp_path / names, expected) == []
        assert main(["verify", str(tmp_path / names), "-q"]) == 0
        assert main(["gather", str(tmp_path / names), str(tmp_path / f"back-{names}"), "-q"]) == 0
        assert (tmp_path / f"back-{names}/model.safetensors").read_bytes() == (
            directory / "model.safetensors"
        ).read_bytes()


def test_tied_names_of_a_library_are_one_tensor_on_the_way(model, tmp_path) -> None:
    directory, hub, _, live = model
    if "lm_head.weight" in hub:
        pytest.skip("not tied")
    args = ["shard", str(directory), str(tmp_path / "meta"), "--mesh", "dp_shard=2", "--names", "meta", "-q"]
    assert main(args) == 0
    for names in ("live", "hub", "megatron"):
        assert reshard(tmp_path / "meta", tmp_path / names, "--names", names) == 0
    assert loaded(tmp_path / "live", live) == []
    assert loaded(tmp_path / "hub", hub) == []


def test_trained_weights_keep_their_root_and_other_state_is_refused(model, tmp_path, capsys) -> None:
    directory, _, titan, live = model
    step = tmp_path / "step-10"
    moment = next(iter(titan))
    state = {"model": titan, "optimizer": {"state": {moment: {"exp_avg": torch.ones(3)}}}}
    dcp.save(state, checkpoint_id=step)
    assert reshard(step, tmp_path / "out", "--names", "live") == 2
    assert "optimizer.state" in capsys.readouterr().err
    only = ("--include", "model.**")
    assert reshard(step, tmp_path / "out", "--names", "live", *only) == 2
    assert "config.json" in capsys.readouterr().err
    shutil.copy(directory / CONFIG, step)
    assert reshard(step, tmp_path / "out", "--names", "live", *only) == 0
    assert loaded(tmp_path / "out", live, "model.") == []


def test_own_map_leads_there_and_back(tmp_path) -> None:
    toys.build("gpt2").save_pretrained(tmp_path / "hub")
    live = load_file(tmp_path / "hub/model.safetensors")
    patterns = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in live)
    lines = [f"{name} = {name.replace('transformer.wte', 'embed')}" for name in patterns]
    (tmp_path / "own.map").write_text("\n".join(["[gpt2]", *lines]))
    assert main(["shard", str(tmp_path / "hub"), str(tmp_path / "dcp"), "--mesh", "dp_shard=2", "-q"]) == 0
    assert reshard(tmp_path / "dcp", tmp_path / "own", "--map", str(tmp_path / "own.map")) == 0
    renamed = {name.replace("transformer.wte", "embed"): tensor for name, tensor in live.items()}
    assert loaded(tmp_path / "own", renamed) == []
    back = ["gather", str(tmp_path / "own"), str(tmp_path / "back"), "--map", str(tmp_path / "own.map"), "-q"]
    assert main(back) == 0
    assert (tmp_path / "back/model.safetensors").read_bytes() == (tmp_path / "hub/model.safetensors").read_bytes()


def test_inspect_shows_the_result_without_writing(model, capsys) -> None:
    directory, _, titan, live = model
    for names, expected in (("torchtitan", titan), ("live", live)):
        assert main(["inspect", str(directory), "--names", names, "--tensors", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        shown = {entry["fqn"]: tuple(entry["shape"]) for entry in document["tensors"]}
        tied = {} if "lm_head.weight" in shown else {"lm_head.weight": tuple(expected["lm_head.weight"].shape)}
        assert shown | tied == {name: tuple(tensor.shape) for name, tensor in expected.items()}
        assert "names of" in (document["names"] or "names of the file")
    assert main(["inspect", str(directory), "--names", "torchtitan", "--mesh", "dp_shard=2"]) == 0
    assert "names of torchtitan's" in capsys.readouterr().out
