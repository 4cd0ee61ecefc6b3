"""`ckpt preflight`."""

from __future__ import annotations

import sys
from typing import Annotated, get_args

import typer

from ckpt_tools import api
from ckpt_tools.cli import options
from ckpt_tools.cli.output import print_json, say, say_findings, terminal_width, use_colour
from ckpt_tools.cli.screen import Screen
from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.errors import UsageError
from ckpt_tools.preflight.report import PreflightReport, describe_spec
from ckpt_tools.preflight.spec import Framework
from ckpt_tools.text import escape_name

Config = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="A trainer's config; for OpenRLHF and verl also the script or text file with its command line.",
    ),
]
FrameworkName = Annotated[
    str,
    typer.Option(
        "--framework",
        envvar="CKPT_FRAMEWORK",
        metavar="auto|accelerate|trainer|torchtitan|axolotl|ai-toolkit|verl|openrlhf",
        help="Whose config it is.",
    ),
]
WorldSize = Annotated[
    int | None,
    typer.Option("--world-size", envvar="CKPT_WORLD_SIZE", min=1, help="Number of ranks; what CONFIG says by default."),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", envvar="CKPT_MODEL", metavar="DIR", help="The model's directory; what CONFIG names by default."
    ),
]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        envvar="CKPT_CHECKPOINT",
        metavar="SRC",
        help="What is loaded; what CONFIG resumes from, or the model's own weights, by default.",
    ),
]
GpuMemory = Annotated[
    str | None,
    typer.Option("--gpu-memory", envvar="CKPT_GPU_MEMORY", metavar="SIZE", help="What a device has (80GB)."),
]
Smoke = Annotated[
    bool,
    typer.Option(
        "--smoke/--no-smoke", envvar="CKPT_SMOKE", help="Train a few steps of the model, cut down, on this machine."
    ),
]
_MARKS = {True: "ok", False: "FAILED", None: "not checked"}
_ORDER = {"error": 0, "warning": 1, "info": 2}


def preflight(
    config: Config,
    framework: FrameworkName = "auto",
    world_size: WorldSize = None,
    model: Model = None,
    checkpoint: Checkpoint = None,
    gpu_memory: GpuMemory = None,
    smoke: Smoke = True,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Go or no-go before the cluster is booked: will the run that a trainer's config describes start, fit, load, train?

    Reads the config without the trainer; checks it against rules, the model, the checkpoint and the memory of a
    device, and trains a few steps of a cut-down model. The report lists what was not checked; an option that could not
    be read, or a config that is not understood, is exit code 3.
    """
    progress = _Progress(shown=not (quiet or json))

    def tell(findings: tuple[Finding, ...]) -> None:
        progress.close()
        kept = [finding for finding in findings if finding.severity == "error" or not quiet]
        say_findings(sorted(kept, key=lambda one: _ORDER[one.severity]))

    try:
        report = api.preflight(
            config,
            framework=_framework(framework),
            world_size=world_size,
            model=model,
            checkpoint=checkpoint,
            gpu_memory=gpu_memory,
            smoke=smoke,
            on_check=progress,
            on_findings=None if json else tell,
        )
    finally:
        progress.close()
    if json:
        print_json(report.to_json())
    else:
        _print(report, quiet=quiet, verbose=verbose)
    return 0 if report.ok else 3


def _framework(text: str) -> Framework | None:
    names: tuple[Framework, ...] = get_args(Framework)
    for name in names:
        if text == name:
            return name
    if text == "auto":
        return None
    raise UsageError(f"{text!r} is not a framework", hint=f"--framework takes auto, {', '.join(names)}")


class _Progress:
    """One changing line on a terminal."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown and sys.stderr.isatty()
        self._is_open = False

    def __call__(self, check: str, state: str) -> None:
        """Take an event."""
        if self._shown and state == "begun":
            sys.stderr.write(f"\r\x1b[K{check} …")
            sys.stderr.flush()
            self._is_open = True

    def close(self) -> None:
        """Take the line away."""
        if self._is_open:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._is_open = False


def _print(report: PreflightReport, *, quiet: bool, verbose: bool) -> None:
    screen = Screen(stream=sys.stdout, width=terminal_width(), colour=use_colour())
    if quiet:
        if not report.was_read:
            say(_verdict(report))
        return
    if report.findings:
        screen.line()
    what = report.framework if report.spec is None else f"{report.framework}, {describe_spec(report.spec)}"
    screen.line(f"{escape_name(report.config)}: {what}", "heading")
    rows = [
        (check.name, _MARKS[check.ok], f"{check.seconds:.1f}" if check.ok is not None else "", check.what)
        for check in report.checks
    ]
    screen.table(("check", "", "seconds", ""), rows, align="llrl")
    screen.line()
    for text in report.notes:
        screen.line(f"note: {text}")
    for text in report.not_checked:
        screen.line(f"not checked: {text}")
    if verbose and report.smoke is not None:
        screen.line()
        for phase in report.smoke.phases:
            screen.line(f"smoke phase {phase.name}: {_MARKS[phase.ok]} {phase.what}")
        for rank, text in sorted(report.smoke.stacks.items()):
            say(f"stacks of rank {rank}:")
            say("\n".join(escape_name(line) for line in text.splitlines()))
    screen.line(_verdict(report), None if report.ok else "warning")


def _verdict(report: PreflightReport) -> str:
    errors = sum(finding.severity == "error" for finding in report.findings)
    warnings = sum(finding.severity == "warning" for finding in report.findings)
    counted = f"{warnings} warning" + ("s" if warnings != 1 else "")
    if report.failed:
        return f"NOT ok: {errors} error" + ("s" if errors != 1 else "") + f", {counted}"
    if not report.was_read:
        return f"NOT CHECKED: {next(text for text in report.not_checked if text.startswith('the config: '))}"
    skipped = [check.name for check in report.checks if check.ok is None]
    made = ", ".join(check.name for check in report.checks if check.ok)
    left = f"; not checked: {', '.join(skipped)}" if skipped else ""
    return f"ok: {made}; {counted}{left}"
