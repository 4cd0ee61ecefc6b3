"""Configs that break one rule each, beside one that nearly does: edits of a right config of each framework.

A key of an edit is a dotted path into the right config (`process[0]` is an item of a list), DROP removes it. For
OpenRLHF it is an option; None removes it, True makes it a switch.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

DROP = object()

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
GPT = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4} | {
    "n_positions": 2048
}
OPT = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 64, "max_position_embeddings": 2048}
TIED = LLAMA | {"tie_word_embeddings": True}
BIG_TIED = TIED | {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
}
"""A Llama of 7 billion parameters; it is only ever built on meta."""
BIG = BIG_TIED | {"tie_word_embeddings": False}

RIGHT: dict[str, dict[str, Any]] = {
    "accelerate": {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": 8,
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": True,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_offload_params": False,
        },
    },
    "trainer": {
        "output_dir": "out",
        "bf16": True,
        "per_device_train_batch_size": 1,
        "optim": "adamw_torch_fused",
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "reshard_after_forward": True,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "SHARDED_STATE_DICT",
            "activation_checkpointing": True,
        },
    },
    "torchtitan": {
        "training": {
            "dtype": "float32",
            "mixed_precision_param": "bfloat16",
            "mixed_precision_reduce": "float32",
            "seq_len": 2048,
            "enable_cpu_offload": False,
        },
        "parallelism": {
            "data_parallel_replicate_degree": 1,
            "data_parallel_shard_degree": -1,
            "fsdp_reshard_after_forward": "default",
            "tensor_parallel_degree": 1,
            "context_parallel_degree": 1,
            "pipeline_parallel_degree": 1,
            "expert_parallel_degree": 1,
        },
        "checkpoint": {"enable": True, "interval": 500},
    },
    "axolotl": {
        "base_model": "model",
        "datasets": [{"path": "data.jsonl", "type": "alpaca"}],
        "bf16": True,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "sequence_len": 2048,
        "optimizer": "adamw_torch_fused",
        "attn_implementation": "flash_attention_2",
        "fsdp_version": 2,
        "fsdp_config": {
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
            "state_dict_type": "SHARDED_STATE_DICT",
            "reshard_after_forward": True,
            "offload_params": False,
        },
    },
    "ai-toolkit": {
        "job": "extension",
        "config": {
            "name": "run",
            "process": [
                {
                    "type": "sd_trainer",
                    "network": {"type": "lora", "linear": 16, "linear_alpha": 16},
                    "model": {"name_or_path": "model", "arch": "flux", "quantize": False, "low_vram": False},
                    "train": {
                        "batch_size": 1,
                        "dtype": "bf16",
                        "optimizer": "adamw",
                        "gradient_checkpointing": False,
                        "distributed": True,
                        "dist_backend": "nccl",
                        "dist_mode": "fsdp",
                        "fsdp_auto_wrap": True,
                        "fsdp_sharding": "full",
                        "fsdp_mixed_precision": "bf16",
                        "fsdp_cpu_offload": False,
                    },
                }
            ],
        },
    },
    "verl": {
        "actor_rollout_ref": {
            "model": {"path": "model", "use_remove_padding": True, "enable_gradient_checkpointing": True},
            "actor": {
                "strategy": "fsdp2",
                "ppo_mini_batch_size": 64,
                "ppo_micro_batch_size_per_gpu": 1,
                "ulysses_sequence_parallel_size": 1,
                "fsdp_config": {
                    "fsdp_size": -1,
                    "reshard_after_forward": True,
                    "param_offload": False,
                    "optimizer_offload": False,
                    "offload_policy": False,
                    "model_dtype": "fp32",
                },
            },
        },
        "trainer": {"n_gpus_per_node": 8, "nnodes": 1},
    },
    "openrlhf": {
        "backend": "fsdp2",
        "pretrain": "model",
        "train_batch_size": "128",
        "micro_train_batch_size": "2",
        "param_dtype": "bf16",
        "gradient_checkpointing": True,
    },
}
"""One right config of each framework."""

NAMES = {
    "accelerate": "accelerate.yaml",
    "trainer": "args.json",
    "torchtitan": "config.json",
    "axolotl": "axolotl.yml",
    "ai-toolkit": "train.yaml",
    "verl": "ppo.yaml",
    "openrlhf": "train.sh",
}
"""Its file."""

Edits = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RuleCase:
    """A config that breaks a rule, and a near miss."""

    rule: str
    framework: str
    fires: Edits
    """Edits of the right config that break the rule."""
    near: Edits
    """Edits that nearly do."""
    also: tuple[str, ...] = ()
    """Other rules that the first one breaks as well, because it cannot be broken alone."""
    near_also: tuple[str, ...] = ()
    """Other rules that the near miss breaks."""
    world_size: int | None = 8
    near_world_size: int | None = None
    """Of the near miss, when it differs."""
    model: dict[str, Any] | None = None
    """config.json of the model."""
    near_model: dict[str, Any] | None = None
    """Of the near miss, when it differs."""
    weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of weights beside it."""
    near_weights: Mapping[str, tuple[int, ...]] | None = None
    build: bool = False
    """Build the model on meta."""


def edited(framework: str, edits: Edits) -> dict[str, Any]:
    """Return the right config of a framework with edits."""
    values = copy.deepcopy(RIGHT[framework])
    if framework == "openrlhf":
        for name, value in edits.items():
            if value is None or value is DROP:
                values.pop(name, None)
            else:
                values[name] = value
        return values
    for path, value in edits.items():
        node: Any = values
        *parents, last = path.replace("]", "").replace("[", ".").split(".")
        for part in parents:
            node = node[int(part)] if part.isdigit() else node.setdefault(part, {})
        if value is DROP:
            node.pop(last, None)
        else:
            node[last] = value
    return values


def text_of(framework: str, values: dict[str, Any], *, ranks: int | None = 8) -> str:
    """Return a config as its file has it."""
    if framework == "openrlhf":
        lines = [f"torchrun --nproc_per_node={ranks or 8} -m openrlhf.cli.train_sft"]
        lines += [f"   --{name}" if value is True else f"   --{name} {value}" for name, value in values.items()]
        return "#!/bin/bash\nset -x\n" + " \\\n".join(lines) + "\n"
    if NAMES[framework].endswith(".json"):
        return json.dumps(values, indent=2)
    return yaml.safe_dump(values, sort_keys=False)


AI = "config.process[0]"
ACTOR = "actor_rollout_ref.actor"
SIZE = "parallelism_config.parallelism_config_{}_size".format
DEGREE = "parallelism.{}_parallel_degree".format
SHARD = "parallelism.data_parallel_shard_degree"
FSDP1 = {"fsdp_config.fsdp_version": 1, "fsdp_config.fsdp_reshard_after_forward": DROP}

CASES: tuple[RuleCase, ...] = (
    # 00x
    RuleCase(
        rule="CKPT001",
        framework="accelerate",
        fires={SIZE("dp_shard"): 4, SIZE("tp"): 4},
        near={SIZE("dp_shard"): 4, SIZE("tp"): 2},
    ),
    RuleCase(
        rule="CKPT001",
        framework="torchtitan",
        fires={SHARD: 4, DEGREE("tensor"): 1},
        near={SHARD: 4, DEGREE("tensor"): 2},
    ),
    RuleCase(
        rule="CKPT001",
        framework="torchtitan",
        fires={SHARD: 2, DEGREE("tensor"): 2, DEGREE("expert"): 2},  # ep takes no ranks of its own
        near={SHARD: 4, DEGREE("tensor"): 2, DEGREE("expert"): 2},
    ),
    RuleCase(
        rule="CKPT001",
        framework="torchtitan",
        fires={DEGREE("tensor"): 3},
        near={DEGREE("tensor"): 4},
    ),
    RuleCase(
        rule="CKPT001",
        framework="axolotl",
        fires={"dp_shard_size": 4, "dp_replicate_size": 4},
        near={"dp_shard_size": 4, "dp_replicate_size": 2},
    ),
    RuleCase(
        rule="CKPT001",
        framework="axolotl",
        fires={"tensor_parallel_size": 3},
        near={"tensor_parallel_size": 2},
    ),
    RuleCase(
        rule="CKPT001",
        framework="verl",
        fires={f"{ACTOR}.fsdp_config.fsdp_size": 3},
        near={f"{ACTOR}.fsdp_config.fsdp_size": 4},
    ),
    RuleCase(
        rule="CKPT001",
        framework="openrlhf",
        fires={"fsdp_tensor_parallel_size": 3},
        near={"fsdp_tensor_parallel_size": 2},
    ),
    RuleCase(
        rule="CKPT002",
        framework="torchtitan",
        fires={DEGREE("tensor"): 0},
        near={SHARD: -1, DEGREE("tensor"): 1},
    ),
    RuleCase(
        rule="CKPT002",
        framework="verl",
        fires={f"{ACTOR}.fsdp_config.fsdp_size": 0},
        near={f"{ACTOR}.fsdp_config.fsdp_size": -1},
    ),
    RuleCase(
        rule="CKPT003",
        framework="accelerate",
        fires={**FSDP1, SIZE("dp_shard"): 8},
        near={SIZE("dp_shard"): 8},
    ),
    RuleCase(
        rule="CKPT003",
        framework="accelerate",
        fires={"distributed_type": "MULTI_GPU", "fsdp_config": DROP, SIZE("dp_shard"): 8},
        near={"distributed_type": "MULTI_GPU", "fsdp_config": DROP, SIZE("tp"): 8},
    ),
    RuleCase(
        rule="CKPT003",
        framework="trainer",
        fires={"fsdp": DROP, "fsdp_config": DROP, "parallelism_config": {"dp_shard_size": 8}},
        near={"parallelism_config": {"dp_shard_size": 8}},
    ),
    RuleCase(
        rule="CKPT004",
        framework="trainer",
        fires={"parallelism_config": {"dp_replicate_size": 8}},
        near={"parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 4}},
    ),
    RuleCase(
        rule="CKPT004",
        framework="accelerate",
        fires={SIZE("tp"): 8},
        near={SIZE("cp"): 8},
    ),
    RuleCase(
        rule="CKPT005",
        framework="accelerate",
        fires={SIZE("dp_shard"): 2, SIZE("cp"): 2, SIZE("sp"): 2},
        near={SIZE("dp_shard"): 4, SIZE("cp"): 2, SIZE("sp"): 1},
    ),
    RuleCase(
        rule="CKPT006",
        framework="accelerate",
        fires={SIZE("dp_replicate"): 4, SIZE("tp"): 2},
        near={SIZE("dp_replicate"): 2, SIZE("dp_shard"): 2, SIZE("tp"): 2},
    ),
    RuleCase(
        rule="CKPT006",
        framework="axolotl",
        fires={"dp_replicate_size": 4, "context_parallel_size": 2},
        near={"fsdp_config": DROP, "fsdp_version": DROP, "context_parallel_size": 2},
    ),
    RuleCase(rule="CKPT007", framework="trainer", fires={}, near={}, world_size=1, near_world_size=2),
    RuleCase(
        rule="CKPT008",
        framework="accelerate",
        fires={"num_machines": 3},
        near={"num_machines": 4},
    ),
    RuleCase(
        rule="CKPT009",
        framework="accelerate",
        fires={},
        near={"num_processes": 16},
        world_size=16,
    ),
    # 01x
    RuleCase(
        rule="CKPT010",
        framework="trainer",
        fires={"deepspeed": "ds.json"},
        near={"deepspeed": None},
    ),
    RuleCase(
        rule="CKPT010",
        framework="axolotl",
        fires={"deepspeed": "ds.json"},
        near={"deepspeed": None},
    ),
    RuleCase(
        rule="CKPT010",
        framework="ai-toolkit",
        fires={f"{AI}.train.dist_mode": "ddp"},
        near={f"{AI}.train.dist_mode": "ddp", f"{AI}.train.fsdp_auto_wrap": False, f"{AI}.train.fsdp_sharding": DROP},
    ),
    RuleCase(
        rule="CKPT011",
        framework="accelerate",
        fires={"deepspeed_config": {"zero_stage": 2}},
        near={"deepspeed_config": {}},
    ),
    RuleCase(
        rule="CKPT011",
        framework="trainer",
        fires={"fsdp": DROP},
        near={"fsdp": DROP, "fsdp_config": DROP},
    ),
    RuleCase(
        rule="CKPT011",
        framework="openrlhf",
        fires={"zero_stage": "3"},
        near={"zero_stage": "3", "backend": "deepspeed"},
    ),
    RuleCase(
        rule="CKPT012",
        framework="trainer",
        fires={"distributed_config": {"fsdp_size": 4, "pp_size": 2}},
        near={"distributed_config": {"fsdp_size": 8, "pp_size": 1}},
    ),
    RuleCase(
        rule="CKPT013",
        framework="ai-toolkit",
        fires={f"{AI}.model.split_model_over_gpus": True},
        near={f"{AI}.model.split_model_over_gpus": False},
    ),
    RuleCase(
        rule="CKPT014",
        framework="ai-toolkit",
        fires={f"{AI}.model.layer_offloading": True},
        near={
            f"{AI}.model.layer_offloading": True,
            **{
                f"{AI}.train.{name}": DROP
                for name in RIGHT["ai-toolkit"]["config"]["process"][0]["train"]
                if "d" in name
            },
            f"{AI}.train.dtype": "bf16",
        },
    ),
    RuleCase(
        rule="CKPT015",
        framework="ai-toolkit",
        fires={f"{AI}.model.low_vram": True},
        near={f"{AI}.model.low_vram": False},
    ),
    RuleCase(
        rule="CKPT016",
        framework="axolotl",
        fires={"fsdp_config": DROP, "fsdp_version": DROP, "dp_shard_size": 8},
        near={"fsdp_config": DROP, "fsdp_version": DROP, "dp_shard_size": 1},
    ),
    RuleCase(
        rule="CKPT017",
        framework="ai-toolkit",
        fires={f"{AI}.train.distributed": DROP},
        near={f"{AI}.train.distributed": True},
    ),
    RuleCase(
        rule="CKPT018",
        framework="ai-toolkit",
        fires={f"{AI}.train.dist_backend": "gloo"},
        near={f"{AI}.train.dist_backend": DROP},
    ),
    # 02x
    RuleCase(
        rule="CKPT020",
        framework="accelerate",
        fires={"fsdp_config.fsdp_reshard_after_forward": "FULL_SHARD"},
        near={"fsdp_config.fsdp_reshard_after_forward": "no"},
    ),
    RuleCase(
        rule="CKPT020",
        framework="trainer",
        fires={"fsdp_config.reshard_after_forward": 4},
        near={"fsdp_config.reshard_after_forward": "false"},
    ),
    RuleCase(
        rule="CKPT021",
        framework="trainer",
        fires={"fsdp": "hybrid_shard auto_wrap"},
        also=("CKPT091",),
        near={"fsdp": "full_shard auto_wrap"},
        near_also=("CKPT091",),
    ),
    RuleCase(
        rule="CKPT021",
        framework="trainer",
        fires={"fsdp": "true"},
        near={"fsdp": "offload"},
        near_also=("CKPT091",),
    ),
    RuleCase(
        rule="CKPT022",
        framework="accelerate",
        fires={"fsdp_config.fsdp_backward_prefetch": "BACKWARD_PRE"},
        near={
            **FSDP1,
            "fsdp_config.fsdp_backward_prefetch": "BACKWARD_PRE",
        },
    ),
    RuleCase(
        rule="CKPT022",
        framework="axolotl",
        fires={"fsdp_config.use_orig_params": True},
        near={"fsdp_config.use_orig_params": True, "optimizer": "q_galore_adamw8bit"},
    ),
    RuleCase(
        rule="CKPT022",
        framework="verl",
        fires={f"{ACTOR}.fsdp_config.use_orig_params": True},
        near={f"{ACTOR}.fsdp_config.use_orig_params": False},
    ),
    RuleCase(
        rule="CKPT023",
        framework="accelerate",
        fires={"fsdp_config.fsdp_version": DROP},
        near={"fsdp_config.fsdp_version": DROP, "fsdp_config.version": 2},
    ),
    RuleCase(
        rule="CKPT023",
        framework="trainer",
        fires={"fsdp_config.version": DROP},
        near={"fsdp_config.version": DROP, "fsdp_config.fsdp_version": 2},
    ),
    RuleCase(
        rule="CKPT023",
        framework="axolotl",
        fires={"fsdp_version": DROP, "fsdp_config.reshard_after_forward": DROP},
        near={"fsdp_version": DROP, "fsdp_config.fsdp_version": 2},
    ),
    RuleCase(
        rule="CKPT024",
        framework="accelerate",
        fires={**FSDP1, "fsdp_config.fsdp_reshard_after_forward": "SHARD_GRAD_OP"},
        near={**FSDP1, "fsdp_config.fsdp_sharding_strategy": "SHARD_GRAD_OP"},
    ),
    RuleCase(
        rule="CKPT025",
        framework="trainer",
        fires={"fsdp_config.version": 1, "fsdp_config.reshard_after_forward": "full_shard"},
        near={"fsdp_config.version": 2},
    ),
    RuleCase(
        rule="CKPT025",
        framework="axolotl",
        fires={"fsdp_version": DROP, "fsdp": ["full_shard", "auto_wrap"], "fsdp_config.reshard_after_forward": DROP},
        near={"fsdp_version": 2},
    ),
    RuleCase(
        rule="CKPT026",
        framework="accelerate",
        fires={"fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER"},
        near={"fsdp_config.fsdp_auto_wrap_policy": "transformer_based_wrap"},
    ),
    RuleCase(
        rule="CKPT026",
        framework="trainer",
        fires={"fsdp_config.auto_wrap_policy": "transformer_based_wrap"},  # Trainer compares case and all
        near={"fsdp_config.auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    ),
    RuleCase(
        rule="CKPT027",
        framework="accelerate",
        fires={"fsdp_config.fsdp_min_num_params": 1000},
        near={
            "fsdp_config.fsdp_min_num_params": 1000,
            "fsdp_config.fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
            "fsdp_config.fsdp_transformer_layer_cls_to_wrap": DROP,
        },
    ),
    RuleCase(
        rule="CKPT028",
        framework="accelerate",
        fires={
            "fsdp_config.fsdp_auto_wrap_policy": DROP,
            "fsdp_config.fsdp_transformer_layer_cls_to_wrap": DROP,
        },
        near={"fsdp_config.fsdp_transformer_layer_cls_to_wrap": DROP},
    ),
    RuleCase(
        rule="CKPT028",
        framework="trainer",
        fires={
            "fsdp_config.auto_wrap_policy": "SIZE_BASED_WRAP",
            "fsdp_config.transformer_layer_cls_to_wrap": DROP,
        },
        near={"fsdp_config.auto_wrap_policy": DROP},
    ),
    RuleCase(
        rule="CKPT029",
        framework="accelerate",
        fires={"fsdp_config.fsdp_sync_module_states": False},
        near={
            "fsdp_config.fsdp_sync_module_states": False,
            "fsdp_config.fsdp_cpu_ram_efficient_loading": False,
        },
        near_also=("CKPT022",),
    ),
    # 03x
    RuleCase(
        rule="CKPT030",
        framework="torchtitan",
        fires={SHARD: 1, DEGREE("tensor"): 8},  # 8 heads, but 4 key and value heads
        near={SHARD: 2, DEGREE("tensor"): 4},
        model=LLAMA,
    ),
    RuleCase(
        rule="CKPT030",
        framework="accelerate",
        fires={SIZE("dp_shard"): 2, SIZE("tp"): 4},
        near={SIZE("dp_shard"): 2, SIZE("tp"): 4},
        model=LLAMA | {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96},
        near_model=LLAMA,
    ),
    RuleCase(
        rule="CKPT031",
        framework="verl",
        fires={f"{ACTOR}.ulysses_sequence_parallel_size": 4},
        near={f"{ACTOR}.ulysses_sequence_parallel_size": 8},  # a multiple of the 4 key and value heads
        model=LLAMA | {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96},
        near_model=LLAMA,
    ),
    RuleCase(
        rule="CKPT032",
        framework="torchtitan",
        fires={DEGREE("expert"): 8},
        near={DEGREE("expert"): 4},
        model=MIXTRAL | {"num_local_experts": 12},
    ),
    RuleCase(
        rule="CKPT033",
        framework="torchtitan",
        fires={"parallelism.data_parallel_replicate_degree": 4, SHARD: 2, DEGREE("expert"): 4},
        near={"parallelism.data_parallel_replicate_degree": 2, SHARD: 4, DEGREE("expert"): 4},
    ),
    RuleCase(
        rule="CKPT034",
        framework="torchtitan",
        fires={DEGREE("expert"): 4},
        near={DEGREE("expert"): 4},
        model=LLAMA,
        near_model=MIXTRAL,
    ),
    RuleCase(
        rule="CKPT035",
        framework="axolotl",
        fires={"expert_parallel_size": 2, "dp_shard_size": 4},
        near={"expert_parallel_size": 1, "dp_shard_size": 8},
    ),
    RuleCase(
        rule="CKPT036",
        framework="axolotl",
        fires={"expert_parallel_size": 2, "dp_shard_size": 2, "tensor_parallel_size": 2},
        also=("CKPT035",),
        near={"expert_parallel_size": 2, "dp_shard_size": 2, "context_parallel_size": 2},
        near_also=("CKPT035",),
    ),
    RuleCase(
        rule="CKPT037",
        framework="torchtitan",
        fires={SHARD: 4, DEGREE("pipeline"): 2},
        near={SHARD: 4, DEGREE("pipeline"): 2},
        model=TIED,
        near_model=LLAMA,
    ),
    RuleCase(
        rule="CKPT038",
        framework="axolotl",
        fires={"context_parallel_size": 2, "attn_implementation": "sdpa"},
        near={"context_parallel_size": 2},
    ),
    RuleCase(
        rule="CKPT038",
        framework="verl",
        fires={f"{ACTOR}.ulysses_sequence_parallel_size": 2, "actor_rollout_ref.model.use_remove_padding": False},
        near={f"{ACTOR}.ulysses_sequence_parallel_size": 2},
    ),
    RuleCase(
        rule="CKPT038",
        framework="verl",
        fires={
            "actor_rollout_ref": DROP,
            "model": {"partial_pretrain": "model"},
            "ulysses_sequence_parallel_size": 2,
        },
        near={
            "actor_rollout_ref": DROP,
            "model": {"partial_pretrain": "model"},
            "ulysses_sequence_parallel_size": 2,
            "use_remove_padding": True,
        },
    ),
    RuleCase(
        rule="CKPT038",
        framework="openrlhf",
        fires={"ring_attn_size": "2"},
        near={"ring_attn_size": "2", "packing_samples": True},
    ),
    RuleCase(
        rule="CKPT039",
        framework="torchtitan",
        fires={SHARD: 1, DEGREE("pipeline"): 8},
        near={SHARD: 2, DEGREE("pipeline"): 4},
        model=LLAMA,
    ),
    # 04x
    RuleCase(
        rule="CKPT040",
        framework="accelerate",
        fires={"fsdp_config.fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderlayer"},
        near={},
        model=LLAMA,
        build=True,
    ),
    RuleCase(
        rule="CKPT040",
        framework="axolotl",
        fires={"fsdp_config.transformer_layer_cls_to_wrap": "Qwen2DecoderLayer"},
        near={},
        model=LLAMA,
        build=True,
    ),
    RuleCase(
        rule="CKPT041",
        framework="trainer",
        fires={"fsdp_config.transformer_layer_cls_to_wrap": ["LlamaMLP"]},
        near={"fsdp_config.transformer_layer_cls_to_wrap": ["LlamaDecoderLayer", "Embedding"]},
        model=LLAMA,
        build=True,
    ),
    RuleCase(
        rule="CKPT042",
        framework="accelerate",
        fires={},
        near={},
        model=TIED,
        weights={"model.embed_tokens.weight": (256, 64), "lm_head.weight": (256, 64)},
        near_weights={"model.embed_tokens.weight": (256, 64)},
    ),
    RuleCase(
        rule="CKPT043",
        framework="accelerate",
        fires={"num_processes": 64},
        near={"num_processes": 8},
        world_size=64,
        near_world_size=8,
        model=MIXTRAL,
        weights={"layers.0.experts.gate_up_proj": (8, 128, 64), "layers.0.self_attn.q_proj.weight": (64, 64)},
    ),
    RuleCase(
        rule="CKPT044",
        framework="torchtitan",
        fires={SHARD: 4, DEGREE("tensor"): 2},
        near={SHARD: 4, DEGREE("tensor"): 2},
        model=LLAMA | {"vocab_size": 257},
        near_model=LLAMA,
    ),
    RuleCase(
        rule="CKPT045",
        framework="verl",
        fires={"trainer.n_gpus_per_node": 16},
        near={"trainer.n_gpus_per_node": 16},
        world_size=16,
        model=BIG_TIED,
        near_model=BIG,
        build=True,
    ),
    RuleCase(
        rule="CKPT046",
        framework="torchtitan",
        fires={"training.seq_len": 4096},
        near={"training.seq_len": 2048},
        model=LLAMA,
    ),
    RuleCase(
        rule="CKPT047",
        framework="trainer",
        fires={"max_length": 2049},
        near={"max_length": 2048},
        model=GPT,
        weights={"wpe.weight": (2048, 64)},
    ),
    RuleCase(
        rule="CKPT047",
        framework="axolotl",
        fires={"sequence_len": 4096},
        near={"sequence_len": 4096},
        model=OPT,
        near_model=LLAMA,
        weights={"model.decoder.embed_positions.weight": (2050, 64)},
        near_weights={"model.norm.weight": (64,)},
    ),
    # 05x
    RuleCase(rule="CKPT050", framework="trainer", fires={"fp16": True}, near={"fp16": False}),
    RuleCase(rule="CKPT050", framework="axolotl", fires={"fp16": True}, near={"fp16": None}),
    RuleCase(
        rule="CKPT051",
        framework="openrlhf",
        fires={"param_dtype": "fp16"},
        near={"param_dtype": "fp16", "backend": "deepspeed"},
    ),
    RuleCase(
        rule="CKPT051",
        framework="ai-toolkit",
        fires={f"{AI}.train.fsdp_mixed_precision": "fp16", f"{AI}.train.dtype": "fp16"},
        near={f"{AI}.train.fsdp_mixed_precision": "bf16"},
    ),
    RuleCase(
        rule="CKPT052",
        framework="verl",
        fires={
            f"{ACTOR}.fsdp_config.mixed_precision": {
                "param_dtype": "fp32",
                "reduce_dtype": "bf16",
                "buffer_dtype": "fp32",
            }
        },
        near={
            f"{ACTOR}.fsdp_config.mixed_precision": {
                "param_dtype": "bf16",
                "reduce_dtype": "bf16",
                "buffer_dtype": "fp32",
            }
        },
    ),
    RuleCase(
        rule="CKPT053",
        framework="torchtitan",
        fires={"training.dtype": "bfloat16"},
        near={"training.dtype": "float32"},
    ),
    RuleCase(
        rule="CKPT053",
        framework="verl",
        fires={f"{ACTOR}.fsdp_config.model_dtype": "bf16"},
        near={f"{ACTOR}.fsdp_config.model_dtype": "bf16", "actor_rollout_ref.model.lora_rank": 16},
    ),
    RuleCase(
        rule="CKPT054",
        framework="axolotl",
        fires={"fsdp_config.mixed_precision_policy": "fp16"},
        near={"fsdp_config.mixed_precision_policy": "bf16"},
    ),
    RuleCase(
        rule="CKPT054",
        framework="ai-toolkit",
        fires={f"{AI}.train.dtype": "fp32"},
        near={f"{AI}.train.dtype": "bfloat16"},
    ),
    RuleCase(
        rule="CKPT054",
        framework="torchtitan",
        fires={"training.dtype": "bfloat16", "training.mixed_precision_param": "float32"},
        also=("CKPT053",),
        near={"training.mixed_precision_param": "float32"},
    ),
    RuleCase(
        rule="CKPT055",
        framework="accelerate",
        fires={"mixed_precision": "fp8", "fp8_config": {"backend": "AO"}},
        near={"mixed_precision": "fp8", "fp8_config": {"backend": "TE"}},
    ),
    RuleCase(
        rule="CKPT056",
        framework="accelerate",
        fires={"mixed_precision": "bfloat16"},
        near={"mixed_precision": "BF16"},
    ),
    RuleCase(
        rule="CKPT057",
        framework="axolotl",
        fires={
            "fp8_enable_fsdp_float8_all_gather": True,
            "fsdp_version": DROP,
            "fsdp_config.fsdp_version": 2,
        },
        near={"fp8_enable_fsdp_float8_all_gather": True},
    ),
    # 06x
    RuleCase(
        rule="CKPT060",
        framework="trainer",
        fires={"fsdp_config.state_dict_type": DROP},
        near={"fsdp_config.state_dict_type": "FULL_STATE_DICT"},
    ),
    RuleCase(
        rule="CKPT060",
        framework="accelerate",
        fires={**FSDP1, "fsdp_config.fsdp_state_dict_type": DROP},
        near={"fsdp_config.fsdp_state_dict_type": DROP},  # FSDP2's default is SHARDED there
    ),
    RuleCase(
        rule="CKPT061",
        framework="accelerate",
        fires={"fsdp_config.fsdp_state_dict_type": "FULL_STATE_DICT"},
        near={"fsdp_config.fsdp_state_dict_type": "FULL_STATE_DICT"},
        model=BIG,
        near_model=LLAMA,
        build=True,
    ),
    RuleCase(
        rule="CKPT062",
        framework="accelerate",
        fires={"fsdp_config.fsdp_state_dict_type": "LOCAL_STATE_DICT"},
        near={**FSDP1, "fsdp_config.fsdp_state_dict_type": "LOCAL_STATE_DICT"},
    ),
    RuleCase(
        rule="CKPT063",
        framework="trainer",
        fires={"save_only_model": True},
        near={"save_only_model": True, "fsdp_config.state_dict_type": "FULL_STATE_DICT"},
    ),
    RuleCase(
        rule="CKPT064",
        framework="trainer",
        fires={
            "save_only_model": True,
            "load_best_model_at_end": True,
            "fsdp_config.state_dict_type": "FULL_STATE_DICT",
        },
        near={"load_best_model_at_end": True, "save_strategy": "no"},
    ),
    RuleCase(
        rule="CKPT065",
        framework="trainer",
        fires={
            "save_only_model": True,
            "resume_from_checkpoint": "out/checkpoint-10",
            "fsdp_config.state_dict_type": "FULL_STATE_DICT",
        },
        near={"resume_from_checkpoint": "out/checkpoint-10"},
    ),
    RuleCase(
        rule="CKPT065",
        framework="torchtitan",
        fires={"checkpoint.exclude_from_loading": ["optimizer"]},
        near={"checkpoint.exclude_from_loading": ["dataloader"]},
    ),
    RuleCase(
        rule="CKPT065",
        framework="verl",
        fires={f"{ACTOR}.checkpoint.save_contents": ["model"], "trainer.resume_mode": "auto"},
        near={f"{ACTOR}.checkpoint.save_contents": ["model"], "trainer.resume_mode": "disable"},
    ),
    RuleCase(
        rule="CKPT066",
        framework="accelerate",
        fires={"fsdp_config.fsdp_activation_checkpointing_offload": True},
        near={
            "fsdp_config.fsdp_activation_checkpointing_offload": True,
            "fsdp_config.fsdp_activation_checkpointing": True,
        },
    ),
    RuleCase(
        rule="CKPT066",
        framework="axolotl",
        fires={"activation_offloading": True},
        near={"activation_offloading": True, "gradient_checkpointing": True},
        near_also=("CKPT068",),
    ),
    RuleCase(
        rule="CKPT067",
        framework="trainer",
        fires={"gradient_checkpointing": True},
        near={"gradient_checkpointing": False},
    ),
    RuleCase(
        rule="CKPT068",
        framework="trainer",
        fires={"activation_checkpointing": True, "fsdp_config.activation_checkpointing": False},
        near={"activation_checkpointing": False, "fsdp_config.activation_checkpointing": False},
    ),
    RuleCase(
        rule="CKPT068",
        framework="ai-toolkit",
        fires={f"{AI}.train.gradient_checkpointing": True},
        near={f"{AI}.train.gradient_checkpointing": False},
    ),
    RuleCase(
        rule="CKPT069",
        framework="verl",
        fires={f"{ACTOR}.fsdp_config.offload_policy": True, f"{ACTOR}.fsdp_config.param_offload": True},
        near={f"{ACTOR}.fsdp_config.offload_policy": True},
    ),
    # 07x
    RuleCase(
        rule="CKPT070",
        framework="axolotl",
        fires={
            "adapter": "qlora",
            "lora_r": 16,
            "load_in_4bit": True,
            "bnb_config_kwargs": {"bnb_4bit_quant_storage": "float32"},
        },
        near={"adapter": "qlora", "lora_r": 16, "load_in_4bit": True},  # axolotl stores as bfloat16
    ),
    RuleCase(
        rule="CKPT070",
        framework="trainer",
        fires={},
        near={},
        model=LLAMA | {"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_storage": "float16"}},
        near_model=LLAMA | {"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}},
    ),
    RuleCase(
        rule="CKPT070",
        framework="trainer",
        fires={"load_in_4bit": True, "use_peft": True, "bnb_4bit_quant_storage": "float16"},
        near={"load_in_4bit": True, "use_peft": True, "bnb_4bit_quant_storage": "bfloat16"},
    ),
    RuleCase(
        rule="CKPT071",
        framework="trainer",
        fires={"load_in_4bit": True, "use_peft": True, "bnb_4bit_quant_storage": "uint8"},
        near={"load_in_4bit": True, "use_peft": True, "bnb_4bit_quant_storage": "bfloat16"},
    ),
    RuleCase(
        rule="CKPT071",
        framework="accelerate",
        fires={},
        near={},
        model=LLAMA | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        near_model=LLAMA | {"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}},
    ),
    RuleCase(
        rule="CKPT072",
        framework="axolotl",
        fires={"adapter": "qlora", "lora_r": 16, "load_in_4bit": True, "rl": "dpo"},
        near={"adapter": "qlora", "lora_r": 16, "load_in_4bit": True},
    ),
    RuleCase(
        rule="CKPT073",
        framework="axolotl",
        fires={"load_in_4bit": True},
        near={"load_in_4bit": True, "adapter": "qlora", "lora_r": 16},
    ),
    RuleCase(
        rule="CKPT073",
        framework="openrlhf",
        fires={"load_in_4bit": True},
        near={"load_in_4bit": True, "lora_rank": "16"},
    ),
    RuleCase(
        rule="CKPT073",
        framework="trainer",
        fires={"load_in_8bit": True},
        near={"load_in_8bit": True, "use_peft": True},
    ),
    RuleCase(
        rule="CKPT074",
        framework="axolotl",
        fires={
            "fsdp_version": 1,
            "fsdp_config.reshard_after_forward": DROP,
            "lora_qkv_kernel": True,
            "adapter": "lora",
            "lora_r": 16,
        },
        also=("CKPT025",),
        near={"lora_qkv_kernel": True, "adapter": "lora", "lora_r": 16},
    ),
    RuleCase(
        rule="CKPT075",
        framework="openrlhf",
        fires={"load_in_4bit": True, "lora_rank": "16", "param_dtype": "fp16", "backend": "deepspeed"},
        near={"load_in_4bit": True, "lora_rank": "16", "backend": "deepspeed"},
    ),
    RuleCase(
        rule="CKPT076",
        framework="axolotl",
        fires={
            "model_quantization_config": "Mxfp4Config",
            "fsdp_config.cpu_ram_efficient_loading": True,
            "adapter": "lora",
            "lora_r": 16,
        },
        near={
            "model_quantization_config": "Mxfp4Config",
            "fsdp_config.cpu_ram_efficient_loading": False,
            "adapter": "lora",
            "lora_r": 16,
        },
    ),
    RuleCase(
        rule="CKPT077",
        framework="axolotl",
        fires={"adapter": "lora", "lora_r": 0},
        near={"adapter": "lora", "lora_r": 1},
    ),
    RuleCase(
        rule="CKPT078",
        framework="ai-toolkit",
        fires={f"{AI}.model.quantize": True},
        near={f"{AI}.model.quantize": False},
    ),
    RuleCase(
        rule="CKPT079",
        framework="trainer",
        fires={"use_peft": True, "lora_target_modules": ["to_q", "to_v"]},
        near={"use_peft": True, "lora_target_modules": ["to_q", "q_proj"]},
        model=LLAMA,
        build=True,
    ),
    # 08x
    RuleCase(
        rule="CKPT080",
        framework="axolotl",
        fires={"optimizer": "adamw_8bit"},
        near={"optimizer": "adamw_torch_8bit"},
    ),
    RuleCase(
        rule="CKPT080",
        framework="trainer",
        fires={"optim": "adamw_bnb_8bit"},
        near={"optim": "adamw_torch"},
    ),
    RuleCase(
        rule="CKPT081",
        framework="axolotl",
        fires={
            "fsdp_version": 1,
            "fsdp_config.reshard_after_forward": DROP,
            "optimizer": "adamw_8bit",
            "fsdp_config.offload_params": True,
        },
        also=("CKPT025",),
        near={"fsdp_version": 1, "fsdp_config.reshard_after_forward": DROP, "optimizer": "adamw_8bit"},
        near_also=("CKPT025",),
    ),
    RuleCase(
        rule="CKPT082",
        framework="axolotl",
        fires={
            "tensor_parallel_size": 8,
            "optimizer": "paged_adamw_8bit",
            "fsdp_config": DROP,
            "fsdp_version": DROP,
        },
        near={
            "tensor_parallel_size": 1,
            "optimizer": "paged_adamw_8bit",
            "fsdp_config": DROP,
            "fsdp_version": DROP,
        },
    ),
    RuleCase(
        rule="CKPT083",
        framework="axolotl",
        fires={"fsdp_version": 1, "fsdp_config.reshard_after_forward": DROP, "optimizer": "muon"},
        also=("CKPT025",),
        near={"optimizer": "muon"},
    ),
    RuleCase(
        rule="CKPT084",
        framework="axolotl",
        fires={"optimizer": "q_galore_adamw8bit"},
        near={"optimizer": "q_galore_adamw8bit", "fsdp_config.use_orig_params": True},
    ),
    # 09x
    RuleCase(
        rule="CKPT090",
        framework="trainer",
        fires={"fsdp_config.version": 1, "fsdp_config.reshard_after_forward": True},
        also=("CKPT025",),
        near={"fsdp_config.version": 1, "fsdp_config.reshard_after_forward": "shard_grad_op"},
        near_also=("CKPT025",),
    ),
    RuleCase(
        rule="CKPT091",
        framework="trainer",
        fires={"fsdp": "shard_grad_op offload"},
        near={"fsdp": True},
    ),
    RuleCase(
        rule="CKPT092",
        framework="axolotl",
        fires={"fsdp_config.offload_params": DROP, "fsdp_config.fsdp_offload_params": False},
        near={"fsdp_version": DROP, "fsdp_config.fsdp_version": 2},
    ),
    RuleCase(
        rule="CKPT093",
        framework="axolotl",
        fires={"fsdp_config.cpu_offload_pin_memory": False},
        near={"fsdp_config.cpu_offload_pin_memory": False, "fsdp_config.offload_params": True},
    ),
    RuleCase(
        rule="CKPT094",
        framework="verl",
        fires={f"{ACTOR}.ulysses_sequence_parallel_size": 3},
        near={f"{ACTOR}.ulysses_sequence_parallel_size": 4},
    ),
    RuleCase(
        rule="CKPT095",
        framework="openrlhf",
        fires={"sequence_parallel": True},
        near={"sequence_parallel": True, "fsdp_tensor_parallel_size": "2"},
    ),
    RuleCase(
        rule="CKPT096",
        framework="axolotl",
        fires={"fsdp_config.auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_config.transformer_layer_cls_to_wrap": DROP},
        near={
            "fsdp_config.auto_wrap_policy": "SIZE_BASED_WRAP",
            "fsdp_config.transformer_layer_cls_to_wrap": DROP,
            "fsdp_config.min_num_params": 1000,
        },
    ),
    RuleCase(
        rule="CKPT097",
        framework="axolotl",
        fires={"fp32_norms": True, "fsdp_version": 1, "fsdp_config.reshard_after_forward": DROP},
        also=("CKPT025",),
        near={"fp32_norms": True},
    ),
    RuleCase(
        rule="CKPT098",
        framework="openrlhf",
        fires={
            "backend": None,
            "pretrain": None,
            "gradient_checkpointing": None,
            "train_batch_size": None,
            "micro_train_batch_size": None,
            "param_dtype": None,
            "model.model_name_or_path": "model",
            "ds.tensor_parallel_size": "2",
            "ds.param_dtype": "fp16",
        },
        near={
            "backend": None,
            "pretrain": None,
            "gradient_checkpointing": None,
            "train_batch_size": None,
            "micro_train_batch_size": None,
            "param_dtype": None,
            "model.model_name_or_path": "model",
            "ds.tensor_parallel_size": "2",
            "ds.param_dtype": "bf16",
        },
    ),
    RuleCase(
        rule="CKPT099",
        framework="axolotl",
        fires={"gradient_checkpointing": True, "fsdp_config.activation_checkpointing": True},
        near={"fsdp_config.activation_checkpointing": True},
    ),
    # 10x
    RuleCase(rule="CKPT100", framework="axolotl", fires={"sequence_len": 8_192_000_000}, near={"sequence_len": 8192}),
    RuleCase(rule="CKPT100", framework="axolotl", fires={"micro_batch_size": 2**31}, near={"micro_batch_size": 2}),
    RuleCase(
        rule="CKPT100",
        framework="trainer",
        fires={"use_peft": True, "lora_r": 10**9},
        near={"use_peft": True, "lora_r": 16},
    ),
    RuleCase(
        rule="CKPT101",
        framework="axolotl",
        fires={"gradient_accumulation_steps": 0},
        near={"gradient_accumulation_steps": 1},
    ),
    RuleCase(
        rule="CKPT101",
        framework="verl",
        fires={"actor_rollout_ref.model.lora_rank": -8},
        near={"actor_rollout_ref.model.lora_rank": 0},
    ),
    RuleCase(rule="CKPT101", framework="openrlhf", fires={"train_batch_size": "0"}, near={"train_batch_size": "128"}),
    RuleCase(rule="CKPT102", framework="torchtitan", fires={"optimizer.lr": -1e-5}, near={"optimizer.lr": 1e-5}),
    RuleCase(rule="CKPT102", framework="trainer", fires={"learning_rate": "-2e-5"}, near={"learning_rate": "2e-5"}),
)
"""A case of every rule."""
