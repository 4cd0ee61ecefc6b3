"""One object on its way to a bucket: front to back, in parts of one size, and looked at when it is there."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from isal import isal_zlib

from ckpt_tools.errors import CkptError, StorageError
from ckpt_tools.storage.remote.store import Bucket, ChangedObjectError, MissingObjectError, StoredObject

MIN_PART_BYTES = 16 << 20  # Smaller parts are more requests than a store takes in a second, when many processes write
_MAX_PARTS = 9_000  # S3 takes 10,000
_MAX_CONCURRENCY = 8

Checked = Literal["none", "sample", "all"]
"""Which parts of an object are read back: the first and the last are the sample."""


def part_bytes_of(nbytes: int) -> int:
    """Return the length of the parts of an object."""
    needed = -(-nbytes // _MAX_PARTS)
    return max(MIN_PART_BYTES, -(-needed >> 20) << 20)


def held_bytes_of(nbytes: int) -> int:
    """Return what an open object takes of memory at least: a part that is being filled and one that is being sent."""
    return min(nbytes, 2 * part_bytes_of(nbytes))


class Upload:
    """One object; any thread may write.

    Args:
        bucket: Where to.
        key: Of the object.
        nbytes: Its size.
        spare: Returns how many parts may be on their way at once.
        gaps: (offset, bytes) of the zeros that nobody writes, in order.
    """

    def __init__(
        self, bucket: Bucket, key: str, nbytes: int, *, spare: Callable[[], int], gaps: Iterable[tuple[int, int]] = ()
    ) -> None:
        self.key = key
        self.nbytes = nbytes
        self.stored: StoredObject | None = None
        """What the store says of it, once it is there."""
        self.checked_bytes = 0
        """How many were read back, and are what was sent."""
        self._bucket = bucket
        self._part_bytes = part_bytes_of(nbytes)
        self._spare = spare
        self._lock = threading.Lock()
        self._stream = PartStream(nbytes, self._part_bytes, self._send, gaps)
        self._writer: Any = None
        self._crcs: list[int] = []

    def write(self, offset: int, buffers: Sequence[memoryview | bytes]) -> int:
        """Write `buffers`, one after the other, from `offset` on; return the number of bytes."""
        with self._lock:
            return self._stream.add(offset, buffers)

    def _send(self, part: bytearray) -> None:
        self._crcs.append(isal_zlib.crc32(part))
        with sending(self._bucket, self.key):
            if len(part) == self.nbytes:
                self._bucket.put(self.key, bytes(part))
                return
            if self._writer is None:
                spare = max(1, min(self._spare(), _MAX_CONCURRENCY))
                self._writer = self._bucket.open_writer(self.key, part_bytes=self._part_bytes, max_concurrency=spare)
            self._writer.write(part)

    def close(self, checked: Checked) -> None:
        """Let the object appear, and compare what is there with what was sent."""
        with self._lock, sending(self._bucket, self.key):
            self._stream.close()
            if self._writer is not None:
                writer, self._writer = self._writer, None
                writer.close()
            elif not self.nbytes:
                self._bucket.put(self.key, b"")
        with sending(self._bucket, self.key):
            self.stored = self._look(checked)

    def _look(self, checked: Checked) -> StoredObject:
        stored = self._bucket.head(self.key)
        if stored.nbytes != self.nbytes:
            raise _differs(self._bucket, self.key, f"{stored.nbytes} bytes where {self.nbytes} were sent")
        last = len(self._crcs) - 1
        for i in {"none": (), "sample": {0, last} if self._crcs else (), "all": range(last + 1)}[checked]:
            start = i * self._part_bytes
            _, content = self._bucket.get(self.key, start, self._part_bytes, etag=stored.etag)
            self.checked_bytes += len(content)
            if isal_zlib.crc32(content) != self._crcs[i]:
                raise _differs(self._bucket, self.key, f"bytes {start}..{start + len(content)} are not those sent")
        return stored

    def abort(self) -> None:
        """Give up: what was sent is forgotten by the store. Does nothing once the object is there."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with sending(self._bucket, self.key):
                writer.__exit__(InterruptedError, None, None)


@contextmanager
def sending(bucket: Bucket, key: str) -> Iterator[None]:
    """Tell what goes wrong with an object that is being written: it is the store's fault, whatever it says."""
    try:
        with bucket.telling(key, "PUT"):
            yield
    except ChangedObjectError:
        raise _differs(bucket, key, "it changed meanwhile") from None
    except MissingObjectError as error:
        raise _differs(bucket, key, error.what) from None


def _differs(bucket: Bucket, key: str, what: str) -> StorageError:
    hint = "run the same command again"
    return StorageError(f"the store does not have what was sent: {what}", where=bucket.label(key), hint=hint)


# Put the pieces of a file, which come in nearly the right order, in that order and into parts of one size.


class PartStream:
    """One file on its way; the caller lets one thread in at a time.

    Args:
        nbytes: Size of the file.
        part_bytes: Size of every part but the last.
        emit: Takes each part, in order. It may keep the bytes: a part is never touched again.
        gaps: (offset, bytes) of the zeros that nobody adds, in order; an iterator is drawn from as far as needed.
    """

    __slots__ = ("_early", "_emit", "_gap", "_gaps", "_held", "_part", "_part_bytes", "nbytes", "position")

    def __init__(
        self, nbytes: int, part_bytes: int, emit: Callable[[bytearray], object], gaps: Iterable[tuple[int, int]] = ()
    ) -> None:
        self.nbytes = nbytes
        self.position = 0
        """Everything before is in a part."""
        self._part_bytes = part_bytes
        self._emit = emit
        self._part = bytearray()
        self._early: list[tuple[int, bytes]] = []
        self._held = 0
        self._gaps = iter(gaps)
        self._gap = next(self._gaps, None)

    @property
    def held_bytes(self) -> int:
        """What is kept in memory: pieces that came early, and the part that is being filled."""
        return self._held + len(self._part)

    def add(self, offset: int, pieces: Iterable[memoryview | bytes]) -> int:
        """Add `pieces`, one after the other, from `offset` on; return their bytes. They are the caller's again."""
        start = offset
        self._catch_up()  # the file may begin with a gap
        for piece in pieces:
            end = offset + len(piece)
            if end == offset:
                continue
            if end > self.nbytes:
                raise CkptError(f"bytes {offset}..{end} of {self.nbytes} are written twice, or beyond the end")
            if offset == self.position:
                self._append(piece)
                self._catch_up()
            else:
                heapq.heappush(self._early, (offset, bytes(piece)))
                self._held += end - offset
            offset = end
        return offset - start

    def close(self) -> None:
        """Emit the last part; raise `CkptError` where bytes were never added."""
        self._catch_up()
        if self.position != self.nbytes:
            raise CkptError(f"nothing was written from byte {self.position} of {self.nbytes} on")
        if self._part:
            self._flush()

    def _catch_up(self) -> None:
        while True:
            if self._gap is not None and self._gap[0] == self.position:
                zeros, self._gap = bytes(self._gap[1]), next(self._gaps, None)
                self._append(zeros)
            elif self._early and self._early[0][0] == self.position:
                _, piece = heapq.heappop(self._early)
                self._held -= len(piece)
                self._append(piece)
            else:
                break
        if self._early and self._early[0][0] < self.position:
            raise CkptError(f"bytes from {self._early[0][0]} on are written twice")

    def _append(self, piece: memoryview | bytes) -> None:
        rest = memoryview(piece)
        while rest:
            room = self._part_bytes - len(self._part)
            self._part += rest[:room]
            self.position += len(rest[:room])
            rest = rest[room:]
            if len(self._part) == self._part_bytes:
                self._flush()

    def _flush(self) -> None:
        part, self._part = self._part, bytearray()
        self._emit(part)
