"""What is known of the checkpoints of a folder: whole or not, verified or not, who needs them, how good they are."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.checkpoint.formats.step import open_step
from ckpt_tools.checkpoint.formats.step_layouts import PROGRESS_FILE, ROLES
from ckpt_tools.checks.step import verify_step
from ckpt_tools.checks.verify import Looks, Verification, verify
from ckpt_tools.errors import CkptError, UnreadableError, UnsupportedError, UsageError
from ckpt_tools.options import ProgressFactory
from ckpt_tools.options.common import Level
from ckpt_tools.runs.compare_series import Profile
from ckpt_tools.runs.folder import POINTERS, Folder, FolderListing, SavedCheckpoint, metric_in_name
from ckpt_tools.runs.retention import Rules, RunCheckpoint, State
from ckpt_tools.sandbox import wire
from ckpt_tools.text import escape_name, first_few

# What was verified in a run's folder: one small file there, which may be lost or damaged without harm

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


_TEMPORARY = re.compile(r".*\.(tmp|part|partial|incomplete)|(tmp|\.tmp)[-_.].*", re.ASCII)
_MAX_POINTER_BYTES = 4096
_UNFIT = ("bad", "unsupported", "incomplete", "changing")


class Assessor:
    """Judges the checkpoints of a folder, and remembers what it has read of those that stay as they are.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._examined: dict[str, tuple[State, str, frozenset[str]]] = {}
        """Stamp → by its headers, what the checkpoint is, why, and what it holds: what a resumed run would miss."""

    def assess(self, look: FolderListing, record: Mapping[str, Entry], rules: Rules) -> tuple[RunCheckpoint, ...]:
        """Say what is known of every checkpoint."""
        named = dict(self._named(look, record))
        found: list[RunCheckpoint] = []
        last: dict[str, SavedCheckpoint] = {}  # whole, of each series
        for saved in look.saved:
            entry = record.get(saved.name)
            series = saved.place.series
            if entry is not None and entry.stamp == saved.stamp:
                state, why = entry.state, "; ".join(entry.unfit) or first_few(entry.codes)
            else:
                state, why = self._look_at(saved, last.get(series))
            if state == "verified" or (state == "complete" and not why):
                last[series] = saved
            link = next((look.links[root] for root in saved.roots if root in look.links), "")
            pins = (
                saved.oddity,
                "the trainer refers to it" if saved.name in rules.kept else "",
                "restored by `prune --undo`" if entry is not None and entry.is_back else "",
                f"the link {escape_name(link)} points to it" if link else "",
                named.get(saved.name, ""),
            )
            one = RunCheckpoint(name=saved.name, series=series, step=saved.place.step, state=state, why=why)
            metric = self._metric(saved, rules.metric) if rules.best is not None else None
            unfit = entry.unfit if entry is not None and state == "unfit" else (why,) * (state in _UNFIT)
            order, pinned = 0 if entry is None else entry.order, next(filter(None, pins), "")
            found.append(replace(one, metric=metric, unfit=unfit, order=order, pinned=pinned, nbytes=saved.nbytes))
        return tuple(found)

    def _look_at(self, saved: SavedCheckpoint, before: SavedCheckpoint | None) -> tuple[State, str]:
        """Return the state of a checkpoint that nobody has verified, and why."""
        temporary = [name for name in saved.files if _TEMPORARY.fullmatch(name.rpartition("/")[2])]
        if temporary:
            return "changing", f"being written, or left by a killed save: {first_few(temporary)}"
        try:
            state, why, holds = self._examine(saved)
            lacks = self._examine(before)[2] - holds if before is not None and state == "complete" else ()
        except CkptError as error:  # of the disk or the network: at the next look it may be gone
            return "incomplete", f"cannot be read: {error.what}"
        if before is not None and lacks:
            return state, f"does not have {first_few(sorted(lacks))}, which {before.name} has"
        return state, why

    def _examine(self, saved: SavedCheckpoint) -> tuple[State, str, frozenset[str]]:
        """Say why a checkpoint cannot be read, as long as its save goes on; what can be and is wrong is bad."""
        if saved.stamp not in self._examined:
            self._examined[saved.stamp] = self._read_headers(saved)
        return self._examined[saved.stamp]

    def _read_headers(self, saved: SavedCheckpoint) -> tuple[State, str, frozenset[str]]:
        holds: frozenset[str] = frozenset()
        for label, path in targets(self._folder, saved):
            try:
                result = examine(path, level="structure", num_workers=1)
            except (UnreadableError, UsageError) as error:
                state: State = "unsupported" if isinstance(error, UnsupportedError) else "incomplete"
                return state, f"{label}: {error.what}" if label else error.what, holds
            holds |= result.has
            for each in (each for each in result.findings if each.code == "not-resumable"):
                return "incomplete", f"{each.where}: {each.what}", holds
        return "complete", "", holds

    def _metric(self, saved: SavedCheckpoint, metric: str) -> float | None:
        """Return what the trainer has measured at this very step."""
        names = (metric, f"eval_{metric}")
        for root in saved.roots:
            for entry in self._progress(f"{root}/{PROGRESS_FILE}", saved.files).get("log_history") or ():
                if isinstance(entry, dict) and entry.get("step") == saved.place.step:
                    values = [entry[name] for name in names if isinstance(entry.get(name), int | float)]
                    if values:
                        return float(values[0])
            for name in names:
                if (value := metric_in_name(root, name)) is not None:
                    return value
        return None

    def _progress(self, file: str, files: Collection[str]) -> Mapping[str, Any]:
        if file not in files:
            return {}
        try:
            found = json.loads(self._folder.read(file) or b"{}")
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _named(self, look: FolderListing, record: Mapping[str, Entry]) -> Iterator[tuple[str, str]]:
        """Yield the checkpoints that files of the trainer name: the one to resume from, the best one."""
        for pointer in (each for each in POINTERS if each in look.unknown):
            text = (self._folder.read(pointer, _MAX_POINTER_BYTES) or b"").decode(errors="replace").strip()
            number = int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None
            for saved in look.saved:
                if text and (
                    saved.name == text.rstrip("/").rpartition("/")[2] or saved.place.step == number is not None
                ):
                    yield saved.name, f"{pointer} names it"
        verified = [saved for saved in look.saved if (entry := record.get(saved.name)) is not None and entry.is_fit]
        states = [self._progress(PROGRESS_FILE, look.unknown)]
        for one in (look.saved, verified):  # the latest that can be read, and the last verified one
            read = (self._progress(f"{saved.name}/{PROGRESS_FILE}", saved.files) for saved in reversed(one))
            states.append(next(filter(None, read), {}))
        for state in states:
            best = state.get("best_model_checkpoint")
            if isinstance(best, str) and best:
                yield best.rstrip("/").rpartition("/")[2], f"{PROGRESS_FILE} names it as the best"


def targets(folder: Folder, saved: SavedCheckpoint) -> Iterator[tuple[str, str]]:
    """Yield what is verified of a checkpoint: (which part of it, path). verl's steps hold several models."""
    for root in saved.roots:
        path = os.path.join(folder.path, root)
        inside = {name[len(root) + 1 :].partition("/")[0] for name in saved.files if name.startswith(f"{root}/")}
        roles = [role for role in ROLES if role in inside]
        if roles:
            yield from ((role, os.path.join(path, role)) for role in roles)
        else:
            yield "" if len(saved.roots) == 1 else root, path


def examine(
    path: str, *, level: Level, num_workers: int, progress: ProgressFactory | None = None, looks: Looks | None = None
) -> Verification:
    """Verify what is at `path`: a step with all of its parts, or one checkpoint."""
    step = open_step(path)
    if step is not None:
        with step:
            total = progress(step.total_bytes) if progress is not None and step.total_bytes else None
            return verify_step(step, level=level, num_workers=num_workers, progress=total, looks=looks)
    with open_path(path, as_part=True) as opened:
        nbytes = opened.checkpoint.total_bytes
        receiver = progress(nbytes) if progress is not None and nbytes else None
        return verify(opened, level=level, num_workers=num_workers, progress=receiver, looks=looks)
