"""What a rank reports while it runs: one line of JSON per event, so that nothing is lost when it dies.

Nobody has to wait for the rank, and whoever reads along knows where it is.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, TypeVar

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.errors import CkptError
from ckpt_tools.sandbox import wire

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that a rank reports, and what belongs to it."""

    kind: Literal["phase", "done", "skip", "finding", "fact", "note", "error"]
    """A phase begun, ended or left out; a finding; a value for the report; a remark; an error that ends the run."""
    time: float = field(default_factory=time.time)
    name: str = ""  # Of the phase, or of the fact
    ok: bool = True
    seconds: float = 0.0
    what: str = ""  # What was done, why not, or the remark
    finding: Finding | None = None
    value: object = None
    error: Mapping[str, str | None] | None = None  # As `wire.error_to_json` tells it


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
        self._add(Event(kind="phase", name=name))

    def done(self, name: str, *, ok: bool, seconds: float, what: str = "") -> None:
        """Say that a phase has ended."""
        self._add(Event(kind="done", name=name, ok=ok, seconds=seconds, what=what))

    def skip(self, name: str, why: str) -> None:
        """Say why a phase does not run."""
        self._add(Event(kind="skip", name=name, what=why))

    def finding(self, finding: Finding) -> None:
        """Report a finding."""
        self._add(Event(kind="finding", finding=finding))

    def fact(self, name: str, value: object) -> None:
        """Report a value that `wire` takes."""
        self._add(Event(kind="fact", name=name, value=value))

    def note(self, text: str) -> None:
        """Report what was not tried."""
        self._add(Event(kind="note", what=text))

    def error(self, error: CkptError) -> None:
        """Report that the run itself cannot be meant, or the source cannot be read."""
        self._add(Event(kind="error", error=wire.error_to_json(error)))

    def _add(self, event: Event) -> None:
        with self._lock:
            self.events.append(event)
            if self._path is not None:
                with open(self._path, "a", encoding="utf-8") as file:
                    file.write(wire.dumps(event) + "\n")


def read_events(path: str) -> list[Event]:
    """Return the events in a file; none when it is not there, and not the last line when it was cut short."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read().split("\n")[:-1]
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        with suppress(ValueError):  # a rank that was ended while it wrote
            found.append(_event_of(line))
    return found


@lru_cache(maxsize=4096)
def _event_of(line: str) -> Event:
    """Return an event; whoever watches a run reads its first ones a hundred times."""
    return wire.loads(Event, line)


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
        return [event for event in self.events if event.kind == kind]

    @property
    def phase(self) -> str | None:
        """The phase that it is in: begun and not ended."""
        current: str | None = None
        for event in self.events:
            if event.kind == "phase":
                current = event.name
            elif event.kind == "done":
                current = None
        return current

    @property
    def last_phase(self) -> str | None:
        """The phase that it began last."""
        names = [event.name for event in self.of_kind("phase")]
        return names[-1] if names else None

    @property
    def failed(self) -> bool:
        """Has it given up?"""
        return any(event.kind == "error" or (event.kind == "done" and not event.ok) for event in self.events)

    @property
    def has_said(self) -> bool:
        """Has it said what is wrong?"""
        return self.failed or any(finding.severity == "error" for finding in self.findings)

    @property
    def findings(self) -> list[Finding]:
        """What it has found."""
        return [event.finding for event in self.events if event.finding is not None]

    @property
    def errors(self) -> list[CkptError]:
        """What ended the run."""
        return [wire.error_from_json(event.error) for event in self.events if event.error is not None]

    def fact(self, name: str, kind: type[T]) -> T | None:
        """Return the last value of a fact that was read from JSON, None without one."""
        values = [event.value for event in self.of_kind("fact") if event.name == name]
        found: T | None = wire.build(kind | None, values[-1]) if values else None
        return found
