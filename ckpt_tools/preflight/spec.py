"""What a trainer's config asks for, in one form for all trainers. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ckpt_tools.checkpoint.layout import AXES, FSDP_AXIS, Mesh
from ckpt_tools.options.preflight import Framework

Engine = Literal["fsdp2", "fsdp1", "ddp", "deepspeed", "none", "other"]
"""What distributes the model; "other" is Megatron, XLA and the like, which are named and not described."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """The adapter that is trained."""

    kind: str = "lora"
    rank: int | None = None
    alpha: float | None = None
    targets: tuple[str, ...] = ()  # Module names or suffixes; empty when the config leaves them to the trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSpec:
    """How a run is distributed, and what it trains. None: the config does not say, and the trainer has no default."""

    framework: Framework
    engine: Engine
    world_size: int | None = None
    axes: Mapping[str, int] = field(default_factory=dict)
    """Mesh axis (dp_replicate, dp_shard, tp, ep, cp, pp, sp) → size as the config says; -1 is "the rest"."""
    mesh: Mesh | None = None
    """The mesh of `axes` over `world_size` ranks, in rank order; None when they do not fit together."""
    strategy: str | None = None  # full_shard, shard_grad_op, hybrid_shard or no_shard
    reshard_after_forward: bool | int | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    master_dtype: str | None = None  # Of the parameters that the optimizer updates
    offload_params: bool = False  # Parameters, gradients and optimizer state live in host memory
    offload_optimizer: bool = False
    activation_checkpointing: bool = False
    selective_checkpointing: str | None = None
    """What is run again of it: "op", all but the results of costly operations; or another choice of the trainer's."""
    sequence_parallel: bool = False
    loss_parallel: bool = False  # tp also cuts the logits
    schedule: str | None = None
    micro_batch: int = 1
    wrap_classes: tuple[str, ...] = ()
    wrap_min_num_params: int | None = None
    adapter: AdapterSpec | None = None
    quantize: str | None = None
    optimizer: str | None = None
    seq_len: int | None = None
    batch_size: int | None = None  # Samples per rank and step
    wraps_blocks: bool = True
    state_dict_type: str | None = None
    cpu_ram_efficient_loading: bool | None = None
    model: str | None = None
    resume_from: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    """Field of this class → key path in the config that said so, for messages."""


def strategy_on(spec: ParallelSpec, mesh: Mesh) -> str:
    """Return the strategy that comes to what `spec` asks for on `mesh`, which need not be its own."""
    replicates, shards = mesh.size("dp_replicate") > 1, mesh.size(FSDP_AXIS) > 1
    keeps = spec.strategy == "shard_grad_op" or spec.reshard_after_forward is False
    if replicates and shards:
        return "hybrid_shard_zero2" if keeps else "hybrid_shard"
    if replicates:
        return "no_shard"
    return "shard_grad_op" if keeps else "full_shard"


# Axes as a config names them → the mesh of its ranks.

ORDER = ("pp", "dp_replicate", FSDP_AXIS, "cp", "tp")
"""Rank order in accelerate, torchtitan and the others: tensor-parallel ranks are neighbours.

Source: `accelerate/parallelism_config.py:_get_mesh`, torchtitan `ParallelDims.build_mesh`.
"""


def build_mesh(axes: Mapping[str, int], world_size: int | None, *, order: Sequence[str] = ORDER) -> Mesh | None:
    """Return the mesh of `axes` over all ranks (one may be -1, the rest); None where they do not fit."""
    sizes = {name: axes.get(name, 1) for name in order if name in AXES}
    rest = [name for name, size in sizes.items() if size == -1]
    if any(size < 1 for size in sizes.values() if size != -1) or len(rest) > 1:
        return None
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if rest:
        if world_size is None or world_size % fixed:
            return None
        sizes[rest[0]] = world_size // fixed
    elif world_size is not None and fixed != world_size:
        return None
    if all(size == 1 for size in sizes.values()):
        return Mesh(((FSDP_AXIS, 1),))
    return Mesh(tuple((name, size) for name, size in sizes.items() if size > 1))


def resolved(spec: ParallelSpec, axis: str) -> int | None:
    """Return the ranks of an axis; None where it is the rest of a world that is not known."""
    size = spec.axes.get(axis, 1)
    if size != -1:
        return size
    return spec.mesh.size(axis) if spec.mesh is not None else None


def sharding_strategy(spec: ParallelSpec, *, reshards: bool) -> str:
    """Return the strategy of an FSDP2 mesh in the words of FSDP1; with `reshards`, parameters do not stay."""
    shard, cp, replicas = (resolved(spec, name) for name in (FSDP_AXIS, "cp", "dp_replicate"))
    experts = 1 if spec.mesh is None else spec.mesh.size("ep")  # more than 1 where ep has ranks of its own
    if shard == 1 and cp == 1 and experts == 1:
        return "no_shard"
    if replicas is not None and replicas > 1:
        return "hybrid_shard"
    return "full_shard" if reshards else "shard_grad_op"


def shard_mesh(mesh: Mesh | None) -> Mesh | None:
    """Return the axes that cut or copy parameters: FSDP cuts over dp_shard × cp × ep, and stages are left out."""
    if mesh is None:
        return None
    axes = []
    shard = mesh.size(FSDP_AXIS) * mesh.size("cp") * mesh.size("ep")
    replicate, tp = mesh.size("dp_replicate"), mesh.size("tp")
    if replicate > 1:
        axes.append(("dp_replicate", replicate))
    if shard > 1 or (replicate == 1 and tp == 1) or FSDP_AXIS in dict(mesh.axes):
        axes.append((FSDP_AXIS, shard))
    if tp > 1:
        axes.append(("tp", tp))
    return Mesh(tuple(axes))
