"""`ckpt preflight`."""

from __future__ import annotations

import sys

from ckpt_tools.cli.build import Call
from ckpt_tools.cli.output import Output, print_json, say, say_findings, terminal_width, use_colour
from ckpt_tools.cli.screen import Screen
from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.preflight.report import PreflightReport, describe_spec
from ckpt_tools.text import escape_name

_MARKS = {True: "ok", False: "FAILED", None: "not checked"}
_ORDER = {"error": 0, "warning": 1, "info": 2}


def run(call: Call[PreflightReport], *, output: Output) -> int:
    """Check a run, and print what was found."""
    progress = _Progress(shown=not output.is_silent)

    def tell(findings: tuple[Finding, ...]) -> None:
        progress.close()
        kept = [finding for finding in findings if finding.severity == "error" or not output.quiet]
        say_findings(sorted(kept, key=lambda one: _ORDER[one.severity]))

    try:
        report = call(on_check=progress, on_findings=None if output.json else tell)
    finally:
        progress.close()
    if output.json:
        print_json(report.to_json())
    else:
        _print(report, output)
    return 0 if report.ok else 3


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


def _print(report: PreflightReport, output: Output) -> None:
    screen = Screen(stream=sys.stdout, width=terminal_width(), colour=use_colour())
    if output.quiet:
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
    if output.verbose and report.smoke is not None:
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
