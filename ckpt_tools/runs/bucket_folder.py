"""A run's folder in a bucket, where nothing can be renamed.

Removing begins with a note of what is removed, object by object, then takes away what makes it a checkpoint, then the
rest, then the note: whoever finds one goes on there, and leaves alone what was written since.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ckpt_tools.checkpoint.formats.file_names import is_weights
from ckpt_tools.runs.folder import (
    LATEST_GOOD,
    MAX_READ_BYTES,
    TRASH_PREFIX,
    Facts,
    Folder,
    FolderListing,
    SavedCheckpoint,
    gather_saved,
    stamp_of,
)
from ckpt_tools.sandbox import wire
from ckpt_tools.storage.remote.store import Bucket, MissingObjectError, StoredObject
from ckpt_tools.storage.run_leases import RECORD_NAME
from ckpt_tools.text import is_plain_path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    """What is removed."""

    roots: tuple[str, ...]
    objects: Mapping[str, str]  # Key below the folder → its version


class BucketFolder(Folder):
    """A prefix; see `Folder`."""

    unseen = ("other readers and writers of the bucket, where deleted checkpoints cannot be restored",)

    def __init__(self, path: str) -> None:
        super().__init__(path.rstrip("/"))
        self._bucket = Bucket(path)

    def _key(self, file: str) -> str:
        return f"{self._bucket.key}/{file}" if self._bucket.key else file

    def _list(self, below: str = "") -> dict[str, Facts]:
        prefix = self._key(below).rstrip("/")
        start = len(self._key(""))
        return {found.key[start:]: _facts(found) for found in self._bucket.list(prefix) if len(found.key) > start}

    def look(self) -> FolderListing:
        """List every object below the prefix."""
        files: dict[str, dict[str, Facts]] = {}
        plain: dict[str, bool] = {}
        leftovers = {}
        for name, facts in self._list().items():
            root, slash, _ = name.partition("/")
            if root.startswith(TRASH_PREFIX):
                leftovers[root] = root.removeprefix(TRASH_PREFIX)
            elif name not in (RECORD_NAME, LATEST_GOOD):
                files.setdefault(root, {})[name] = facts
                plain[root] = plain.get(root, True) and bool(slash)
        items = {
            root: (plain[root], facts, "" if all(map(is_plain_path, facts)) else "one of its keys is not a plain path")
            for root, facts in files.items()
        }
        saved, unknown = gather_saved(items)
        return FolderListing(saved=saved, unknown=unknown, leftovers=leftovers)

    def read(self, file: str, max_bytes: int = MAX_READ_BYTES) -> bytes | None:
        """Return the beginning of an object."""
        try:
            if not self._bucket.head(self._key(file)).nbytes:  # of which no store gives a range
                return b""
            return bytes(self._bucket.get(self._key(file), 0, max_bytes)[1])
        except MissingObjectError:
            return None

    def write(self, file: str, content: bytes) -> None:
        """Write an object; a store does that whole or not at all."""
        self._bucket.put(self._key(file), content)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Nothing: a lock in a store would outlive its owner. Whoever else manages it does what this one would."""
        yield

    def users(self, saved: Collection[SavedCheckpoint]) -> Mapping[str, str]:
        """See what is being written by ckpt, from its claim."""
        claimed = (each.name for each in saved if any("/.ckpt/" in f"/{name}" for name in each.files))
        return dict.fromkeys(claimed, "a ckpt process that is writing it")

    def remove(self, saved: Sequence[SavedCheckpoint]) -> list[str]:
        """Leave a note of each, and remove what it names, what makes it a checkpoint first."""
        gone = []
        for each in saved:
            now = self._now(each)
            if {name: now.get(name) for name in each.files} != dict(each.files):
                continue
            note = f"{TRASH_PREFIX}{each.name}"
            versions = {name: facts.version for name, facts in each.files.items()}
            self.write(note, wire.dumps(_Note(roots=each.roots, objects=versions)).encode())
            self.remove_leftover(note)
            gone.append(each.name)
        return gone

    def _now(self, saved: SavedCheckpoint) -> dict[str, Facts]:
        return {name: facts for root in saved.roots for name, facts in self._list(root).items()}

    def stamp(self, saved: SavedCheckpoint) -> str:
        """List it again."""
        return stamp_of(self._now(saved))

    def point(self, name: str) -> None:
        """Write the name, where it is another one."""
        if name and self.read(LATEST_GOOD) != name.encode():
            self.write(LATEST_GOOD, name.encode())

    def remove_leftover(self, name: str) -> None:
        """Remove the objects that a note names, as far as they are those that it was written about."""
        note = _Note(roots=(), objects={})  # a damaged one removes nothing
        with suppress(ValueError, RecursionError):
            note = wire.loads(_Note, (self.read(name) or b"").decode())
        there = {file: facts for root in note.roots if "/" not in root for file, facts in self._list(root).items()}
        ours = [file for file, version in note.objects.items() if file in there and there[file].version == version]
        for file in sorted(ours, key=lambda file: (not _is_marker(file), file)):
            self._bucket.delete(self._key(file))
        self._bucket.delete(self._key(name))


def _facts(stored: StoredObject) -> Facts:
    return Facts(nbytes=stored.nbytes, version=stored.etag or stored.modified.isoformat())


def _is_marker(file: str) -> bool:
    """Is this what readers look for first? Everything is, but the data of DCP and what lies beside the weights."""
    return is_weights(file) and not file.endswith(".distcp")
