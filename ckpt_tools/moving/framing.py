"""What lies around the payloads of a file that a plan writes: known from the plan and the CRC-32s, never read back.

The digest is that of `formats.frames`, which reads the same bytes from a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import xxhash

from ckpt_tools.formats.torch_zip import item_frame
from ckpt_tools.moving.plan import Copy, FilePlan, Seal, is_plain

_ZEROS = bytes(1 << 16)


def has_frames(plan: FilePlan) -> bool:
    """Does the file hold anything around its payloads that says what they are?"""
    return plan.seal is not None or any(copy.encoding != "raw" for copy in plan.copies)


def digest_planned_frames(plan: FilePlan, crcs: Mapping[int, int]) -> str:
    """Return the digest of every byte of a file that belongs to no payload; `crcs` are by where a payload begins."""
    state = xxhash.xxh3_128()
    position = 0
    for start, piece, nbytes in sorted(_pieces(plan, crcs), key=lambda each: each[:1] + each[2:]):
        _skip(state, start - position)
        state.update(piece)
        position = start + (nbytes or len(piece))
    _skip(state, plan.nbytes - position)
    return state.hexdigest()


class Sealing:
    """What closes the payloads of an archive: each piece as soon as it is known. One thread at a time."""

    def __init__(self, plan: FilePlan, seal: Seal) -> None:
        self._starts = sorted({copy.offset for copy in plan.copies if not is_plain(copy.source)})
        self._crcs: dict[int, int] = {}
        self._num_told = 0
        self._pieces = iter(seal(self._crcs[start] for start in self._starts))

    def add(self, start: int | None = None, crc32: int = 0) -> list[tuple[int, bytes]]:
        """Take the CRC-32 of the payload at `start`, if there is any; return what can be written now."""
        if start is None:
            return list(self._pieces)
        self._crcs[start] = crc32
        told = self._num_told
        while self._num_told < len(self._starts) and self._starts[self._num_told] in self._crcs:
            self._num_told += 1
        return [next(self._pieces) for _ in range(self._num_told - told)]


def gaps_of(plan: FilePlan) -> Iterator[tuple[int, int]]:
    """Yield (offset, bytes) of what lies between the pieces of a file, and is zeros, in order."""
    if plan.seal is not None:  # an archive has none
        return
    position = len(plan.head)
    for start, end in sorted(map(_extent, plan.copies)):
        if start > position:
            yield position, start - position
        position = max(position, end)
    if position < plan.nbytes:
        yield position, plan.nbytes - position


def _extent(copy: Copy) -> tuple[int, int]:
    if copy.encoding == "raw":
        return copy.offset, copy.offset + copy.nbytes
    frame = item_frame(copy.dtype, copy.box.sizes)
    start = copy.offset - frame.payload_offset
    return start, start + frame.nbytes


def _pieces(plan: FilePlan, crcs: Mapping[int, int]) -> Iterator[tuple[int, bytes, int]]:
    """Yield (offset, bytes, 0) of what lies around payloads, and (offset, b"", bytes) of those."""
    if plan.head:
        yield 0, plan.head, 0
    for copy in plan.copies:
        if copy.nbytes:
            yield copy.offset, b"", copy.nbytes
        if copy.encoding != "raw":
            frame = item_frame(copy.dtype, copy.box.sizes)
            yield copy.offset - frame.payload_offset, frame.before, 0
            yield copy.offset + copy.nbytes, frame.after(crcs[copy.offset]), 0
    if plan.seal is not None:
        for offset, content in plan.seal([crcs[start] for start in sorted(crcs)]):
            yield offset, content, 0


def _skip(state: xxhash.xxh3_128, nbytes: int) -> None:
    """Add the zeros that lie between two pieces."""
    while nbytes > 0:
        state.update(_ZEROS[:nbytes])
        nbytes -= len(_ZEROS)
