"""Every model of torchtitan 0.3.0: all of its names and shapes, and the tensors that its own adapter makes of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from names.keymaps import assert_same, backward, forward
from safetensors.torch import load_file
from trainers import titan_models

from ckpt_tools.checkpoint.names.keymap import load_key_maps
from ckpt_tools.cli import main

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
for _needed in ("torchtitan", "torchdata", "spmd_types", "tyro"):
    pytest.importorskip(_needed, reason=f"needs {_needed}: see tests/names/test_torchtitan_own.py")


def patches(size, layers):
    sizes = {"in_channels": 3, "patch_size": size, "temporal_patch_size": 2, "num_hidden_layers": layers}
    return {"vision_config": sizes}


MUSE = {
    "text_config": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    "vision_config": {"num_attention_heads": 4, "num_hidden_layers": 3, "head_dim": 16},
}
MODELS = {
    ("llama3", "debugmodel"): ("llama", {"num_attention_heads": 16, "num_key_value_heads": 16}),
    ("qwen3", "debugmodel"): ("qwen3", {}),
    ("qwen3", "debugmodel_moe"): ("qwen3_moe", {"num_experts": 64}),
    ("gpt_oss", "debugmodel"): ("gpt_oss", {}),
    ("deepseek_v3", "debugmodel"): ("deepseek_v3", {"n_routed_experts": 8}),
    ("kimi_k2_7", "debugmodel"): ("kimi_k25", {"n_routed_experts": 8, **patches(14, 4)}),
    ("qwen3_5", "debugmodel"): ("qwen3_5", patches(16, 4)),
    ("qwen3_5", "debugmodel_moe"): ("qwen3_5_moe", patches(16, 2)),
    ("muse_glimmer", "debugmodel_mm"): ("muse_glimmer", MUSE),
}


@pytest.fixture(autouse=True)
def on_cpu():
    from trainers.test_torchtitan import Absent, let_torchtitan_use_cpu

    let_torchtitan_use_cpu()
    for name in (
        "fla",
        "fla.ops",
        "fla.ops.gated_delta_rule",
        "fla.ops.gated_delta_rule.chunk",
        "fla.ops.gated_delta_rule.fused_recurrent",
        "fla.modules",
        "fla.modules.conv",
        "fla.modules.conv.triton",
        "fla.modules.conv.triton.ops",
    ):  # kernels for GPUs
        sys.modules.setdefault(name, Absent(name))


@pytest.mark.parametrize("model", MODELS, ids="-".join)
def test_map_makes_all_tensors_of_the_model_as_its_adapter_does(model) -> None:
    kind, config = MODELS[model]
    entry, live = titan_models.debug_model(*model)
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in live.state_dict().items()}
    torch.manual_seed(0)
    state = {
        name: torch.randn(shape)
        for name, (shape, _) in shapes.items()
        if "expert_bias" not in name or kind.startswith(("deep", "kimi"))
    }
    theirs = entry.state_dict_adapter(entry.model, None)
    theirs._validate_hf_rope_config = lambda *_: None  # of a config.json
    if "lm_head.weight" in state and getattr(entry.model, "enable_weight_tying", False):
        state["lm_head.weight"] = state["tok_embeddings.weight"]
    known = {
        titan_models.AXES.sub(r"\1", name) if kind == "gpt_oss" else name: tensor for name, tensor in state.items()
    }
    hub = theirs.to_hf(dict(known))
    assert_same(theirs.from_hf(dict(hub)), known)
    config = config | sizes_of(entry.model, shapes)
    key_map = load_key_maps("torchtitan")[kind]
    hub = titan_models.of_transformers(hub, kind)
    ours = forward(key_map, hub, config, zeros=True)
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in ours.items()} == shapes
    assert_same({name: tensor for name, tensor in ours.items() if name in state}, state)
    assert not any(tensor.any() for name, tensor in ours.items() if name not in state)
    assert_same(backward(key_map, state, config), hub)


def sizes_of(model, shapes):
    """What the hub's config.json says of these tensors."""
    rows = {name.rpartition("attn.")[2]: shape[0] for name, (shape, _) in shapes.items()}
    experts = [shape[1] for name, (shape, _) in shapes.items() if name.endswith("w1_EFD")]
    linear = {"linear_num_key_heads": 1, "linear_key_head_dim": rows.get("in_proj_q.weight", 1)}
    tied = {"tie_word_embeddings": getattr(model, "enable_weight_tying", False)}
    return {"num_hidden_layers": len(model.layers), "moe_intermediate_size": max(experts, default=1), **linear, **tied}


SIZES = {
    **dict.fromkeys(("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 256),
    **dict.fromkeys(("vocab_size", "head_dim", "linear_key_head_dim", "linear_value_head_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "linear_num_key_heads"), 2),
    "num_experts": 8,
}
VISION = {"hidden_size": 256, "out_hidden_size": 256, "num_position_embeddings": 1024, "num_heads": 4, "depth": 2}


@pytest.mark.parametrize("one_by_one", [True, False])
def test_experts_as_transformers_saves_them_load_into_the_model_and_come_back(one_by_one, tmp_path) -> None:
    made = transformers.Qwen3_5MoeConfig(text_config=SIZES, vision_config=VISION | {"intermediate_size": 512})
    hub = transformers.Qwen3_5MoeForConditionalGeneration(made)
    hub.save_pretrained(tmp_path / "hub", save_original_format=one_by_one)
    assert any(".experts.7." in name for name in load_file(tmp_path / "hub" / "model.safetensors")) is one_by_one
    paths = [str(tmp_path / name) for name in ("hub", "dcp", "run", "hf")]
    assert main(["shard", *paths[:2], "--mesh", "dp_shard=2", "--names", "torchtitan", "-q"]) == 0
    config = titan_models.debug_model("qwen3_5", "debugmodel_moe")[0].model
    config.tok_embeddings.num_embeddings = config.lm_head.out_features = 64
    with torch.device("meta"):
        state = config.build().to_empty(device="cpu").state_dict()
    dcp.load(state, checkpoint_id=paths[1])
    dcp.save(state, checkpoint_id=paths[2])
    assert main(["gather", *paths[2:], "--assets", paths[0], "-q"]) == 0
    assert_same(type(hub).from_pretrained(tmp_path / "hf").state_dict(), hub.state_dict())


def test_every_model_has_a_map() -> None:
    import torchtitan.models

    there = {path.parent.name for path in Path(torchtitan.models.__file__).parent.glob("*/state_dict_adapter.py")}
    assert there == {module for module, _ in MODELS}  # flux: test_torchtitan_own
