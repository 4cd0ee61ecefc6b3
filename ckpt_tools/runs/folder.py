"""What lies in a run's folder, wherever that is, and the few things that are done there."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache

from ckpt_tools.checkpoint.formats.table import detect_format
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.storage.locations import is_remote, local, open_source, scheme_of

# The names that trainers give to the checkpoints of a run, and the step that a name tells

POINTERS = ("latest", "latest_checkpointed_iteration.txt", "latest_step.txt")
"""Files beside the checkpoints that name the one to resume from: DeepSpeed's, verl's and Megatron's."""
_DIRECTORY = re.compile(r"(checkpoint[-_]|step[-_]|epoch_|global_step_?|iter_)(\d{1,18})", re.ASCII)
_ADAPTER = re.compile(r"(.+_)(\d{9})(_[A-Za-z]\w*)?(\.safetensors)?", re.ASCII)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_LIGHTNING = re.compile(r"(step|epoch)=(\d{1,18})(?!\d)", re.ASCII)
_IN_NAME = re.compile(rf"([A-Za-z_][\w/]*)=({_NUMBER.pattern})(?=[-.]|$)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesPlace:
    """What a name tells."""

    name: str  # Of the checkpoint: that of its file or directory, or what the names of its several files have in common
    series: str  # Checkpoints of one series follow each other by their steps
    step: int | None  # None where the name has no number: `last.ckpt`


def parse_name(name: str, *, is_directory: bool) -> SeriesPlace | None:
    """Return whose checkpoint is called so; None for what no trainer saves."""
    if is_directory and (found := _DIRECTORY.fullmatch(name)):
        return SeriesPlace(name=name, series=f"{found[1]}*", step=int(found[2]))
    if name.endswith(".ckpt") and not name.startswith("."):
        steps = {key: int(number) for key, number in _LIGHTNING.findall(name)}
        series = _NUMBER.sub("*", name) if steps else name
        return SeriesPlace(name=name, series=series, step=steps.get("step", steps.get("epoch")))
    found = _ADAPTER.fullmatch(name)
    if found and not name.startswith(".") and is_directory == (found[4] is None):
        # A model of several experts has a file for each: name_000000500_high_noise.safetensors.
        common = name if found[3] is None else f"{found[1]}{found[2]}{found[4] or ''}"
        return SeriesPlace(name=common, series=f"{found[1]}*{found[4] or ''}", step=int(found[2]))
    return None


@cache
def place_of(name: str) -> SeriesPlace | None:
    """Return whose checkpoint has this name, whether of a file or of a directory."""
    return parse_name(name, is_directory=True) or parse_name(name, is_directory=False)


def checkpoints_in(path: str) -> list[str]:
    """Return the checkpoints in the folder of a run on this machine, in order; none where it is one itself."""
    if is_remote(path) or not os.path.isdir(local(path)):
        return []
    with open_source(path) as source:
        files = source.list_files()
    if detect_format(files, is_file=False) is not None:
        return []
    names = {file.partition("/")[0]: "/" in file for file in files}
    places = (parse_name(name, is_directory=is_directory) for name, is_directory in names.items())
    found = sorted((each.series, each.step or 0, each.name) for each in places if each is not None)
    return [os.path.join(path, name) for *_, name in found if name in names]


def metric_in_name(name: str, metric: str) -> float | None:
    """Return the metric that Lightning has put into a name: `epoch=1-step=20-val_loss=0.25.ckpt`."""
    return next((float(value) for key, value in _IN_NAME.findall(name) if key == metric), None)


TRASH_PREFIX = ".ckpt-trash-"  # What is removed lies below such a name, which no trainer looks for
LATEST_GOOD = "latest-good"  # A link to the newest fit checkpoint, in a bucket an object with its name
MAX_READ_BYTES = 64 << 20  # Of one document that says something about a checkpoint


class BusyError(CkptError):
    """Another process manages the same folder."""

    code = "busy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a listing says of a file."""

    nbytes: int
    version: str  # Differs when the file was written again: its time of modification, an ETag, what a link leads to


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint as it lies there, whole or not."""

    place: SeriesPlace
    roots: tuple[str, ...]  # The files or directories directly in the folder that it consists of
    files: Mapping[str, Facts]  # Relative to the folder
    stamp: str  # Of names, sizes and times of all files
    oddity: str = ""  # Why it cannot be removed: something in it that is not its own

    @property
    def name(self) -> str:
        """As people call it."""
        return self.place.name

    @property
    def written(self) -> str:
        """As `stamp`, without what a new name or another owner changes."""
        plain = {name: replace(each, version=each.version.partition(" ")[0]) for name, each in self.files.items()}
        return stamp_of(plain)

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(facts.nbytes for facts in self.files.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderListing:
    """What a folder holds at one time."""

    saved: tuple[SavedCheckpoint, ...]  # By series, the earliest first
    unknown: tuple[str, ...]  # Names that no trainer gives to a checkpoint: they are never touched
    links: Mapping[str, str] = field(default_factory=dict)
    """Name in the folder that a symbolic link leads to → the link."""
    leftovers: Mapping[str, str] = field(default_factory=dict)
    """What was removed, or an interrupted removal has left → name of the checkpoint that it was."""

    def find(self, name: str) -> SavedCheckpoint | None:
        """Return the checkpoint of that name."""
        return next((each for each in self.saved if each.name == name), None)


class Folder(ABC):
    """A run's folder.

    Args:
        path: As the user named it.
    """

    unseen: tuple[str, ...] = ()  # What nobody can see here of who uses a checkpoint, in words
    notes: tuple[str, ...] = ()  # What the last look has to tell

    def __init__(self, path: str) -> None:
        self.path = path

    @abstractmethod
    def look(self) -> FolderListing:
        """List it."""

    @abstractmethod
    def read(self, file: str, max_bytes: int = MAX_READ_BYTES) -> bytes | None:
        """Return the beginning of a file, whole where it is not longer than that; None when it cannot be read."""

    @abstractmethod
    def write(self, file: str, content: bytes) -> None:
        """Replace a small file of the folder's own, whole or not at all."""

    @abstractmethod
    def lock(self) -> AbstractContextManager[None]:
        """Let one process manage the folder at a time, where that can be had; raise `BusyError` for another."""

    @abstractmethod
    def users(self, saved: Collection[SavedCheckpoint]) -> Mapping[str, str]:
        """Return name of a checkpoint → who reads or writes it, as far as that can be seen."""

    @abstractmethod
    def remove(self, saved: Sequence[SavedCheckpoint]) -> list[str]:
        """Remove checkpoints, no part of which ever looks like one; return those that nobody has opened or changed."""

    @abstractmethod
    def stamp(self, saved: SavedCheckpoint) -> str:
        """Return the stamp that a checkpoint has now."""

    def forget(self, saved: SavedCheckpoint) -> None:  # noqa: B027
        """Let the next read of a checkpoint be one of the disk."""

    def free_bytes(self) -> float:
        """Return how much can still be written."""
        return math.inf

    def age(self, leftover: str) -> float:  # noqa: ARG002 - what is not kept is old
        """Return for how many seconds something is removed."""
        return math.inf

    def restore(self, names: Collection[str]) -> list[str]:  # noqa: ARG002
        """Bring back what was removed, of these names or all; return what came back."""
        raise UsageError("checkpoints that were removed from a bucket cannot be restored", where=self.path)

    @abstractmethod
    def point(self, name: str) -> None:
        """Let `LATEST_GOOD` lead to a checkpoint; to none with ""."""

    @abstractmethod
    def remove_leftover(self, name: str) -> None:
        """End what an interrupted `remove` has begun."""


def open_folder(path: str, also_used_by: Sequence[str] = ()) -> Folder:
    """Open a run's folder, which need not hold anything yet; links in other directories hold what they lead to."""
    if not is_remote(path):
        from ckpt_tools.runs.disk_folder import DiskFolder

        return DiskFolder(local(path), also_used_by)
    if scheme_of(path) not in ("s3", "gs", "az"):
        what = "the run folder must be on a disk or in a bucket (s3, gs, az)"
        raise UsageError(what, where=path, hint="name the run folder")
    from ckpt_tools.runs.bucket_folder import BucketFolder

    return BucketFolder(path)


def gather_saved(
    items: Mapping[str, tuple[bool, Mapping[str, Facts], str]],
) -> tuple[tuple[SavedCheckpoint, ...], tuple[str, ...]]:
    """Put what lies in a folder together to checkpoints.

    An item has: whether it is a directory, its files relative to the folder, and what is odd about it. Return the
    checkpoints by series and step, and the names that are none.
    """
    found: dict[str, list[str]] = {}
    places: dict[str, SeriesPlace] = {}
    unknown = []
    for name, (is_directory, _, _) in sorted(items.items()):
        place = parse_name(name, is_directory=is_directory)
        if place is None:
            unknown.append(name)
            continue
        places.setdefault(place.name, place)
        found.setdefault(place.name, []).append(name)
    saved = []
    for name, roots in found.items():
        files = {file: facts for root in roots for file, facts in items[root][1].items()}
        stamp = stamp_of(files)
        oddity = next((items[root][2] for root in roots if items[root][2]), "")
        saved.append(SavedCheckpoint(place=places[name], roots=tuple(roots), files=files, stamp=stamp, oddity=oddity))
    saved.sort(key=lambda each: (each.place.series, -1 if each.place.step is None else each.place.step, each.name))
    return tuple(saved), tuple(unknown)


def stamp_of(files: Mapping[str, Facts]) -> str:
    """Return what stands for all that a listing says of some files."""
    rows = [[file, facts.nbytes, facts.version] for file, facts in sorted(files.items())]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
