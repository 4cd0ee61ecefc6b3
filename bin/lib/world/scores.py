"""Precision and recall by trainer: how much of the newest releases' files is read, and how many mistakes are found.

The table stands in docs/dev/world.md between two marks; `bin/world --update` rewrites it.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import get_args

from outcomes import GREEN, REFUSED, Outcome
from releases import HERE, rows

from ckpt_tools.options.preflight import Framework

ROOT = HERE.parents[2]
PAGE = ROOT / "docs" / "dev" / "world.md"
_MARKS = ("<!-- bin/world --update writes this table -->\n", "<!-- until here -->\n")
_TRAINERS = {"transformers": "trainer", "trl": "trainer"}
_HEADS = (
    "trainer", "files", "read", "keys", "understood", "errors", "true", "green with unread", "mistakes", "found",
)  # fmt: skip


def table(found: Mapping[str, Outcome], newest: set[str], judged: list[list[str]]) -> str:
    """Return the table in Markdown: outcomes of the newest releases, each under the trainer that read it.

    Args:
        found: Example → outcome.
        newest: Names of the newest release of each project.
        judged: judged.tsv: errors that are true.
    """
    parts = [row for row in rows(HERE / "examples.tsv") if row[1] == "part"]
    of: dict[str, list[tuple[str, Outcome]]] = defaultdict(list)
    for name, outcome in found.items():
        release, _, path = name.partition("/")
        project = release.rpartition("-")[0]
        is_part = any(row[0] == project and fnmatchcase(path, row[2]) for row in parts)
        if release in newest and not is_part:
            reader = outcome.framework.rpartition(" + ")[2]
            of[_TRAINERS.get(project, project) if outcome.verdict == REFUSED else reader].append((name, outcome))
    mistakes, hits = _mistakes()
    lines = [_line(_HEADS), "|---" * len(_HEADS) + "|"]
    for trainer in sorted({*of, *mistakes}, key=lambda one: (one not in get_args(Framework), one)):
        mine = of.get(trainer, [])
        read = [one for _, one in mine if one.verdict != REFUSED and trainer in get_args(Framework)]
        keys, understood = sum(one.num_options for one in read), sum(one.num_understood for one in read)
        errors = [(name, one) for name, out in mine for one in out.findings if one.severity == "error"]
        true = sum(
            any(fnmatchcase(name, row[0]) and (one.code, one.where) == (row[1], row[2]) for row in judged)
            for name, one in errors
        )
        unread = sum(one.verdict == GREEN and bool(one.unread) for one in read)
        cells = (len(mine), _share(len(read), len(mine)), keys, _share(understood, keys), len(errors), true, unread)
        lines.append(_line((trainer, *cells, mistakes[trainer], _share(hits[trainer], mistakes[trainer]))))
    return "\n".join(lines) + "\n"


def write(text: str) -> None:
    """Put a table into its page."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(_MARKS[0])
    PAGE.write_text(
        before + _MARKS[0] + "\n" + text + "\n" + _MARKS[1] + rest.partition(_MARKS[1])[2], encoding="utf-8"
    )


def _mistakes() -> tuple[Counter[str], Counter[str]]:
    """Return how many injected mistakes there are by trainer, and how many of them are found."""
    sys.path.insert(0, str(ROOT / "tests"))
    from preflight.mistakes import MISTAKES, findings_of

    all_of, hits = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as scratch:
        for one in MISTAKES:
            findings = findings_of(Path(scratch), one.base, one.change, ranks=one.ranks, model=one.model)
            all_of[one.framework] += 1
            hits[one.framework] += one.is_found_in(findings)
    return all_of, hits


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


def _line(cells: tuple[object, ...]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"
