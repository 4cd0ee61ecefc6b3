"""`ckpt smoke`."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from ckpt_tools import api
from ckpt_tools.cli import options
from ckpt_tools.cli.output import note, print_json, say, say_findings, terminal_width, use_colour
from ckpt_tools.cli.screen import Screen
from ckpt_tools.errors import UsageError
from ckpt_tools.smoke.report import HOW_MEMORY, PHASES, ReloadResult, SmokeReport
from ckpt_tools.text import escape_name
from ckpt_tools.units import format_size

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="[SRC]",
        help="A safetensors file, a model directory or a DCP directory; without it the weights are random.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", envvar="CKPT_MODEL", metavar="DIR|CONFIG", help="Where the config.json is; beside SRC by default."
    ),
]
Factory = Annotated[
    str | None,
    typer.Option(
        "--factory", envvar="CKPT_FACTORY", metavar="PKG.MOD:CALLABLE", help="Builds the model, instead of a config."
    ),
]
NumRanks = Annotated[
    int | None,
    typer.Option("--nproc", envvar="CKPT_NPROC", min=1, help="Number of ranks; 2, or as many as the mesh needs."),
]
Device = Annotated[
    str,
    typer.Option(
        "--device", envvar="CKPT_DEVICE", metavar="auto|cpu|cuda", help="auto takes GPUs if every rank gets one."
    ),
]
Strategy = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        envvar="CKPT_STRATEGY",
        metavar="full_shard|shard_grad_op|hybrid_shard|no_shard",
        help="What suits the mesh by default. FSDP1's names and accelerate's numbers work too.",
    ),
]
Steps = Annotated[int, typer.Option("--steps", envvar="CKPT_STEPS", min=1, help="Training steps.")]
ParamDtype = Annotated[
    str,
    typer.Option(
        "--param-dtype", envvar="CKPT_PARAM_DTYPE", metavar="keep|bf16|f16|f32", help="Mixed precision: compute in."
    ),
]
ReduceDtype = Annotated[
    str,
    typer.Option(
        "--reduce-dtype",
        envvar="CKPT_REDUCE_DTYPE",
        metavar="keep|bf16|f16|f32",
        help="Mixed precision: average gradients in; as --param-dtype by default.",
    ),
]
Lora = Annotated[
    bool, typer.Option("--lora", envvar="CKPT_LORA", help="Freeze the model; train LoRA adapters on its linear layers.")
]
Quantize = Annotated[
    str | None,
    typer.Option("--quantize", envvar="CKPT_QUANTIZE", metavar="nf4", help="With --lora: 4-bit frozen weights."),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        envvar="CKPT_MEMORY",
        metavar="SIZE",
        help="What the run may take (8GB), what is free by default; larger models are tried with fewer layers.",
    ),
]
Timeout = Annotated[
    str | None,
    typer.Option(
        "--timeout",
        envvar="CKPT_TIMEOUT",
        metavar="SECONDS",
        help="A phase that takes longer hangs, and where is a finding; 120 by default, more for large models.",
    ),
]


def smoke(
    source: Source = None,
    model: Model = None,
    factory: Factory = None,
    mesh: options.Mesh = None,
    nproc: NumRanks = None,
    device: Device = "auto",
    strategy: Strategy = None,
    steps: Steps = 3,
    param_dtype: ParamDtype = "keep",
    reduce_dtype: ReduceDtype = "keep",
    lora: Lora = False,
    quantize: Quantize = None,
    memory: Memory = None,
    timeout: Timeout = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Train a few steps under FSDP2, before a long run: does this checkpoint load, train, save and reload correctly?

    Everything is compared with the same model in one process: losses, gradients, norms. Under torchrun its processes
    are the ranks.
    """
    is_first = os.environ.get("RANK", "0") == "0"
    progress = _Progress(shown=is_first and not (quiet or json), lines=verbose)

    def show(report: SmokeReport) -> None:
        if report.is_primary and json:
            print_json(report.to_json())
        elif report.is_primary:
            _print(report, quiet=quiet, verbose=verbose)

    try:
        report = api.smoke(
            source,
            model=model,
            factory=factory,
            mesh=mesh,
            nproc=nproc,
            device=device,
            strategy=strategy,
            steps=steps,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            lora=lora,
            quantize=quantize,
            memory=memory,
            timeout_s=None if timeout is None else _seconds(timeout),
            on_phase=progress,
            on_abandoned=show,
        )
    finally:
        progress.close()
    show(report)
    return 0 if report.ok else 3


def _seconds(text: str) -> float:
    try:
        return float(text.removesuffix("s"))
    except ValueError as error:
        raise UsageError(f"{text!r} is not a number of seconds", hint="--timeout takes for example 300") from error


class _Progress:
    """One changing line on a terminal; with --verbose, a line for every phase."""

    def __init__(self, *, shown: bool, lines: bool) -> None:
        self._lines = shown and lines
        self._changes = shown and not lines and sys.stderr.isatty()
        self._is_open = False

    def __call__(self, phase: str, state: str) -> None:
        """Take an event."""
        if self._lines and state != "begun":
            note(f"{phase}: {state}")
        if self._changes and state == "begun":
            number = PHASES.index(phase) if phase in PHASES else 0
            sys.stderr.write(f"\r\x1b[K{number}/{len(PHASES) - 1} {phase}")
            sys.stderr.flush()
            self._is_open = True

    def close(self) -> None:
        """Take the changing line away."""
        if self._is_open:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


_MARKS = {True: "ok", False: "FAILED", None: "-"}


def _print(report: SmokeReport, *, quiet: bool, verbose: bool) -> None:
    screen = Screen(stream=sys.stdout, width=terminal_width(), colour=use_colour())
    if not quiet:
        ranks = f"{report.world_size} rank" + ("s" if report.world_size != 1 else "")
        title = f"{escape_name(report.source)}: {escape_name(report.model)} on {ranks} ({report.mesh}), "
        screen.line(title + f"{report.strategy}, {report.device}", "heading")
        rows = [
            (phase.name, _MARKS[phase.ok], f"{phase.seconds:.2f}" if phase.ok is not None else "", phase.what)
            for phase in report.phases
        ]
        screen.table(("phase", "", "seconds", ""), rows, align="llrl")
        if report.memory:
            screen.line()
            _print_memory(screen, report)
            if verbose:
                screen.line(f"  {HOW_MEMORY}", "dim")
        for text in report.notes:
            screen.line(f"note: {text}")
        screen.line()
    say_findings(report.findings)
    if verbose:
        for rank, text in sorted(report.stacks.items()):
            say(f"stacks of rank {rank}:")
            say("\n".join(escape_name(line) for line in text.splitlines()))
    if not quiet:
        screen.line(_verdict(report))


def _print_memory(screen: Screen, report: SmokeReport) -> None:
    rows = [
        (
            str(memory.rank),
            *(format_size(size) for size in (memory.params, memory.grads, memory.optimizer, memory.peak)),
        )
        for memory in report.memory
    ]
    shown = rows if len(rows) <= 8 else [*rows[:4], ("…", "", "", "", ""), *rows[-3:]]
    screen.table(("rank", "params", "grads", "optimizer", "peak"), shown, align="rrrrr")


def _verdict(report: SmokeReport) -> str:
    if not report.ok:
        failed = [phase.name for phase in report.phases if phase.ok is False]
        return f"NOT ok: {', '.join(failed) or 'see above'}"
    parts = []
    if report.max_grad_error is not None:
        exact = report.max_grad_error == 0
        parts.append("gradients " + ("bitwise the reference's" if exact else f"within {report.max_grad_error:.1e}"))
    parts += [
        f"reload on {result.mesh}{' bitwise' if result.bitwise else ''}"
        for result in (report.reload_same_world, report.reload_other_world)
        if isinstance(result, ReloadResult)
    ]
    return "ok: " + "; ".join(parts)
