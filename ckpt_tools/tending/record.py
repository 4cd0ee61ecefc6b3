"""What was verified in a run's folder: one small file there, which may be lost or damaged without harm.

An entry counts only for the very files that were verified: whoever has changed one of them since has to verify again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from ckpt_tools.processes import wire
from ckpt_tools.tending.retention import State

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
    order: int
    """Which verification in this folder, counted from 1."""
    codes: tuple[str, ...] = ()
    """Of the findings that make it bad."""
    sent: tuple[str, ...] = ()
    """Where it was gathered or pushed to."""

    @property
    def state(self) -> State:
        """What the verification tells."""
        return "verified" if self.ok else "unsupported" if {*self.codes} == {"unsupported"} else "bad"


def parse_record(content: bytes | None) -> dict[str, Entry]:
    """Return name → entry; what is not as `build_record` writes it counts as never verified."""
    found = {}
    with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        document = json.loads(content or b"{}")
        for name, row in document["checkpoints"].items() if document["version"] == _VERSION else ():
            with suppress(ValueError):
                entry = wire.build(Entry, row)
                if isinstance(entry, Entry):
                    found[name] = entry
    return found


def build_record(entries: Mapping[str, Entry]) -> bytes:
    """Return the document."""
    return wire.dumps({"version": _VERSION, "checkpoints": dict(sorted(entries.items()))}).encode() + b"\n"
