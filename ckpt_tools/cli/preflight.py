"""`ckpt preflight`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.cli.build import CommandCall
from ckpt_tools.cli.estimate import estimate_sections
from ckpt_tools.cli.output import ChangingLine, print_json, report_to, say, say_findings
from ckpt_tools.cli.screen import terminal
from ckpt_tools.cli.smoke import MARKS, smoke_sections
from ckpt_tools.cli.views import page
from ckpt_tools.options.output import OutputOptions
from ckpt_tools.options.preflight import PreflightView
from ckpt_tools.preflight.places import ConfigLocation
from ckpt_tools.preflight.report import CheckResult, PreflightReport, describe_spec, describe_verdict
from ckpt_tools.text import escape_name

_HERE = "this machine"


def run(call: CommandCall[PreflightReport], view: PreflightView, output: OutputOptions) -> int:
    """Check a run, and print what was found."""
    form = "json" if output.json else view.format
    line = ChangingLine(shown=form == "text" and not output.quiet)

    def follow(check: str, state: str) -> None:
        if state == "begun":
            line.show(f"{check} …")

    places: Mapping[Finding, ConfigLocation] = {}

    def keep(filling: Mapping[Finding, ConfigLocation]) -> None:
        nonlocal places
        places = filling

    def tell(findings: tuple[Finding, ...]) -> None:
        line.close()
        kept = [finding for finding in findings if finding.severity == "error" or not output.quiet]
        say_findings([_located(one, places) for one in sorted(kept, key=lambda one: page.SEVERITIES[one.severity])])
        sys.stdout.flush()  # the slow checks follow

    with report_to(view.html, "preflight", ", ".join(map(str, call.given.get("config", (_HERE,)))), output) as write:
        try:
            report = call(on_check=follow, on_findings=tell if form == "text" else None, on_places=keep)
        except Exception as error:
            if form in ("sarif", "github"):  # whoever reads them gets a document in any case
                _print_for_ci(form, error)
            raise
        finally:
            line.close()
        if write is not None:
            found = tuple(_located(one, report.places) for one in report.findings)
            write(preflight_page(replace(report, findings=found, notes=(*report.notes, *_ignored(report)))))
    if form == "json":
        print_json(report.to_dict())
    elif form == "text":
        _print(report, output)
    else:
        _print_for_ci(form, report)
    return 0 if report.ok else 3


def _print_for_ci(form: str, result: PreflightReport | Exception) -> None:
    from ckpt_tools.preflight.for_ci import to_github, to_sarif

    say(json.dumps(to_sarif(result), indent=1) if form == "sarif" else "\n".join(to_github(result)))


def _located(finding: Finding, places: Mapping[Finding, ConfigLocation]) -> Finding:
    """Return a finding with the file and line before its key."""
    place = places.get(finding)
    return finding if place is None else replace(finding, where=f"{place}: {finding.where}")


def _ignored(report: PreflightReport) -> list[str]:
    return [f"ignored {one.severity}: {one.code}: {one.what} ({one.where})" for one in report.ignored]


def _print(report: PreflightReport, output: OutputOptions) -> None:
    screen = terminal()
    if output.quiet:
        if not report.was_read:
            say(describe_verdict(report, begins="GO"))
        return
    if report.findings:
        screen.line()
    what = report.framework if report.spec is None else f"{report.framework}, {describe_spec(report.spec)}"
    screen.line(": ".join(filter(None, (escape_name(report.config) or _HERE, what))), "heading")
    screen.show(_checks(report))
    screen.line()
    for text in _ignored(report):
        screen.line(text)
    for text in report.notes:
        screen.line(f"note: {text}")
    for text in report.not_checked:
        screen.line(f"not checked: {text}")
    if output.verbose and report.smoke is not None:
        screen.line()
        for phase in report.smoke.phases:
            screen.line(f"smoke phase {phase.name}: {MARKS[phase.ok]} {phase.what}")
        for rank, text in sorted(report.smoke.stacks.items()):
            say(f"stacks of rank {rank}:")
            say("\n".join(escape_name(line) for line in text.splitlines()))
    screen.line(describe_verdict(report, begins="GO"), None if report.ok else "warning")


def _checks(report: PreflightReport) -> page.PageTable:
    def cells(check: CheckResult) -> tuple[str, ...]:
        return check.name, MARKS[check.ok], f"{check.seconds:.1f}" if check.ok is not None else "", check.what

    return page.PageTable.of("Checks", "check, result, >seconds, what", report.checks, cells)


def preflight_page(report: PreflightReport) -> page.Page:
    """Return the page of a preflight: one page for everybody who must agree to a run."""
    skipped = [check.name for check in report.checks if check.ok is None]
    mood = page.mood_of(ok=not report.failed, left=report.not_checked or skipped or report.findings)
    unseen: list[str] = [*skipped] or ["listed below"] * bool(report.not_checked)
    go = "NO-GO" if report.failed else "NOT CHECKED" if not report.was_read else "GO"
    go += f" (not checked: {', '.join(unseen)})" if go == "GO" and unseen else ""
    if not report.failed and not report.was_read:
        mood = "unknown"
    title = f"{report.framework} · mesh {report.mesh or 'not known'}" if report.framework else ""
    title += "" if report.spec is None else f" · {describe_spec(report.spec)}"
    sections = [
        page.PageSection("Checks", [_checks(report)]),
        *page.findings_section(report.findings),
        *page.notes_section("Not checked", report.not_checked or skipped),
        *page.notes_section("Settings", report.notes),
    ]
    if report.estimate is not None:
        sections += estimate_sections(report.estimate)
    if report.smoke is not None:
        sections += smoke_sections(report.smoke)
    verdict = f"{go}. {describe_verdict(report)}"
    return page.Page("preflight", report.config or _HERE, sections, mood, verdict, titles=[title] * bool(title))
