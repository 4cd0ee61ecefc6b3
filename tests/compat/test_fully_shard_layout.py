"""The closed form against real `fully_shard` and `parallelize_module` models.

One process plays every rank in turn through the fake process group: a model on the meta device is wrapped,
DCP's planner makes that rank's plan, and the global plan is compared chunk by chunk, owner by owner.
"""

from __future__ import annotations

import os
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import toys
import transformers
from compat.world.models import LLAMA as SMALL, LLAMA_TP
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard as TorchShard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpt_tools.checkpoint.dtypes import BY_TORCH_NAME
from ckpt_tools.checkpoint.entries import ByteSpan, Chunk, TensorEntry
from ckpt_tools.checkpoint.layout import Box, Mesh
from ckpt_tools.errors import UsageError
from ckpt_tools.transfer.placement.place import cut_entry, parse_rules, place_tensors
from ckpt_tools.transfer.placement.tp_plan import auto_plan, tp_plan_rules

LLAMA_RULES = """
version: 1
rules:
  - {match: "model.layers.*.self_attn.{q,k,v}_proj", style: colwise}
  - {match: "model.layers.*.self_attn.o_proj.weight", place: {tp: S(1)}}
  - {match: "model.layers.*.mlp.{gate,up}_proj", style: colwise}
  - {match: "model.layers.*.mlp.down_proj", style: rowwise}
"""


def llama():
    return toys.build("llama", **SMALL)


def qwen2():
    return toys.build("qwen2", **SMALL)


def qwen3_moe():
    return toys.build("qwen3-moe", **SMALL, num_experts=5, moe_intermediate_size=7)


def bert():
    odd = {"hidden_size": 20, "intermediate_size": 12, "vocab_size": 30, "max_position_embeddings": 9}
    return toys.build("bert", **odd).bert


def t5():
    odd = {"d_model": 18, "d_kv": 6, "d_ff": 20, "num_heads": 3, "vocab_size": 31}
    return toys.build("t5", **odd, relative_attention_num_buckets=8)


def convnext():
    config = transformers.ConvNextConfig(depths=[1, 1], hidden_sizes=[6, 10], num_stages=2, num_labels=3)
    return transformers.ConvNextForImageClassification(config)


def squares():
    return nn.Sequential(nn.Linear(8, 12, bias=False), nn.Linear(12, 4, bias=False))


@contextmanager
def rank_of(world_size, rank):
    """This process as one rank of a world that communicates nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # The cache does not know ranks: what it holds would carry this rank's mesh over to the next one.
        _clear_sharding_prop_cache()


def blocks_of(model):
    # Children come before the parents that hold them.
    classes = getattr(model, "_no_split_modules", None) or ()
    return [module for module in reversed(list(model.modules())) if type(module).__name__ in classes]


def plan_of(build, mesh, *, plan=None, placement_fn=None):
    """Return the global metadata and (fqn, offsets) → rank, as a real job would save them."""
    names = tuple(name for name, _ in mesh.axes)
    dp = tuple(name for name in names if name.startswith("dp_"))
    local_plans = []
    for rank in range(mesh.world_size):
        with rank_of(mesh.world_size, rank):
            device_mesh = init_device_mesh("cpu", tuple(n for _, n in mesh.axes), mesh_dim_names=names)
            with torch.device("meta"):
                model = build()
            for block in blocks_of(model):
                if plan is not None:
                    parallelize_module(block, device_mesh["tp"], {key: style() for key, style in plan.items()})
                fully_shard(block, mesh=device_mesh[dp], shard_placement_fn=placement_fn)
            fully_shard(model, mesh=device_mesh[dp], shard_placement_fn=placement_fn)
            planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
            planner.set_up_planner(model.state_dict(), is_coordinator=rank == 0)
            local_plans.append(planner.create_local_plan())
            if rank == 0:
                assert all(isinstance(p, DTensor) for p in model.parameters())
                coordinator = planner
    plans, metadata = coordinator.create_global_plan(local_plans)
    owners = {(item.index.fqn, tuple(item.index.offset)): rank for rank, p in enumerate(plans) for item in p.items}
    return metadata, owners


def entries_of(metadata):
    entries = []
    for fqn, item in metadata.state_dict_metadata.items():
        shape = tuple(item.size)
        dtype = BY_TORCH_NAME[str(item.properties.dtype).removeprefix("torch.")]
        chunk = Chunk(box=Box((0,) * len(shape), shape), span=ByteSpan(file="", offset=0, nbytes=0))
        entries.append(TensorEntry(fqn=fqn, dtype=dtype, shape=shape, chunks=(chunk,)))
    return entries


def assert_same_table(metadata, owners, mesh, rules):
    entries = entries_of(metadata)
    assert entries
    placed = place_tensors(entries, mesh, rules).placements
    for entry in entries:
        chunks = metadata.state_dict_metadata[entry.fqn].chunks
        theirs = [
            (owners[entry.fqn, tuple(chunk.offsets)], Box(tuple(chunk.offsets), tuple(chunk.sizes))) for chunk in chunks
        ]
        ours = list(cut_entry(entry, mesh, placed[entry.fqn]).cells)
        assert ours == theirs, entry.fqn
    assert len(owners) == sum(len(item.chunks) for item in metadata.state_dict_metadata.values())
    return placed


def mesh_of(**axes):
    return Mesh(tuple(axes.items()))


@pytest.mark.parametrize(
    ("build", "mesh"),
    [
        pytest.param(llama, mesh_of(dp_shard=4), id="llama-fsdp4"),
        pytest.param(llama, mesh_of(dp_replicate=2, dp_shard=2), id="llama-hsdp2x2"),
        pytest.param(qwen3_moe, mesh_of(dp_shard=3), id="qwen3-moe-fsdp3-uneven"),
        pytest.param(bert, mesh_of(dp_shard=8), id="bert-fsdp8-empty-ranks"),
        pytest.param(t5, mesh_of(dp_shard=5), id="t5-fsdp5-uneven"),
        pytest.param(convnext, mesh_of(dp_shard=4), id="convnext-fsdp4"),
        pytest.param(convnext, mesh_of(dp_replicate=3, dp_shard=2), id="convnext-hsdp3x2"),
        pytest.param(llama, mesh_of(dp_shard=2, tp=2), id="llama-2x2"),
        pytest.param(llama, mesh_of(dp_shard=3, tp=2), id="llama-3x2-uneven"),
        pytest.param(llama, mesh_of(dp_replicate=2, dp_shard=2, tp=2), id="llama-hsdp-tp"),
        pytest.param(qwen2, mesh_of(dp_shard=8, tp=2), id="qwen2-8x2-biases-empty-ranks"),
    ],
)
def test_fully_shard_model_has_the_planned_chunks(build, mesh):
    is_tp = mesh.size("tp") > 1
    metadata, owners = plan_of(build, mesh, plan=LLAMA_TP if is_tp else None)
    placed = assert_same_table(metadata, owners, mesh, parse_rules(LLAMA_RULES, where="r").rules if is_tp else ())
    assert {str(axes.get("tp")) for axes in placed.values()} == ({"S(0)", "S(1)", "None"} if is_tp else {"None"})


@pytest.mark.full
def test_fully_shard_with_the_automatic_plan_has_the_planned_chunks():
    mesh = mesh_of(dp_shard=2, tp=2)
    metadata, owners = plan_of(llama, mesh, plan=LLAMA_TP)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SMALL}
    rules = tp_plan_rules(config, list(metadata.state_dict_metadata), auto_plan(config, os.getcwd()))
    # This model keeps the embedding and the head off the tp axis; both have an odd number of rows.
    outside = parse_rules(
        'version: 1\nrules: [{match: "{model.embed_tokens,lm_head}.weight", place: {}}]', where="rules.yaml"
    )
    assert_same_table(metadata, owners, mesh, (*outside.rules, *rules))


def test_fully_shard_custom_placement_has_the_planned_chunks():
    mesh = mesh_of(dp_shard=4)
    metadata, owners = plan_of(squares, mesh, placement_fn=lambda _: TorchShard(1))
    rules = parse_rules('version: 1\nrules: [{match: "*.weight", place: {dp_shard: S(1)}}]', where="r").rules
    placed = assert_same_table(metadata, owners, mesh, rules)
    assert {str(axes["dp_shard"]) for axes in placed.values()} == {"S(1)"}


def test_fully_shard_uneven_custom_placement_is_refused_by_torch_too():
    # The reason for our refusal: `place_tensors` must not promise what fully_shard does not do.
    with pytest.raises(NotImplementedError, match="uneven sharding on dim 1"):
        plan_of(squares, mesh_of(dp_shard=3), placement_fn=lambda _: TorchShard(1))


def test_fully_shard_uneven_same_dim_gives_a_table_that_contradicts_the_data():
    # The other refusal. TP halves 17 rows into 9 and 8, FSDP cuts one into 3, 3, 3, 0 and the other into
    # 2, 2, 2, 2: the last FSDP rank has 0 and 2 rows, where the table gives each TP rank one.
    mesh = mesh_of(dp_shard=4, tp=2)
    differing = []
    for rank in range(8):
        with rank_of(8, rank):
            device_mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp_shard", "tp"))
            with torch.device("meta"):
                model = nn.Sequential(nn.Linear(4, 17, bias=False))
            parallelize_module(model, device_mesh["tp"], {"0": ColwiseParallel()})
            fully_shard(model, mesh=device_mesh["dp_shard"])
            planner = DefaultSavePlanner()
            planner.set_up_planner(model.state_dict(), is_coordinator=rank == 0)
            (item,) = planner.create_local_plan().items
            (weight,) = model.parameters()
            if tuple(weight.to_local().shape) != tuple(item.tensor_data.chunk.sizes):
                differing.append(rank)
    assert differing == [6, 7]
    with pytest.raises(UsageError, match="it cannot load"):
        place_tensors(
            [TensorEntry(fqn="0.weight", dtype=BY_TORCH_NAME["float32"], shape=(17, 4), chunks=())],
            mesh,
            parse_rules('version: 1\nrules: [{match: "0.weight", place: {tp: S(0)}}]', where="r").rules,
        )
