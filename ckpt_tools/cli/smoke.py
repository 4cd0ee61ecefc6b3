"""`ckpt smoke`."""

from __future__ import annotations

import os
import sys

from ckpt_tools.cli.build import Call
from ckpt_tools.cli.output import Output, note, print_json, say, say_findings, terminal_width, use_colour
from ckpt_tools.cli.screen import Screen
from ckpt_tools.smoke.report import HOW_MEMORY, PHASES, ReloadResult, SmokeReport
from ckpt_tools.text import escape_name
from ckpt_tools.units import format_size


def run(call: Call[SmokeReport], *, output: Output) -> int:
    """Try a model, and print what was found."""
    is_first = os.environ.get("RANK", "0") == "0"
    progress = _Progress(shown=is_first and not output.is_silent, lines=output.verbose)

    def show(report: SmokeReport) -> None:
        if report.is_primary and output.json:
            print_json(report.to_json())
        elif report.is_primary:
            _print(report, output)

    try:
        report = call(on_phase=progress, on_abandoned=show)
    finally:
        progress.close()
    show(report)
    return 0 if report.ok else 3


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


def _print(report: SmokeReport, output: Output) -> None:
    screen = Screen(stream=sys.stdout, width=terminal_width(), colour=use_colour())
    if not output.quiet:
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
            if output.verbose:
                screen.line(f"  {HOW_MEMORY}", "dim")
        for text in report.notes:
            screen.line(f"note: {text}")
        screen.line()
    say_findings(report.findings)
    if output.verbose:
        for rank, text in sorted(report.stacks.items()):
            say(f"stacks of rank {rank}:")
            say("\n".join(escape_name(line) for line in text.splitlines()))
    if not output.quiet:
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
