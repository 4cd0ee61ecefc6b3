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
from preflight.config_examples import ACCELERATE, AXOLOTL, found, mesh, read

from ckpt_tools.checkpoint.layout import Mesh
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
    assert set(answer["accelerate"]) <= option_names(accelerate._Accelerate)
    assert set(answer["parallelism_config"]) <= option_names(accelerate._Parallelism)
    fsdp = {name.removeprefix("fsdp_") for name in answer["fsdp_config"]}
    assert fsdp | {"ignored_modules"} <= option_names(accelerate._AccelerateFsdp)  # which is read, but has no option
    assert set(answer["trainer"]) <= option_names(trainer._Trainer)


# What one framework does


@pytest.mark.parametrize(
    ("sizes", "world", "expected"),
    [
        ({}, 8, mesh(dp_shard=8)),
        ({"dp_shard_size": 4}, 16, mesh(dp_replicate=4, dp_shard=4)),
        ({"dp_replicate_size": 2}, 8, mesh(dp_replicate=2, dp_shard=4)),
        ({"dp_shard_size": 1}, 8, mesh(dp_shard=8)),
        ({"dp_shard_size": 2, "dp_replicate_size": 2}, 8, None),
        ({"tensor_parallel_size": 2, "context_parallel_size": 2}, 8, mesh(dp_shard=2, cp=2, tp=2)),
        ({"tensor_parallel_size": 3}, 8, None),
        ({"sequence_parallel_degree": 4}, 8, mesh(dp_shard=2, cp=4)),
        ({"expert_parallel_size": 2, "dp_shard_size": 4}, 8, mesh(ep=2, dp_shard=4)),  # an axis of its own
        ({"expert_parallel_size": 3}, 8, None),
        ({"dp_shard_size": -2}, 8, mesh(dp_shard=8)),
    ],
    ids=str,
)
def test_axolotl_fills_the_world(sizes: dict[str, int], world: int, expected: Mesh | None, tmp_path: Path) -> None:
    assert read(tmp_path, AXOLOTL | sizes, world_size=world).spec.mesh == expected


@pytest.mark.parametrize(
    ("options", "dtypes"),
    [
        ({}, ("bf16", "bf16")),
        ({"bf16": "auto"}, ("bf16", "bf16")),
        ({"fp16": True}, ("f16", "f16")),
        ({"bf16": "auto", "fp16": True}, ("f16", "f16")),
        ({"bf16": "full"}, ("bf16", "bf16")),
        ({"bf16": False}, ("f32", "f32")),
        ({"bf16": True, "fsdp_version": 1}, ("bf16", "f32")),
        ({"bf16": "full", "fsdp_version": 1}, ("bf16", "bf16")),
    ],
    ids=str,
)
def test_axolotl_dtypes_follow_its_own_order(options: dict[str, Any], dtypes: tuple[str, str], tmp_path: Path) -> None:
    spec = read(tmp_path, AXOLOTL | options).spec
    assert (spec.param_dtype, spec.master_dtype) == dtypes


@pytest.mark.parametrize(
    ("values", "engine"),
    [
        ({"base_model": "m"}, "ddp"),
        ({"base_model": "m", "deepspeed": "zero3.json"}, "deepspeed"),
        ({"base_model": "m", "fsdp_config": {"offload_params": True}}, "fsdp2"),  # no version is 2 since 0.20
        ({"base_model": "m", "fsdp_config": {"fsdp_version": 2}}, "fsdp2"),
        ({"base_model": "m", "fsdp": ["full_shard"], "fsdp_version": 2}, "fsdp2"),
        ({"output_dir": "o"}, "ddp"),
        ({"output_dir": "o", "fsdp": ""}, "ddp"),
        ({"output_dir": "o", "fsdp": "full_shard"}, "fsdp2"),  # no version is 2
        ({"output_dir": "o", "fsdp": True, "fsdp_config": {"fsdp_version": 1}}, "fsdp1"),
        ({"output_dir": "o", "fsdp": True, "fsdp_config": {"xla": True}}, "other"),
        ({"output_dir": "o", "deepspeed": {"zero_optimization": {}}}, "deepspeed"),
        ({"distributed_type": "FSDP", "fsdp_config": {}}, "fsdp1"),  # no version is 1
        ({"distributed_type": "MULTI_GPU"}, "ddp"),
        ({"distributed_type": "MEGATRON_LM"}, "other"),
        ({"distributed_type": False}, "none"),  # a bare NO
        ({"actor_rollout_ref": {"actor": {}}}, "fsdp1"),
        ({"actor_rollout_ref": {"actor": {"strategy": "megatron"}}}, "other"),
        ({"parallelism": {"data_parallel_shard_degree": 1, "data_parallel_replicate_degree": 2}}, "ddp"),
        ({"parallelism": {"data_parallel_shard_degree": 1, "tensor_parallel_degree": 2}}, "fsdp2"),
        ({"config": {"process": [{"train": {"dist_mode": "ddp"}}]}}, "ddp"),
    ],
    ids=str,
)
def test_engine_is_what_the_framework_would_use(values: dict[str, Any], engine: str, tmp_path: Path) -> None:
    assert read(tmp_path, values).spec.engine == engine


def test_run_of_one_rank_has_no_engine(tmp_path: Path) -> None:
    for values in ({"output_dir": "o"}, {"base_model": "m"}, {"parallelism": {"data_parallel_shard_degree": -1}}):
        spec = read(tmp_path, values, world_size=1).spec
        assert (spec.engine, spec.mesh) == ("none", mesh(dp_shard=1))


def test_fsdp_words_that_trainer_does_not_know_are_reported(tmp_path: Path) -> None:
    config = read(tmp_path, {"output_dir": "o", "fsdp": "full_shard fast 1"})
    assert [(item.code, item.where, item.what.split()[0]) for item in config.findings] == [
        ("unknown-value", "fsdp", "'fast'"),
        ("unknown-value", "fsdp", "'1'"),
    ]


def test_fsdp_config_in_a_file_that_is_missing_is_a_finding(tmp_path: Path) -> None:
    config = read(tmp_path, {"output_dir": "o", "fsdp": True, "fsdp_config": "no.json"})
    assert found(config) == [("missing-file", "error", "fsdp_config")]
    (tmp_path / "no.json").write_text("[")
    config = read(tmp_path, {"output_dir": "o", "fsdp": True, "fsdp_config": "no.json"})
    assert found(config) == [("missing-file", "error", "fsdp_config")]
    (tmp_path / "no.json").write_text('{"fsdp_version": 1, "fsdp_reshard": 3}')
    config = read(tmp_path, {"output_dir": "o", "fsdp": True, "fsdp_config": "no.json"})
    assert found(config) == [("unknown-key", "warning", "fsdp_config.fsdp_reshard")]
    assert config.values["fsdp_config"] == {"fsdp_version": 1, "fsdp_reshard": 3}
    assert config.spec.engine == "fsdp1"


def test_distributed_type_that_is_missing_is_an_error(tmp_path: Path) -> None:
    config = read(tmp_path, {"num_processes": 2}, framework="accelerate")
    assert found(config) == [("missing-key", "error", "distributed_type")]


def test_hybrid_sharding_of_ai_toolkit_has_no_mesh(tmp_path: Path) -> None:
    values = {"config": {"process": [{"train": {"dist_mode": "fsdp", "fsdp_sharding": "hybrid"}}]}}
    config = read(tmp_path, values, world_size=8)
    assert (config.spec.strategy, config.spec.mesh) == ("hybrid_shard", None)
    assert found(config) == [("unknown-value", "info", "config.process[0].train.fsdp_sharding")]


def test_arch_that_ai_toolkit_does_not_have_is_a_warning(tmp_path: Path) -> None:
    process: dict[str, Any] = {"type": "sd_trainer", "train": {"batch_size": 1}, "model": {"arch": "qwen_image"}}
    assert found(read(tmp_path, {"config": {"process": [process]}})) == []
    process["model"]["arch"] = "qwen_imgae"
    config = read(tmp_path, {"config": {"process": [process]}})
    assert found(config) == [("unknown-value", "warning", "config.process[0].model.arch")]
    assert config.findings[0].hint == "arch: qwen_image"


def test_option_of_a_list_that_is_not_looked_at_is_known_by_its_name(tmp_path: Path) -> None:
    datasets = [{"folder_path": "a", "num_repeats": 2}, {"folder_path": "b", "num_repeates": 2, "my_own": 1}]
    config = read(tmp_path, {"config": {"process": [{"type": "sd_trainer", "train": {}, "datasets": datasets}]}})
    assert found(config) == [("unknown-key", "warning", "config.process[0].datasets[1].num_repeates")]
    assert config.options.passed_over == 1


def test_processes_of_ai_toolkit_beyond_the_first_are_mentioned(tmp_path: Path) -> None:
    process = {"train": {"batch_size": 3}}
    config = read(tmp_path, {"config": {"process": [process, {"train": {"batch_size": 5}}]}})
    assert config.spec.batch_size == 3
    assert found(config) == [("several-processes", "info", "config.process")]
    assert found(read(tmp_path, {"config": {"process": []}})) == [("several-processes", "error", "config.process")]


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


@pytest.mark.parametrize(
    ("size", "world", "expected"),
    [
        (-1, 8, mesh(dp_shard=8)),
        (4, 8, mesh(dp_replicate=2, dp_shard=4)),
        (8, 8, mesh(dp_shard=8)),
        (16, 8, mesh(dp_shard=8)),  # more than there are: all
        (3, 8, None),
        (0, 8, None),
        (4, None, None),
    ],
)
def test_verl_shards_over_groups(size: int, world: int | None, expected: Mesh | None, tmp_path: Path) -> None:
    values: dict[str, Any] = {"actor_rollout_ref": {"actor": {"fsdp_config": {"fsdp_size": size}}}}
    if world is None:
        values["trainer"] = {"nnodes": "${oc.env:NNODES}"}
    assert read(tmp_path, values, world_size=world).spec.mesh == expected


def test_verl_starts_eight_ranks_unless_told_otherwise(tmp_path: Path) -> None:
    values: dict[str, Any] = {"actor_rollout_ref": {"actor": {"strategy": "fsdp2"}}}
    assert read(tmp_path, values).spec.world_size == 8
    assert read(tmp_path, values | {"trainer": {"nnodes": 3, "n_gpus_per_node": 4}}).spec.world_size == 12


def test_verl_interpolations_are_followed_and_others_said(tmp_path: Path) -> None:
    text = """
    gpus: 4
    loop: ${loop}
    actor_rollout_ref:
      model: {path: "${oc.env:MODEL}", lora_rank: "${oc.select:no.such,16}"}
      actor:
        strategy: ${.kind}
        kind: fsdp2
        fsdp_config: {fsdp_size: "${gpus}", model_dtype: "a${gpus}"}
    trainer: {n_gpus_per_node: "${gpus}", nnodes: 2}
    """
    config = read(tmp_path, text)
    assert config.spec.engine == "fsdp2"
    assert config.spec.mesh == mesh(dp_replicate=2, dp_shard=4)
    assert config.spec.adapter is not None
    assert config.spec.adapter.rank == 16
    assert ("unknown-value", "warning", "actor_rollout_ref.actor.fsdp_config.model_dtype") in found(config)
    assert config.options.unread == ("actor_rollout_ref.model.path", "actor_rollout_ref.actor.fsdp_config.model_dtype")
    assert config.spec.model is None
