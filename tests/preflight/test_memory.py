"""A spec as what an estimate is asked, and its answer in the words of the config."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ckpt_tools.checkpoint.layout import parse_mesh
from ckpt_tools.preflight.memory import (
    ask,
    blocks_too_small,
    check_memory,
    doubt_of,
    in_own_words,
    savers_of,
    start_estimate,
)
from ckpt_tools.preflight.spec import AdapterSpec, ParallelSpec


def spec(mesh="dp_shard=8", engine="fsdp2", framework="accelerate", **fields):
    parsed = None if mesh is None else parse_mesh(mesh)
    fields = {"seq_len": 128, "batch_size": 1, **fields}
    return ParallelSpec(framework=framework, engine=engine, mesh=parsed, **fields)


@pytest.mark.parametrize(
    ("fields", "strategy", "mesh"),
    [
        ({}, "full_shard", "dp_shard=8"),
        ({"strategy": "shard_grad_op"}, "shard_grad_op", "dp_shard=8"),
        ({"mesh": "dp_replicate=2,dp_shard=4"}, "hybrid_shard", "dp_replicate=2,dp_shard=4"),
        (
            {"mesh": "dp_replicate=2,dp_shard=4", "reshard_after_forward": False},
            "hybrid_shard_zero2",
            "dp_replicate=2,dp_shard=4",
        ),
        ({"engine": "ddp", "mesh": "dp_replicate=8"}, "no_shard", "dp_replicate=8"),
        ({"engine": "ddp"}, "no_shard", "dp_replicate=8"),
        ({"mesh": "dp_shard=4,cp=2,tp=2"}, "full_shard", "dp_shard=4,cp=2,tp=2"),
        ({"mesh": "cp=8"}, "full_shard", "dp_shard=1,cp=8"),
        ({"mesh": "dp_replicate=2,cp=4"}, "hybrid_shard", "dp_replicate=2,dp_shard=1,cp=4"),
        ({"mesh": "pp=2,dp_shard=4", "schedule": "1F1B"}, "full_shard", "dp_shard=4,pp=2"),
    ],
)
def test_ask_takes_strategy_and_mesh_of_the_spec(fields, strategy, mesh):
    options = ask(spec(**fields), model="model", gpu_memory=1).options
    assert (options.strategies, options.mesh, options.gpu_memory) == ((strategy,), mesh, 1)


def test_ask_cuts_what_the_trainer_cuts():
    both = {"sequence_parallel": True, "loss_parallel": True}
    titan = ask(spec(mesh="dp_shard=4,tp=2", axes={"ep": 4}, **both), model="m", gpu_memory=1).options
    assert (titan.sequence_parallel, titan.loss_parallel, titan.expert_parallel) == (True, True, 4)
    without = ask(spec(mesh="dp_shard=4", selective_checkpointing="op", **both), model="m", gpu_memory=1).options
    assert (without.sequence_parallel, without.loss_parallel, without.selective_checkpointing) == (False, False, True)
    stages = spec(mesh="dp_shard=2,pp=4", schedule="Interleaved1F1B", batch_size=8, micro_batch=2)
    staged = ask(stages, model="m", gpu_memory=1).options
    assert (staged.schedule, staged.micro_batches, staged.batch_size) == ("interleaved-1f1b", 4, 8)
    other = ask(spec(mesh="dp_shard=4,tp=2", offload_optimizer=True), model="m", gpu_memory=1).options
    assert (other.sequence_parallel, other.loss_parallel, other.offload_optimizer) == (False, False, True)
    for optimizer, expected in {
        "paged_adamw_8bit": "paged-adamw-8bit",
        "adamw_bnb_8bit": "adamw-8bit",
        "adamw_torch_4bit": "adamw-4bit",
        "lion_8bit": "lion-8bit",
        "Muon": "muon",
        "sgd": "sgd",
    }.items():
        assert ask(spec(optimizer=optimizer), model="m", gpu_memory=1).options.optimizer == expected


@pytest.mark.parametrize(
    ("framework", "values", "found"),
    [
        ("trainer", {"use_liger_kernel": True, "torch_compile": False}, ("use_liger_kernel",)),
        ("trainer", {"use_liger_kernel": "$LIGER"}, ("use_liger_kernel",)),
        ("axolotl", {"cut_cross_entropy": "true"}, ("cut_cross_entropy",)),
        ("torchtitan", {"compile": {"enable": True}, "loss": {"num_chunks": 8}}, ("compile.enable", "loss.num_chunks")),
        ("torchtitan", {"compile": {"enable": False}, "loss": {"num_chunks": 1}}, ()),
        ("verl", {"actor_rollout_ref": {"model": {"use_liger": True}}}, ("actor_rollout_ref.model.use_liger",)),
        ("ai-toolkit", None, ()),
    ],
)
def test_options_that_save_memory_make_the_estimate_an_upper_bound(framework, values, found):
    savers = savers_of(framework, values)
    assert savers == found
    question = ask(spec(), model="model", gpu_memory=1, savers=savers)
    assert question.is_upper is bool(found)
    assert len(question.notes) == len(found)


def test_number_of_ranks_that_was_given_is_not_changed_by_a_proposal():
    assert ask(spec(), model="m", gpu_memory=1).options.world_size is None
    for mesh in ("dp_shard=8", "dp_shard=2,cp=2,tp=2", "dp_replicate=2,dp_shard=4"):
        assert ask(spec(mesh=mesh), model="m", gpu_memory=1, is_fixed=True).options.world_size == 8


def test_experts_over_ranks_that_do_not_divide_are_said_and_not_cut():
    question = ask(spec(axes={"ep": 3}), model="m", gpu_memory=1)
    assert question.options.expert_parallel == 1
    assert any("ep=3" in note for note in question.notes)


def test_blocks_smaller_than_what_is_wrapped_are_not_estimated():
    shapes = {f"layers.{i}.{name}.weight": (10, 10) for i in range(2) for name in ("a", "b")} | {"head": (99, 99)}
    assert blocks_too_small(spec(wrap_min_num_params=200), shapes) == ""
    assert "the largest has 200" in blocks_too_small(spec(wrap_min_num_params=201), shapes)
    assert blocks_too_small(spec(), shapes) == ""
    assert blocks_too_small(spec(engine="ddp", wrap_min_num_params=201), shapes) == ""


def test_ask_takes_over_what_is_trained_and_in_which_dtypes():
    wanted = spec(
        param_dtype="bf16",
        reduce_dtype="f32",
        master_dtype="f32",
        adapter=AdapterSpec(rank=8),
        quantize="nf4",
        offload_params=True,
        activation_checkpointing=True,
        batch_size=3,
        optimizer="adamw_torch_fused",
    )
    question = ask(wanted, model="model", gpu_memory=None)
    case = question.options
    assert (case.param_dtype, case.reduce_dtype, case.master_dtype) == ("bf16", "f32", "f32")
    assert (case.lora, case.quantize, case.offload, case.optimizer) == (8, "nf4", True, "adamw")
    assert (case.seq_len, case.batch_size) == (128, 3)
    assert case.activation_checkpointing is True
    assert question.notes == ()


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"seq_len": None}, "samples of 2048 tokens per rank: assumed"),
        ({"batch_size": None}, "one sample per rank: assumed"),
        ({"selective_checkpointing": "2"}, "some activations (2) is not counted: the run needs less"),
        ({"optimizer": "galore_adamw_8bit"}, "galore_adamw_8bit is counted as AdamW's: the run needs less"),
        ({"optimizer": "mystery"}, "mystery is counted as AdamW's"),
        ({"adapter": AdapterSpec(kind="lokr", rank=4)}, "counted as LoRA"),
        ({"adapter": AdapterSpec()}, "adapters of rank 16 are assumed"),
        ({"quantize": "int8"}, "counted as unquantised"),
        ({"param_dtype": "fp8"}, "fp8 is counted as bf16"),
    ],
)
def test_ask_says_where_the_estimate_differs_from_the_config(fields, word):
    assert sum(word in note for note in ask(spec(**fields), model="model", gpu_memory=None).notes) == 1


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"engine": "other", "mesh": None}, "neither FSDP nor DDP"),
        ({"engine": "deepspeed"}, "DeepSpeed"),
        ({"wraps_blocks": False}, "gathers the whole model at once"),
        ({"mesh": None}, "pass --world-size"),
        ({"mesh": "pp=2,dp_shard=4"}, "pipeline"),
        ({"mesh": "pp=2,dp_shard=4", "schedule": "DualPipeV"}, "the schedule DualPipeV is not known"),
    ],
)
def test_ask_about_what_is_not_estimated_says_why(fields, word):
    question = ask(spec(**fields), model="model", gpu_memory=None)
    assert question.options is None
    assert word in question.why_not
    with start_estimate(question) as child:
        assert child is None


@pytest.mark.parametrize(
    ("change", "fields", "words"),
    [
        ("--activation-checkpointing", {}, "checkpoint activations (fsdp_config.fsdp_activation_checkpointing: true)"),
        (
            "--activation-checkpointing --mesh dp_shard=16",
            {"framework": "torchtitan"},
            "checkpoint activations (activation_checkpoint.mode: full) and use more ranks: dp_shard=16",
        ),
        ("--strategy full_shard", {"engine": "ddp"}, "use FSDP2, full_shard"),
        (
            "--lora --quantize nf4",
            {"framework": "axolotl"},
            (
                "train LoRA adapters of rank 16 (adapter: lora) and "
                "quantise the frozen weights to nf4 (adapter: qlora, load_in_4bit: true)"
            ),
        ),
        ("--seq-len 512", {"keys": {"seq_len": "max_length"}}, "shorten samples to 512 tokens (max_length)"),
    ],
)
def test_a_proposal_is_told_in_the_words_of_the_config(change, fields, words):
    assert in_own_words(change, spec(**fields)) == words


@pytest.mark.full
def test_what_does_not_fit_is_an_error_with_a_change_that_was_computed(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    # 2 GB hold the margin, and not the activations of eight samples.
    wanted = spec(mesh="dp_shard=2", seq_len=2048, batch_size=8, param_dtype="bf16", keys={"strategy": "fsdp"})
    with start_estimate(ask(wanted, model=str(tmp_path), gpu_memory=2 * 10**9)) as child:
        estimate = child.result()
    (finding,) = check_memory(estimate, wanted)
    assert (finding.code, finding.severity, finding.where) == ("memory-does-not-fit", "error", "fsdp")
    assert estimate.advice is not None
    assert "and fits" in finding.hint
    # Where the run needs less than what was counted, nobody knows; nor where more may be needed than was assumed.
    less = ask(replace(wanted, quantize="int8"), model=str(tmp_path), gpu_memory=2 * 10**9)
    assert "the run needs less" in doubt_of(estimate, less)
    assert doubt_of(estimate, ask(wanted, model=str(tmp_path), gpu_memory=2 * 10**9)) == ""
    fitting = replace(estimate, cases=(estimate.advice.estimate,))
    unsaid = ask(replace(wanted, seq_len=None), model=str(tmp_path), gpu_memory=2 * 10**9)
    assert "samples of 2048 tokens" in doubt_of(fitting, unsaid)
    actor = ask(
        replace(wanted, keys={"model": "actor_rollout_ref.model.path"}), model=str(tmp_path), gpu_memory=2 * 10**9
    )
    assert "the actor alone" in doubt_of(fitting, actor)
    assert doubt_of(estimate, actor) == ""
    assert doubt_of(fitting, less) == doubt_of(estimate, unsaid) == ""
    # What fits is no finding.
    assert check_memory(replace(estimate, cases=(estimate.advice.estimate,)), wanted) == ()
