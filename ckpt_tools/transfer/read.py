"""Read one block of a tensor out of whatever chunks hold it, in bounded memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from isal import isal_zlib

from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.entries import Chunk, TensorEntry
from ckpt_tools.checkpoint.layout import Box, BoxIndex
from ckpt_tools.errors import CkptError, UnreadableError
from ckpt_tools.storage.source import Source
from ckpt_tools.transfer.box_bytes import MAX_WASTE, StridedPart, byte_box, is_contiguous, move, row_major, start_of
from ckpt_tools.transfer.casting import cast
from ckpt_tools.transfer.plan import blocks_of, chunk_index

ALIGNMENT = 64  # Bytes of a cache line: positions that differ by a multiple of it are aligned alike
_WORTH_ALIGNING_BYTES = 64 << 10
_CRC_PASS_BYTES = 4 << 20


class Buffers:
    """One worker's memory: buffers that begin on a page, grown to what its blocks need.

    Buffer 0 is the block, 1 is scratch, and 2 holds tiles: what this and the next blocks need of chunks that are stored
    in another order.

    The kernel copies between a buffer and a page of a file many times slower when the two are aligned differently
    (measured: 2.8 ms instead of 0.3 ms for 4 MiB on an AMD EPYC, 8 bytes off). So what is read goes to the
    beginning of a page, and what is written to an odd place of a file (the data of a safetensors file begins at any
    multiple of 8) comes from as odd a place of a buffer.
    """

    def __init__(self) -> None:
        self._memory: list[mmap.mmap] = [mmap.mmap(-1, mmap.PAGESIZE) for _ in range(3)]
        self._ahead: Box | None = None
        self._tiles: dict[int, tuple[Chunk, StridedPart, memoryview]] = {}
        self._used = 0

    def get(self, which: int, nbytes: int, *, shift: int = 0) -> memoryview:
        """Return `nbytes` of a buffer, `shift` bytes past the beginning of a page."""
        if len(self._memory[which]) < shift + nbytes:
            self._memory[which] = mmap.mmap(-1, ALIGNMENT + nbytes)
        return memoryview(self._memory[which])[shift : shift + nbytes]

    def tile(self, chunk: Chunk, ahead: Box, itemsize: int) -> tuple[StridedPart, memoryview] | None:
        """Return what is there of a chunk for the blocks `ahead`, always one object; None where nothing is, yet."""
        if ahead is not self._ahead:
            self._ahead, self._tiles, self._used = ahead, {}, 0
            self.get(2, MAX_WASTE * ahead.num_elems * itemsize)
        found = self._tiles.get(id(chunk))
        return None if found is None else found[1:]

    def new_tile(self, strided: StridedPart) -> memoryview:
        """Return memory for a tile that `tile` has not found."""
        return self.get(2, self._used + strided.nbytes)[self._used :]

    def keep_tile(self, chunk: Chunk, strided: StridedPart, runs: memoryview) -> None:
        """Remember a tile that has been read whole into its memory."""
        self._tiles[id(chunk)] = chunk, strided, runs
        self._used += strided.nbytes

    def align(self, run: memoryview, at: int, offset: int) -> memoryview:
        """Return the bytes of `run`, or a copy in buffer 1, in memory that suits writing them at `offset` of a file.

        `run` begins at `at` in buffer 0.
        """
        if len(run) < _WORTH_ALIGNING_BYTES or offset % 32 == 0 or (offset - at) % ALIGNMENT == 0:
            return run
        copy = self.get(1, len(run), shift=offset % ALIGNMENT)
        # memmove, unlike the kernel, is fast at any alignment; through ctypes it lets other threads run.
        target, source = (ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in (copy, run))
        ctypes.memmove(target, source, len(run))
        return copy


class Edit(Protocol):
    """Changes the elements of one tensor on their way; called from any thread, for blocks in any order."""

    @property
    def is_settled(self) -> bool:
        """Has everything been seen that must be? Until then no block of an interrupted run is kept."""

    def apply(self, block: Box, content: memoryview, result: memoryview) -> None:
        """Compute the new elements of a canonical block.

        `content` has its row-major bytes in the source's dtype; `result` takes those in the destination's dtype, in the
        same memory when both are as long.
        """

    def finish(self) -> None:
        """Free what only this tensor needed: its last block is done."""


class Read(NamedTuple):
    """A run that was read of a chunk."""

    chunk: Chunk
    start: int  # First byte in the chunk's payload
    nbytes: int
    crc32: int | None  # CRC-32 of the run, when the chunk's writer recorded one


Parts = list[tuple[int, int, int]]  # (first byte, bytes, CRC-32) of runs of one payload, in any order


def combine_crcs(parts: Parts) -> tuple[int, int]:
    """Return the CRC-32 of the concatenated parts and their bytes; -1 bytes when there is a hole."""
    crc32 = total = 0
    for start, nbytes, part in sorted(parts):
        if start != total:
            return crc32, -1
        crc32 = isal_zlib.crc32_combine(crc32, part, nbytes)
        total += nbytes
    return crc32, total


class Checksums:
    """CRC-32s of what was read of a tensor's chunks, to be compared with those that their writer recorded."""

    def __init__(self) -> None:
        self._parts: dict[int, Parts] = {}  # by the chunk's id: its hash takes longer than the look-up

    def add(self, reads: Iterable[Read]) -> None:
        """Remember what was read; the chunks must live as long as this."""
        for read in reads:
            if read.crc32 is not None:
                self._parts.setdefault(id(read.chunk), []).append((read.start, read.nbytes, read.crc32))

    def runs(self, chunk: Chunk) -> Parts:
        """Return what was read of a chunk with a recorded CRC-32."""
        return self._parts.get(id(chunk), [])

    def check(self, entry: TensorEntry, chunk: Chunk, source: Source) -> bool:
        """Return whether a chunk's bytes were compared with a CRC-32: not when none is known, or a part was not read.

        A chunk with strides is read once more, in the order of its bytes.
        """
        if chunk.crc32 is None:
            return False
        span = chunk.span
        if chunk.strides is None:
            crc32, total = combine_crcs(self.runs(chunk))
        else:
            crc32, total = 0, span.nbytes
            for start in range(0, total, _CRC_PASS_BYTES):
                nbytes = min(_CRC_PASS_BYTES, total - start)
                crc32 = isal_zlib.crc32(source.read(span.file, span.offset + start, nbytes), crc32)
        if total != span.nbytes:
            return False
        if crc32 != chunk.crc32:
            what = f"CRC-32 of its bytes is {crc32:08x}, its writer recorded {chunk.crc32:08x}"
            where = f"{span.file}, bytes {span.offset}..{span.offset + span.nbytes}"
            hint = "restore the file from where it was copied, or save the checkpoint again"
            raise UnreadableError(f"tensor {entry.fqn!r} is damaged: {what}", where=where, hint=hint, file=span.file)
        return True


def read_block(
    entry: TensorEntry,
    chunks: BoxIndex[Chunk],
    dtype: DType,
    block: Box,
    source: Source,
    buffers: Buffers,
    *,
    ahead: Box | None = None,
    see: Callable[[Box, memoryview], None] | None = None,
) -> tuple[memoryview, list[Read], int]:
    """Read `block` of `entry`, whose chunks are raw, as `dtype`.

    Of a canonical block, any row-major chunk holds one run. `ahead` is this block and those that will be read next with
    the same buffers: what they need of a chunk that is stored in another order is read at once. `see` is shown the
    block before it is cast. Return the row-major bytes, which are valid until the next use of the buffers, the runs
    that were read in the order of the chunks, and the bytes read.
    """
    own = entry.dtype
    content = buffers.get(0, own.num_bytes(block.num_elems))
    reads: list[Read] = []
    total = covered = 0
    for chunk, part in chunks.overlaps(block):
        covered += part.num_elems
        strides = chunk.strides
        if strides is None and not is_contiguous(part, chunk.box):
            strides = row_major(chunk.box.sizes)
        if strides is not None:
            total += _read_strided(chunk, strides, own.num_bytes(1), (block, part), ahead, source, content, buffers)
            reads.append(Read(chunk, 0, 0, None))
            continue
        start, nbytes = own.num_bytes(start_of(part, chunk.box)), own.num_bytes(part.num_elems)
        direct = is_contiguous(part, block)
        at = own.num_bytes(start_of(part, block))
        run = content[at : at + nbytes] if direct else buffers.get(1, nbytes)
        source.read_into(chunk.span.file, chunk.span.offset + start, run)
        crc32 = None if chunk.crc32 is None else isal_zlib.crc32(run)
        reads.append(Read(chunk, start, len(run), crc32))
        if not direct:
            piece = byte_box(part, own)
            move(piece, run, piece, content, byte_box(block, own))
        total += len(run)
    if covered != block.num_elems:
        raise CkptError(f"tensor {entry.fqn!r}: its chunks hold {covered} of {block.num_elems} elements of a block")
    if see is not None:
        see(block, content)
    if dtype is not own:
        target = buffers.get(1, dtype.num_bytes(block.num_elems))
        cast(content, own, target, dtype)
        content = _to_front(target, buffers)
    return content, reads, total


def edit_block(edit: Edit, block: Box, content: memoryview, dtype: DType, buffers: Buffers) -> memoryview:
    """Return the new row-major bytes of a canonical block as `dtype`, in the memory of `content`, which is overwritten.

    `content` is buffer 0; the result is valid until the next use of the buffers.
    """
    nbytes = dtype.num_bytes(block.num_elems)
    if nbytes == len(content):
        edit.apply(block, content, content)
        return content
    result = buffers.get(1, nbytes)
    edit.apply(block, content, result)
    return _to_front(result, buffers)


def _to_front(scratch: memoryview, buffers: Buffers) -> memoryview:
    """Copy what is in buffer 1 to buffer 0, which is the block's."""
    front = buffers.get(0, len(scratch))
    front[:] = scratch
    return front


def _read_strided(
    chunk: Chunk,
    strides: tuple[int, ...],
    itemsize: int,
    wanted: tuple[Box, Box],
    ahead: Box | None,
    source: Source,
    content: memoryview,
    buffers: Buffers,
) -> int:
    """Move a part of a chunk to a block, both in `wanted`; return the bytes that were read for it."""
    block, part = wanted
    tiled = None if ahead is None else chunk.box.intersect(ahead)
    if ahead is None or tiled is None:  # no part of a chunk is outside of what is ahead
        ahead = None
        strided = StridedPart(part, chunk.box, strides, itemsize)
        runs = buffers.get(1, strided.nbytes)
    elif found := buffers.tile(chunk, ahead, itemsize):
        strided, runs = found
        strided.scatter(runs, content, block, part=part)
        return 0
    else:
        strided = StridedPart(tiled, chunk.box, strides, itemsize)
        runs = buffers.new_tile(strided)
    position = 0
    for offset, nbytes in strided.runs():
        if offset < 0 or offset + nbytes > chunk.span.nbytes:
            raise UnreadableError("strides lead out of the item", where=chunk.span.file)
        source.read_into(chunk.span.file, chunk.span.offset + offset, runs[position : position + nbytes])
        position += nbytes
    if ahead is not None:
        buffers.keep_tile(chunk, strided, runs)
    strided.scatter(runs, content, block, part=part)
    return strided.nbytes


def read_blocks(entry: TensorEntry, source: Source) -> Iterator[tuple[Box, memoryview]]:
    """Yield (box, row-major bytes) of every block of a tensor (raw chunks); a view is valid until the next."""
    chunks, buffers = chunk_index(entry), Buffers()
    for block in blocks_of(entry, entry.dtype):
        yield block, read_block(entry, chunks, entry.dtype, block, source, buffers)[0]
