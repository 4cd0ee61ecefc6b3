"""Meshes folded to this machine, specs as smoke runs, and models cut down so that they run in seconds."""

from __future__ import annotations

import json
import math

import pytest

from ckpt_tools.checkpoint.layout import parse_mesh
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.preflight.shrink_run import (
    collapse_mesh,
    collapse_spec,
    cut_depth,
    describe_chosen,
    describe_cut,
    shrink_config,
    write_cuts,
)
from ckpt_tools.preflight.spec import AdapterSpec, ParallelSpec

HYBRID = {"mesh": "dp_replicate=4,dp_shard=8", "strategy": "hybrid_shard"}
ZERO2 = HYBRID | {"reshard_after_forward": False}


def spec(mesh="dp_shard=8", engine="fsdp2", framework="accelerate", **fields):
    return ParallelSpec(framework=framework, engine=engine, mesh=None if mesh is None else parse_mesh(mesh), **fields)


@pytest.mark.parametrize(
    ("mesh", "ranks", "folded"),
    [
        ("dp_replicate=2,dp_shard=32,tp=2", 4, "dp_shard=2,tp=2"),
        ("dp_replicate=2,dp_shard=32,tp=2", 2, "dp_shard=2"),
        ("dp_replicate=2,dp_shard=32,tp=2", 8, "dp_replicate=2,dp_shard=2,tp=2"),
        ("dp_replicate=4,dp_shard=8", 4, "dp_replicate=2,dp_shard=2"),
        ("dp_shard=64", 4, "dp_shard=2"),
        ("dp_replicate=8", 4, "dp_replicate=2"),
        ("tp=8", 4, "tp=2"),
        ("dp_shard=2,tp=2", 4, "dp_shard=2,tp=2"),
        ("dp_shard=1", 4, "dp_shard=1"),
        ("pp=2,dp_shard=4", 4, "dp_shard=2"),
        ("cp=4", 4, "dp_shard=2"),
        ("ep=8", 4, "dp_shard=2"),
    ],
)
def test_fold_mesh_keeps_the_kinds_of_axes_that_the_ranks_allow(mesh, ranks, folded):
    assert str(collapse_mesh(parse_mesh(mesh), max_ranks=ranks)[0]) == folded


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("dp_replicate=2,dp_shard=32,tp=2", ("dp_shard=32 to 2", "without dp_replicate=2")),
        ("pp=2,dp_shard=4", ("dp_shard=4 to 2", "without pp=2")),
        ("dp_shard=2,cp=2", ("without cp=2",)),
        ("dp_shard=2,tp=2", ()),
    ],
)
def test_fold_mesh_says_what_became_of_every_axis(mesh, words):
    notes = collapse_mesh(parse_mesh(mesh))[1]
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))


@pytest.mark.parametrize(
    ("fields", "strategy", "mesh"),
    [
        ({}, "full_shard", "dp_shard=2"),
        ({"strategy": "shard_grad_op"}, "shard_grad_op", "dp_shard=2"),
        (ZERO2, "hybrid_shard_zero2", "dp_replicate=2,dp_shard=2"),
        ({"reshard_after_forward": False}, "shard_grad_op", "dp_shard=2"),
        (HYBRID, "hybrid_shard", "dp_replicate=2,dp_shard=2"),
        ({"mesh": "dp_replicate=4,dp_shard=8,tp=2", "strategy": "hybrid_shard"}, "full_shard", "dp_shard=2,tp=2"),
        ({"engine": "ddp", "mesh": "dp_replicate=8"}, "no_shard", "dp_replicate=2"),
        ({"engine": "fsdp1"}, "full_shard", "dp_shard=2"),
        ({"mesh": None}, "full_shard", "dp_shard=2"),
        ({"mesh": None, "axes": {"dp_shard": -1, "tp": 2, "cp": 1, "sp": 4}}, "full_shard", "dp_shard=2,tp=2"),
        ({"mesh": None, "engine": "ddp"}, "no_shard", "dp_replicate=2"),
    ],
)
def test_fold_spec_takes_the_strategy_that_the_mesh_allows(fields, strategy, mesh):
    options = collapse_spec(spec(**fields), model="model", source=None).options
    assert (options.strategy, options.mesh) == (strategy, mesh)


def test_fold_spec_takes_over_what_a_smoke_run_has_options_for():
    pytest.importorskip("bitsandbytes", reason="needs the extra qlora")
    wanted = spec(
        param_dtype="bf16", reduce_dtype="f32", adapter=AdapterSpec(rank=8), quantize="nf4", optimizer="adamw_torch"
    )
    collapse = collapse_spec(wanted, model="model", source="weights")
    options = collapse.options
    assert (options.param_dtype, options.reduce_dtype, options.lora, options.quantize) == ("bf16", "f32", True, "nf4")
    assert (options.model, options.source) == ("model", "weights")
    assert collapse.notes == ("the mesh dp_shard=8 is reduced: dp_shard=8 to 2",)


@pytest.mark.parametrize("kind", ["lora", "dora", "loha", "lokr", "oft", "boft"])
def test_fold_spec_tries_the_adapter_on_the_chosen_layers(kind):
    pytest.importorskip("peft", reason="needs the extra hf")
    collapse = collapse_spec(
        spec(adapter=AdapterSpec(kind=kind, targets=("q_proj", "attn.out"))), model="model", source=None
    )
    assert (collapse.options.lora, collapse.options.adapter) == (True, kind)
    assert collapse.options.target == ("q_proj", "**.q_proj", "attn.out", "**.attn.out")
    assert collapse.notes == ("the mesh dp_shard=8 is reduced: dp_shard=8 to 2",)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"offload_params": True}, "offloading is not tested"),
        ({"activation_checkpointing": True}, "activation checkpointing is not tested"),
        ({"optimizer": "adamw_8bit"}, "adamw_8bit is not tested"),
        ({"optimizer": "adafactor"}, "adafactor is not tested"),
        ({"adapter": AdapterSpec(kind="glora")}, "instead of glora"),
        ({"adapter": AdapterSpec(kind="lokr"), "quantize": "nf4"}, "instead of lokr"),
        ({"quantize": "int8"}, "quantising to int8 is not tested"),
        ({"param_dtype": "fp8"}, "computing in fp8 is not tested"),
        ({"reshard_after_forward": 4}, "reshard_after_forward=4 is tested as true"),
        ({"wrap_min_num_params": 1000}, "number of parameters is not tested"),
        ({"engine": "fsdp1"}, "FSDP1 is tested as"),
        ({"wraps_blocks": False}, "in the run the model is one FSDP group"),
        ({"wrap_classes": ("LlamaMLP",)}, "the wrapped classes are LlamaDecoderLayer, not LlamaMLP"),
        ({"adapter": AdapterSpec(targets=(r".*\.(q|k)_proj",))}, "adapters are on all linear layers"),
        ({"adapter": AdapterSpec(targets=("blocks",)), "framework": "ai-toolkit"}, "adapters are on all linear layers"),
        ({"framework": "torchtitan"}, "not torchtitan's own"),
        ({"mesh": None}, "the mesh is not known"),
    ],
)
def test_fold_spec_says_what_the_smoke_run_does_not_try(fields, word):
    notes = collapse_spec(spec(**fields), model="model", source=None, blocks=("LlamaDecoderLayer",)).notes
    assert sum(word in note for note in notes) == 1


@pytest.mark.parametrize(("engine", "word"), [("deepspeed", "DeepSpeed"), ("none", "one process")])
def test_fold_spec_of_what_no_smoke_run_tries_says_why(engine, word):
    collapse = collapse_spec(spec(engine=engine), model="model", source=None)
    assert collapse.options is None
    assert word in collapse.why_not


def llama(**values):
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128009],
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    } | values


def test_shrink_keeps_the_ratio_of_heads_and_the_tokens_apart():
    cut = shrink_config(llama())
    assert cut["num_attention_heads"] / cut["num_key_value_heads"] == 4
    assert cut["num_key_value_heads"] == 2  # two ranks of tp still divide it
    assert cut["hidden_size"] % cut["num_attention_heads"] == 0
    tokens = [cut["bos_token_id"], *cut["eos_token_id"]]
    assert len(set(tokens)) == 3
    assert max(tokens) < cut["vocab_size"]


def test_shrink_keeps_more_experts_than_a_token_goes_to():
    cut = shrink_config(llama(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768))
    assert (cut["num_experts"], cut["num_experts_per_tok"]) == (8, 1)
    few = shrink_config(llama(num_local_experts=8, num_experts_per_tok=2))
    assert (few["num_local_experts"], few["num_experts_per_tok"]) == (8, 2)
    ernie = shrink_config(llama(moe_num_experts=64, moe_k=6))
    assert (ernie["moe_num_experts"], ernie["moe_k"]) == (8, 1)


def test_cut_depth_keeps_one_layer_of_every_kind():
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    cut = cut_depth(llama(num_hidden_layers=12, layer_types=kinds * 2))
    assert cut["num_hidden_layers"] == 6
    assert cut["layer_types"] == kinds


def test_cut_depth_keeps_a_layer_of_experts_behind_the_dense_ones():
    cut = cut_depth(llama(first_k_dense_replace=3))
    assert (cut["num_hidden_layers"], cut["first_k_dense_replace"]) == (2, 1)


def test_shrink_does_not_change_what_it_was_given():
    config = llama()
    shrink_config(config)
    assert config == llama()


def test_describe_cut_names_every_size_that_changed():
    config = llama()
    described = describe_cut(config, shrink_config(config))
    assert "num_hidden_layers 32 → 2" in described
    assert "num_key_value_heads 8 → 2" in described
    assert "token_id" not in described


_LLAMA = {key: value for key, value in llama().items() if key not in ("architectures", "model_type")}
CONFIGS = {
    "LlamaForCausalLM": ("LlamaConfig", _LLAMA),
    "LlamaForCausalLM 2": ("LlamaConfig", {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8}),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", {}),
    "Gemma3ForCausalLM": (
        "Gemma3TextConfig",
        {"num_hidden_layers": 34, "hidden_size": 2560, "intermediate_size": 10240},
    ),
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "FalconForCausalLM": ("FalconConfig", {}),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16, "decoder_start_token_id": 0},
    ),
    "OPTForCausalLM": ("OPTConfig", {"hidden_size": 4096, "ffn_dim": 16384, "word_embed_proj_dim": 4096}),
    "LlavaForConditionalGeneration": ("LlavaConfig", {}),
    "Qwen2_5_VLForConditionalGeneration": (
        "Qwen2_5_VLConfig",
        {
            "text_config": {
                "hidden_size": 3584,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
                "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            },
            "vision_config": {"out_hidden_size": 3584, "hidden_size": 1280, "intermediate_size": 3420},
        },
    ),
}
"""Class of a model → its config."""


def try_cuts(paths, scratch):
    """What the child does once it is behind its walls."""
    from ckpt_tools.models.config import read_config
    from ckpt_tools.preflight.meta_model import _try_cuts
    from ckpt_tools.sandbox.audit import Sandbox, in_sandbox

    cuts = [(path, read_config(path)) for path in paths]
    with in_sandbox(Sandbox(subject="a cut model", where="config.json", scratch=str(scratch))):
        return _try_cuts(cuts, "config.json")


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", CONFIGS)
def test_cut_of_a_real_architecture_runs_by_itself(tmp_path, kind):
    import transformers

    name, values = CONFIGS[kind]
    config = getattr(transformers, name)(**values)
    config.architectures = [kind.partition(" ")[0]]
    config.save_pretrained(tmp_path / "model")
    trial = try_cuts(write_cuts(str(tmp_path / "model"), str(tmp_path / "cuts")), tmp_path)
    assert trial.path is not None, trial.why
    assert trial.path.endswith("narrow")
    assert trial.num_elems < 3_000_000
    assert "→" in describe_chosen(str(tmp_path / "model"), trial.path)
    heads = json.loads((tmp_path / "cuts" / "narrow" / "config.json").read_text())
    heads = heads.get("text_config", heads)
    kv = heads.get("num_key_value_heads")
    full = config.get_text_config()
    if kv is not None and kind != "DeepseekV3ForCausalLM":
        assert heads["num_attention_heads"] / kv == min(8, full.num_attention_heads / full.num_key_value_heads)


def test_cut_that_does_not_run_is_not_chosen(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(llama(architectures=["NoSuchModel"])))
    trial = try_cuts(write_cuts(str(tmp_path), str(tmp_path / "cuts")), tmp_path)
    assert trial.path is None
    assert "no model class NoSuchModel" in trial.why


def test_write_cuts_of_no_config_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot read the model's config"):
        write_cuts(str(tmp_path), str(tmp_path / "cuts"))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UnreadableError, match="not a JSON object"):
        write_cuts(str(tmp_path), str(tmp_path / "cuts"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnreadableError, match="not valid JSON"):
        write_cuts(str(tmp_path), str(tmp_path / "cuts"))


def test_a_mesh_never_grows():
    for mesh in ("dp_shard=2", "dp_replicate=2,dp_shard=2,tp=2", "tp=2", "dp_shard=3,tp=5"):
        for ranks in (1, 2, 3, 4, 8):
            parsed = parse_mesh(mesh)
            folded, _ = collapse_mesh(parsed, max_ranks=ranks)
            assert folded.world_size <= min(ranks, math.prod(size for _, size in parsed.axes))
