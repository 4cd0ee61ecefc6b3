"""docs/reference/findings.md: every code of findings and errors, what it means, and what to do."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

from finding_codes import error_codes, finding_codes

HEAD = """\
# Findings, errors and exit codes

<!-- Written by bin/docs from the package's source and bin/lib/findings.toml. Do not edit. -->

A *finding* is something that a check noticed; an *error* stops a command. Both have a code that does not change: decide
on it, not on the words. `--json` has them as `findings[].code` and `error.code`.

## Exit codes

| code | meaning |
|---:|---|
{exits}

With 0, no finding is an error, and everything that the verdict needs was read. `diff` ends with 3 where two checkpoints
differ.
Warnings and infos do not change the exit code (`preflight --strict` fails on warnings too).
"""
_TABLE = "| code | severity | means | do |\n|---|---|---|---|\n"
_ORDER = ("error", "warning", "info")


def table() -> dict[str, dict[str, list[str]]]:
    """Heading → code → meaning, what to do, and the severity where the source leaves it open."""
    return tomllib.loads(Path(__file__).with_name("findings.toml").read_text(encoding="utf-8"))


@cache
def codes() -> dict[str, set[str]]:
    """Code of a finding that is neither a diagnosis nor a rule → its severities."""
    from ckpt_tools.errors import UnsupportedError
    from ckpt_tools.fsdp2.catalogue import CATALOGUE
    from ckpt_tools.preflight.rules import RULES

    others = {*CATALOGUE, *(one.id for one in RULES)}
    found = finding_codes() | {UnsupportedError.finding: {"error"}}
    return {code: severities for code, severities in found.items() if code not in others}


def render() -> str:
    """The whole page."""
    from ckpt_tools.cli.help_text import EXIT_CODES
    from ckpt_tools.fsdp2.catalogue import CATALOGUE
    from ckpt_tools.preflight.rules import RULES

    found, exits, groups = codes(), error_codes(), table()
    errors = groups.pop("Errors")
    meanings = "\n".join(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items())
    parts = [HEAD.replace("{exits}", meanings), "## Findings\n"]
    for heading, rows in groups.items():
        lines = [f"| `{code}` | {_severity(found[code], row)} | {row[0]} | {row[1]} |\n" for code, row in rows.items()]
        parts.append(f"### {heading}\n\n{_TABLE}{''.join(lines)}")
    lines = [f"| `{one.id}` | {one.severity} | {one.title} |\n" for one in RULES]
    why = "Why, and what to change: [rules of preflight](preflight-rules.md)."
    parts.append(f"### `preflight`: rules\n\n{why}\n\n| code | severity | means |\n|---|---|---|\n{''.join(lines)}")
    names = " · ".join(f"[`{code}`](diagnoses.md#{code})" for code in CATALOGUE)
    why = "Errors of `smoke`, `audit`, `compare_ranks`, `watch` and `diagnose`, each with symptom, cause and fix:"
    parts.append(f"### Diagnoses\n\n{why}\n{names}.\n")
    lines = [f"| `{code}` | {exits[code]} | {row[0]} | {row[1]} |\n" for code, row in errors.items()]
    parts.append(f"## Errors\n\n| code | exit code | means | do |\n|---|---:|---|---|\n{''.join(lines)}")
    return "\n".join(parts)


def _severity(found: set[str], row: list[str]) -> str:
    return row[2] if len(row) > 2 else " or ".join(each for each in _ORDER if each in found)
