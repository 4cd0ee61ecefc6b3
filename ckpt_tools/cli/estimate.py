"""`ckpt estimate`."""

from __future__ import annotations

import re
import sys
from decimal import Decimal
from typing import Annotated

import typer

from ckpt_tools import api
from ckpt_tools.cli import options
from ckpt_tools.cli.output import print_json, terminal_width, use_colour
from ckpt_tools.cli.screen import Screen
from ckpt_tools.errors import UsageError
from ckpt_tools.estimate import Estimate
from ckpt_tools.estimate.options import DEFAULT_LORA_RANK
from ckpt_tools.estimate.report import CaseEstimate
from ckpt_tools.text import escape_name
from ckpt_tools.units import format_size

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?)", re.IGNORECASE)
_SCALES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="A config.json or its directory; or a checkpoint without one, for the formula alone.",
    ),
]
Params = Annotated[
    str | None,
    typer.Option(
        "--params",
        envvar="CKPT_PARAMS",
        metavar="N",
        help="Parameters (7B) of a model without a config, for the formula; with --layers and --hidden.",
    ),
]
Layers = Annotated[int | None, typer.Option("--layers", envvar="CKPT_LAYERS", help="With --params: blocks.")]
Hidden = Annotated[int | None, typer.Option("--hidden", envvar="CKPT_HIDDEN", help="With --params: width.")]
Vocab = Annotated[
    int | None,
    typer.Option("--vocab", envvar="CKPT_VOCAB", help="With --params: rows of the output layer; 0 for none."),
]
Strategy = Annotated[
    list[str] | None,
    typer.Option(
        "--strategy",
        envvar="CKPT_STRATEGY",
        metavar="full_shard|shard_grad_op|hybrid_shard|no_shard|all",
        help="Repeatable; what suits the mesh by default. all shows all, with and without checkpointing.",
    ),
]
SeqLen = Annotated[int, typer.Option("--seq-len", envvar="CKPT_SEQ_LEN", min=1, help="Tokens of a sample.")]
BatchSize = Annotated[int, typer.Option("--batch-size", envvar="CKPT_BATCH_SIZE", min=1, help="Samples per rank.")]
ParamDtype = Annotated[
    str, typer.Option("--param-dtype", envvar="CKPT_PARAM_DTYPE", metavar="bf16|f16|f32", help="Compute in.")
]
ReduceDtype = Annotated[
    str,
    typer.Option("--reduce-dtype", envvar="CKPT_REDUCE_DTYPE", metavar="bf16|f16|f32", help="Average gradients in."),
]
MasterDtype = Annotated[
    str,
    typer.Option(
        "--master-dtype",
        envvar="CKPT_MASTER_DTYPE",
        metavar="bf16|f16|f32",
        help="Keep trained parameters and gradients in.",
    ),
]
FrozenDtype = Annotated[
    str | None,
    typer.Option(
        "--frozen-dtype",
        envvar="CKPT_FROZEN_DTYPE",
        metavar="bf16|f16|f32",
        help="With --lora: keep the others in; bf16.",
    ),
]
Optimizer = Annotated[
    str, typer.Option("--optimizer", envvar="CKPT_OPTIMIZER", metavar="adamw|adam|sgd|sgd-momentum", help="Its state.")
]
StateDtype = Annotated[
    str | None,
    typer.Option(
        "--state-dtype",
        envvar="CKPT_STATE_DTYPE",
        metavar="bf16|f16|f32",
        help="Its dtype, where it is not --master-dtype, as with PyTorch's own optimizers.",
    ),
]
Checkpointing = Annotated[
    bool | None,
    typer.Option(
        "--activation-checkpointing/--no-activation-checkpointing",
        envvar="CKPT_ACTIVATION_CHECKPOINTING",
        help="Compute activations again in backward.",
    ),
]
Lora = Annotated[
    bool, typer.Option("--lora", envvar="CKPT_LORA", help="Freeze the model; train LoRA adapters on its linear layers.")
]
LoraRank = Annotated[
    int | None,
    typer.Option(
        "--lora-rank", envvar="CKPT_LORA_RANK", min=1, help=f"Rank of the adapters, {DEFAULT_LORA_RANK}; means --lora."
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option("--quantize", envvar="CKPT_QUANTIZE", metavar="nf4", help="With --lora: 4-bit frozen weights."),
]
Offload = Annotated[
    bool,
    typer.Option("--offload", envvar="CKPT_OFFLOAD", help="Keep parameters, gradients and state in host memory."),
]
GpuMemory = Annotated[
    str | None,
    typer.Option(
        "--gpu-memory",
        envvar="CKPT_GPU_MEMORY",
        metavar="SIZE",
        help="What a device has (80GB): says what fits, and looks for a change that does when nothing fits.",
    ),
]


def estimate(
    model: Model = None,
    params: Params = None,
    layers: Layers = None,
    hidden: Hidden = None,
    vocab: Vocab = None,
    mesh: options.Mesh = None,
    world_size: options.WorldSize = None,
    strategy: Strategy = None,
    seq_len: SeqLen = 2048,
    batch_size: BatchSize = 1,
    param_dtype: ParamDtype = "bf16",
    reduce_dtype: ReduceDtype = "f32",
    master_dtype: MasterDtype = "f32",
    frozen_dtype: FrozenDtype = None,
    optimizer: Optimizer = "adamw",
    state_dtype: StateDtype = None,
    activation_checkpointing: Checkpointing = None,
    lora: Lora = False,
    lora_rank: LoraRank = None,
    quantize: Quantize = None,
    offload: Offload = False,
    gpu_memory: GpuMemory = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Say how much memory training takes on one rank, and whether it fits, before a GPU is booked.

    A training step of the real model under FSDP2 runs without data, and PyTorch's own tracker counts; a formula
    stands beside it as a second opinion, and alone where there is no config or weights are quantised.
    """
    if frozen_dtype is not None and not lora and lora_rank is None:
        raise UsageError("--frozen-dtype, and nothing is frozen", hint="add --lora, or drop it")
    shows_all = "all" in (strategy or ()) and activation_checkpointing is None
    result = api.estimate(
        model,
        params=None if params is None else _count(params),
        layers=layers,
        hidden=hidden,
        vocab=vocab,
        mesh=mesh,
        world_size=world_size,
        strategy=strategy or None,
        seq_len=seq_len,
        batch_size=batch_size,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        master_dtype=master_dtype,
        frozen_dtype=frozen_dtype or "bf16",
        optimizer=optimizer,
        state_dtype=state_dtype,
        activation_checkpointing="both" if shows_all else bool(activation_checkpointing),
        lora=lora_rank or (DEFAULT_LORA_RANK if lora else None),
        quantize=quantize,
        offload=offload,
        gpu_memory=gpu_memory,
    )
    if json:
        print_json(result.to_json())
    else:
        _print(result, quiet=quiet, verbose=verbose)
    return 0 if result.fits or result.gpu_memory is None else 3


def _count(text: str) -> int:
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a number of parameters", hint="--params takes for example 7B or 6738415616")
    return int(Decimal(match[1]) * _SCALES[match[2].upper()])


def _print(result: Estimate, *, quiet: bool, verbose: bool) -> None:
    screen = Screen(stream=sys.stdout, width=terminal_width(), colour=use_colour())
    if not quiet:
        _print_table(screen, result)
        _print_margin(screen, result)
        if verbose:
            _print_peaks(screen, result)
        for text in result.notes:
            screen.line(f"note: {text}")
        for reason in dict.fromkeys(case.why_not_tracked for case in result.cases if case.why_not_tracked):
            screen.line(f"note: by the formula: {escape_name(reason)}")
    if result.gpu_memory is not None:
        _print_verdict(screen, result, quiet=quiet)


def _unit(result: Estimate) -> tuple[str, int]:
    most = max(case.needed for case in result.cases)
    return ("GiB", 1 << 30) if most >= 1 << 30 else ("MiB", 1 << 20)


def _print_table(screen: Screen, result: Estimate) -> None:
    first = result.cases[0].case
    unit, scale = _unit(result)
    ranks = f"{first.mesh.world_size} ranks" if first.mesh.world_size != 1 else "1 rank"
    screen.line(f"{escape_name(result.model)}: {result.params:,} parameters, {ranks}", "heading")
    dtypes = f"{first.param_dtype} compute, {first.reduce_dtype} reduce, {first.master_dtype} master"
    tokens = f"{first.batch_size} × {first.seq_len} tokens per rank, {first.optimizer}"
    screen.line(f"{dtypes}, {tokens}; {unit} on the rank that holds the most")
    is_tracked = any(case.tracked is not None for case in result.cases)
    headers = ["", "mesh", "params", "grads", "optimizer", "activations", "gathered", "peak"]
    headers += ["formula", "with margin"] if is_tracked else ["with margin"]
    has_host = any(case.per_rank.host for case in result.cases)
    headers += (["host"] if has_host else []) + (["fits"] if result.gpu_memory is not None else [])
    rows = []
    for case in result.cases:
        memory = case.per_rank
        sizes = [memory.params, memory.grads, memory.optimizer, memory.activations, memory.gathered, memory.peak]
        by_formula = _size(case.formula.peak, scale)
        by_formula += "" if case.difference is None else f" ({case.difference:+.0%})"
        row = [case.case.label, str(case.case.mesh), *(_size(size, scale) for size in sizes)]
        row += [by_formula] if is_tracked else []
        row += [_size(case.needed, scale)]
        row += [_size(memory.host, scale)] if has_host else []
        row += [_fits(case)] if result.gpu_memory is not None else []
        rows.append(row)
    screen.table(headers, rows, align="ll" + "r" * (len(headers) - 2))


def _size(nbytes: int, scale: int) -> str:
    return f"{nbytes / scale:.1f}" if nbytes >= 10 * scale else f"{nbytes / scale:.2f}"


_VERDICTS = {True: "fits", False: "does not fit", None: "not known whether it fits"}


def _fits(case: CaseEstimate) -> str:
    return {True: "yes", False: "no", None: "not known"}[case.fits]


def _print_margin(screen: Screen, result: Estimate) -> None:
    margin = result.cases[0].margin
    screen.line(
        f"  margin: {format_size(margin.context)} CUDA context, {format_size(margin.workspace)} workspaces, "
        f"{format_size(margin.nccl)} NCCL, {format_size(margin.fragmentation)} fragmentation",
        "dim",
    )


def _print_peaks(screen: Screen, result: Estimate) -> None:
    for case in result.cases:
        parts = ", ".join(f"{name} {format_size(size)}" for name, size in case.per_rank.at_peak.items() if size)
        screen.line(f"  {case.case.label} at its peak: {parts}", "dim")
    memory = format_size(result.peak_rss_bytes)
    screen.line(f"  estimated in {result.seconds:.1f} s with {memory} of memory", "dim")


def _print_verdict(screen: Screen, result: Estimate, *, quiet: bool) -> None:
    size = result.gpu_memory or 0
    device = f"{size / 10**9:.3g} GB ({format_size(size)})"
    if result.fits:
        fitting = ", ".join(case.case.label for case in result.cases if case.fits)
        screen.line(f"fits in {device}: {fitting}")
        return
    for case in result.cases:
        if case.doubt is not None:
            screen.line(f"not known whether it fits in {device}: {case.case.label}: {case.doubt}")
    if result.fits is False:
        screen.line(f"does NOT fit in {device}")
    for proposal in () if quiet else result.proposals:
        found = proposal.estimate
        how = "formula" if found.tracked is None else "tracked"
        screen.line(f"  {proposal.what}: {format_size(found.needed)} ({how}), {_VERDICTS[found.fits]}")
    advice = result.advice
    if advice is not None:
        screen.line(f"hint: {advice.what}")
    elif result.proposals:
        screen.line("hint: nothing that was tried fits: a larger device, more ranks, or a smaller model")
