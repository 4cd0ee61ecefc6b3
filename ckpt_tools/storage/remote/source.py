"""A directory on another machine: listed once, read by ranges, each pinned to the version that the listing named.

Large reads go straight into the caller's memory. Small ones are served from what is kept: the first 1 MiB of a file,
where headers stand, and runs read ahead where small reads follow each other.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from ckpt_tools.errors import LimitError, UnreadableError
from ckpt_tools.storage.source import LOST_HINT, MAX_FILES, MAX_LISTED_DEPTH, Source, T, short_file
from ckpt_tools.text import is_plain_path

# Bytes of remote files that were fetched and may be asked for again; what was used least recently goes first


class Kept:
    """Runs of bytes by file and place, `limit_bytes` in all. Not safe for threads: whoever owns it locks.

    Args:
        limit_bytes: A longer run than this is not kept.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._nbytes = 0
        self._runs: OrderedDict[tuple[str, int], bytes | bytearray] = OrderedDict()
        self._starts: dict[str, list[int]] = {}

    def put(self, file: str, offset: int, run: bytes | bytearray) -> None:
        """Keep `run`, the bytes of `file` from `offset` on, and no run that lies within another."""
        if not run or len(run) > self._limit_bytes:
            return
        kept = self.find(file, offset, len(run))
        if kept is not None and len(kept) == len(run):
            return
        starts = self._starts.get(file, [])
        for start in starts[bisect_left(starts, offset) : bisect_left(starts, offset + len(run))]:
            if start + len(self._runs[file, start]) <= offset + len(run):
                self._drop((file, start))
        while self._runs and self._nbytes + len(run) > self._limit_bytes:
            self._drop(next(iter(self._runs)))
        self._runs[file, offset] = run
        self._nbytes += len(run)
        insort(self._starts.setdefault(file, []), offset)

    def find(self, file: str, offset: int, nbytes: int) -> memoryview | None:
        """Return what is kept of the bytes [offset, offset + nbytes): a beginning of them, at least one; else None."""
        starts = self._starts.get(file, ())
        at = bisect_right(starts, offset) - 1
        if at < 0:
            return None
        start = starts[at]
        run = self._runs[file, start]
        if offset >= start + len(run):
            return None
        self._runs.move_to_end((file, start))
        return memoryview(run)[offset - start : offset - start + nbytes]

    def _drop(self, key: tuple[str, int]) -> None:
        self._nbytes -= len(self._runs.pop(key))
        starts = self._starts[key[0]]
        starts.pop(bisect_left(starts, key[1]))
        if not starts:
            del self._starts[key[0]]


# Many small ranges of remote files, fetched at once by few requests: neighbours are joined, and all are under way

Range = tuple[str, int, int]  # File, first byte, number of bytes


class Joined(NamedTuple):
    """Ranges of one file that one request fetches."""

    file: str
    start: int
    nbytes: int
    parts: list[tuple[int, int]]
    """First byte in the file and number of bytes of each of them, what overlaps being one; in order."""


def join(ranges: Iterable[Range], *, max_gap: int, max_bytes: int) -> Iterator[Joined]:
    """Join ranges of a file that lie no more than `max_gap` bytes apart, up to `max_bytes` at once."""
    for file, group in groupby(sorted(each for each in ranges if each[2] > 0), key=lambda each: each[0]):
        parts: list[tuple[int, int]] = []
        first = end = 0
        for _, start, nbytes in group:
            if parts and (start - end > max_gap or start + nbytes - first > max_bytes) and start >= end:
                yield Joined(file, first, end - first, parts)
                parts = []
            if not parts:
                first = end = start
            if parts and start <= end:  # touches the one before, or lies in it
                begun, _ = parts.pop()
                parts.append((begun, max(end, start + nbytes) - begun))
            else:
                parts.append((start, nbytes))
            end = max(end, start + nbytes)
        yield Joined(file, first, end - first, parts)


def fetch_joined(
    ranges: Iterable[Range],
    fetch: Callable[[str, int, memoryview], None],
    keep: Callable[[str, int, bytes], None],
    *,
    max_gap: int,
    max_bytes: int,
    workers: int,
) -> None:
    """Fetch ranges, in any order, and keep just them; for `max_gap` and `max_bytes` see `join`.

    `fetch` fills a buffer with the bytes of a file that begin at an offset, and `keep` is given those from an offset
    on; both are called from several threads. What `fetch` raised first is raised, and the rest is left.
    """

    def work(joined: Joined) -> None:
        run = bytearray(joined.nbytes)
        fetch(joined.file, joined.start, memoryview(run))
        for start, nbytes in joined.parts:
            keep(joined.file, start, bytes(memoryview(run)[start - joined.start :][:nbytes]))

    found = list(join(ranges, max_gap=max_gap, max_bytes=max_bytes))
    if not found:
        return
    pool = ThreadPoolExecutor(min(workers, len(found)), thread_name_prefix="ckpt-ahead")
    try:
        for _ in pool.map(work, found):
            pass
    finally:
        pool.shutdown(cancel_futures=True)


HEAD_BYTES = 1 << 20
"""The first GET of a file asks for so many: nearly every header fits. Reads as long as this are never kept."""
MAX_GAP_BYTES = 1 << 20  # Reads of a file that are no further apart follow each other
MAX_RUN_BYTES = 16 << 20  # Most bytes that one request reads ahead
MAX_KEPT_BYTES = 64 << 20  # Of one source
_AT_ONCE = 16  # Requests for what is fetched ahead of its use, and files that are begun at the same time
_MAX_FOLLOWED = 256  # Files whose sequence of reads is remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """What the listing says of a file."""

    nbytes: int
    version: Mapping[str, object] = field(default_factory=dict)
    """What tells this content from any other of the same name and size: an object id, an ETag. Plain JSON values."""


@dataclass(slots=True)
class _Sequence:
    """How a file is being read."""

    end: int = 0
    nbytes: int = 0
    """Read without a leap, gaps included: so much, at most, is read ahead, so that less than half is ever in vain."""


class RemoteSource(Source):
    """The files below a place on another machine. Subclasses say what there is (`_list`) and get bytes (`_fetch`).

    Args:
        root: The place as the user named it, without a secret.
    """

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self._listed: dict[str, RemoteFile] | None = None
        self._used: set[str] = set()
        self._kept = Kept(MAX_KEPT_BYTES)
        self._sequences: OrderedDict[str, _Sequence] = OrderedDict()
        self._lock = threading.Lock()
        self._fetching: dict[str, threading.Lock] = {}

    @abstractmethod
    def _list(self) -> Iterable[tuple[str, RemoteFile]]:
        """Yield every file by its name below the root; asked once. Directories are none."""

    @abstractmethod
    def _fetch(self, file: str, facts: RemoteFile, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of `file` from `offset` on by one request; from any thread.

        Bytes that are not of the version that `facts` names are an error: see `changed`.
        """

    def files(self) -> Mapping[str, RemoteFile]:
        """Return every file, in order, those in hidden directories too."""
        with self._lock:
            if self._listed is None:
                found: dict[str, RemoteFile] = {}
                for name, facts in self._list():
                    if not is_plain_path(name):
                        what = "a file name leads out of the checkpoint or is not a plain relative name"
                        raise UnreadableError(what, where=self.label(name))
                    found[name] = facts
                    if len(found) > MAX_FILES:
                        raise LimitError(f"more than {MAX_FILES} files", where=self.root)
                self._listed = dict(sorted(found.items()))
            return self._listed

    def list_files(self, *, max_depth: int = MAX_LISTED_DEPTH, max_files: int = MAX_FILES) -> dict[str, int]:
        """Return what was listed."""
        found = {}
        for name, facts in self.files().items():
            *directories, _ = name.split("/")
            if len(directories) <= max_depth and not any(each.startswith(".") for each in directories):
                found[name] = facts.nbytes
                if len(found) > max_files:
                    raise LimitError(f"more than {max_files} files", where=self.root)
        return found

    def size(self, file: str) -> int:
        """Return the size of `file` in bytes."""
        return self._facts(file).nbytes

    def _facts(self, file: str) -> RemoteFile:
        facts = self.files().get(file)
        if facts is None:
            where = self.label(file)
            raise UnreadableError("a file is missing", where=where, hint=LOST_HINT) from FileNotFoundError(file)
        self._used.add(file)
        return facts

    def each(self, work: Callable[[str], T], files: Sequence[str]) -> list[T]:
        """Return what `work` makes of every file, in order; it waits for several at a time."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(work, files))

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of `file` that begin at `offset`; see `Source`."""
        facts = self._facts(file)
        if offset < 0 or offset + len(buffer) > facts.nbytes:
            raise short_file(self.label(file), offset, len(buffer), facts.nbytes)
        buffer = buffer.cast("B")
        offset, buffer = self._take(file, offset, buffer)
        if not buffer:
            return
        if len(buffer) >= HEAD_BYTES:
            self._fetch(file, facts, offset, buffer)
            return
        with self._lock:
            fetching = self._fetching.setdefault(file, threading.Lock())
        with fetching:  # one small read of a file at a time: the next one finds what this one reads ahead
            offset, buffer = self._take(file, offset, buffer)
            if buffer:
                self._fetch_run(file, facts, offset, buffer)

    def _take(self, file: str, offset: int, buffer: memoryview) -> tuple[int, memoryview]:
        """Fill a beginning of `buffer` from what is kept, and return the rest of it."""
        with self._lock:
            while buffer and (kept := self._kept.find(file, offset, len(buffer))) is not None:
                buffer[: len(kept)] = kept
                offset, buffer = offset + len(kept), buffer[len(kept) :]
        return offset, buffer

    def _fetch_run(self, file: str, facts: RemoteFile, offset: int, buffer: memoryview) -> None:
        start = offset
        if offset + len(buffer) <= HEAD_BYTES:
            start, nbytes = 0, HEAD_BYTES
        else:
            nbytes = max(len(buffer), self._ahead(file, offset, len(buffer)))
        run = bytearray(min(nbytes, facts.nbytes - start))
        self._fetch(file, facts, start, memoryview(run))
        buffer[:] = run[offset - start : offset - start + len(buffer)]
        self.keep(file, start, run)

    def _ahead(self, file: str, offset: int, nbytes: int) -> int:
        """Return how many bytes to read from `offset` on where `nbytes` are asked for and not kept."""
        with self._lock:
            sequence = self._sequences.setdefault(file, _Sequence())
            self._sequences.move_to_end(file)
            if len(self._sequences) > _MAX_FOLLOWED:
                self._sequences.popitem(last=False)
            gap = offset - sequence.end
            sequence.nbytes = sequence.nbytes + gap + nbytes if 0 <= gap <= MAX_GAP_BYTES else nbytes
            share = MAX_KEPT_BYTES // (2 * len(self._sequences))
            ahead = max(nbytes, min(sequence.nbytes, MAX_RUN_BYTES, share))
            sequence.nbytes += ahead - nbytes
            sequence.end = offset + ahead
            return ahead

    def prefetch(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Fetch what is not kept, neighbours together and all at once; see `Source`."""
        files = self.files()
        known = (each for each in ranges if each[0] in files and 0 <= each[1] <= files[each[0]].nbytes - each[2])
        with self._lock:
            wanted = [each for each in known if len(self._kept.find(*each) or b"") < each[2]]
        limits = {"max_gap": MAX_GAP_BYTES, "max_bytes": MAX_RUN_BYTES, "workers": _AT_ONCE}
        fetch_joined(wanted, lambda file, start, run: self._fetch(file, files[file], start, run), self.keep, **limits)

    def keep(self, file: str, offset: int, run: bytes | bytearray) -> None:
        """Keep bytes of `file` that were fetched, for reads to come. They must not change any more."""
        with self._lock:
            self._kept.put(file, offset, run)

    def identities(self) -> dict[str, Mapping[str, object]]:
        """Return size and version of every file that was looked at."""
        files = self.files()
        return {file: {"nbytes": files[file].nbytes, **files[file].version} for file in sorted(self._used)}

    def check_unchanged(self) -> None:
        """Nothing to look at again: every range was asked for under the condition that its file is the listed one."""

    def close(self) -> None:
        """Free what is kept."""
        with self._lock:
            self._kept = Kept(0)
