"""What a rank reports while it runs: one line of JSON per event, so that nothing is lost when it dies.

Events: `phase` (begun), `done` (with seconds and a remark), `finding`, `fact` (a number for the report), `note`, and
`error` (what is no finding: the arguments, or the source, cannot be meant).
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.errors import CkptError
from ckpt_tools.processes.child import error_to_json

Event = dict[str, Any]
"""`kind`, `time`, and what belongs to that kind."""
WORLD_NAME = "world"
"""Directory of the ranks that train."""
RELOAD_NAME = "reload"
"""Directory of the ranks that reload."""


class Journal:
    """Takes the events of one rank.

    Args:
        path: File to append them to; None keeps them in memory only.
    """

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.events: list[Event] = []

    def phase(self, name: str) -> None:
        """Say that a phase begins."""
        self._add({"kind": "phase", "name": name})

    def done(self, name: str, *, ok: bool, seconds: float, what: str = "") -> None:
        """Say that a phase has ended."""
        self._add({"kind": "done", "name": name, "ok": ok, "seconds": seconds, "what": what})

    def skip(self, name: str, why: str) -> None:
        """Say why a phase does not run."""
        self._add({"kind": "skip", "name": name, "what": why})

    def finding(self, finding: Finding) -> None:
        """Report a finding."""
        self._add({"kind": "finding", "finding": asdict(finding)})

    def fact(self, name: str, value: object) -> None:
        """Report a value, which JSON can hold."""
        self._add({"kind": "fact", "name": name, "value": value})

    def note(self, text: str) -> None:
        """Report what was not tried."""
        self._add({"kind": "note", "text": text})

    def error(self, error: CkptError) -> None:
        """Report that the run itself cannot be meant, or the source cannot be read."""
        self._add({"kind": "error", **error_to_json(error)})

    def _add(self, event: Event) -> None:
        event["time"] = time.time()
        with self._lock:
            self.events.append(event)
            if self._path is not None:
                with open(self._path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(event) + "\n")


def read_events(path: str) -> list[Event]:
    """Return the events in a file; none when it is not there, and not the last line when it was cut short."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read().split("\n")[:-1]
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:  # a rank that was ended while it wrote
            continue
    return found


def events_path(directory: str, rank: int) -> str:
    """Return where a rank's events are."""
    return os.path.join(directory, f"events-{rank}.jsonl")


@dataclass(slots=True)
class RankLog:
    """What one rank has reported so far."""

    rank: int
    events: list[Event] = field(default_factory=list)

    def of_kind(self, kind: str) -> Iterable[Event]:
        """Return the events of one kind."""
        return [event for event in self.events if event["kind"] == kind]

    @property
    def phase(self) -> str | None:
        """The phase that it is in: begun and not ended."""
        current: str | None = None
        for event in self.events:
            if event["kind"] == "phase":
                current = event["name"]
            elif event["kind"] == "done":
                current = None
        return current

    @property
    def last_phase(self) -> str | None:
        """The phase that it began last."""
        names = [event["name"] for event in self.of_kind("phase")]
        return names[-1] if names else None

    @property
    def failed(self) -> bool:
        """Has it given up?"""
        return any(event["kind"] == "error" or (event["kind"] == "done" and not event["ok"]) for event in self.events)

    @property
    def has_said(self) -> bool:
        """Has it said what is wrong?"""
        return self.failed or any(event["finding"]["severity"] == "error" for event in self.of_kind("finding"))

    def fact(self, name: str) -> Any:  # noqa: ANN401 - whatever was reported
        """Return the last value of a fact, None without one."""
        values = [event["value"] for event in self.of_kind("fact") if event["name"] == name]
        return values[-1] if values else None
