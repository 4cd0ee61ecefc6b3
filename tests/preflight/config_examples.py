"""The example configs, and what each of them means."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ckpt_tools.description.layout import Mesh
from ckpt_tools.preflight.configs import Config, read_config
from ckpt_tools.preflight.spec import AdapterSpec

FIXTURES = Path(__file__).parent / "fixtures"


def mesh(**axes: int) -> Mesh:
    return Mesh(tuple(axes.items()))


# What each example means. Fields that are not named are the defaults of ParallelSpec.
EXAMPLES: Mapping[str, tuple[str, int | None, dict[str, Any]]] = {
    "accelerate/fsdp2.yaml": (
        "accelerate",
        None,
        {
            "engine": "fsdp2",
            "world_size": 8,
            "axes": {"dp_shard": -1},
            "mesh": mesh(dp_shard=8),
            "strategy": "full_shard",
            "reshard_after_forward": True,
            "param_dtype": "bf16",
            "reduce_dtype": "bf16",
            "master_dtype": "f32",
            "activation_checkpointing": True,
            "wrap_classes": ("Qwen3DecoderLayer",),
            "state_dict_type": "SHARDED_STATE_DICT",
            "cpu_ram_efficient_loading": True,
        },
    ),
    "accelerate/nd_parallel.yaml": (
        "accelerate",
        None,
        {
            "engine": "fsdp2",
            "world_size": 16,
            "axes": {"dp_replicate": 2, "dp_shard": 4, "cp": 1, "sp": 1, "tp": 2},
            "mesh": mesh(dp_replicate=2, dp_shard=4, tp=2),
            "strategy": "hybrid_shard",
            "reshard_after_forward": False,
            "param_dtype": "bf16",
            "reduce_dtype": "bf16",
            "master_dtype": "f32",
            "state_dict_type": "SHARDED_STATE_DICT",
            "cpu_ram_efficient_loading": False,
        },
    ),
    "accelerate/fsdp1_hybrid.yaml": (
        "accelerate",
        None,
        {
            "engine": "fsdp1",
            "world_size": 16,
            "axes": {"dp_replicate": 2, "dp_shard": -1},
            "mesh": mesh(dp_replicate=2, dp_shard=8),
            "strategy": "hybrid_shard",
            "reshard_after_forward": True,
            "param_dtype": "f16",
            "reduce_dtype": "f16",
            "master_dtype": "f32",
            "offload_params": True,
            "wrap_min_num_params": 20_000_000,
            "state_dict_type": "FULL_STATE_DICT",
            "cpu_ram_efficient_loading": True,
        },
    ),
    "accelerate/zero3.yaml": (
        "accelerate",
        None,
        {
            "engine": "deepspeed",
            "world_size": 4,
            "axes": {"dp_shard": -1},
            "mesh": mesh(dp_shard=4),
            "strategy": "full_shard",
            "param_dtype": "bf16",
            "master_dtype": "f32",
            "offload_optimizer": True,
        },
    ),
    "trainer/args.json": (
        "trainer",
        4,
        {
            "engine": "fsdp2",
            "world_size": 4,
            "axes": {"dp_shard": -1},
            "mesh": mesh(dp_shard=4),
            "strategy": "full_shard",
            "reshard_after_forward": True,
            "param_dtype": "bf16",
            "reduce_dtype": "bf16",
            "master_dtype": "f32",
            "activation_checkpointing": True,
            "wrap_classes": ("Qwen3DecoderLayer",),
            "optimizer": "adamw_torch",
            "batch_size": 2,
            "state_dict_type": "SHARDED_STATE_DICT",
            "cpu_ram_efficient_loading": True,
            "model": "Qwen/Qwen3-8B",
        },
    ),
    "trainer/sft_lora.yaml": (
        "trainer",
        None,
        {
            "engine": "fsdp2",
            "axes": {"dp_shard": -1},
            "strategy": "shard_grad_op",
            "reshard_after_forward": False,
            "param_dtype": "bf16",
            "reduce_dtype": "bf16",
            "master_dtype": "f32",
            "offload_params": True,
            "adapter": AdapterSpec(kind="lora", rank=32, alpha=64.0, targets=("q_proj", "v_proj")),
            "activation_checkpointing": True,  # TRL's default
            "optimizer": "adamw_torch_fused",
            "seq_len": 4096,
            "batch_size": 1,
            "state_dict_type": "SHARDED_STATE_DICT",
            "cpu_ram_efficient_loading": False,
            "model": "meta-llama/Llama-3.1-8B",
        },
    ),
    "torchtitan/job.json": (
        "torchtitan",
        16,
        {
            "engine": "fsdp2",
            "world_size": 16,
            "axes": {"pp": 2, "dp_replicate": 1, "dp_shard": -1, "cp": 1, "tp": 2, "ep": 8},
            "mesh": mesh(pp=2, dp_shard=4, tp=2),  # ep is inside
            "strategy": "shard_grad_op",  # "default" keeps the parameters in a pipeline
            "reshard_after_forward": False,
            "param_dtype": "bf16",
            "reduce_dtype": "f32",
            "master_dtype": "f32",
            "activation_checkpointing": True,
            "sequence_parallel": True,
            "loss_parallel": True,
            "schedule": "Interleaved1F1B",
            "optimizer": "AdamW",
            "seq_len": 4096,
            "batch_size": 4,  # 16384 tokens
            "state_dict_type": "SHARDED_STATE_DICT",
            "model": "./assets/hf/deepseek-moe-16b-base",
            "resume_from": "assets/step-0",
        },
    ),
    "torchtitan/llama3_8b.toml": (
        "torchtitan",
        None,
        {
            "engine": "fsdp2",
            "axes": {"pp": 1, "dp_replicate": 2, "dp_shard": 4, "cp": 2, "tp": 1, "ep": 1},
            "mesh": mesh(dp_replicate=2, dp_shard=4, cp=2),
            "strategy": "hybrid_shard",
            "reshard_after_forward": False,
            "param_dtype": "bf16",
            "reduce_dtype": "f32",
            "master_dtype": "f32",
            "selective_checkpointing": "op",
            "sequence_parallel": True,
            "loss_parallel": True,
            "schedule": "1F1B",
            "optimizer": "AdamW",
            "seq_len": 8192,
            "batch_size": 1,
            "state_dict_type": "SHARDED_STATE_DICT",
            "model": "./assets/hf/Llama-3.1-8B",
        },
    ),
    "axolotl/fft.yaml": (
        "axolotl",
        16,
        {
            "engine": "fsdp2",
            "world_size": 16,
            "axes": {"cp": 2, "dp_shard": 4, "dp_replicate": -1},
            "mesh": mesh(dp_replicate=2, dp_shard=4, cp=2),
            "strategy": "hybrid_shard",
            "reshard_after_forward": True,
            "param_dtype": "bf16",
            "reduce_dtype": "bf16",
            "master_dtype": "bf16",
            "activation_checkpointing": True,
            "wrap_classes": ("Qwen3DecoderLayer",),
            "optimizer": "adamw_torch_fused",
            "seq_len": 8192,
            "batch_size": 1,
            "state_dict_type": "SHARDED_STATE_DICT",
            "cpu_ram_efficient_loading": True,
            "model": "Qwen/Qwen3-8B",
        },
    ),
    "axolotl/qlora.yaml": (
        "axolotl",
        2,
        {
            "engine": "fsdp2",
            "world_size": 2,
            "axes": {"dp_shard": -1},
            "mesh": mesh(dp_shard=2),
            "strategy": "full_shard",
            "reshard_after_forward": True,
            "param_dtype": "bf16",
            "reduce_dtype": "bf16",
            "master_dtype": "bf16",
            "offload_params": True,
            "wrap_classes": ("LlamaDecoderLayer",),
            "adapter": AdapterSpec(kind="lora", rank=16, alpha=32.0, targets=("all-linear",)),
            "quantize": "nf4",
            "optimizer": "adamw_torch_fused",
            "seq_len": 2048,
            "batch_size": 2,
            "state_dict_type": "FULL_STATE_DICT",
            "cpu_ram_efficient_loading": False,
            "model": "meta-llama/Llama-3.1-70B",
        },
    ),
    "ai_toolkit/flux2_loha_fsdp.yaml": (
        "ai-toolkit",
        4,
        {
            "engine": "fsdp1",
            "world_size": 4,
            "axes": {"dp_shard": -1},
            "mesh": mesh(dp_shard=4),
            "strategy": "full_shard",
            "reshard_after_forward": True,
            "param_dtype": "bf16",
            "reduce_dtype": "bf16",
            "master_dtype": "f32",
            "offload_params": True,
            "wrap_classes": ("DoubleStreamBlock", "SingleStreamBlock"),
            "adapter": AdapterSpec(kind="loha", rank=64, alpha=32.0),
            "optimizer": "adamw",
            "batch_size": 2,
            "state_dict_type": "SHARDED_STATE_DICT",
            "model": "black-forest-labs/FLUX.2-dev",
        },
    ),
    "ai_toolkit/flux_lokr.yaml": (
        "ai-toolkit",
        None,
        {
            "engine": "none",
            "axes": {},
            "mesh": mesh(dp_shard=1),
            "param_dtype": "bf16",
            "master_dtype": "f32",
            "activation_checkpointing": True,
            "adapter": AdapterSpec(kind="lokr", targets=("single_blocks",)),
            "quantize": "uint4",
            "optimizer": "adamw8bit",
            "batch_size": 1,
            "model": "black-forest-labs/FLUX.1-dev",
        },
    ),
    "verl/grpo.yaml": (
        "verl",
        None,
        {
            "engine": "fsdp2",
            "world_size": 16,
            "axes": {"dp_replicate": -1, "dp_shard": 8, "sp": 2},
            "mesh": mesh(dp_replicate=2, dp_shard=8),
            "strategy": "hybrid_shard",
            "reshard_after_forward": True,
            "param_dtype": "bf16",
            "reduce_dtype": "f32",
            "master_dtype": "f32",
            "offload_params": True,
            "activation_checkpointing": True,
            "wrap_classes": ("Qwen3DecoderLayer",),
            "optimizer": "AdamW",
            "seq_len": 4096,
            "batch_size": 2,
            "state_dict_type": "SHARDED_STATE_DICT",
            "model": "Qwen/Qwen3-8B",
        },
    ),
    "verl/grpo.sh": (
        "verl",
        None,
        {
            "engine": "fsdp2",
            "world_size": 4,
            "axes": {"dp_shard": -1, "sp": 1},
            "mesh": mesh(dp_shard=4),
            "strategy": "full_shard",
            "reshard_after_forward": True,
            "param_dtype": "bf16",
            "reduce_dtype": "bf16",
            "master_dtype": "f32",
            "activation_checkpointing": True,
            "adapter": AdapterSpec(kind="lora", rank=32, alpha=64.0, targets=("q_proj", "v_proj")),
            "optimizer": "AdamW",
            "model": "Qwen/Qwen3-4B",  # the default of ${MODEL:-…}
            "seq_len": 1536,
            "batch_size": 8,
            "state_dict_type": "SHARDED_STATE_DICT",
        },
    ),
    "verl/sft.yaml": (
        "verl",
        8,
        {
            "engine": "fsdp2",
            "world_size": 8,
            "axes": {"dp_shard": -1, "sp": 2},
            "mesh": mesh(dp_shard=8),
            "strategy": "full_shard",
            "reshard_after_forward": True,
            "param_dtype": "bf16",
            "reduce_dtype": "f32",
            "master_dtype": "bf16",
            "adapter": AdapterSpec(kind="lora", rank=8, alpha=16.0, targets=("all-linear",)),
            "optimizer": "AdamW",
            "seq_len": 4096,
            "batch_size": 2,
            "state_dict_type": "SHARDED_STATE_DICT",
            "model": "Qwen/Qwen3-1.7B",
        },
    ),
    "openrlhf/sft_fsdp2.sh": (
        "openrlhf",
        None,
        {
            "engine": "fsdp2",
            "world_size": 16,
            "axes": {"dp_shard": -1, "tp": 2},
            "mesh": mesh(dp_shard=8, tp=2),
            "strategy": "full_shard",
            "reshard_after_forward": True,
            "param_dtype": "bf16",
            "reduce_dtype": "f32",
            "master_dtype": "f32",
            "offload_optimizer": True,
            "activation_checkpointing": True,
            "optimizer": "adam",
            "seq_len": 4096,
            "batch_size": 2,
            "state_dict_type": "SHARDED_STATE_DICT",
            "model": "meta-llama/Meta-Llama-3-8B",
        },
    ),
    "openrlhf/ppo_ray.sh": (
        "openrlhf",
        None,
        {
            "engine": "deepspeed",
            "world_size": 16,
            "axes": {"dp_shard": -1, "sp": 2, "tp": 1},
            "mesh": mesh(dp_shard=8, cp=2),
            "strategy": "full_shard",
            "param_dtype": "bf16",
            "reduce_dtype": "bf16",
            "master_dtype": "f32",
            "offload_optimizer": True,
            "activation_checkpointing": True,
            "optimizer": "adam",
            "seq_len": 8192,
            "batch_size": 4,
            "model": "OpenRLHF/Llama-3-8b-sft-mixture",
        },
    ),
    "openrlhf/dpo_options.txt": (
        "openrlhf",
        8,
        {
            "engine": "deepspeed",
            "world_size": 8,
            "axes": {"dp_shard": -1, "sp": 2, "tp": 1},
            "mesh": mesh(dp_shard=4, cp=2),
            "strategy": "shard_grad_op",
            "param_dtype": "bf16",
            "reduce_dtype": "bf16",
            "master_dtype": "f32",
            "activation_checkpointing": True,
            "adapter": AdapterSpec(kind="lora", rank=64, alpha=64.0, targets=("q_proj", "v_proj")),
            "quantize": "nf4",
            "optimizer": "adam",
            "batch_size": 1,
            "model": "OpenRLHF/Llama-3-8b-sft-mixture",
        },
    ),
}


def read(tmp_path: Path, values: Mapping[str, Any] | str, *, name: str = "config.yaml", **options: Any) -> Config:
    path = tmp_path / name
    text = (
        values if isinstance(values, str) else json.dumps(values) if name.endswith(".json") else yaml.safe_dump(values)
    )
    path.write_text(text)
    return read_config(str(path), **options)


def found(config: Config) -> list[tuple[str, str, str]]:
    return [(finding.code, finding.severity, finding.where) for finding in config.findings]


ACCELERATE = {
    "distributed_type": "FSDP",
    "num_processes": 4,
    "mixed_precision": "bf16",
    "fsdp_config": {"fsdp_version": 2},
}
AXOLOTL = {"base_model": "m", "fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}
