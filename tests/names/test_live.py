"""What `shard` writes loads into the live model by stock PyTorch; what was trained loads everywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import forked
import pytest
import torch
import torch.distributed.checkpoint as dcp
import toys
from safetensors.torch import load_file, save_file

from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME
from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.checkpoint.names import load_table, match_names
from ckpt_tools.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
QUICK = ("qwen3-moe", "t5")


@pytest.fixture(scope="module", params=["llava", "qwen3-moe", "t5"])
def model(request, tmp_path_factory):
    """A model, and a directory with it as transformers saves it; `test_zoo` walks the others."""
    directory = tmp_path_factory.mktemp("hub") / request.param
    made = toys.build(request.param)
    made.save_pretrained(directory, max_shard_size="100KB")
    return made, directory


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of a directory, but the manifest."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != MANIFEST_NAME}


def load_stock(model, directory: Path) -> dict[str, torch.Tensor]:
    """What the guide's lines do, without ranks."""
    state = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    dcp.load(state, checkpoint_id=directory)
    return state


def assert_same(found, expected) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


@pytest.mark.full(but=QUICK)
def test_sharded_model_loads_into_the_live_one_and_comes_back_byte_for_byte(model, tmp_path) -> None:
    live, hub = model
    assert main(["shard", str(hub), str(tmp_path / "dcp"), "--mesh", "dp_shard=2,tp=2", "-q"]) == 0
    assert main(["verify", str(tmp_path / "dcp"), "-q"]) == 0
    assert_same(load_stock(live, tmp_path / "dcp"), live.state_dict())
    assert main(["reshard", str(tmp_path / "dcp"), str(tmp_path / "three"), "--mesh", "dp_shard=3", "-q"]) == 0
    assert_same(load_stock(live, tmp_path / "three"), live.state_dict())
    for source in ("dcp", "three"):
        assert main(["gather", str(tmp_path / source), str(tmp_path / f"{source}-hf"), "-q"]) == 0
        assert contents(tmp_path / f"{source}-hf") == contents(hub)


@pytest.mark.full(but=QUICK)
def test_trained_model_becomes_what_from_pretrained_and_the_original_say(model, tmp_path) -> None:
    live, hub = model
    dcp.save({"model": live.state_dict()}, checkpoint_id=tmp_path / "run")
    assert main(["gather", str(tmp_path / "run"), str(tmp_path / "hf"), "--assets", str(hub), "-q"]) == 0
    loaded, info = type(live).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert {what: names for what, names in info.items() if names} == {}
    assert_same(loaded.state_dict(), live.state_dict())
    assert main(["gather", str(tmp_path / "run"), str(tmp_path / "like"), "--like", str(hub), "-q"]) == 0
    assert contents(tmp_path / "like") == contents(hub)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A model with experts, on the hub and as a training run saves it."""
    directory = tmp_path_factory.mktemp("experts")
    made = toys.build("qwen3-moe")
    made.save_pretrained(directory / "hub")
    dcp.save(made.state_dict(), checkpoint_id=directory / "run")
    return directory


def test_names_hub_keeps_those_of_the_file(experts, tmp_path) -> None:
    args = ["shard", str(experts / "hub"), str(tmp_path / "dcp"), "--mesh", "dp_shard=2", "--names", "hub"]
    assert main([*args, "-q"]) == 0
    with open_path(str(tmp_path / "dcp")) as opened:
        names = {entry.fqn for entry in opened.checkpoint.tensors}
    assert names == load_file(experts / "hub" / "model.safetensors").keys()


@pytest.mark.full
def test_layout_that_inspect_shows_is_the_one_that_shard_writes(experts, tmp_path, capsys) -> None:
    options = ["--mesh", "tp=2", "--tp-plan", "auto"]
    assert forked.main(["shard", str(experts / "hub"), str(tmp_path / "dcp"), *options]) == 0
    assert "packed tensors (model.layers.0.mlp.experts.gate_up_proj, model.layers.1" in capsys.readouterr().err
    shown = []
    for argv in ([str(experts / "hub"), *options], [str(tmp_path / "dcp")]):
        assert forked.main(["inspect", *argv, "--tensors", "--json"]) == 0
        tensors = json.loads(capsys.readouterr().out)["tensors"]
        shown.append({one["fqn"]: {(*chunk["offsets"], *chunk["sizes"]) for chunk in one["chunks"]} for one in tensors})
    assert shown[0] == shown[1]
    # The way out for names that are not those of the plan.
    assert forked.main(["shard", str(experts / "hub"), str(tmp_path / "other"), *options, "--names", "hub"]) == 2
    assert "names of the live model" in capsys.readouterr().err


@pytest.mark.parametrize(("gone", "config"), [(1, {}), (3, {"num_local_experts": 4})])
def test_experts_that_are_not_there_are_not_passed_over(experts, gone, config) -> None:
    """The others would be stacked without a gap, as other experts than they are."""
    names = [n for n in load_file(experts / "hub" / "model.safetensors") if f".1.mlp.experts.{gone}." not in n]
    held = match_names(names, load_table().expected("Qwen3MoeForCausalLM", config), config)
    assert set(held.incomplete) == {f"model.layers.1.mlp.experts.{name}_proj" for name in ("gate_up", "down")}


@pytest.mark.parametrize("names", ["torchtitan", "megatron"])
def test_experts_in_one_tensor_are_those_that_stand_one_by_one(experts, names, tmp_path) -> None:
    toys.build("qwen3-moe").save_pretrained(tmp_path / "fused", save_original_format=False)
    digests = set()
    for hub in (experts / "hub", tmp_path / "fused"):
        written, back = (tmp_path / f"{hub.name}-{what}" for what in ("dcp", "back"))
        assert main(["shard", str(hub), str(written), "--mesh", "dp_shard=2", "--names", names, "-q"]) == 0
        assert main(["gather", str(written), str(back), "-q"]) == 0
        assert contents(back) == contents(hub)
        digests.add(json.loads((written / MANIFEST_NAME).read_text())["origin"]["map"]["digest"])
    assert len(digests) == 2  # of other rules
    assert main(["diff", str(tmp_path / "hub-dcp"), str(tmp_path / "fused-dcp"), "-q"]) == 0


@pytest.mark.full
def test_plan_that_does_not_fit_says_why_the_names_are_those_of_the_file(experts, tmp_path, capsys) -> None:
    shutil.copytree(experts / "hub", tmp_path / "hub")
    tensors = load_file(tmp_path / "hub" / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.0.up_proj.weight"]
    save_file(tensors, tmp_path / "hub" / "model.safetensors")
    args = ["shard", str(tmp_path / "hub"), str(tmp_path / "dcp"), "--mesh", "tp=2", "--tp-plan", "auto", "--as-part"]
    assert main(args) == 2
    error = capsys.readouterr().err
    assert "experts.gate_up_proj' matches no tensor (names of the file: " in error
    assert "names of the live model" in error


@pytest.mark.full
def test_names_live_of_a_gathered_model_are_those_of_training(experts, tmp_path) -> None:
    args = ["gather", str(experts / "run"), str(tmp_path / "hf"), "--names", "live", "--assets", str(experts / "hub")]
    assert main([*args, "-q"]) == 0
    live = toys.build("qwen3-moe").state_dict()
    assert_same(load_file(tmp_path / "hf" / "model.safetensors"), live)


@pytest.mark.full
def test_names_live_of_nothing_that_is_known_is_refused(experts, tmp_path, capsys) -> None:
    (tmp_path / "hub").mkdir()
    shutil.copy(experts / "hub" / "model.safetensors", tmp_path / "hub")
    args = ["shard", str(tmp_path / "hub"), str(tmp_path / "dcp"), "--mesh", "dp_shard=2"]
    assert main([*args, "--names", "live"]) == 2
    assert "no config.json" in capsys.readouterr().err
    assert main([*args, "--engine", "dtensor", "--names", "live"]) == 2
    assert "--engine stream" in capsys.readouterr().err


def test_file_that_lacks_an_expert_keeps_its_names_and_says_why(experts, tmp_path, capsys) -> None:
    (tmp_path / "hub").mkdir()
    shutil.copy(experts / "hub" / "config.json", tmp_path / "hub")
    tensors = load_file(experts / "hub" / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.1.up_proj.weight"]
    save_file(tensors, tmp_path / "hub" / "model.safetensors")
    args = ["shard", str(tmp_path / "hub"), str(tmp_path / "dcp"), "--mesh", "dp_shard=2"]
    assert main(args) == 4
    assert main([*args, "--as-part"]) == 0
    said = capsys.readouterr()
    assert "names of the file: its tensors are not those of a Qwen3MoeForCausalLM" in said.out + said.err


def test_damaged_chunk_that_is_written_in_parts_is_found(experts, tmp_path, capsys) -> None:
    run = tmp_path / "run"
    shutil.copytree(experts / "run", run)
    (data,) = run.glob("*.distcp")
    content = bytearray(data.read_bytes())
    part = toys.build("qwen3-moe").state_dict()["model.layers.1.mlp.experts.gate_up_proj"].numpy().tobytes()
    content[content.index(part) + len(part) // 2] ^= 1
    data.write_bytes(content)
    assert main(["gather", str(run), str(tmp_path / "hf"), "--assets", str(experts / "hub"), "-q"]) == 4
    assert "is damaged: CRC-32" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def test_manifest_s_digest_of_what_is_written_in_parts_is_held(experts, tmp_path, capsys) -> None:
    assert main(["shard", str(experts / "hub"), str(tmp_path / "dcp"), "--mesh", "dp_shard=2", "-q"]) == 0
    target = tmp_path / "dcp" / "__1_0.distcp"
    content = bytearray(target.read_bytes())
    live = toys.build("qwen3-moe").state_dict()["model.layers.1.mlp.experts.down_proj"].numpy()
    content[content.index(live[3].tobytes()) + 9] ^= 1
    target.write_bytes(content)
    assert main(["gather", str(tmp_path / "dcp"), str(tmp_path / "hf"), "-q"]) == 4
    assert "model.layers.1.mlp.experts.down_proj" in capsys.readouterr().err


def test_tied_weights_that_differ_are_refused(tmp_path, capsys) -> None:
    made = toys.build("gpt2")
    made.save_pretrained(tmp_path / "hub")
    state = dict(made.state_dict())
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    dcp.save(state, checkpoint_id=tmp_path / "run")
    assert main(["gather", str(tmp_path / "run"), str(tmp_path / "hf"), "--assets", str(tmp_path / "hub"), "-q"]) == 2
    assert "one tensor in the config, but differ" in capsys.readouterr().err


@pytest.mark.full
def test_tied_weights_are_one_item(tmp_path) -> None:
    made = toys.build("gpt2")
    made.save_pretrained(tmp_path / "model")
    for names in ("hub", "live"):
        args = ["shard", str(tmp_path / "model"), str(tmp_path / names), "--mesh", "dp_shard=2", "--names", names]
        assert main([*args, "-q"]) == 0
    sizes = {names: sum(p.stat().st_size for p in (tmp_path / names).glob("*.distcp")) for names in ("hub", "live")}
    assert sizes["hub"] == sizes["live"]


@pytest.mark.full
def test_map_of_another_version_is_not_turned_back(experts, tmp_path, capsys, monkeypatch) -> None:
    from ckpt_tools.checkpoint.names.table import Expected

    assert main(["shard", str(experts / "hub"), str(tmp_path / "dcp"), "--mesh", "dp_shard=2", "-q"]) == 0
    monkeypatch.setattr(Expected, "digest", property(lambda _: "0" * 32))
    assert main(["gather", str(tmp_path / "dcp"), str(tmp_path / "hf"), "-q"]) == 2
    assert "by a different map" in capsys.readouterr().err


@pytest.mark.full
def test_sharded_and_trained_are_compared_with_the_model_on_the_hub(model, tmp_path, capsys) -> None:
    live, hub = model
    assert main(["shard", str(hub), str(tmp_path / "dcp"), "--mesh", "dp_shard=2", "-q"]) == 0
    assert main(["verify", str(tmp_path / "dcp"), "--against", str(hub), "-q"]) == 0
    state = live.state_dict()
    dcp.save({"model": state}, checkpoint_id=tmp_path / "run")
    assert main(["diff", str(hub), str(tmp_path / "run")]) == 0
    name = max(state, key=lambda fqn: state[fqn].numel())
    state[name] = state[name] + 1
    dcp.save({"model": state}, checkpoint_id=tmp_path / "changed")
    capsys.readouterr()
    assert main(["diff", str(tmp_path / "changed"), str(hub)]) == 3
    assert name in capsys.readouterr().out


def test_matrices_side_by_side_that_tensor_parallel_ranks_may_have_cut_are_refused(experts, tmp_path, capsys) -> None:
    args = ["shard", str(experts / "hub"), str(tmp_path / "dcp"), "--mesh", "tp=2"]
    assert main([*args, "--set", "**.experts.gate_up_proj=tp:S(1)", "-q"]) == 0
    assert main(["gather", str(tmp_path / "dcp"), str(tmp_path / "known"), "-q"]) == 0
    (tmp_path / "dcp" / MANIFEST_NAME).unlink()
    args = ["gather", str(tmp_path / "dcp"), str(tmp_path / "hf"), "--assets", str(experts / "hub"), "-q"]
    assert main(args) == 2
    assert "cut where they lie side by side" in capsys.readouterr().err
    assert main(["reshard", str(tmp_path / "dcp"), str(tmp_path / "two"), "--mesh", "dp_shard=2", "-q"]) == 0
    assert main(["gather", str(tmp_path / "two"), str(tmp_path / "hf"), "--assets", str(experts / "hub"), "-q"]) == 0


def test_quantised_model_keeps_the_names_of_its_file(experts, tmp_path, capsys) -> None:
    (tmp_path / "hub").mkdir()
    shutil.copy(experts / "hub" / "model.safetensors", tmp_path / "hub")
    config = json.loads((experts / "hub" / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "fp8"}
    }
    (tmp_path / "hub" / "config.json").write_text(json.dumps(config))
    assert main(["shard", str(tmp_path / "hub"), str(tmp_path / "dcp"), "--mesh", "dp_shard=2"]) == 0
    said = capsys.readouterr()
    assert "names of the file: the model is quantised" in said.out + said.err
    assert main(["gather", str(tmp_path / "dcp"), str(tmp_path / "back"), "-q"]) == 0
    assert contents(tmp_path / "back") == contents(tmp_path / "hub")
