"""Read boxes of tensors from an open checkpoint into torch tensors, and no byte more.

Shape legend: a box has offsets and sizes in elements of the global tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from isal import isal_zlib

from ckpt_tools.description.checkpoint import Chunk, TensorEntry
from ckpt_tools.description.dtypes import BY_TORCH_NAME, DType
from ckpt_tools.description.layout import Box, BoxIndex, split_blocks
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.formats.opening import Opened
from ckpt_tools.moving.plan import check_complete, chunk_index
from ckpt_tools.moving.read import Buffers, Read, read_block
from ckpt_tools.moving.strides import is_contiguous, row_major
from ckpt_tools.text import escape_name

_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """A source tensor as a part of a tensor that the checkpoint stores in parts (experts of one layer)."""

    entry: TensorEntry
    offsets: tuple[int, ...]
    """Where its first element lies in the whole."""
    new_dims: tuple[int, ...]
    """Dims of the whole that the piece does not have; it has size 1 there."""

    @property
    def box(self) -> Box:
        """Its elements of the whole."""
        return Box(self.offsets, self.widen(self.entry.shape, 1))

    def widen(self, values: Sequence[int], fill: int) -> tuple[int, ...]:
        """Return `values` by the piece's own dims with `fill` at the new ones."""
        widened = list(values)
        for dim in sorted(self.new_dims):
            widened.insert(dim, fill)
        return tuple(widened)


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A tensor to read: one of the checkpoint's, or several put together."""

    shape: tuple[int, ...]
    dtype: DType
    pieces: tuple[Piece, ...]

    @property
    def label(self) -> str:
        """Names of what it is made of, for messages."""
        names = [escape_name(piece.entry.fqn) for piece in self.pieces]
        return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def as_whole(entry: TensorEntry) -> Whole:
    """Return a tensor that the checkpoint stores under one name."""
    piece = Piece(entry, (0,) * len(entry.shape), ())
    return Whole(shape=entry.shape, dtype=entry.dtype, pieces=(piece,))


class _Target(Buffers):
    """Buffers whose first one is the memory that shall be filled, so that nothing is copied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.target = memoryview(b"")
        self._scratch = bytearray()

    def get(self, which: int, nbytes: int, *, shift: int = 0) -> memoryview:
        if which == 0:
            return self.target[shift : shift + nbytes]
        if len(self._scratch) < shift + nbytes:
            self._scratch = bytearray(shift + nbytes)
        return memoryview(self._scratch)[shift : shift + nbytes]


class BoxReader:
    """Reads boxes of the tensors of one open checkpoint.

    Args:
        opened: The checkpoint.
    """

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._indexes: dict[str, BoxIndex[Chunk]] = {}
        self._buffers = Buffers()
        self._into = _Target()
        self.bytes_read = 0
        """Payload bytes read so far."""

    def read(self, whole: Whole, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """Return the elements of `box` as a contiguous tensor on the CPU, cast to `dtype`.

        Raises:
            UnreadableError: The bytes are damaged, missing, or of a type that torch lacks.
            UsageError: A cast that is not between floating-point types.
        """
        wanted = _dtype_of(dtype)
        if len(whole.pieces) == 1 and not whole.pieces[0].new_dims:
            return self._read_entry(whole.pieces[0].entry, box, wanted)
        result = torch.empty(box.sizes, dtype=dtype)
        for piece in whole.pieces:
            part = piece.box.intersect(box) if 0 not in box.sizes else None
            if part is None:
                continue
            own = Box(
                tuple(o - p for d, (o, p) in enumerate(_pairs(part.offsets, piece.offsets)) if d not in piece.new_dims),
                tuple(n for d, n in enumerate(part.sizes) if d not in piece.new_dims),
            )
            target = tuple(
                slice(o - b, o - b + n) for o, b, n in zip(part.offsets, box.offsets, part.sizes, strict=True)
            )
            result[target] = self._read_entry(piece.entry, own, wanted).reshape(part.sizes)
        return result

    def _read_entry(self, entry: TensorEntry, box: Box, dtype: DType) -> torch.Tensor:
        if entry.dtype is not dtype and not (entry.dtype.is_float and dtype.is_float):
            raise UsageError(
                f"tensor {entry.fqn!r} is {entry.dtype.name} in the checkpoint and {dtype.name} in the "
                "model; only floating-point types are cast",
            )
        result = torch.empty(box.sizes, dtype=getattr(torch, str(dtype.torch_name)))
        if not result.numel():
            return result
        memory: memoryview = result.reshape(-1).view(torch.uint8).numpy().data
        entry = self._restrict(entry, box)
        plain = chunk_index(entry)
        rows: BoxIndex[Chunk] | None = None
        reads: list[Read] = []
        position = 0
        for block in split_blocks(box.sizes, dtype.bits, block_bytes=_BLOCK_BYTES):
            part = Box(tuple(o + b for o, b in zip(box.offsets, block.offsets, strict=True)), block.sizes)
            nbytes = dtype.num_bytes(block.num_elems)
            target = memory[position : position + nbytes]
            chunks = plain
            if not all(is_contiguous(own, chunk.box) for chunk, own in plain.overlaps(part)):
                # `read_block` takes a block's part of a row-major chunk for one run; columns are many.
                rows = rows or chunk_index(replace(entry, chunks=tuple(map(_with_strides, entry.chunks))))
                chunks = rows
            if entry.dtype is dtype:
                self._into.target = target
                _, done, count = read_block(entry, chunks, dtype, part, self._opened.source, self._into)
            else:
                content, done, count = read_block(entry, chunks, dtype, part, self._opened.source, self._buffers)
                target[:] = content
            reads += done
            self.bytes_read += count
            position += nbytes
        _check_crcs(entry, reads)
        return result

    def _restrict(self, entry: TensorEntry, box: Box) -> TensorEntry:
        """Return `entry` with the chunks that `box` needs, on their raw bytes; only their headers are read."""
        if entry.dtype.torch_name is None or entry.dtype.pack > 1:
            raise UsageError(f"tensor {entry.fqn!r}: a model cannot take {entry.dtype.name} elements")
        index = self._indexes.get(entry.fqn)
        if index is None:
            check_complete(entry)
            index = self._indexes[entry.fqn] = chunk_index(entry)
        needed = tuple(chunk for chunk, _ in index.overlaps(box))
        return self._opened.resolve(replace(entry, chunks=needed))


def _with_strides(chunk: Chunk) -> Chunk:
    """Say of a row-major chunk what its strides are, so that any part of it can be read run by run."""
    return chunk if chunk.strides is not None else replace(chunk, strides=row_major(chunk.box.sizes))


def _check_crcs(entry: TensorEntry, reads: Sequence[Read]) -> None:
    """Hold every chunk that was read whole against the CRC-32 that its writer recorded."""
    parts: dict[Chunk, list[Read]] = {}
    for read in reads:
        if read.crc32 is not None:
            parts.setdefault(read.chunk, []).append(read)
    for chunk, runs in parts.items():
        crc32 = total = 0
        for run in sorted(runs, key=lambda read: read.start):
            if run.start != total or run.crc32 is None:
                break
            crc32 = isal_zlib.crc32_combine(crc32, run.crc32, run.nbytes)
            total += run.nbytes
        if total == chunk.span.nbytes and crc32 != chunk.crc32:
            raise UnreadableError(
                f"tensor {entry.fqn!r} is damaged: CRC-32 of its bytes is {crc32:08x}, its writer "
                f"recorded {chunk.crc32:08x}",
                where=f"{chunk.span.file}, bytes {chunk.span.offset}..",
                hint="restore the file from where it was copied, or save the checkpoint again",
            )


def _pairs(one: Sequence[int], other: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(one, other, strict=True))


def _dtype_of(dtype: torch.dtype) -> DType:
    found = BY_TORCH_NAME.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise UsageError(f"{dtype} is not a type that checkpoints hold")
    return found
