"""The digest of a tensor as it is stored, from bytes that are read in the blocks of what is made of it.

Blocks are bounded in bytes, so a tensor that is cast has others than its source.
"""

from __future__ import annotations

import threading
from bisect import bisect_right

import xxhash

from ckpt_tools.description.checkpoint import Chunk, TensorEntry
from ckpt_tools.description.flat import flat_boxes
from ckpt_tools.description.layout import Box, BoxIndex
from ckpt_tools.formats.digest import digest_tensor
from ckpt_tools.moving.plan import blocks_of
from ckpt_tools.moving.read import Buffers, read_block
from ckpt_tools.moving.strides import start_of
from ckpt_tools.storage.source import Source

_Stream = tuple[xxhash.xxh3_128 | None, int]
"""What has seen the block that has begun, if one has, as far as an element."""
_AGAIN_ELEMS = 1 << 16
"""Read at once, of what is read again."""
BLOCKS_IN_A_ROW = 4
"""What one worker should take: of the blocks that they make the last may end elsewhere, and is read on."""


class AsStored:
    """Takes boxes of one tensor, from any thread; a block that a thread leaves before its end is read to the end."""

    def __init__(self, entry: TensorEntry, chunks: BoxIndex[Chunk], source: Source) -> None:
        self._read_from = (entry, chunks, source)
        self._whole = Box((0,) * len(entry.shape), entry.shape)
        self._starts = [start_of(block, self._whole) for block in blocks_of(entry, entry.dtype)]
        self._streams: dict[int, _Stream] = {}
        self._digests: dict[int, bytes] = {}

    def add(self, box: Box, content: memoryview) -> None:
        """Take the row-major bytes of a box that is one run of the tensor."""
        first, size = start_of(box, self._whole), len(content) // max(1, box.num_elems)
        at, end, thread = first, first + box.num_elems, threading.get_ident()
        hasher, before = self._streams.get(thread, (None, at))
        if before != at:
            self._complete((hasher, before))
            hasher = None
        while at < end:
            index, stop = self._block_of(at)
            to = min(end, stop)
            hasher = xxhash.xxh3_128() if at == self._starts[index] else hasher
            if hasher is not None:
                hasher.update(content[(at - first) * size : (to - first) * size])
                if to == stop:
                    self._digests[index], hasher = hasher.digest(), None
            at = to
        self._streams[thread] = hasher, end

    def digests(self) -> dict[int, bytes]:
        """Return those of all blocks that begin in what was added, once nothing more will be."""
        for stream in self._streams.values():
            self._complete(stream)
        self._streams = {}
        return self._digests

    def digest(self) -> str | None:
        """Return the tensor's; None when not all of it was added."""
        found = self.digests()
        return digest_tensor(b"".join(found[i] for i in sorted(found))) if len(found) == len(self._starts) else None

    def _block_of(self, position: int) -> tuple[int, int]:
        """Return the block that an element lies in, and where that ends."""
        index = bisect_right(self._starts, position)
        return index - 1, self._starts[index] if index < len(self._starts) else self._whole.num_elems

    def _complete(self, stream: _Stream) -> None:
        (hasher, start), (entry, chunks, source) = stream, self._read_from
        if hasher is None:
            return
        buffers = Buffers()
        index, stop = self._block_of(start - 1)
        for at in range(start, stop, _AGAIN_ELEMS):
            for box in flat_boxes(entry.shape, at, min(at + _AGAIN_ELEMS, stop)):
                hasher.update(read_block(entry, chunks, entry.dtype, box, source, buffers)[0])
        self._digests[index] = hasher.digest()
