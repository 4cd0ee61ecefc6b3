"""Launchers' FSDP options as a policy, a mesh and blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpt_tools.errors import UsageError
from ckpt_tools.fsdp2 import Policy, Precision
from ckpt_tools.preflight.policy import read_sharding

BF16 = Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
PLAN = {  # ai-toolkit's, as it stands there: a process alone
    "train": {
        "distributed": True, "dist_backend": "nccl", "dist_mode": "fsdp", "fsdp_auto_wrap": True, "batch_size": 2,
        "fsdp_sharding": "full", "fsdp_mixed_precision": "bf16", "fsdp_cpu_offload": False,
        "fsdp_backward_prefetch": True, "gradient_checkpointing": False,
    },
    "network": {"type": "loha", "linear": 64},
}  # fmt: skip
OPENRLHF = """torchrun --nproc_per_node=8 -m openrlhf.cli.train_sft --backend fsdp2 --param_dtype bf16 \\
    --pretrain meta-llama/Meta-Llama-3-8B --gradient_checkpointing --fsdp_tensor_parallel_size 2 --adam_offload"""
LAUNCHER = {
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "ResidualBlock,TransformerBlock",
        "fsdp_reshard_after_forward": False,
        "fsdp_offload_params": True,
        "fsdp_limit_all_gathers": True,
    },
}


def test_plan_as_it_is_read_from_yaml():
    import yaml

    assert read_sharding(yaml.safe_load(yaml.safe_dump(PLAN)), world_size=4).policy.precision == BF16


def plan(**options):
    return {**PLAN, "train": PLAN["train"] | options}


@pytest.mark.parametrize(
    ("config", "policy", "mesh", "blocks", "noted"),
    [
        (PLAN, Policy(precision=BF16, reshard_after_forward=True), "dp_shard=8", "auto", []),
        (
            plan(fsdp_cpu_offload=True, fsdp_backward_prefetch=False, fsdp_auto_wrap=False),
            Policy(precision=BF16, reshard_after_forward=True, cpu_offload=True),
            "dp_shard=8",
            (),
            [],
        ),
        (
            OPENRLHF,
            Policy(
                precision=Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32),
                reshard_after_forward=True,
            ),
            "dp_shard=4,tp=2",
            "auto",
            [],
        ),
        (
            LAUNCHER,
            Policy(strategy="shard_grad_op", precision=BF16, cpu_offload=True),
            "dp_shard=8",
            ("ResidualBlock", "TransformerBlock"),
            ["limit_all_gathers"],
        ),
        (
            {"fsdp_version": 1, "sharding_strategy": "HYBRID_SHARD", "use_orig_params": True, "forward_prefetch": True},
            Policy(reshard_after_forward=True, prefetch_forward=1),
            "dp_shard=8",
            (),
            ["use_orig_params", "hybrid_shard on one machine"],
        ),
        (
            {"fsdp_version": 2, "mixed_precision_policy": {"param_dtype": "bf16", "buffer_dtype": torch.float32}},
            Policy(precision=Precision(param_dtype=torch.bfloat16), reshard_after_forward=True),
            "dp_shard=8",
            (),
            ["buffer_dtype"],
        ),
        ({"fsdp_version": 1, "sharding_strategy": 3}, Policy(strategy="no_shard"), "dp_replicate=8", (), []),
    ],
    ids=["ai-toolkit", "ai-toolkit-offload", "openrlhf", "launcher", "plugin-v1", "precision", "no-shard"],
)
def test_options_become_what_shard_model_takes(config, policy, mesh, blocks, noted):
    found = read_sharding(config, world_size=8)
    assert found.policy == policy
    assert str(found.mesh) == mesh
    assert found.blocks == blocks
    assert [note.startswith(name) for note, name in zip(found.notes, noted, strict=True)] == [True] * len(noted)
    assert found.offload_optimizer == (config is OPENRLHF)
    assert found.activation_checkpointing == (config is OPENRLHF)


def test_plugin_itself_says_the_same():
    accelerate = pytest.importorskip("accelerate", reason="accelerate's own plugin")
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["ResidualBlock", "TransformerBlock"],
        reshard_after_forward=True,
        cpu_offload=True,
        activation_checkpointing=True,
        mixed_precision_policy="bf16",
        ignored_modules="vae|vae.encoder",
    )
    model = nn.ModuleDict({"vae": nn.Linear(1, 1), "body": nn.Linear(1, 1)})
    with pytest.raises(UsageError, match="ignored_modules needs the model"):
        read_sharding(plugin, world_size=4)
    found = read_sharding(plugin, world_size=4, model=model)
    assert found.blocks == ("ResidualBlock", "TransformerBlock")
    assert found.activation_checkpointing
    own = Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    assert found.policy == Policy(
        precision=own, cpu_offload=True, pin_memory=True, reshard_after_forward=True, ignored=("vae",)
    )
    plugin.ignored_modules = [model["body"]]
    assert read_sharding(plugin, world_size=4, model=model).policy.ignored == ("body",)
    assert [note.partition(":")[0] for note in found.notes] == ["state_dict_type"]


def test_hybrid_takes_the_mesh_that_is_given():
    with pytest.raises(UsageError, match="how many ranks share a copy"):
        read_sharding(plan(fsdp_sharding="hybrid"), world_size=8)
    found = read_sharding(plan(fsdp_sharding="hybrid"), world_size=8, mesh="dp_replicate=2,dp_shard=4")
    assert (found.policy.strategy, str(found.mesh)) == ("hybrid_shard", "dp_replicate=2,dp_shard=4")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"distributed_type": "MULTI_GPU"}, "the engine is ddp, not FSDP"),
        ({"fsdp_version": 2, "reshard_after_forwrad": True}, "the nearest one is fsdp_reshard_after_forward"),
        ({"fsdp_version": 2, "frobnicate": 1}, "unsupported: fsdp_config.fsdp_frobnicate"),
        (plan(fsdp_shardin="full"), "at: config.process.0..train.fsdp_shardin; hint: write fsdp_sharding"),
        ({"fsdp_version": 2, "mixed_precision_policy": "int7"}, "unknown dtype 'int7'"),
        ({"fsdp_version": 2, "ignored_modules": "decoder"}, "matches no module"),
        ({}, "not a config of a known trainer"),
    ],
)
def test_options_that_cannot_be_followed_are_refused(config, message):
    with pytest.raises(UsageError, match=message):
        read_sharding(config, world_size=8, model=nn.Linear(1, 1))
