"""What was verified in a run's folder: one small file there, which may be lost or damaged without harm.

An entry counts only for the very files that were verified: whoever has changed one of them since has to verify again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from ckpt_tools.runs.fitness import Profile
from ckpt_tools.runs.retention import State
from ckpt_tools.sandbox import wire

MAX_RECORD_BYTES = 64 << 20
_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What is known of a checkpoint since it was verified."""

    stamp: str  # Of its files' names, sizes and times (on a store their ETags)
    written: str = ""  # As `stamp`, of names, sizes and times of modification alone
    ok: bool
    level: str
    order: int  # Which verification in this folder, counted from 1
    codes: tuple[str, ...] = ()  # Of the findings that make it bad
    sent: tuple[str, ...] = ()  # Where it was gathered or pushed to
    unfit: tuple[str, ...] = ()  # Why it must not succeed the checkpoints before it, though its bytes are right
    profile: Profile = field(default_factory=Profile)
    is_back: bool = False  # It was removed, and brought back

    @property
    def is_fit(self) -> bool:
        """May earlier ones go because of it?"""
        return self.ok and not self.unfit

    @property
    def state(self) -> State:
        """What the verification tells."""
        if self.ok:
            return "unfit" if self.unfit else "verified"
        return "unsupported" if {*self.codes} == {"unsupported"} else "bad"


def parse_record(content: bytes | None) -> dict[str, Entry]:
    """Return name → entry; what is not as `build_record` writes it counts as never verified."""
    found = {}
    layouts: dict[str, dict[str, str]] = {}
    for line in (content or b"").splitlines():
        with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            document = json.loads(line)
            if document["version"] != _VERSION:
                continue
            layouts.update(document.get("layouts", {}))
            for name, row in document["checkpoints"].items():
                with suppress(ValueError, TypeError, KeyError):
                    if isinstance(layout := row["profile"]["layout"], str):
                        row["profile"]["layout"] = layouts[layout]
                    entry = wire.build(Entry, row)
                    if isinstance(entry, Entry):
                        found[name] = entry
    return found


def build_record(entries: Mapping[str, Entry]) -> bytes:
    """Return the document: a layout that several have stands there once."""
    numbers: dict[str, str] = {}
    rows = json.loads(wire.dumps(dict(sorted(entries.items()))))
    for row in rows.values():
        layout = json.dumps(row["profile"]["layout"], sort_keys=True)
        row["profile"]["layout"] = numbers.setdefault(layout, str(len(numbers)))
    layouts = {number: json.loads(layout) for layout, number in numbers.items()}
    return json.dumps({"version": _VERSION, "layouts": layouts, "checkpoints": rows}).encode() + b"\n"
