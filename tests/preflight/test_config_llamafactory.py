"""LLaMA-Factory's configs and command lines, TRL's command lines, DeepSpeed's own file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from preflight.config_examples import found, mesh, read

from ckpt_tools.preflight.configs.overrides import read_flags
from ckpt_tools.preflight.spec import AdapterSpec

SFT: dict[str, Any] = {
    "model_name_or_path": "m", "stage": "sft", "do_train": True, "dataset": "d", "template": "llama3",
    "output_dir": "o", "per_device_train_batch_size": 2, "bf16": True,
}  # fmt: skip
ALL = ("all-linear",)
R8 = AdapterSpec(rank=8, alpha=16.0, targets=ALL)
V1: dict[str, Any] = {"model": "m", "model_class": "llm", "template": "t", "train_dataset": "d.yaml", "output_dir": "o"}


@pytest.mark.parametrize(
    ("options", "adapter", "quantize"),
    [
        ({}, R8, None),  # LoRA is the default
        ({"lora_rank": 64, "lora_target": "q, v"}, AdapterSpec(rank=64, alpha=128.0, targets=("q", "v")), None),
        ({"lora_alpha": 8, "quantization_bit": 4}, AdapterSpec(rank=8, alpha=8.0, targets=ALL), "nf4"),
        ({"quantization_bit": 8}, R8, "int8"),
        ({"quantization_bit": 2, "quantization_method": "hqq"}, R8, "hqq-2bit"),
        ({"finetuning_type": "full"}, None, None),
        ({"finetuning_type": "freeze", "lora_rank": 4}, None, None),
        ({"finetuning_type": "oft", "oft_rank": 4}, AdapterSpec(kind="oft", rank=4, targets=ALL), None),
    ],
    ids=str,
)  # fmt: skip
def test_llamafactory_trains_what_its_type_says(options: Any, adapter: Any, quantize: Any, tmp_path: Path) -> None:
    config = read(tmp_path, SFT | options)
    assert (config.framework, config.spec.adapter, config.spec.quantize) == ("llamafactory", adapter, quantize)
    assert found(config) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("bf16", "f32", True, 2048)),
        ({"pure_bf16": True}, ("bf16", "bf16", True, 2048)),
        ({"bf16": False, "fp16": True}, ("f16", "f32", True, 2048)),
        ({"disable_gradient_checkpointing": True, "cutoff_len": 4096}, ("bf16", "f32", False, 4096)),
    ],
    ids=str,
)
def test_llamafactory_computes_as_it_says(options: Any, expected: Any, tmp_path: Path) -> None:
    spec = read(tmp_path, SFT | options).spec
    assert (spec.param_dtype, spec.master_dtype, spec.activation_checkpointing, spec.seq_len) == expected


def test_llamafactory_misspelt_option_is_an_error_and_trainers_other_names_are_not_offered(tmp_path: Path) -> None:
    assert found(read(tmp_path, SFT | {"lora_rnak": 8})) == [("unknown-key", "error", "lora_rnak")]
    assert found(read(tmp_path, SFT | {"stage": "grpo"})) == [("wrong-type", "error", "stage")]


@pytest.mark.parametrize("option", [{"use_kt": True}, {"use_mca": True}, {"pipeline_model_parallel_size": 4}], ids=str)
def test_llamafactory_engine_of_others_is_not_read(option: Any, tmp_path: Path) -> None:
    assert read(tmp_path, SFT | option).spec.engine == "other"
    assert read(tmp_path, SFT | {"use_kt": False}).spec.engine == "ddp"


def test_llamafactory_deepspeed_file_lies_where_its_repository_begins(tmp_path: Path) -> None:
    (tmp_path / "examples" / "train").mkdir(parents=True)
    (tmp_path / "examples" / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    config = read(tmp_path / "examples" / "train", SFT | {"deepspeed": "examples/ds.json"})
    assert (config.spec.engine, config.spec.strategy, config.options.unread) == ("deepspeed", "full_shard", ())
    config = read(tmp_path / "examples" / "train", SFT | {"deepspeed": "examples/none.json"})
    assert config.options.unread == ("deepspeed",)


def test_llamafactory_command_line_is_read(tmp_path: Path) -> None:
    script = (
        "torchrun --nproc_per_node 4 src/train.py --stage sft --do_train --model_name_or_path m --finetuning_type lora "
        "--lora-rank=16 --lora_target q_proj,v_proj --bf16 --cutoff_len 1024 --template t --dataset d --output_dir o"
    )
    config = read(tmp_path, script, name="run.sh")
    assert (config.framework, config.spec.world_size, config.spec.seq_len) == ("llamafactory", 4, 1024)
    assert config.spec.adapter == AdapterSpec(rank=16, alpha=32.0, targets=("q_proj", "v_proj"))
    assert config.options.words == ()


def test_llamafactory_command_that_hides_options_is_not_green(tmp_path: Path) -> None:
    config = read(tmp_path, "llamafactory-cli train --stage sft --do_train $EXTRA_ARGS", name="run.sh")
    assert config.why_not != ""


def test_llamafactory_v1_is_read(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        V1 | {"dist_config": {"name": "fsdp2", "mp_shard_size": 4, "mp_replicate_size": 2, "cp_size": 2},
              "peft_config": {"name": "lora", "r": 16, "lora_alpha": 32, "target_modules": "all"},
              "quant_config": {"name": "bnb", "quantization_bit": 4}, "micro_batch_size": 3},
        world_size=8,
    )  # fmt: skip
    spec = config.spec
    assert (config.framework, spec.engine, spec.mesh) == ("llamafactory", "fsdp2", mesh(dp_replicate=2, dp_shard=4))
    assert (spec.param_dtype, spec.reduce_dtype, spec.batch_size, spec.quantize) == ("bf16", "f32", 3, "nf4")
    assert spec.adapter == AdapterSpec(rank=16, alpha=32.0, targets=ALL)
    assert read(tmp_path, V1 | {"dist_config": {"name": "deepspeed"}}).options.unread == ("dist_config.config_file",)


# TRL


def test_trl_command_has_trls_defaults(tmp_path: Path) -> None:
    script = "trl sft --model_name_or_path m --dataset_name d --output_dir o --per_device_train_batch_size 4"
    spec = read(tmp_path, script, name="run.sh").spec
    assert (spec.framework, spec.param_dtype, spec.activation_checkpointing, spec.seq_len) == (
        "trainer", "bf16", True, 1024,
    )  # fmt: skip
    plain = read(tmp_path, f"{script} --no_gradient_checkpointing --bf16 false", name="run.sh").spec
    assert (plain.param_dtype, plain.activation_checkpointing) == (None, False)
    other = read(tmp_path, script.replace("trl sft", "python run_clm.py"), name="run.sh").spec
    assert (other.param_dtype, other.activation_checkpointing, other.seq_len) == (None, False, None)


def test_trl_grpo_samples_are_prompt_and_completion(tmp_path: Path) -> None:
    values = {"output_dir": "o", "num_generations": 8, "max_prompt_length": 512, "max_completion_length": 1024}
    assert read(tmp_path, values).spec.seq_len == 1536


def test_flags_are_split_as_argparse_does() -> None:
    values, unread = read_flags(
        ["--a", "1", "--b-c=x", "--d", "--e", "p", "q", "--f", '{"k": 1}', "--no_g", "--h", "-1", "--i", "$V", "$ARGS"]
    )
    assert values == {
        "a": "1", "b_c": "x", "d": True, "e": ["p", "q"], "f": {"k": 1}, "g": False, "h": "-1", "i": "$V",
    }  # fmt: skip
    assert unread == ("$ARGS",)


# DeepSpeed's own file


def deepspeed(tmp_path: Path, values: Any, **given: Any) -> Any:
    return read(tmp_path, json.dumps(values), name="ds.json", **given)


def test_deepspeed_file_is_read_on_its_own(tmp_path: Path) -> None:
    config = deepspeed(
        tmp_path,
        {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "tensor_parallel": {"autotp_size": 2},
         "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "optimizer": {"type": "Lion"}},
        world_size=8,
    )  # fmt: skip
    spec = config.spec
    assert (config.framework, spec.engine, spec.strategy) == ("deepspeed", "deepspeed", "full_shard")
    assert (spec.mesh, spec.batch_size, spec.param_dtype) == (mesh(dp_shard=4, tp=2), 4, "bf16")
    assert (spec.offload_optimizer, spec.offload_params, spec.optimizer) == (True, False, "Lion")
    assert found(config) == []


def test_deepspeed_auto_is_left_to_the_trainer(tmp_path: Path) -> None:
    values = {"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}
    config = deepspeed(tmp_path, values)
    assert (config.spec.batch_size, config.spec.param_dtype, config.spec.strategy) == (None, None, "shard_grad_op")
    assert found(config) == [("unknown-value", "info", "train_micro_batch_size_per_gpu")]


@pytest.mark.parametrize(
    ("section", "where"),
    [
        ({"stage": 4}, "zero_optimization.stage"),
        ({"stagee": 3}, "zero_optimization.stagee"),
        ({"stage": 3, "offload_param": {"device": "gpu"}}, "zero_optimization.offload_param.device"),
    ],
)
def test_deepspeed_section_that_it_refuses_is_an_error(section: Any, where: str, tmp_path: Path) -> None:
    config = deepspeed(tmp_path, {"train_batch_size": 8, "zero_optimization": section})
    assert [(severity, at) for _, severity, at in found(config)] == [("error", where)]
