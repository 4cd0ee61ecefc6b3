"""What was verified in a run's folder: one small file there, which may be lost or damaged without harm.

An entry counts only for the very files that were verified: whoever has changed one of them since has to verify again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

RECORD_NAME = ".ckpt-tend.json"
MAX_RECORD_BYTES = 64 << 20
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What is known of a checkpoint since it was verified."""

    stamp: str
    """Of its files' names, sizes and times (on a store their ETags)."""
    digest: str
    """Of its metadata."""
    ok: bool
    level: str
    codes: tuple[str, ...] = ()
    """Of the findings that make it bad."""
    sent: tuple[str, ...] = ()
    """Where it was gathered or pushed to."""


def parse_record(content: bytes | None) -> dict[str, Entry]:
    """Return name → entry; what is not as `build_record` writes it counts as never verified."""
    try:
        document = json.loads(content or b"{}")
        rows = document["checkpoints"] if document["version"] == _VERSION else {}
        return {name: found for name, row in rows.items() if (found := _entry(row)) is not None}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _entry(row: Mapping[str, object]) -> Entry | None:
    try:
        texts = {name: row[name] for name in ("stamp", "digest", "level")}
        lists = {name: row.get(name, []) for name in ("codes", "sent")}
        is_one = isinstance(row["ok"], bool) and all(isinstance(each, str) and each for each in texts.values())
        is_one &= all(isinstance(each, list) and all(isinstance(x, str) for x in each) for each in lists.values())
    except (TypeError, KeyError, AttributeError):
        return None
    given = {**texts, **{name: tuple(each) for name, each in lists.items()}}  # type: ignore[arg-type]
    return Entry(ok=row["ok"], **given) if is_one else None  # type: ignore[arg-type]


def build_record(entries: Mapping[str, Entry]) -> bytes:
    """Return the document."""
    rows = {name: asdict(entry) for name, entry in sorted(entries.items())}
    return json.dumps({"version": _VERSION, "checkpoints": rows}, indent=1).encode() + b"\n"
