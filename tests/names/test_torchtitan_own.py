"""The maps of torchtitan beside its own adapters, on random weights, both ways.

torchtitan is no dependency: `pip install --no-deps --target DIR torchtitan==0.3.0` (0.2.2 for llama4), and DIR on
PYTHONPATH. Its adapters run as they are; what they import and do not need here are stubs.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import toys
from names.keymaps import Tensors, alone, assert_same, backward, forward, per_expert

from ckpt_tools.checkpoint.names.keymap import load_key_maps

MODELS = "torchtitan.models"
REAL = ("torchtitan.protocols.state_dict_adapter", "torchtitan.models.utils")


def adapter(module: str, name: str, config: object, *others: str):
    with alone("torchtitan", f"{MODELS}.{module}", *REAL, *others) as found:
        made = object.__new__(getattr(found, name))
        made.fqn_to_index_mapping = None
        try:
            type(made).__init__(made, config, None)
        except (AttributeError, TypeError) as error:
            pytest.skip(f"this torchtitan's adapter is built differently: {error}")
        made._validate_hf_rope_config = lambda *_: None
        return made


def random(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Tensors:
    torch.manual_seed(seed)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def experts(config: object, prefix: str = "") -> SimpleNamespace:
    """What adapters ask torchtitan's configuration."""
    moe = SimpleNamespace(num_experts=4)
    attention = SimpleNamespace(
        q_lora_rank=getattr(config, "q_lora_rank", 0) or 0,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=None,
        dim=config.hidden_size,
    )
    layers = [SimpleNamespace(moe=moe, attention=attention) for _ in range(config.num_hidden_layers)]
    return SimpleNamespace(
        layers=layers,
        mtp_layers=layers[:1],
        enable_weight_tying=False,
        moe=moe,
        moe_args=moe,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        dim=config.hidden_size,
    )


DEEPSEEK = {
    "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_routed_experts": 4,
}  # fmt: skip
LATENT = {
    "self_attn.kv_a_proj_with_mqa.weight": (12, 16),
    "self_attn.kv_a_layernorm.weight": (8,),
    "self_attn.kv_b_proj.weight": (32, 8),
    "self_attn.o_proj.weight": (16, 16),
    "input_layernorm.weight": (16,),
    "post_attention_layernorm.weight": (16,),
    "mlp.gate.weight": (4, 16),
    "mlp.gate.e_score_correction_bias": (4,),
    **{f"mlp.shared_experts.{name}_proj.weight": (8, 16) for name in ("gate", "up")},
    "mlp.shared_experts.down_proj.weight": (16, 8),
    **{f"mlp.experts.{e}.{name}_proj.weight": (8, 16) for e in range(4) for name in ("gate", "up")},
    **{f"mlp.experts.{e}.down_proj.weight": (16, 8) for e in range(4)},
}
QUERY = {
    True: {
        "self_attn.q_a_proj.weight": (6, 16),
        "self_attn.q_a_layernorm.weight": (6,),
        "self_attn.q_b_proj.weight": (24, 6),
    },
    False: {"self_attn.q_proj.weight": (24, 16)},
}
NEXT_TOKENS = {
    "enorm.weight": (16,),
    "hnorm.weight": (16,),
    "eh_proj.weight": (16, 32),
    "shared_head.norm.weight": (16,),
}
OUTSIDE = {"model.embed_tokens.weight": (32, 16), "model.norm.weight": (16,), "lm_head.weight": (32, 16)}


@pytest.mark.parametrize("is_latent", [True, False])
def test_deepseek_is_what_its_adapter_makes_with_layers_for_further_tokens(is_latent) -> None:
    config = DEEPSEEK | {"q_lora_rank": 6 if is_latent else None}
    theirs = adapter("deepseek_v3.state_dict_adapter", "DeepSeekV3StateDictAdapter", experts(SimpleNamespace(**config)))
    layer = LATENT | QUERY[is_latent]
    hub = random(
        OUTSIDE
        | {f"model.layers.{at}.{name}": shape for at in range(3) for name, shape in layer.items()}
        | {f"model.layers.2.{name}": shape for name, shape in NEXT_TOKENS.items()}
    )
    ours = forward(load_key_maps("torchtitan")["deepseek_v3"], hub, config)
    made = theirs.from_hf(dict(hub))
    assert_same(ours, made)
    assert_same(backward(load_key_maps("torchtitan")["deepseek_v3"], made, config), theirs.to_hf(made))


def test_gpt_oss_is_what_its_adapter_makes_of_the_published_form(tmp_path) -> None:
    """Its blocks, dequantised, are the columns of the hub's bf16 form as rows; experts also have names with axes."""
    config = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    theirs = adapter("gpt_oss.state_dict_adapter", "GptOssStateDictAdapter", experts(SimpleNamespace(**config)))
    torch.manual_seed(0)
    layer = {
        **{f"self_attn.{name}_proj.weight": (16, 16) for name in "qkvo"},
        **{f"self_attn.{name}_proj.bias": (16,) for name in "qkvo"},
        "self_attn.sinks": (4,),
        "input_layernorm.weight": (16,),
        "post_attention_layernorm.weight": (16,),
        "mlp.router.weight": (4, 16),
        "mlp.router.bias": (4,),
        "mlp.experts.gate_up_proj": (4, 16, 24),
        "mlp.experts.gate_up_proj_bias": (4, 24),
        "mlp.experts.down_proj": (4, 12, 16),
        "mlp.experts.down_proj_bias": (4, 16),
    }
    hub = random(OUTSIDE | {f"model.layers.{at}.{name}": shape for at in range(2) for name, shape in layer.items()})
    published = {
        f"{name}_blocks" if name.endswith(("gate_up_proj", "down_proj")) else name: (
            tensor.transpose(1, 2) if name.endswith(("gate_up_proj", "down_proj")) else tensor
        )
        for name, tensor in hub.items()
    }
    ours = forward(load_key_maps("torchtitan")["gpt_oss"], hub, config)
    made = theirs.from_hf(published)
    axes = {"mlp1_weight": "_EGD", "mlp1_bias": "_EG", "mlp2_weight": "_EDF", "mlp2_bias": "_ED"}
    modules = {name + axes.get(name.rpartition(".")[2], ""): tensor for name, tensor in made.items()}
    assert_same(ours, modules)
    for state in (made, modules):
        assert_same(backward(load_key_maps("torchtitan")["gpt_oss"], state, config), hub)


LLAMA4 = {
    "input_layernorm.weight": (16,),
    "post_attention_layernorm.weight": (16,),
    **{f"self_attn.{name}_proj.weight": (16, 16) for name in "qkvo"},
    "feed_forward.router.weight": (4, 16),
    "feed_forward.experts.gate_up_proj": (4, 16, 24),
    "feed_forward.experts.down_proj": (4, 12, 16),
    "feed_forward.shared_expert.gate_proj.weight": (12, 16),
    "feed_forward.shared_expert.up_proj.weight": (12, 16),
    "feed_forward.shared_expert.down_proj.weight": (16, 12),
}


def test_llama4_is_what_its_adapter_made() -> None:
    theirs = adapter("llama4.model.state_dict_adapter", "Llama4StateDictAdapter", SimpleNamespace())
    shapes = {f"language_model.{name}": shape for name, shape in OUTSIDE.items()}
    shapes |= {f"language_model.model.layers.{at}.{n}": shape for at in range(2) for n, shape in LLAMA4.items()}
    hub = random(shapes)
    made = theirs.from_hf(hub)
    key_map = load_key_maps("torchtitan")["llama4"]
    assert_same(forward(key_map, hub, {"num_hidden_layers": 2}), made)
    assert_same(backward(key_map, made, {}), theirs.to_hf(made))
    text = {name.removeprefix("language_model."): tensor for name, tensor in hub.items()}
    assert_same(forward(load_key_maps("torchtitan")["llama4_text"], text, {"num_hidden_layers": 2}), made)


@pytest.mark.full
def test_flux_is_what_its_adapter_makes_of_diffusers_model() -> None:
    diffusers = pytest.importorskip("diffusers")
    sizes = {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2}
    model = diffusers.FluxTransformer2DModel(
        **sizes, in_channels=4, joint_attention_dim=16, pooled_projection_dim=8, axes_dims_rope=(2, 2, 4)
    )
    hub = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    theirs = adapter(
        "flux.model.state_dict_adapter", "FluxStateDictAdapter", SimpleNamespace(hidden_size=16, mlp_ratio=4.0)
    )
    key_map = load_key_maps("torchtitan")["FluxTransformer2DModel"]
    made = theirs.from_hf(dict(hub))
    assert_same(forward(key_map, hub, sizes), made)
    assert_same(backward(key_map, made, sizes), theirs.to_hf(made))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_earlier_tables_are_what_adapters_make(kind) -> None:
    config = toys.config_of(kind)
    hub = {name: torch.randn_like(tensor) for name, tensor in toys.build(kind).state_dict().items()}
    name, module = {"llama": ("Llama3", "llama3"), "qwen3-moe": ("Qwen3", "qwen3")}[kind]
    if kind == "qwen3-moe":
        hub = per_expert(hub)
    theirs = adapter(f"{module}.state_dict_adapter", f"{name}StateDictAdapter", experts(config))
    made = theirs.from_hf(dict(hub))
    key_map = load_key_maps("torchtitan")[config.model_type]
    assert_same(forward(key_map, hub, config.to_dict()), made)
    assert_same(backward(key_map, made, config.to_dict()), theirs.to_hf(dict(made)))
