"""How much memory training takes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from ckpt_tools.description.layout import Mesh
from ckpt_tools.estimate import Case, Estimate, EstimateOptions, run_estimate
from ckpt_tools.units import parse_size


def estimate(
    model: str | os.PathLike[str] | None = None,
    *,
    params: int | None = None,
    layers: int | None = None,
    hidden: int | None = None,
    vocab: int | None = None,
    mesh: str | Mesh | None = None,
    world_size: int | None = None,
    strategy: str | Sequence[str] | None = None,
    seq_len: int = 2048,
    batch_size: int = 1,
    param_dtype: str = "bf16",
    reduce_dtype: str = "f32",
    master_dtype: str = "f32",
    frozen_dtype: str = "bf16",
    optimizer: str = "adamw",
    state_dtype: str | None = None,
    activation_checkpointing: bool | Literal["both"] = False,
    lora: int | None = None,
    quantize: str | None = None,
    offload: bool = False,
    gpu_memory: str | int | None = None,
) -> Estimate:
    """Say how much memory training a model takes on the rank that holds the most; nothing is allocated.

    Args:
        model: A config.json or its directory: a step is run without data, and tracked. A checkpoint without a
            config, of any format: a formula answers, from the shapes in its headers.
        params: Number of parameters of a model that is nowhere yet, for the formula; with `layers` and `hidden`.
        layers: Its blocks.
        hidden: Its width.
        vocab: Rows of its output layer.
        mesh: For example "dp_replicate=2,dp_shard=4"; one axis over all ranks by default.
        world_size: Number of ranks; 8 when neither this nor `mesh` says.
        strategy: One or several of no_shard, shard_grad_op, full_shard and hybrid_shard, or "all"; what suits the
            mesh by default.
        seq_len: Tokens of a sample.
        batch_size: Samples per rank and step.
        param_dtype: "bf16", "f16" or "f32": what the ranks compute in.
        reduce_dtype: In what gradients are averaged.
        master_dtype: In what trained parameters and their gradients are kept.
        frozen_dtype: In what the frozen ones are kept, with `lora`.
        optimizer: "adamw", "adam", "sgd" or "sgd-momentum".
        state_dtype: Of its state, where that is not `master_dtype`, as it is with PyTorch's own optimizers.
        activation_checkpointing: Compute activations again in backward; "both" shows it beside the default.
        lora: Rank of adapters on the frozen model.
        quantize: "nf4" for 4-bit frozen weights.
        offload: Keep parameters, gradients and optimizer state in host memory.
        gpu_memory: What a device has, for example "80GB"; says what fits, and when nothing does what would.

    Raises:
        UsageError: Options or a mesh that cannot be, or a model that cannot be built.
        UnreadableError: The checkpoint cannot be described.
    """
    names = () if strategy is None else (strategy,) if isinstance(strategy, str) else tuple(strategy)
    checkpointing = (False, True) if activation_checkpointing == "both" else (activation_checkpointing,)
    case = Case(
        lora=lora,
        quantize=quantize,
        offload=offload,
        seq_len=seq_len,
        batch_size=batch_size,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        master_dtype=master_dtype,
        frozen_dtype=frozen_dtype,
        optimizer=optimizer,
        state_dtype=state_dtype,
    )
    options = EstimateOptions(
        model=None if model is None else os.fspath(model),
        params=params,
        layers=layers,
        hidden=hidden,
        vocab=vocab,
        mesh=None if mesh is None else str(mesh),
        world_size=world_size,
        strategies=names,
        activation_checkpointing=checkpointing,
        gpu_memory=parse_size(gpu_memory) if isinstance(gpu_memory, str) else gpu_memory,
        case=case,
    )
    return run_estimate(options)
