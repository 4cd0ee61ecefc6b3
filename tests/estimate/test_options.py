"""What can be asked, and on which mesh a strategy stands."""

from __future__ import annotations

import pytest

from ckpt_tools.errors import UsageError
from ckpt_tools.estimate import EstimateOptions
from ckpt_tools.estimate.options import STRATEGIES, cases_of, parse_strategy
from ckpt_tools.sandbox import wire

SIZES = {"params": 7 * 10**9, "layers": 32, "hidden": 4096}


def meshes(**options):
    return {case.strategy: str(case.mesh) for case in cases_of(EstimateOptions(**SIZES, **options))}


@pytest.mark.parametrize(
    ("strategy", "spellings"),
    [
        ("full_shard", "full_shard zero3 1"),
        ("shard_grad_op", "shard-grad-op ZeRO2 2"),
        ("hybrid_shard", "hybrid_shard hsdp 4"),
        ("no_shard", "no_shard ddp 3"),
        ("hybrid_shard_zero2", "hybrid_shard_zero2 _hybrid_shard_zero2 5"),
    ],
)
def test_strategies_spelled_otherwise_are_those_of_fsdp2(strategy, spellings):
    from ckpt_tools.fsdp2 import parse_policy, policy as policies

    assert set(STRATEGIES) == set(policies.STRATEGIES)
    for text in (spelling for each in spellings.split() for spelling in (each, f"ShardingStrategy.{each.upper()}")):
        assert parse_strategy(text) == strategy
        policy = parse_policy(text)
        assert (policy.strategy, policy.reshard_after_forward) == (
            (strategy, None) if strategy in STRATEGIES else ("hybrid_shard", False)
        )


def test_all_strategies_share_the_world():
    assert meshes(strategy=("all",), world_size=16) == {
        "no_shard": "dp_replicate=16",
        "shard_grad_op": "dp_shard=16",
        "full_shard": "dp_shard=16",
        "hybrid_shard": "dp_replicate=2,dp_shard=8",
    }


def test_all_strategies_keep_the_mesh_where_it_suits_them():
    assert meshes(strategy=("all",), mesh="dp_replicate=4,dp_shard=2,tp=2") == {
        "no_shard": "dp_replicate=8,tp=2",
        "shard_grad_op": "dp_shard=8,tp=2",
        "full_shard": "dp_shard=8,tp=2",
        "hybrid_shard": "dp_replicate=4,dp_shard=2,tp=2",
    }


def test_odd_worlds_have_no_hybrid():
    assert "hybrid_shard" not in meshes(strategy=("all",), world_size=3)


@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        (None, "full_shard"),
        ("dp_shard=4", "full_shard"),
        ("dp_replicate=4", "no_shard"),
        ("dp_replicate=2,dp_shard=2", "hybrid_shard"),
        ("dp_shard=-1,tp=2", "full_shard"),
    ],
)
def test_strategy_by_default_is_what_suits_the_mesh(mesh, strategy):
    assert list(meshes(mesh=mesh)) == [strategy]


def test_checkpointing_both_gives_two_cases():
    found = cases_of(EstimateOptions(**SIZES, activation_checkpointing="both"))
    assert [case.activation_checkpointing for case in found] == [False, True]


def test_options_survive_the_way_to_another_process():
    options = EstimateOptions(
        model="m", mesh="dp_replicate=2,dp_shard=4", strategy=("all",), gpu_memory=80, lora=4, seq_len=9
    )
    assert wire.loads(EstimateOptions, wire.dumps(options)) == options


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({}, "no model"),
        ({"params": 7}, "--layers, --hidden missing"),
        ({"model": "m", "layers": 3}, "MODEL and --layers both"),
        ({"model": "m", "vocab": 3}, "MODEL and --vocab both"),
        (SIZES | {"hidden": 0}, "--hidden must be at least 1, got 0"),
        (SIZES | {"strategy": ("fast",)}, "unknown strategy 'fast'"),
        (SIZES | {"mesh": "dp_shard=2", "sequence_parallel": True}, "needs a mesh with a tp axis"),
        (SIZES | {"mesh": "dp_shard=2", "micro_batches": 2}, "needs a mesh with a pp axis"),
        (SIZES | {"mesh": "pp=2", "micro_batches": 2}, "2 micro-batches exceed the batch size of 1"),
        (SIZES | {"mesh": "pp=2", "schedule": "fast"}, "'fast' is not a schedule"),
        (SIZES | {"mesh": "dp_shard=2", "expert_parallel": 3}, "experts cannot be sharded over 3 of 2 ranks"),
        (SIZES | {"mesh": "tp=2", "loss_parallel": True, "fused_loss": True}, "exclude each other"),
        (SIZES | {"activation_checkpointing": True, "selective_checkpointing": True}, "exclude each other"),
        (SIZES | {"gpu": "H100-8GB"}, "unknown device 'H100-8GB'"),
        (SIZES | {"gpu": "h200", "gpu_memory": "80GB"}, "both set the device memory"),
        (SIZES | {"mesh": "dp_shard=2", "world_size": 4}, "--world-size says 4"),
        (SIZES | {"mesh": "dp_shard=4", "strategy": ("hybrid_shard",)}, "hybrid_shard needs"),
        (SIZES | {"mesh": "dp_replicate=2,dp_shard=2", "strategy": ("full_shard",)}, "full_shard needs"),
        (SIZES | {"world_size": 3, "strategy": ("hybrid_shard",)}, "even number"),
        (SIZES | {"seq_len": 0}, "--seq-len must be at least 1, got 0"),
        (SIZES | {"batch_size": -1}, "--batch-size must be at least 1, got -1"),
        (SIZES | {"seq_len": 10**400}, "--seq-len must be at most"),
        (SIZES | {"params": 10**400}, "--params must be at most"),
        (SIZES | {"world_size": 10**7}, "--world-size must be between 1 and 1000000, got 10000000"),
        (SIZES | {"world_size": 0, "mesh": "dp_shard=-1"}, "--world-size must be between 1 and 1000000, got 0"),
        (SIZES | {"mesh": "dp_shard=9999999"}, "--world-size must be between 1 and 1000000, got 9999999"),
        (SIZES | {"param_dtype": "int4"}, "'int4' is not a dtype"),
        (SIZES | {"state_dtype": "int4"}, "'int4' is not a dtype"),
        (SIZES | {"optimizer": "galore"}, "'galore'"),
        (SIZES | {"quantize": "nf4"}, "cannot be trained"),
        (SIZES | {"quantize": "int3", "lora": 4}, "'int3'"),
        (SIZES | {"lora": 0}, "--lora-rank must be at least 1, got 0"),
        (SIZES | {"gpu_memory": 0}, "--gpu-memory must be positive"),
    ],
)
def test_options_that_cannot_be_are_refused(options, what):
    with pytest.raises(UsageError, match=what):
        EstimateOptions(**options)
