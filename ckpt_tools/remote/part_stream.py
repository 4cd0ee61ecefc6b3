"""Put the pieces of a file, which come in nearly the right order, in that order and into parts of one size.

A store takes an object front to back. Workers finish their blocks in any order, a few blocks apart: what comes early
waits here, and what is next goes into the part that is being filled. Pure: `emit` takes the parts, in order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from ckpt_tools.errors import CkptError


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
        self,
        nbytes: int,
        part_bytes: int,
        emit: Callable[[bytearray], object],
        gaps: Iterable[tuple[int, int]] = (),
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
