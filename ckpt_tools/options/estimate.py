"""Options of `estimate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ckpt_tools.options import AnyPath, Argument, Option, common

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv")
"""Of pipelines, by the part of the step that keeps activations."""
DEFAULT_LORA_RANK = 16  # Rank of the adapters when nothing says it
_DTYPES = "bf16|f16|f32"


@dataclass(frozen=True, kw_only=True)
class _ModelAndRanks:
    model: Annotated[
        AnyPath | None,
        Argument("A config.json or its directory; or a checkpoint without one, for the formula only.", "MODEL"),
    ] = field(default=None, kw_only=False)
    params: Annotated[
        int | str | None,
        Option("Parameter count (7B) without a config, for the formula; with --layers and --hidden.", metavar="N"),
    ] = None
    layers: Annotated[int | None, Option("With --params: number of blocks.")] = None
    hidden: Annotated[int | None, Option("With --params: hidden size.")] = None
    vocab: Annotated[int | None, Option("With --params: rows of the output layer; 0 for none.")] = None
    mesh: common.MeshText = None
    world_size: common.WorldSize = None
    strategy: Annotated[
        str | Sequence[str] | None,
        Option(
            "Sharding strategy (repeatable; default: what suits the mesh); "
            "all shows all, with and without checkpointing.",
            metavar="full_shard|shard_grad_op|hybrid_shard|no_shard|all",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)  # no slots: another class has this one and a second base
class TrainingOptions:
    """What all cases of an estimate have in common."""

    seq_len: Annotated[int, Option("Tokens per sample.", min=1)] = 2048
    batch_size: Annotated[int, Option("Samples per rank.", min=1)] = 1
    param_dtype: Annotated[str, Option("Compute dtype.", metavar=_DTYPES)] = "bf16"
    reduce_dtype: Annotated[str, Option("Dtype of the gradient average.", metavar=_DTYPES)] = "f32"
    master_dtype: Annotated[str, Option("Dtype of trained parameters and gradients.", metavar=_DTYPES)] = "f32"
    frozen_dtype: Annotated[
        str, Option("With --lora: dtype of frozen weights (default: bf16).", metavar=_DTYPES, is_tristate=True)
    ] = "bf16"
    optimizer: Annotated[str, Option("Optimizer: adamw, adamw-8bit, lion, muon, …", metavar="NAME")] = "adamw"
    state_dtype: Annotated[
        str | None, Option("Dtype of the optimizer state (default: --master-dtype, as in PyTorch).", metavar=_DTYPES)
    ] = None
    quantize: Annotated[str | None, Option("With --lora: 4-bit frozen weights.", metavar="nf4", after="lora_rank")] = (
        None
    )
    offload: Annotated[bool, Option("Keep parameters, gradients and state in host memory.", after="quantize")] = False
    offload_optimizer: Annotated[
        bool, Option("Keep the optimizer state in host memory between steps.", after="offload")
    ] = False
    offload_activations: Annotated[
        bool, Option("Keep activations in host memory between forward and backward.", after="offload_optimizer")
    ] = False
    selective_checkpointing: Annotated[
        bool,
        Option(
            "Keep attention and every second matrix product, recompute the rest (torchtitan's selective, per op).",
            after="activation_checkpointing",
        ),
    ] = False
    sequence_parallel: Annotated[bool, Option("With tp: cut activations between blocks along the sequence.")] = False
    loss_parallel: Annotated[bool, Option("With tp: cut logits along the vocabulary.")] = False
    fused_loss: Annotated[bool, Option("Compute the loss in chunks; the logits never exist whole (Liger).")] = False
    expert_parallel: Annotated[
        int, Option("Ranks over which experts are cut, out of those of dp_shard, cp and tp.", min=1)
    ] = 1
    micro_batches: Annotated[
        int | None, Option("With pp: parts that --batch-size is split into (default: one sample each).", min=1)
    ] = None
    schedule: Annotated[str, Option("With pp: schedule of the pipeline.", metavar="|".join(SCHEDULES))] = "1f1b"
    compile: Annotated[bool, Option("Compile blocks with torch.compile.")] = False
    fp8: Annotated[bool, Option("Compute linear layers in float8 (torchao).")] = False


@dataclass(frozen=True, kw_only=True)
class EstimateFields(TrainingOptions, _ModelAndRanks):
    """The options of `ckpt estimate`."""

    activation_checkpointing: Annotated[
        bool | Literal["both"],
        Option(
            "Recompute activations in the backward pass.",
            name="--activation-checkpointing/--no-activation-checkpointing",
            is_tristate=True,
        ),
    ] = False
    lora: Annotated[bool | int | None, Option("Freeze the model; train LoRA adapters on its linear layers.")] = None
    lora_rank: Annotated[
        int | None, Option(f"Rank of the adapters (default: {DEFAULT_LORA_RANK}); implies --lora.", min=1)
    ] = None
    gpu_memory: Annotated[
        str | int | None,
        Option("Memory of a device, e.g. 80GB; the result shows what fits, or a change that would.", metavar="SIZE"),
    ] = None
    gpu: Annotated[
        str | None, Option("Name of a device (H100-80GB, A100-40GB, RTX4090, …), in place of --gpu-memory.")
    ] = None
