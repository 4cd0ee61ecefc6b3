"""A report as machines of code hosts take it: SARIF 2.1.0, workflow commands of GitHub.

Source: OASIS "Static Analysis Results Interchange Format (SARIF) Version 2.1.0", 3.13, 3.14, 3.19, 3.27 and 3.58;
GitHub's "Workflow commands" (`::error file=…,line=…::…`; % CR LF are escaped, in properties : and , too).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from urllib.parse import quote

from ckpt_tools._version import __version__
from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.preflight.report import PreflightReport, describe_verdict
from ckpt_tools.preflight.rules import CATALOGUE

_LEVELS = {"error": "error", "warning": "warning", "info": "note"}
_COMMANDS = {"error": "error", "warning": "warning", "info": "notice"}


def to_sarif(report: PreflightReport) -> dict[str, object]:
    """Return a report as a SARIF log of one run; what was not read or not checked is a notification of it."""
    shown = [*report.findings, *report.ignored]
    codes = list(dict.fromkeys(finding.code for finding in shown))
    notices = [(text, "note") for text in report.not_checked]
    if not report.ok:
        notices.insert(0, (describe_verdict(report), "error"))
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "ckpt preflight",
                        "version": __version__,
                        "rules": [_rule(code) for code in codes],
                    }
                },
                "invocations": [
                    {
                        "executionSuccessful": report.was_read,
                        "toolExecutionNotifications": [
                            {"level": level, "message": {"text": text}} for text, level in notices
                        ],
                    }
                ],
                "results": [_result(report, finding, codes.index(finding.code)) for finding in shown],
            }
        ],
    }


def _rule(code: str) -> dict[str, object]:
    rule = CATALOGUE.get(code)
    if rule is None:
        return {"id": code}
    return {"id": code, "shortDescription": {"text": rule.title}, "fullDescription": {"text": f"{rule.why}."}}


def _result(report: PreflightReport, finding: Finding, index: int) -> dict[str, object]:
    path, line = _place(report, finding)
    region = {"region": {"startLine": line}} if line else {}
    location = {
        "physicalLocation": {"artifactLocation": {"uri": quote(path.replace(os.sep, "/"))}, **region},
        "logicalLocations": [{"fullyQualifiedName": finding.where}],
    }
    result: dict[str, object] = {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": _LEVELS[finding.severity],
        "message": {"text": _text(finding)},
        "locations": [location],
    }
    if finding in report.ignored:
        result["suppressions"] = [{"kind": "external", "justification": "--ignore"}]
    return result


def to_github(report: PreflightReport) -> Iterator[str]:
    """Yield the commands that show findings beside the lines that they are about, and what the report comes to."""
    for finding in report.findings:
        path, line = _place(report, finding)
        at = f"file={_property(path)}" + (f",line={line}" if line else "")
        title = _property(f"{finding.code} at {finding.where}")
        yield f"::{_COMMANDS[finding.severity]} {at},title={title}::{_data(_text(finding))}"
    for finding in report.ignored:
        yield f"::notice title={_property(f'ignored: {finding.code} at {finding.where}')}::{_data(_text(finding))}"
    yield f"::{'notice' if report.ok else 'error'} title=ckpt preflight::{_data(describe_verdict(report))}"


def _place(report: PreflightReport, finding: Finding) -> tuple[str, int]:
    """Return the file and the line; without a file of its own, the first config."""
    place = report.places.get(finding)
    if place is None or not place.line:
        return report.configs[0], 0
    return place.path, place.line


def _text(finding: Finding) -> str:
    return finding.what + (f"; {finding.hint}" if finding.hint else "")


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
