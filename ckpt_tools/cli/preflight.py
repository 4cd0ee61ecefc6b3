"""`ckpt preflight`."""

from __future__ import annotations

from ckpt_tools.cli.build import Call
from ckpt_tools.cli.output import ChangingLine, Output, print_json, say, say_findings
from ckpt_tools.cli.reports import Html, report_to
from ckpt_tools.cli.screen import terminal
from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.preflight.report import PreflightReport, describe_spec, describe_verdict
from ckpt_tools.text import escape_name

_MARKS = {True: "ok", False: "FAILED", None: "not checked"}
_ORDER = {"error": 0, "warning": 1, "info": 2}


def run(call: Call[PreflightReport], *, html: Html = None, output: Output) -> int:
    """Check a run, and print what was found."""
    line = ChangingLine(shown=not output.is_silent)

    def follow(check: str, state: str) -> None:
        if state == "begun":
            line.show(f"{check} …")

    def tell(findings: tuple[Finding, ...]) -> None:
        line.close()
        kept = [finding for finding in findings if finding.severity == "error" or not output.quiet]
        say_findings(sorted(kept, key=lambda one: _ORDER[one.severity]))

    with report_to(html, "preflight", str(call.given["config"]), output) as write:
        try:
            report = call(on_check=follow, on_findings=None if output.json else tell)
        finally:
            line.close()
        if write is not None:
            from ckpt_tools.report.run_pages import preflight_page

            write(preflight_page(report))
    if output.json:
        print_json(report.to_json())
    else:
        _print(report, output)
    return 0 if report.ok else 3


def _print(report: PreflightReport, output: Output) -> None:
    screen = terminal()
    if output.quiet:
        if not report.was_read:
            say(describe_verdict(report))
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
    screen.line(describe_verdict(report), None if report.ok else "warning")
