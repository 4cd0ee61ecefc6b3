"""Options of `smoke`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from ckpt_tools.options import AnyPath, Argument, Option, common

ADAPTERS = ("lora", "dora", "loha", "lokr", "oft", "boft")


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeFields:
    """The options of `ckpt smoke`."""

    source: Annotated[
        AnyPath | None,
        Argument("A safetensors file, a model directory or a DCP directory; without it the weights are random.", "SRC"),
    ] = field(default=None, kw_only=False)
    model: Annotated[
        AnyPath | None, Option("Model config or its directory (default: beside SRC).", metavar="DIR|CONFIG")
    ] = None
    factory: Annotated[
        str | None, Option("Function that builds the model, in place of a config.", metavar="PKG.MOD:CALLABLE")
    ] = None
    build: Annotated[
        str,
        Option(
            "Where the model is built; auto: on meta, and on the CPU of every rank where that is not possible.",
            metavar="auto|meta|cpu",
        ),
    ] = "auto"
    mesh: common.MeshText = None
    nproc: Annotated[int | None, Option("Number of ranks (default: 2, or what the mesh needs).", min=1)] = None
    device: Annotated[
        str, Option("Device of the ranks; auto takes GPUs if there is one per rank.", metavar="auto|cpu|cuda")
    ] = "auto"
    strategy: Annotated[
        str | None,
        Option(
            "Sharding strategy (default: what suits the mesh); FSDP1's names and accelerate's numbers work too.",
            metavar="full_shard|shard_grad_op|hybrid_shard|no_shard",
        ),
    ] = None
    steps: Annotated[int, Option("Training steps.", min=1)] = 3
    param_dtype: Annotated[str, Option("Mixed precision: compute dtype.", metavar="keep|bf16|f16|f32")] = "keep"
    reduce_dtype: Annotated[
        str,
        Option("Mixed precision: dtype of the gradient average; keep: --param-dtype.", metavar="keep|bf16|f16|f32"),
    ] = "keep"
    lora: Annotated[bool, Option("Freeze the model; train LoRA adapters on its linear layers.")] = False
    adapter: Annotated[str, Option("With --lora: kind of the adapters.", metavar="|".join(ADAPTERS))] = "lora"
    target: Annotated[
        Sequence[str],
        Option("With --lora: linear layers to adapt (repeatable; default: all but the output layer).", metavar="GLOB"),
    ] = ()
    quantize: Annotated[str | None, Option("With --lora: 4-bit frozen weights.", metavar="nf4")] = None
    loss: Annotated[
        str | None,
        Option(
            "Loss in the output of forward: a position, a key, or a path such as losses.total "
            "(default: .loss, or the only scalar with a gradient).",
            metavar="NAME",
        ),
    ] = None
    compare: Annotated[
        str | None,
        Option("Strategy of a second run: full copies; shows memory and seconds per step of both.", metavar="no_shard"),
    ] = None
    memory: Annotated[
        str | int | None,
        Option(
            "Memory limit of the run, e.g. 8GB (default: what is free); larger models run with fewer layers.",
            metavar="SIZE",
        ),
    ] = None
    timeout_s: Annotated[
        float | str | None,
        Option(
            "Seconds before a phase counts as hung (default: 120, more for large models).",
            name="--timeout",
            metavar="SECONDS",
        ),
    ] = None
