"""A report as machines of code hosts take it: SARIF 2.1.0, workflow commands of GitHub.

Source: GitHub's "Workflow commands" (`::error file=…,line=…::…`; % CR LF are escaped, in properties : and , too).
"""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checks.for_ci import Located, build_sarif, describe_failure, text_of
from ckpt_tools.preflight.report import PreflightReport, describe_verdict
from ckpt_tools.preflight.rules import CATALOGUE
from ckpt_tools.text import escape_message

_COMMANDS = {"error": "error", "warning": "warning", "info": "notice"}


def to_sarif(report: PreflightReport | Exception) -> dict[str, object]:
    """Return a report, or what ended the run, as a SARIF log; what was not read or checked is a notification of it."""
    if isinstance(report, Exception):
        return build_sarif("ckpt preflight", [], notices=[(describe_failure(report), "error")], was_read=False)
    shown = [*report.findings, *report.ignored]
    notices = [(text, "note") for text in report.not_checked]
    if not report.ok:
        notices.insert(0, (describe_verdict(report), "error"))
    located = [Located(each, *_place(report, each), is_ignored=each in report.ignored) for each in shown]
    return build_sarif("ckpt preflight", located, notices=notices, was_read=report.was_read, describe=_describe_rule)


def _describe_rule(code: str) -> tuple[str, str] | None:
    rule = CATALOGUE.get(code)
    return None if rule is None else (rule.title, f"{rule.why}.")


def to_github(report: PreflightReport | Exception) -> Iterator[str]:
    """Yield the commands that show findings at the lines that they are about, and what the report comes to."""
    if isinstance(report, Exception):
        yield f"::error title=ckpt preflight::{_data(describe_failure(report))}"
        return
    for finding in report.findings:
        path, line = _place(report, finding)
        at = (f"file={_property(path)}," if path else "") + (f"line={line}," if line else "")
        title = _property(f"{finding.code} at {finding.where}")
        yield f"::{_COMMANDS[finding.severity]} {at}title={title}::{_data(text_of(finding))}"
    for finding in report.ignored:
        yield f"::notice title={_property(f'ignored: {finding.code} at {finding.where}')}::{_data(text_of(finding))}"
    yield f"::{'notice' if report.ok else 'error'} title=ckpt preflight::{_data(describe_verdict(report))}"


def _place(report: PreflightReport, finding: Finding) -> tuple[str, int]:
    """Return the file and the line; without a file of its own, the first config, if any."""
    place = report.places.get(finding)
    if place is None or not place.line:
        return next(iter(report.configs), ""), 0
    return place.path, place.line


def _data(text: str) -> str:
    return escape_message(text).replace("%", "%25")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
