"""Configs mean what the trainers make of them; accelerate and transformers are asked themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from preflight.config_examples import ACCELERATE, found, read

from ckpt_tools.preflight.configs import Config, read_config
from ckpt_tools.preflight.configs.schema import option_names
from ckpt_tools.preflight.spec import ParallelSpec

# The trainers themselves


def ask(questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ask accelerate and transformers, in a process of their own."""
    result = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "plugin_oracle.py")],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    answers: list[dict[str, Any]] = json.loads(result.stdout.splitlines()[-1])
    return answers


DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "f16", "torch.float32": "f32", None: None}


def as_the_plugin_says(spec: ParallelSpec) -> dict[str, Any]:
    v1 = spec.engine == "fsdp1"
    return {
        "version": 1 if v1 else 2,
        "strategy": spec.strategy.upper() if v1 and spec.strategy else None,
        "reshard": None if v1 else spec.reshard_after_forward,
        "offload": spec.offload_params,
        "state_dict_type": spec.state_dict_type,
        "activation_checkpointing": spec.activation_checkpointing,
        "cpu_ram_efficient_loading": spec.cpu_ram_efficient_loading,
        "classes": list(spec.wrap_classes),
        "min_num_params": spec.wrap_min_num_params,
        "param_dtype": spec.param_dtype,
        "reduce_dtype": spec.reduce_dtype,
    }


def of_the_plugin(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{name: answer[name] for name in as_the_plugin_says(ParallelSpec(framework="trainer", engine="fsdp1"))},
        "param_dtype": DTYPES[answer["param_dtype"]],
        "reduce_dtype": DTYPES[answer["reduce_dtype"]],
        "classes": answer["classes"] or [],
        "min_num_params": answer["min_num_params"] or None,
    }


# No `sync_module_states` under FSDP1: it asks for a device.
V1 = {"fsdp_cpu_ram_efficient_loading": False, "fsdp_sync_module_states": False}
LAUNCHES: tuple[dict[str, Any], ...] = (
    {"fsdp_version": 2},
    {"version": "2", "reshard_after_forward": "no", "offload_params": "true"},
    {"fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_state_dict_type": "FULL_STATE_DICT"},
    {"fsdp_version": 2, "fsdp_state_dict_type": 3, "fsdp_cpu_ram_efficient_loading": "false"},
    {"fsdp_version": 2, "fsdp_auto_wrap_policy": "size_based_wrap"},
    {"fsdp_version": 2, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000},
    {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer,Embedding",
        "fsdp_activation_checkpointing": True,
    },
    {"fsdp_version": 2, "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"},
    V1,
    V1 | {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_offload_params": True},
    V1 | {"fsdp_sharding_strategy": 3},
    V1 | {"sharding_strategy": "HYBRID_SHARD", "fsdp_state_dict_type": "SHARDED_STATE_DICT"},
    V1 | {"fsdp_reshard_after_forward": "SHARD_GRAD_OP"},
)
"""`fsdp_config` for `accelerate launch`."""
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"fsdp": True},
    {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": "false", "cpu_offload": True}},
    {"fsdp": "full_shard auto_wrap offload", "bf16": True},
    {"fsdp": "shard_grad_op", "fsdp_config": {"fsdp_state_dict_type": "SHARDED_STATE_DICT"}},
    {"fsdp": ["shard_grad_op", "offload"], "fsdp_config": {"reshard_after_forward": True, "cpu_offload": False}},
    {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 2000}},
    {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP"}},
    {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "NO_WRAP", "activation_checkpointing": "true"}},
    {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}, "optim": "sgd"},
    {"fsdp": True, "fsdp_config": {"fsdp_cpu_ram_efficient_loading": True}, "per_device_train_batch_size": 3},
    {
        "fsdp": True,
        "fsdp_config": {"version": 1, "sync_module_states": False, "reshard_after_forward": "shard_grad_op"},
    },
    {"fsdp": "hybrid_shard", "fsdp_config": {"version": 1, "sync_module_states": False}},
)
"""TrainingArguments."""


MESHES: tuple[dict[str, int], ...] = (
    {"dp_shard": 8},
    {"dp_replicate": 2, "dp_shard": 4},
    {"dp_shard": 2, "tp": 2, "cp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    {"cp": 8},
    {"tp": 4, "dp_shard": 2},
)
"""Sizes of `parallelism_config`, for 8 ranks."""


def launch_configs() -> dict[str, dict[str, Any]]:
    """Return the configs that accelerate is asked about, by name."""
    files = {
        f"fsdp-{i}-{mixed}": ACCELERATE | {"fsdp_config": options, "mixed_precision": mixed}
        for i, options in enumerate(LAUNCHES)
        for mixed in ("bf16", "fp16", "no")
    }
    for i, sizes in enumerate(MESHES):
        section = {f"parallelism_config_{axis}_size": size for axis, size in sizes.items()}
        files[f"mesh-{i}"] = ACCELERATE | {"num_processes": 8, "parallelism_config": section}
    return files


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Config, dict[str, Any]]]:
    """Everything that the trainers are asked, in one process of theirs: name → (what we read, what they say)."""
    folder = tmp_path_factory.mktemp("configs")
    questions, configs = [], {}
    for name, values in launch_configs().items():
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values))
        questions.append({"kind": "accelerate", "path": str(path)})
        configs[name] = read_config(str(path))
    for i, values in enumerate(ARGUMENTS):
        path = folder / f"args-{i}.json"
        path.write_text(json.dumps({"output_dir": str(folder / "out"), "use_cpu": True} | values))
        questions.append({"kind": "trainer", "values": json.loads(path.read_text())})
        configs[f"args-{i}"] = read_config(str(path))
    *answers, names = ask([*questions, {"kind": "names"}])
    pairs = dict(zip(configs, zip(configs.values(), answers, strict=True), strict=True))
    return pairs | {"names": (configs["args-0"], names)}


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in launch_configs() if name.startswith("fsdp")])
def test_accelerate_makes_the_same_of_its_config(name: str, launched: Mapping[str, Any]) -> None:
    config, answer = launched[name]
    assert as_the_plugin_says(config.spec) == of_the_plugin(answer)


@pytest.mark.full
@pytest.mark.parametrize("at", range(len(MESHES)), ids=[str(sizes) for sizes in MESHES])
def test_accelerate_builds_the_same_mesh(at: int, launched: Mapping[str, Any]) -> None:
    config, answer = launched[f"mesh-{at}"]
    assert [list(axis) for axis in config.spec.mesh.axes] == answer["mesh"]
    assert config.spec.world_size == answer["num_processes"]


@pytest.mark.full
@pytest.mark.parametrize("at", range(len(ARGUMENTS)))
def test_trainer_makes_the_same_of_its_arguments(at: int, launched: Mapping[str, Any]) -> None:
    config, answer = launched[f"args-{at}"]
    assert as_the_plugin_says(config.spec) == of_the_plugin(answer)
    assert (config.spec.optimizer, config.spec.batch_size) == (answer["optim"], answer["batch_size"])


@pytest.mark.full
def test_option_that_accelerate_or_trainer_has_is_known(launched: Mapping[str, Any]) -> None:
    from ckpt_tools.preflight.configs import accelerate, trainer

    _, answer = launched["names"]
    raw: Any = accelerate.OPTIONS()
    assert set(answer["accelerate"]) <= option_names(accelerate.OPTIONS)
    assert set(answer["parallelism_config"]) <= option_names(type(raw.parallelism_config))
    fsdp = {name.removeprefix("fsdp_") for name in answer["fsdp_config"]}
    assert fsdp | {"ignored_modules"} <= option_names(type(raw.fsdp_config))  # which is read, but has no option
    assert set(answer["trainer"]) <= option_names(trainer.OPTIONS)


# What one framework does


def test_process_of_ai_toolkit_without_its_job_is_read_and_told_where_it_belongs(tmp_path: Path) -> None:
    process = {
        "train": {"dist_mode": "fsdp", "fsdp_sharding": "full", "fsdp_mixed_precision": "bf16", "batch_size": 2},
        "model": {"low_vram": True},
        "network": {"type": "loha", "linear": 64},
    }
    config = read(tmp_path, process)
    assert config.framework == "ai-toolkit"
    job = read(tmp_path, {"config": {"process": [process]}}).spec
    assert config.spec == replace(job, keys={k: v.removeprefix("config.process[0].") for k, v in job.keys.items()})
    assert (config.spec.engine, config.spec.batch_size, config.spec.keys["batch_size"]) == (
        "fsdp1",
        2,
        "train.batch_size",
    )
    assert found(config) == [("no-job", "error", "train")]
    # What the file has of a job counts.
    job = {"config": {"process": []}}
    assert ("several-processes", "error", "config.process") in found(read(tmp_path, process | job))
