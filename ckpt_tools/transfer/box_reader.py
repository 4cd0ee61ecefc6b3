"""Read boxes of tensors out of an open checkpoint, of any layout, and no byte more."""

from __future__ import annotations

from dataclasses import replace

from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.entries import Chunk, TensorEntry
from ckpt_tools.checkpoint.formats.manifest import BLOCK_BYTES
from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.checkpoint.layout import Box, BoxIndex, split_blocks
from ckpt_tools.checkpoint.recorded_checks import Ledger
from ckpt_tools.storage.source import short_file
from ckpt_tools.transfer.plan import check_complete, chunk_index
from ckpt_tools.transfer.read import Buffers, Checksums, read_block
from ckpt_tools.transfer.tensor_digest import AsStored


class BytesReader:
    """Reads boxes as row-major bytes; for one thread at a time.

    CRC-32s are checked of every chunk that is read whole and whose writer recorded one. Memory beside what is returned
    or filled: two buffers of a block.
    """

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._indexes: dict[str, tuple[TensorEntry, BoxIndex[Chunk]]] = {}
        self._buffers = Buffers()
        self._into = _Target()
        self.bytes_read = 0
        """Payload bytes read so far."""
        self.ledger = Ledger()
        """What is recorded of the boxes that were read, and of tensors that were read whole."""
        self._digested: set[str] = set()

    def read(self, entry: TensorEntry) -> memoryview:
        """Return a whole tensor, in its own dtype."""
        box = Box((0,) * len(entry.shape), entry.shape)
        raw, opened, fqn = self._restrict(entry, box), self._opened, entry.fqn
        content = memoryview(bytearray(entry.nbytes))
        self._fill(raw, box, entry.dtype, content)
        if opened.manifest is not None and fqn in opened.manifest.tensors and fqn not in self._digested:
            self._digested.add(fqn)
            stored = AsStored(raw, chunk_index(raw), opened.source)
            if any(entry is own for own in opened.checkpoint.tensors):  # and not laid out for this read
                stored.add(box, content)
            record = opened.manifest.tensors[fqn]
            self.ledger.compare("digests", f"tensor {fqn!r}", stored.digest(), record.digest, opened.source.root)
        return content

    def read_into(self, entry: TensorEntry, box: Box, dtype: DType, memory: memoryview) -> None:
        """Fill `memory` with the elements of `box` as `dtype`; only floating-point types are cast."""
        self._fill(self._restrict(entry, box), box, dtype, memory)

    def _fill(self, entry: TensorEntry, box: Box, dtype: DType, memory: memoryview) -> None:
        chunks, checksums = chunk_index(entry), Checksums()
        position = 0
        for block in split_blocks(box.sizes, dtype.bits, block_bytes=BLOCK_BYTES, granule=dtype.granule):
            part = Box(tuple(o + b for o, b in zip(box.offsets, block.offsets, strict=True)), block.sizes)
            target = memory[position : position + dtype.num_bytes(block.num_elems)]
            if entry.dtype is dtype:
                self._into.target = target
                _, reads, count = read_block(entry, chunks, dtype, part, self._opened.source, self._into)
            else:
                content, reads, count = read_block(entry, chunks, dtype, part, self._opened.source, self._buffers)
                target[:] = content
            checksums.add(reads)
            self.bytes_read += count
            position += len(target)
        for chunk, part in chunks.overlaps(box):
            is_held = part == chunk.box and checksums.check(entry, chunk, self._opened.source)
            self.ledger.count_crcs(is_held, chunk.crc32 is not None)

    def _restrict(self, entry: TensorEntry, box: Box) -> TensorEntry:
        """Return `entry` with the chunks that `box` needs, on their raw bytes; only their headers are read."""
        known = self._indexes.get(entry.fqn)
        if known is None or known[0] is not entry:  # a part that was laid out for this read has the whole's name
            check_complete(entry)
            known = self._indexes[entry.fqn] = (entry, chunk_index(entry))
        needed = tuple(chunk for chunk, _ in known[1].overlaps(box))
        entry = self._opened.resolve(replace(entry, chunks=needed))
        for chunk in entry.chunks:  # before memory is taken for what headers claim
            span, size = chunk.span, self._opened.source.size(chunk.span.file)
            if span.offset + span.nbytes > size:
                raise short_file(span.file, span.offset, span.nbytes, size, what=f"tensor {entry.fqn!r}: ")
        return entry


class _Target(Buffers):
    """Buffers whose first one is the memory that shall be filled, so that nothing is copied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.target = memoryview(b"")

    def get(self, which: int, nbytes: int, *, shift: int = 0) -> memoryview:
        return self.target[shift : shift + nbytes] if which == 0 else super().get(which, nbytes, shift=shift)
