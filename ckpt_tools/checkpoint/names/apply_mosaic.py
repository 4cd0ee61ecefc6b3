"""Mosaics as chunks: what a tensor is made of, seen through its pieces. Whoever moves bytes learns nothing new."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.entries import ByteSpan, Chunk, TensorEntry
from ckpt_tools.checkpoint.layout import Box, BoxIndex
from ckpt_tools.checkpoint.names.mosaic import STACKED, Mosaic, Piece, resized, row_major, without_at, without_dim

ZEROS_FILE = ".ckpt/zeros"  # What nobody has written: all bytes are zero


def zero_entry(mosaic: Mosaic) -> TensorEntry:
    """Return the source of a tensor of zeros."""
    (piece,), dtype = mosaic.pieces, mosaic.dtype
    span = ByteSpan(file=ZEROS_FILE, offset=0, nbytes=dtype.num_bytes(piece.box.num_elems))
    return TensorEntry(fqn=piece.source, dtype=dtype, shape=mosaic.shape, chunks=(Chunk(box=piece.box, span=span),))


def lay_out(fqn: str, mosaic: Mosaic, sources: Mapping[str, TensorEntry]) -> TensorEntry:
    """Return the entry of a tensor: the chunks of what it is made of, seen through its pieces."""
    # `sources` have raw chunks; replicas count once. A tensor of less than a byte per element must be taken whole.
    entry = sources[mosaic.pieces[0].source] if mosaic.pieces else None
    if entry is not None and mosaic.is_only(entry.shape):
        return entry if entry.fqn == fqn else replace(entry, fqn=fqn, path=())
    if mosaic.dtype.bits % 8:
        raise ValueError(f"elements of {mosaic.dtype.name} do not start on byte boundaries")
    indexes = {source: _index(sources[source]) for source in mosaic.sources}
    views = [view for piece in mosaic.pieces for view in _lay(piece, indexes[piece.source])]
    for dim in range(len(mosaic.shape) if len(views) > 1 else 0):
        views = _merged(views, dim)
    chunks = tuple(_chunk(view, mosaic.dtype) for view in views)
    return TensorEntry(fqn=fqn, dtype=mosaic.dtype, shape=mosaic.shape, chunks=chunks)


class _PieceView(NamedTuple):
    """Elements of a chunk, and where they are in the tensor that is put together."""

    of: Chunk
    box: Box
    strides: tuple[int, ...]
    position: int  # Of the first, in elements of the chunk


def _merged(views: Sequence[_PieceView], dim: int) -> list[_PieceView]:
    """Join views of one chunk that go on in each other along a dim, so that what was only reshaped is one again."""
    groups: dict[tuple[object, ...], list[_PieceView]] = defaultdict(list)
    for view in views:
        strides = tuple(stride if size > 1 else 0 for stride, size in zip(view.strides, view.box.sizes, strict=True))
        key = (view.of.span, without_dim(view.box, dim), without_at(strides, dim))
        groups[key].append(view)
    found = []
    for group in groups.values():
        last, *others = sorted(group, key=lambda view: view.box.offsets[dim])
        for view in others:
            length, step = last.box.sizes[dim], last.strides[dim]
            if length == 1:
                step = view.position - last.position
            is_next = view.box.offsets[dim] == last.box.offsets[dim] + length
            is_next = is_next and step > 0 and view.position == last.position + length * step
            if is_next and (view.box.sizes[dim] == 1 or view.strides[dim] == step):
                box = Box(last.box.offsets, resized(last.box.sizes, dim, length + view.box.sizes[dim]))
                last = last._replace(box=box, strides=resized(last.strides, dim, step))
            else:
                found.append(last)
                last = view
        found.append(last)
    return found


def _index(entry: TensorEntry) -> BoxIndex[Chunk]:
    distinct: dict[Box, Chunk] = {}
    for one in entry.chunks:
        distinct.setdefault(one.box, one)
    return BoxIndex((one, box) for box, one in distinct.items())


def _lay(piece: Piece, index: BoxIndex[Chunk]) -> Iterator[_PieceView]:
    counts = [1] * len(piece.starts)
    for dim, axis in enumerate(piece.axes):
        if axis != STACKED:
            counts[axis] = piece.box.sizes[dim]
    reach = tuple((count - 1) * step + 1 for count, step in zip(counts, piece.steps, strict=True))
    for one, _ in index.overlaps(Box(piece.starts, reach)):
        strides = one.strides or row_major(one.box.sizes)
        position = 0
        begins, lengths = [], []
        for axis, (start, step, count) in enumerate(zip(piece.starts, piece.steps, counts, strict=True)):
            offset, size = one.box.offsets[axis], one.box.sizes[axis]
            first = max(0, -(-(offset - start) // step))
            last = min(count, -(-(offset + size - start) // step))
            begins.append(first)
            lengths.append(last - first)
            position += (start + step * first - offset) * strides[axis]
        if min(lengths, default=1) <= 0:
            continue
        sizes = tuple(1 if axis == STACKED else lengths[axis] for axis in piece.axes)
        moved = (0 if axis == STACKED else begins[axis] for axis in piece.axes)
        offsets = tuple(offset + by for offset, by in zip(piece.box.offsets, moved, strict=True))
        seen = tuple(1 if axis == STACKED else strides[axis] * piece.steps[axis] for axis in piece.axes)
        yield _PieceView(one, Box(offsets, sizes), seen, position)


def _chunk(view: _PieceView, dtype: DType) -> Chunk:
    """Return a view as a chunk; the CRC-32 of what it is of is its own when it is all of the bytes, in their order."""
    one, box, strides, position = view
    length = 1 + sum((size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True))
    plain = all(
        size == 1 or stride == wanted
        for size, stride, wanted in zip(box.sizes, strides, row_major(box.sizes), strict=True)
    )
    span = ByteSpan(
        file=one.span.file, offset=one.span.offset + dtype.num_bytes(position), nbytes=dtype.num_bytes(length)
    )
    return Chunk(
        box=box, span=span, strides=None if plain else strides, crc32=one.crc32 if plain and span == one.span else None
    )
