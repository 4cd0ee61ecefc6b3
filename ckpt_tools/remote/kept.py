"""Bytes of remote files that were fetched and may be asked for again; what was used least recently goes first."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict


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
