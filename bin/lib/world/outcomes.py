"""What `ckpt preflight` says of one example, as a line of a table: through the command, as a user would ask."""

from __future__ import annotations

import contextlib
import io
import json
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ckpt_tools.cli import main

GREEN, ERROR, NOT_CHECKED, REFUSED, CRASH = "green", "error", "not-checked", "refused", "crash"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One finding."""

    severity: str
    code: str
    where: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one example got."""

    verdict: str
    framework: str
    """"-" where it was refused."""
    findings: tuple[Found, ...]
    """Errors and warnings."""
    why: str
    """What was not checked, or why it was refused."""
    unread: tuple[str, ...] = ()
    """Options whose values are not in the file, and on which something depends."""
    num_options: int = 0
    num_understood: int = 0

    @property
    def codes(self) -> str:
        """Return the findings by code, for the table: `error:unknown-key×2 warning:CKPT022`."""
        counts = Counter(f"{found.severity}:{found.code}" for found in self.findings)
        return " ".join(f"{code}×{n}" if n > 1 else code for code, n in sorted(counts.items())) or "-"

    def count(self, severity: str) -> int:
        """Return the findings of a severity."""
        return sum(found.severity == severity for found in self.findings)


def judge(path: Path, options: tuple[str, ...] = ()) -> Outcome:
    """Run preflight on a file."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["preflight", str(path), "--no-smoke", "--json", *options])
        document = json.loads(out.getvalue() if code in (0, 3) else err.getvalue())
    except Exception:
        return Outcome(verdict=CRASH, framework="-", findings=(), why=traceback.format_exc())
    if code in (0, 3):
        findings = tuple(
            Found(severity=one["severity"], code=one["code"], where=one["where"], what=one["what"])
            for one in document["findings"]
            if one["severity"] != "info"
        )
        read = document["options"] or {}
        failed = any(found.severity == "error" for found in findings)
        verdict = GREEN if code == 0 else ERROR if failed else NOT_CHECKED
        return Outcome(
            verdict=verdict,
            framework=document["framework"],
            findings=findings,
            why="; ".join(document["not_checked"]),
            unread=tuple(read.get("unread", ())),
            num_options=read.get("read", 0),
            num_understood=read.get("understood", 0),
        )
    error = document.get("error", {})
    verdict = REFUSED if code in (2, 4) else CRASH
    return Outcome(verdict=verdict, framework="-", findings=(), why=str(error.get("what", document)))
