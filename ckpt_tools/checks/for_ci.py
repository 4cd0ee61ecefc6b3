"""Findings as code hosts take them: SARIF 2.1.0.

Source: OASIS "Static Analysis Results Interchange Format (SARIF) Version 2.1.0", 3.13, 3.14, 3.19, 3.27 and 3.58.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple
from urllib.parse import quote

from ckpt_tools._version import __version__
from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.errors import CkptError
from ckpt_tools.text import escape_message

_LEVELS = {"error": "error", "warning": "warning", "info": "note"}


class Located(NamedTuple):
    """A finding, and the file and line that it is about; "" and 0 without."""

    finding: Finding
    path: str
    line: int = 0  # From 1; 0 for the whole file
    is_ignored: bool = False


def build_sarif(
    command: str,
    located: Sequence[Located],
    *,
    notices: Iterable[tuple[str, str]],
    was_read: bool,
    describe: Callable[[str], tuple[str, str] | None] = lambda _: None,
) -> dict[str, object]:
    """Return findings as a SARIF log of one run.

    `notices` are (text, level); `describe` returns the title and the reason of a finding's code.
    """
    codes = list(dict.fromkeys(each.finding.code for each in located))
    rules = []
    for code in codes:
        told = describe(code)
        texts = {} if told is None else {"shortDescription": {"text": told[0]}, "fullDescription": {"text": told[1]}}
        rules.append({"id": code, **texts})
    notes = [{"level": level, "message": {"text": escape_message(text)}} for text, level in notices]
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": command, "version": __version__, "rules": rules}},
                "invocations": [{"executionSuccessful": was_read, "toolExecutionNotifications": notes}],
                "results": [_result(each, codes.index(each.finding.code)) for each in located],
            }
        ],
    }


def describe_failure(error: Exception) -> str:
    """Return what ended a run."""
    parts = (error.what, error.where, error.hint) if isinstance(error, CkptError) else (type(error).__name__, error)
    return "; ".join(str(part) for part in parts if part)


def text_of(finding: Finding) -> str:
    """Return what is wrong and what to do about it."""
    return finding.what + (f"; {finding.hint}" if finding.hint else "")


def _result(located: Located, index: int) -> dict[str, object]:
    finding = located.finding
    region = {"region": {"startLine": located.line}} if located.line else {}
    uri = quote(os.fsencode(located.path.replace(os.sep, "/")))
    location: dict[str, object] = {"logicalLocations": [{"fullyQualifiedName": finding.where}]}
    if located.path:
        location["physicalLocation"] = {"artifactLocation": {"uri": uri}, **region}
    result: dict[str, object] = {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": _LEVELS[finding.severity],
        "message": {"text": text_of(finding)},
        "locations": [location],
    }
    if located.is_ignored:
        result["suppressions"] = [{"kind": "external", "justification": "--ignore"}]
    return result
