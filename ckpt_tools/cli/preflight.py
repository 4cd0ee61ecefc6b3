"""`ckpt preflight`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.cli.build import CommandCall
from ckpt_tools.cli.estimate import estimate_sections
from ckpt_tools.cli.output import ChangingLine, print_json, report_to, say, say_findings
from ckpt_tools.cli.screen import terminal
from ckpt_tools.cli.smoke import MARKS, smoke_sections
from ckpt_tools.cli.views import page
from ckpt_tools.hub.secrets import find_secrets
from ckpt_tools.options.output import OutputOptions
from ckpt_tools.options.preflight import PreflightView
from ckpt_tools.preflight.places import ConfigLocation
from ckpt_tools.preflight.report import CHECKS, CheckResult, PreflightReport, describe_spec, describe_verdict
from ckpt_tools.text import escape_name

_HERE = "this machine"


def run(call: CommandCall[PreflightReport], view: PreflightView, output: OutputOptions) -> int:
    """Check a run, and print what was found."""
    form = "json" if output.json else view.format
    line = ChangingLine(shown=form == "text" and not output.quiet)

    numbers = count(1)
    total = len(CHECKS) + bool(call.given.get("host")) if call.given.get("config") else 2  # config and host

    def follow(check: str, state: str) -> None:
        if state == "begun":
            line.show(f"check {next(numbers)} of {total}: {check} …")

    places: Mapping[Finding, ConfigLocation] = {}

    def keep(filling: Mapping[Finding, ConfigLocation]) -> None:
        nonlocal places
        places = filling

    later: list[Finding] = []  # Warnings and notes: errors are said first, before the slow checks

    def tell(findings: tuple[Finding, ...]) -> None:
        line.close()
        later.extend(finding for finding in findings if finding.severity != "error" and not output.quiet)
        say_findings([*_located([one for one in findings if one.severity == "error"], places).values()])
        sys.stdout.flush()

    with report_to(view.html, "preflight", ", ".join(map(str, call.given.get("config", (_HERE,)))), output) as write:
        try:
            report = call(on_check=follow, on_findings=tell if form == "text" else None, on_places=keep)
        except Exception as error:
            if form in ("sarif", "github"):  # whoever reads them gets a document in any case
                _print_for_ci(form, error)
            raise
        finally:
            line.close()
            say_findings([*_located(later, places).values()])
        write(lambda: preflight_page(report))
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


def _located(findings: Sequence[Finding], places: Mapping[Finding, ConfigLocation]) -> dict[Finding, Finding]:
    """Return findings with the file and line before their keys: the worst first, then in the order of the lines."""
    at = {one: (place.path, place.line) for one in findings if (place := places.get(one)) is not None}
    ordered = sorted(findings, key=lambda one: (page.SEVERITIES[one.severity], one not in at, at.get(one, ("", 0))))
    return {one: replace(one, where=f"{places[one]}: {one.where}") if one in at else one for one in ordered}


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
    found = _located(report.findings, report.places)
    sections = [
        page.PageSection("Checks", [_checks(report)]),
        *_config_sections(found, report.places),
        *page.findings_section([*found.values()]),
        *page.notes_section("Not checked", report.not_checked or skipped),
        *page.notes_section("Settings", (*report.notes, *_ignored(report))),
    ]
    if report.estimate is not None:
        sections += estimate_sections(report.estimate)
    if report.smoke is not None:
        sections += smoke_sections(report.smoke)
    verdict = f"{go}. {describe_verdict(report)}"
    return page.Page("preflight", report.config or _HERE, sections, mood, verdict, titles=[title] * bool(title))


def _config_sections(
    found: Mapping[Finding, Finding], places: Mapping[Finding, ConfigLocation]
) -> list[page.PageSection]:
    """Return the lines of the config that findings are about, with two on either side of each."""
    marked: dict[str, dict[int, list[Finding]]] = {}
    for finding, located in found.items():
        if (place := places.get(finding)) is not None:
            marked.setdefault(place.path, {}).setdefault(place.line, []).append(located)
    parts = []
    for path, about in marked.items():
        near = {line + i for line in about if line for i in range(-2, 3)}
        with suppress(OSError):
            lines = [(i, text, about.get(i, ())) for i, text in _lines(path, near)]
            parts += [page.Excerpt(path, lines)] * bool(lines)
    return [page.PageSection("In the config", parts)] if parts else []


_HIDDEN = re.compile(
    r"(.*?(?:token(?!iz|s\b|_id)|secret|pass(?:w|ph|\b)|pwd?\b|credential|key\b|auth|sig\b)[\w-]*[\"']?(?:\s*[:=]\s*|\s+))"
    r"(?!(?:true|false|null|none)\b)\S.*|(?<=://)[^/\s@]+(?=@)",
    re.IGNORECASE,
)
"""The value of what is named like a secret, and who logs in at an address."""
_SHOWN = re.compile(r"\s*(?:- )*(?:--?[a-z]|(?:export\s+)?[\w.\"'-]+\s*[:=]|[\[\]{}#]|$)|.*\s--[a-z]", re.IGNORECASE)
"""Not a value on a line of its own."""
_MAX_CONFIG_BYTES = 4 << 20
_MAX_LINE_CHARS = 400


def _lines(path: str, wanted: Collection[int]) -> Iterator[tuple[int, str]]:
    """Yield some lines of a config by their numbers, each up to `_MAX_LINE_CHARS`, without what may be a secret."""
    with open(path, "rb") as file:
        content = file.read(_MAX_CONFIG_BYTES).removesuffix(b"\n")
    known = {each.line for each in find_secrets(path, [content])}
    for number, whole in enumerate(content.decode(errors="replace").split("\n"), 1):
        line = whole[:_MAX_LINE_CHARS].rstrip()
        if number in wanted:
            yield number, _HIDDEN.sub(r"\1…", line) if number not in known and _SHOWN.match(line) else "…"
