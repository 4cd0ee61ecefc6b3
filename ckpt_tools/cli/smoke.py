"""`ckpt smoke`."""

from __future__ import annotations

import os

from ckpt_tools.cli.build import Call
from ckpt_tools.cli.output import ChangingLine, note, print_json, say, say_findings
from ckpt_tools.cli.reports import report_to
from ckpt_tools.cli.screen import Screen, terminal
from ckpt_tools.options.output import HtmlOptions, Output
from ckpt_tools.smoke.report import HOW_MEMORY, PHASES, SmokeReport, describe_compared, describe_verdict
from ckpt_tools.text import escape_name
from ckpt_tools.units import format_size


def run(call: Call[SmokeReport], page: HtmlOptions, output: Output) -> int:
    """Try a model, and print what was found."""
    is_shown = os.environ.get("RANK", "0") == "0" and not output.is_silent
    line = ChangingLine(shown=is_shown and not output.verbose)

    def follow(phase: str, state: str) -> None:
        """Change a line on a terminal; with --verbose, write one for every phase."""
        if state == "begun":
            number = PHASES.index(phase) if phase in PHASES else 0
            line.show(f"{number}/{len(PHASES) - 1} {phase}")
        elif is_shown and output.verbose:
            note(f"{phase}: {state}")

    with report_to(page.html, "smoke", str(call.given.get("source", "")), output) as write:

        def show(report: SmokeReport) -> None:
            if report.is_primary and write is not None:
                from ckpt_tools.report.run_pages import smoke_page

                write(smoke_page(report))
            if report.is_primary and output.json:
                print_json(report.to_json())
            elif report.is_primary:
                _print(report, output)

        try:
            report = call(on_phase=follow, on_abandoned=show)
        finally:
            line.close()
        show(report)
    return 0 if report.ok else 3


_MARKS = {True: "ok", False: "FAILED", None: "-"}


def _print(report: SmokeReport, output: Output) -> None:
    screen = terminal()
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
        if report.compared is not None:
            screen.line(describe_compared(report, report.compared))
        for text in report.notes:
            screen.line(f"note: {text}")
        screen.line()
    say_findings(report.findings)
    if output.verbose:
        for rank, text in sorted(report.stacks.items()):
            say(f"stacks of rank {rank}:")
            say("\n".join(escape_name(line) for line in text.splitlines()))
    if not output.quiet:
        screen.line(describe_verdict(report))


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
