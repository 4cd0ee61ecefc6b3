"""What a trainer's config asks for, in one form for all trainers. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ckpt_tools.description.layout import FSDP_AXIS, Mesh
from ckpt_tools.options.preflight import Framework

Engine = Literal["fsdp2", "fsdp1", "ddp", "deepspeed", "none", "other"]
"""What distributes the model; "other" is Megatron, XLA and the like, which are named and not described."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """The adapter that is trained."""

    kind: str = "lora"
    """lora, lokr, …"""
    rank: int | None = None
    alpha: float | None = None
    """Numerator of the scale."""
    targets: tuple[str, ...] = ()
    """Module names or suffixes; empty when the config leaves them to the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSpec:
    """How a run is distributed, and what it trains. None: the config does not say, and the trainer has no default."""

    framework: Framework
    engine: Engine
    world_size: int | None = None
    """Ranks, from `--world-size` or the config."""
    axes: Mapping[str, int] = field(default_factory=dict)
    """Mesh axis (dp_replicate, dp_shard, tp, ep, cp, pp, sp) → size as the config says; -1 is "the rest"."""
    mesh: Mesh | None = None
    """The mesh of `axes` over `world_size` ranks, in rank order; None when they do not fit together."""
    strategy: str | None = None
    """full_shard, shard_grad_op, hybrid_shard or no_shard."""
    reshard_after_forward: bool | int | None = None
    """What becomes of gathered parameters after forward."""
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    """In which gradients are averaged."""
    master_dtype: str | None = None
    """Of the parameters that the optimizer updates."""
    offload_params: bool = False
    """Parameters, gradients and optimizer state live in host memory."""
    offload_optimizer: bool = False
    activation_checkpointing: bool = False
    """Every block runs again in backward."""
    selective_checkpointing: str | None = None
    """What is run again of it: "op", all but the results of costly operations; or another choice of the trainer's."""
    sequence_parallel: bool = False
    """tp also cuts what passes between blocks."""
    loss_parallel: bool = False
    """tp also cuts the logits."""
    schedule: str | None = None
    """Of a pipeline, in the trainer's spelling."""
    micro_batch: int = 1
    """Samples of a pipeline's micro-batch."""
    wrap_classes: tuple[str, ...] = ()
    wrap_min_num_params: int | None = None
    """Wrap whatever has more parameters."""
    adapter: AdapterSpec | None = None
    """None: every parameter is trained."""
    quantize: str | None = None
    """nf4, int8, … of the frozen weights."""
    optimizer: str | None = None
    """In the trainer's spelling."""
    seq_len: int | None = None
    """Tokens of one sample."""
    batch_size: int | None = None
    """Samples per rank and step."""
    wraps_blocks: bool = True
    """False: the model is one FSDP group, which is gathered whole."""
    state_dict_type: str | None = None
    """FULL_STATE_DICT or SHARDED_STATE_DICT, where the config says."""
    cpu_ram_efficient_loading: bool | None = None
    """Only the first rank reads the weights."""
    model: str | None = None
    """Directory or hub id of the base model."""
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
