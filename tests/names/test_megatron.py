"""megatron-core's names: formulas, Megatron-Bridge's own mappings, and a GPTModel that computes the same.

Bridge and megatron-core are no dependencies: `pip install --no-deps --target DIR megatron-bridge megatron-core`, and
DIR on PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import toys
from names.keymaps import Tensors, alone, assert_same, backward, forward, per_expert
from names.test_torchtitan_own import DEEPSEEK, LATENT, NEXT_TOKENS, OUTSIDE, QUERY, random
from safetensors.torch import load_file

from ckpt_tools.checkpoint.names.keymap import load_key_maps
from ckpt_tools.cli import main
from ckpt_tools.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MAPS = load_key_maps("megatron")
CONFIG = {
    "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32,
    "num_experts": 4, "n_routed_experts": 4,
}  # fmt: skip
DENSE = {
    "input_layernorm.weight": (16,), "post_attention_layernorm.weight": (16,), "self_attn.q_proj.weight": (16, 16),
    "self_attn.k_proj.weight": (8, 16), "self_attn.v_proj.weight": (8, 16), "self_attn.q_proj.bias": (16,),
    "self_attn.k_proj.bias": (8,), "self_attn.v_proj.bias": (8,), "self_attn.q_norm.weight": (4,),
    "self_attn.k_norm.weight": (4,), "self_attn.o_proj.weight": (16, 16), "mlp.gate_proj.weight": (24, 16),
    "mlp.up_proj.weight": (24, 16), "mlp.down_proj.weight": (16, 24),
}  # fmt: skip
MIXED = {
    **{name: shape for name, shape in DENSE.items() if not name.startswith("mlp")},
    "mlp.gate.weight": (4, 16),
    **{f"mlp.experts.{e}.{name}_proj.weight": (8, 16) for e in range(4) for name in ("gate", "up")},
    **{f"mlp.experts.{e}.down_proj.weight": (16, 8) for e in range(4)},
}
DENSE_DEEPSEEK = {
    **{name: shape for name, shape in (LATENT | QUERY[True]).items() if not name.startswith("mlp")},
    **{name: shape for name, shape in DENSE.items() if name.startswith("mlp")},
}


def hub_of(*layers: dict[str, tuple[int, ...]]) -> Tensors:
    shapes = {f"model.layers.{at}.{name}": shape for at, layer in enumerate(layers) for name, shape in layer.items()}
    return random(OUTSIDE | shapes)


CASES = {
    "llama": hub_of(DENSE, DENSE),
    "qwen2": hub_of(DENSE, DENSE),
    "qwen3": hub_of(DENSE, DENSE),
    "qwen3_moe": hub_of(DENSE, MIXED),
    "deepseek_v3": hub_of(DENSE_DEEPSEEK, LATENT | QUERY[True]),
}
BRIDGES = {
    "llama": ("llama.llama_bridge", "LlamaBridge"),
    "qwen2": ("qwen.qwen2_bridge", "Qwen2Bridge"),
    "qwen3": ("qwen.qwen3_bridge", "Qwen3Bridge"),
    "qwen3_moe": ("qwen.qwen3_moe_bridge", "Qwen3MoEBridge"),
    "deepseek_v3": ("deepseek.deepseek_v3_bridge", "DeepSeekV3Bridge"),
}


@pytest.mark.parametrize("kind", list(CASES))
def test_names_are_those_of_megatron_bridge_and_values_what_its_mappings_make(kind) -> None:
    root = "megatron.bridge.models"
    mapping, registry = (f"{root}.conversion.{name}" for name in ("param_mapping", "mapping_registry"))
    module, name = BRIDGES[kind]
    hub, asked = CASES[kind], SimpleNamespace(num_attention_heads=4, num_query_groups=2, kv_channels=4, hidden_size=16)
    asked.attention_output_gate = False
    with alone("megatron.bridge", f"{root}.{module}", mapping, registry, f"{root}.deepseek.common") as found:
        import megatron.bridge.models.conversion.param_mapping as theirs

        merge = {1: theirs.merge_qkv_biases, 2: theirs.merge_qkv_weights}
        expected: dict[str, torch.Tensor] = {}
        for one in getattr(found, name).mapping_registry(SimpleNamespace()).mappings:
            parts = one.hf_param if isinstance(one.hf_param, dict) else {"": one.hf_param}
            first = re.compile(re.escape(next(iter(parts.values()))).replace(r"\*", r"(\d+)"))
            for numbers in (match.groups() for hub_name in hub if (match := first.fullmatch(hub_name))):
                tensors = {key: hub[_filled(pattern, numbers)] for key, pattern in parts.items()}
                if isinstance(one, theirs.QKVMapping):
                    made = merge[tensors["q"].ndim](asked, **tensors)
                elif isinstance(one, theirs.GatedMLPMapping):
                    made = theirs.GatedMLPMapping.hf_to_megatron(SimpleNamespace(tp_size=1), tensors, None)
                else:
                    made = tensors[""]
                expected[_filled(one.megatron_param, numbers)] = made
    ours = forward(MAPS[kind], hub, CONFIG)
    new = ours.keys() - expected.keys()  # what models of this kind do not have, says Bridge, and some do
    rare = {"qwen3_moe": r"decoder\.layers\.0\.mlp|_layernorm|bias"}.get(kind, "_layernorm|bias")
    assert [name for name in new if not re.search(rare, name)] == []
    assert [name for name in ours.keys() - new if not torch.equal(expected[name], ours[name])] == []


def _filled(pattern: str, numbers: tuple[str, ...]) -> str:
    for number in numbers:
        pattern = pattern.replace("*", number, 1)
    return pattern


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Two groups of two queries that share a key and a value."""
    parts = [part.chunk(2) for part in (q, k, v)]
    return torch.cat([part for group in zip(*parts, strict=True) for part in group])


def test_layers_are_written_as_transformer_engine_has_them() -> None:
    hub = CASES["qwen3_moe"]
    made = forward(MAPS["qwen3_moe"], hub, CONFIG)
    dense, mixed = "model.layers.0.", "model.layers.1."
    for ours, expected in (
        ("0.mlp.linear_fc1.weight", torch.cat([hub[f"{dense}mlp.{name}_proj.weight"] for name in ("gate", "up")])),
        ("0.mlp.linear_fc1.layer_norm_weight", hub[f"{dense}post_attention_layernorm.weight"]),
        ("1.pre_mlp_layernorm.weight", hub[f"{mixed}post_attention_layernorm.weight"]),
        ("1.self_attention.linear_qkv.weight", grouped(*(hub[f"{mixed}self_attn.{n}_proj.weight"] for n in "qkv"))),
        ("1.self_attention.linear_qkv.bias", grouped(*(hub[f"{mixed}self_attn.{name}_proj.bias"] for name in "qkv"))),
        (
            "1.mlp.experts.linear_fc1.weight3",
            torch.cat([hub[f"{mixed}mlp.experts.3.{name}_proj.weight"] for name in ("gate", "up")]),
        ),
        ("1.mlp.experts.linear_fc2.weight2", hub[f"{mixed}mlp.experts.2.down_proj.weight"]),
    ):
        assert torch.equal(made[f"decoder.layers.{ours}"], expected)
    assert not any(name.startswith("decoder.layers.1.mlp.linear") for name in made)


def local(name: str) -> str:
    """A name of the layers that megatron-core has without TransformerEngine."""
    name = name.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
    name = name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
    name = re.sub(r"linear_(q|kv)_up_proj\.layer_norm_weight", r"\1_layernorm.weight", name)
    return re.sub(r"experts\.(linear_fc[12])\.weight(\d+)", r"experts.local_experts.\2.\1.weight", name)


def halves(made: Tensors) -> Tensors:
    """As `singleton_local_shards` saves them: experts by themselves, gate and up by themselves."""
    found = {}
    for own, tensor in made.items():
        name = re.sub(r"experts\.(linear_fc[12])\.weight(\d+)", r"experts.experts.\2.\1.weight", own)
        if name.endswith("linear_fc1.weight"):
            found[f"{name}_w"], found[f"{name}_v"] = tensor.chunk(2)
        else:
            found[name] = tensor
    return found


@pytest.mark.parametrize("kind", list(CASES))
def test_every_spelling_leads_back(kind) -> None:
    hub = CASES[kind]
    made = forward(MAPS[kind], hub, CONFIG)
    for state in (made, {local(name): tensor for name, tensor in made.items()}, halves(made)):
        assert_same(backward(MAPS[kind], state, CONFIG), hub)


@pytest.mark.parametrize("layer", [DENSE, MIXED])
def test_layers_and_experts_that_are_stacked_lead_back(layer) -> None:
    """As torch_dist saves layers that are alike: [L, …], experts [L, E, …]."""
    hub = hub_of(layer, layer, layer)
    made = forward(MAPS["qwen3_moe"], hub, CONFIG | {"num_hidden_layers": 3})
    stacked = {name: tensor for name, tensor in made.items() if "layers." not in name}
    for name in {re.sub(r"\.layers\.\d+\.", ".layers.*.", name) for name in made if "layers." in name}:
        _, _, number = name.partition(".weight")
        if number and not number.startswith("_"):
            continue
        stacked[name.replace(".*", "")] = torch.stack([made[name.replace("*", str(at))] for at in range(3)])
    if layer is MIXED:
        for linear in ("linear_fc1", "linear_fc2"):
            stacked[f"decoder.layers.mlp.experts.experts.{linear}.weight"] = torch.stack(
                [
                    torch.stack([made[f"decoder.layers.{at}.mlp.experts.{linear}.weight{e}"] for e in range(4)])
                    for at in range(3)
                ]
            )
    assert_same(backward(MAPS["qwen3_moe"], stacked, CONFIG), hub)


def test_layers_for_further_tokens_come_after_the_others() -> None:
    hub = hub_of(DENSE_DEEPSEEK, LATENT | QUERY[True], LATENT | QUERY[True] | NEXT_TOKENS)
    made = forward(MAPS["deepseek_v3"], hub, CONFIG)
    layer = "mtp.layers.0."
    assert torch.equal(made[f"{layer}eh_proj.weight"], hub["model.layers.2.eh_proj.weight"])
    assert torch.equal(made[f"{layer}final_layernorm.weight"], hub["model.layers.2.shared_head.norm.weight"])
    router = made[f"{layer}transformer_layer.mlp.router.expert_bias"]
    assert torch.equal(router, hub["model.layers.2.mlp.gate.e_score_correction_bias"])
    assert f"{layer}transformer_layer.pre_mlp_layernorm.weight" in made
    assert_same(backward(MAPS["deepseek_v3"], made, CONFIG), hub)
    with pytest.raises(UsageError, match="needs num_hidden_layers"):
        forward(MAPS["deepseek_v3"], hub, DEEPSEEK | {"num_hidden_layers": None})


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"num_key_value_heads": None}, "needs num_key_value_heads"),
        ({"num_attention_heads": 8}, "rows of q, k and v are not those of 8 heads"),
        ({"num_key_value_heads": 4}, "rows of q, k and v are not those of 4 heads in 4 groups"),
        ({"num_attention_heads": True}, "needs num_attention_heads"),
        ({"head_dim": 8}, "4 heads of 8"),
        ({"vocab_size": 31}, "32 rows are not the 31 of config.json"),
        ({"num_hidden_layers": 3}, r"is 3 in config.json, but number 2 of model\.layers\.\* is"),
        ({"num_hidden_layers": 1}, r"number 1 of model\.layers\.\* is one too many"),
    ],
)
def test_config_that_the_weights_are_not_of_is_refused(changed, what) -> None:
    with pytest.raises(UsageError, match=what):
        forward(MAPS["llama"], CASES["llama"], CONFIG | changed)


def test_tensors_that_do_not_belong_together_are_refused() -> None:
    hub = dict(CASES["llama"])
    del hub["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(UsageError, match=r"also needs model\.layers\.1\.self_attn\.k_proj\.weight"):
        forward(MAPS["llama"], hub, CONFIG)
    hub = dict(CASES["qwen3_moe"])
    for name in ("gate", "up"):
        del hub[f"model.layers.1.mlp.experts.3.{name}_proj.weight"]
    with pytest.raises(
        UsageError, match=r"number 3 of model\.layers\.1\.mlp\.experts\.\+\.gate_proj.weight is missing"
    ):
        forward(MAPS["qwen3_moe"], hub, CONFIG)
    made = forward(MAPS["llama"], CASES["llama"], CONFIG)
    with pytest.raises(UsageError, match="one tensor has two names"):
        backward(MAPS["llama"], made | {"decoder.layers.0.input_layernorm.weight": torch.ones(16)}, CONFIG)
    with pytest.raises(UsageError, match=r"no place for decoder\.layers\.00"):
        backward(MAPS["llama"], made | {"decoder.layers.00.input_layernorm.weight": torch.ones(16)}, CONFIG)
    with pytest.raises(UsageError, match="31 rows are fewer than the 32"):
        backward(MAPS["llama"], made | {"output_layer.weight": torch.ones(31, 16)}, CONFIG)
    with pytest.raises(UsageError, match="63 rows of q, k and v"):
        backward(MAPS["llama"], made | {"decoder.layers.0.self_attention.linear_qkv.weight": torch.ones(63, 2)}, CONFIG)


@pytest.mark.full(but=["llama"])
@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_sharded_for_megatron_verifies_and_comes_back(kind, tmp_path) -> None:
    hub, made, back = (str(tmp_path / name) for name in ("hub", "made", "back"))
    toys.save(kind, hub)
    assert main(["shard", hub, made, "--mesh", "dp_shard=2", "--names", "megatron", "-q"]) == 0
    assert main(["verify", made, "-q"]) == 0
    assert main(["verify", made, "--against", hub, "-q"]) == 0
    tensors = load_file(f"{hub}/model.safetensors")
    state = {"decoder.layers.1.self_attention.linear_qkv.weight": torch.zeros(64, 32)}
    dcp.load(state, checkpoint_id=made)
    parts = (tensors[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv")
    assert torch.equal(*state.values(), grouped(*parts))
    assert main(["gather", made, back, "-q"]) == 0
    with open(f"{hub}/model.safetensors", "rb") as one, open(f"{back}/model.safetensors", "rb") as other:
        assert one.read() == other.read()


@pytest.mark.parametrize("asked", [(), ("--names", "megatron")])
def test_trained_by_megatron_with_a_padded_vocabulary_gathers_to_the_hub_s_names(tmp_path, capsys, asked) -> None:
    toys.save("llama", tmp_path / "hub")
    hub = load_file(tmp_path / "hub" / "model.safetensors")
    made = forward(MAPS["llama"], hub, toys.config_of("llama").to_dict())
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        made[name] = torch.cat([made[name], torch.zeros(64, 32)])
    dcp.save(made, checkpoint_id=tmp_path / "iter")
    args = ["gather", str(tmp_path / "iter"), str(tmp_path / "hf"), "--assets", str(tmp_path / "hub"), *asked]
    assert main(args) == 0
    assert "left out 64 rows of padding of output_layer.weight" in capsys.readouterr().err
    assert_same(load_file(tmp_path / "hf" / "model.safetensors"), hub)


@contextlib.contextmanager
def one_rank():
    """megatron-core on a processor: what it asks of CUDA is answered."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import random as states
        from megatron.core.transformer.moe import moe_utils

        patch.setattr(states.CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext())
        patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
        parallel_state.initialize_model_parallel()
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3-moe"])
def test_megatron_s_own_model_computes_the_same(kind) -> None:
    model = toys.build(kind)
    config = model.config
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    hub = {name: tensor.detach() for name, tensor in per_expert(model.state_dict()).items()}
    state = {local(name): tensor for name, tensor in forward(MAPS[config.model_type], hub, config.to_dict()).items()}
    experts = (
        {
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": config.moe_intermediate_size,
            "moe_grouped_gemm": False,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
            "moe_router_pre_softmax": True,
            "moe_router_dtype": "fp32",
        }
        if kind == "qwen3-moe"
        else {}
    )
    unfused = dict.fromkeys(
        ("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion"), False
    )
    with one_rank():
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.transformer_config import TransformerConfig

        settings = TransformerConfig(
            **(unfused | experts | {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64}),
            num_attention_heads=4,
            num_query_groups=2,
            kv_channels=8,
            use_cpu_initialization=True,
            normalization="RMSNorm",
            gated_linear_unit=True,
            add_bias_linear=False,
            activation_func=torch.nn.functional.silu,
            add_qkv_bias=kind == "qwen2",
            qk_layernorm=kind == "qwen3-moe",
            layernorm_epsilon=config.rms_norm_eps,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
        )
        spec = get_gpt_layer_local_spec(
            normalization="RMSNorm",
            qk_layernorm=kind == "qwen3-moe",
            num_experts=4 if experts else None,
            moe_grouped_gemm=False,
        )
        theirs = GPTModel(
            settings,
            spec,
            vocab_size=64,
            max_sequence_length=64,
            position_embedding_type="rope",
            rotary_base=int(config.rope_parameters["rope_theta"]),
            share_embeddings_and_output_weights=False,
        ).eval()
        own = {name for name, tensor in theirs.state_dict().items() if isinstance(tensor, torch.Tensor)}
        assert own == state.keys()
        theirs.load_state_dict(state, strict=False)
        ids = torch.randint(0, 64, (2, 8))
        future = torch.triu(torch.ones(1, 1, 8, 8, dtype=torch.bool), 1)
        with torch.no_grad():
            computed = theirs(ids, torch.arange(8)[None].expand(2, 8), future)
            torch.testing.assert_close(computed, model(ids).logits, atol=2e-5, rtol=1e-4)
