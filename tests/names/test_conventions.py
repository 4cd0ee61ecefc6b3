"""Whole walks by the names of libraries: shard, verify, gather byte for byte, and what a trainer saves."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
import toys
from names.keymaps import assert_same
from safetensors.torch import load_file, save_file

from ckpt_tools.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
HEADS = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64, "head_dim": 8}
GROUPS = HEADS | {"num_key_value_heads": 2, "intermediate_size": 24, "num_local_experts": 4}
LATENT = {
    **{name: size for name, size in HEADS.items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
KINDS = {
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", GROUPS | {"num_experts_per_tok": 2}),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig", GROUPS | {"intermediate_size_mlp": 24}),
    "deepseek": ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT),
    "deepseek-whole-queries": ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT | {"q_lora_rank": None}),
}


def save(kind: str, directory) -> str:
    import transformers

    torch.manual_seed(0)
    model, config, sizes = KINDS[kind]
    getattr(transformers, model)(getattr(transformers, config)(**sizes)).save_pretrained(directory)
    return str(directory)


def state_of(path: str) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint, as its trainer would load it."""
    found = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {name: torch.zeros(one.size, dtype=one.properties.dtype) for name, one in found.items()}
    dcp.load(state, checkpoint_id=path)
    return state


WALKS = [
    ("gpt_oss", "torchtitan"), ("llama4", "torchtitan"), ("deepseek", "torchtitan"),
    ("deepseek-whole-queries", "torchtitan"), ("deepseek", "megatron"), ("deepseek-whole-queries", "megatron"),
]  # fmt: skip


@pytest.mark.full(but=["gpt_oss-torchtitan", "deepseek-megatron"])
@pytest.mark.parametrize(("kind", "names"), WALKS, ids=map("-".join, WALKS))
def test_model_by_a_library_s_names_verifies_and_comes_back(kind, names, tmp_path) -> None:
    hub, made = save(kind, tmp_path / "hub"), str(tmp_path / "made")
    assert main(["shard", hub, made, "--mesh", "dp_shard=2", "--names", names, "-q"]) == 0
    assert main(["verify", made, "--against", hub, "-q"]) == 0
    assert main(["diff", hub, made, "-q"]) == 0
    assert main(["gather", made, str(tmp_path / "back"), "-q"]) == 0
    original = (tmp_path / "hub" / "model.safetensors").read_bytes()
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == original
    dcp.save({"model": state_of(made)}, checkpoint_id=tmp_path / "step")
    assert main(["gather", str(tmp_path / "step"), str(tmp_path / "hf"), "--assets", hub, "-q"]) == 0
    assert_same(load_file(tmp_path / "hf" / "model.safetensors"), load_file(tmp_path / "hub" / "model.safetensors"))


@pytest.mark.full
def test_flux_by_torchtitan_s_names_verifies_and_comes_back(tmp_path) -> None:
    diffusers = pytest.importorskip("diffusers")
    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2}
    more = {"in_channels": 4, "joint_attention_dim": 16, "pooled_projection_dim": 8, "axes_dims_rope": (2, 2, 4)}
    diffusers.FluxTransformer2DModel(**sizes, **more, guidance_embeds=True).save_pretrained(tmp_path / "hub")
    hub, made, file = str(tmp_path / "hub"), str(tmp_path / "made"), "diffusion_pytorch_model.safetensors"
    assert main(["shard", hub, made, "--mesh", "dp_shard=2", "--names", "torchtitan", "-q"]) == 0
    assert main(["verify", made, "--against", hub, "-q"]) == 0
    assert main(["gather", made, str(tmp_path / "back"), "-q"]) == 0
    assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "hub" / file).read_bytes()
    dcp.save(state_of(made), checkpoint_id=tmp_path / "step")
    assert main(["gather", str(tmp_path / "step"), str(tmp_path / "hf"), "--assets", hub, "-q"]) == 0
    assert_same(load_file(next((tmp_path / "hf").glob("*.safetensors"))), load_file(tmp_path / "hub" / file))


def test_what_the_hub_has_no_place_for_is_for_the_user_to_leave_out(tmp_path, capsys) -> None:
    """A bias that balanced experts while they were trained: without it, others are chosen."""
    hub, made = str(toys.save("qwen3-moe", tmp_path / "hub")), str(tmp_path / "made")
    assert main(["shard", hub, made, "--mesh", "dp_shard=2", "--names", "torchtitan"]) == 0
    assert "not in the files, written as zeros: layers.0.moe.expert_bias_E" in capsys.readouterr().err
    assert main(["gather", made, str(tmp_path / "back")]) == 0
    assert "left out layers.0.moe.expert_bias_E" in capsys.readouterr().err
    assert_same(load_file(tmp_path / "back" / "model.safetensors"), load_file(tmp_path / "hub" / "model.safetensors"))
    assert all(state_of(made)[f"layers.{at}.moe.expert_bias_E"].equal(torch.zeros(4)) for at in range(2))
    state = state_of(made) | {f"layers.{at}.moe.expert_bias_E": torch.ones(4) for at in range(2)}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "step")
    args = ["gather", str(tmp_path / "step"), str(tmp_path / "hf"), "--assets", hub, "-q"]
    assert main(args) == 2
    error = capsys.readouterr().err
    assert "the hub has no place for layers.0.moe.expert_bias_E" in error
    assert "--exclude '**layers.*.moe.expert_bias_E'" in error
    assert main([*args, "--exclude", "**layers.*.moe.expert_bias_E"]) == 0
    assert_same(load_file(tmp_path / "hf" / "model.safetensors"), load_file(tmp_path / "hub" / "model.safetensors"))
    assert main(["diff", str(tmp_path / "step"), hub, "--json"]) == 3
    difference = json.loads(capsys.readouterr().out)
    assert difference["only_in_a"] == ["layers.0.moe.expert_bias_E", "layers.1.moe.expert_bias_E"]
    assert difference["changed"] == []


@pytest.mark.full
def test_what_was_not_compared_is_said(tmp_path, capsys) -> None:
    hub = str(toys.save("llama", tmp_path / "hub"))
    assert main(["shard", hub, str(tmp_path / "made"), "--mesh", "dp_shard=2", "--names", "megatron", "-q"]) == 0
    state = state_of(str(tmp_path / "made"))
    name = "output_layer.weight"
    dcp.save(state | {name: torch.cat([state[name], torch.ones(64, 32)])}, checkpoint_id=tmp_path / "step")
    step, said = str(tmp_path / "step"), f"left out 64 rows of padding of {name}"
    assert main(["verify", step, "--against", hub]) == 0
    assert said in "".join(capsys.readouterr())
    assert main(["diff", step, hub]) == 0
    assert said in "".join(capsys.readouterr())
    assert main(["diff", step, hub, "--names", "megatron", "-q"]) == 0
    assert main(["diff", step, hub, "--names", "meta"]) == 2
    assert "neither checkpoint has names of meta's" in capsys.readouterr().err


def test_part_of_a_tensor_is_compared_as_it_is(tmp_path, capsys) -> None:
    """Half of what the hub's tensors are made of is no reason to stop."""
    hub = str(toys.save("llama", tmp_path / "hub"))
    dcp.save({"decoder.layers.0.mlp.linear_fc1.weight_w": torch.ones(64, 32)}, checkpoint_id=tmp_path / "step")
    assert main(["diff", str(tmp_path / "step"), hub, "-q"]) == 3
    assert "- decoder.layers.0.mlp.linear_fc1.weight_w" in capsys.readouterr().out


def test_file_that_lacks_a_tensor_is_refused(tmp_path, capsys) -> None:
    directory = tmp_path / "hub"
    toys.save("llama", directory)
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    args = ["shard", str(directory), str(tmp_path / "made"), "--mesh", "dp_shard=2"]
    assert main(args) == 4
    args.append("--as-part")
    for names in ("meta", "torchtitan"):
        assert main([*args, "--names", names]) == 2
        assert "not in the file: model.layers.1.self_attn.k_proj.weight" in capsys.readouterr().err
    assert main([*args, "--names", "megatron"]) == 2
    assert "also needs model.layers.1.self_attn.k_proj.weight" in capsys.readouterr().err
