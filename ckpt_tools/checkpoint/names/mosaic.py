"""Tensors put together from parts of others, as descriptions: no byte is read, and any of it can be turned around.

A mosaic says of every element of a tensor which element of which other tensor it is: the tensor is tiled by pieces,
and a piece is a box whose dims walk along dims of the other tensor. Renaming, stacking, cutting, joining, reordering
axes and interleaving are all of that kind; none of them computes. So bytes are moved as they lie, and the way back
needs no second table: it is the same pieces, seen from the other side. What tensors do not allow is a `ValueError`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import mul

from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.checkpoint.tiling import check_tiling

MAX_RUNS = 100_000  # Into which one tensor may be taken apart
ZEROS = "\0zeros "  # How the name of a source begins that is in no file
STACKED = -1  # A dim of size 1 that the other tensor does not have


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of one tensor, and where its elements are in another."""

    box: Box  # In the tensor that is put together
    source: str  # FQN of the other
    axes: tuple[int, ...]
    """Dim of the box → dim of the source, or `STACKED`. Dims of the source that are not named stay at `starts`."""
    starts: tuple[int, ...]  # Where the piece begins in the source, by dim of the source
    steps: tuple[int, ...]  # How far one element of the box is from the next one in the source, by dim of the source


@dataclass(frozen=True, slots=True, kw_only=True)
class Mosaic:
    """One tensor that is put together."""

    dtype: DType
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]  # They tile the shape; none where it has no element

    def is_only(self, shape: tuple[int, ...]) -> bool:
        """Is it one other tensor, of this shape, as it is?"""
        if len(self.pieces) != 1 or self.shape != shape:
            return False
        return self.pieces[0].axes == tuple(range(len(shape))) and set(self.pieces[0].steps) <= {1}

    @property
    def is_zeros(self) -> bool:
        """Is it whole, and in no file?"""
        return any(source.startswith(ZEROS) for source in self.sources)

    @property
    def sources(self) -> tuple[str, ...]:
        """The tensors that it is made of."""
        return tuple(dict.fromkeys(piece.source for piece in self.pieces))


def whole(fqn: str, dtype: DType, shape: tuple[int, ...]) -> Mosaic:
    """Return the mosaic that is another tensor as it is."""
    dims = len(shape)
    piece = Piece(
        box=Box((0,) * dims, shape), source=fqn, axes=tuple(range(dims)), starts=(0,) * dims, steps=(1,) * dims
    )
    return Mosaic(dtype=dtype, shape=shape, pieces=(piece,))


def stack(parts: Sequence[Mosaic], dim: int) -> Mosaic:
    """Return the tensors on top of each other along a new dim, as `torch.stack` does."""
    first = parts[0]
    if any(part.shape != first.shape or part.dtype is not first.dtype for part in parts):
        raise ValueError("tensors that are stacked differ in shape or dtype")
    pieces = (
        replace(piece, box=_with_dim(piece.box, dim, at), axes=(*piece.axes[:dim], STACKED, *piece.axes[dim:]))
        for at, part in enumerate(parts)
        for piece in part.pieces
    )
    shape = (*first.shape[:dim], len(parts), *first.shape[dim:])
    return Mosaic(dtype=first.dtype, shape=shape, pieces=tuple(pieces))


def join(parts: Sequence[Mosaic], dim: int) -> Mosaic:
    """Return the tensors one after another along a dim, as `torch.cat` does."""
    first = parts[0]
    pieces: list[Piece] = []
    length = 0
    for part in parts:
        if part.dtype is not first.dtype or len(part.shape) <= dim or _without(part, dim) != _without(first, dim):
            raise ValueError("tensors that are joined differ in shape or dtype")
        pieces += (replace(piece, box=_moved(piece.box, dim, length)) for piece in part.pieces)
        length += part.shape[dim]
    return Mosaic(dtype=first.dtype, shape=resized(first.shape, dim, length), pieces=tuple(pieces))


def part_of(tensor: Mosaic, dim: int, start: int, length: int) -> Mosaic:
    """Return elements [start, start + length) along one dim."""
    if dim >= len(tensor.shape) or start < 0 or start + length > tensor.shape[dim]:
        raise ValueError("a tensor that is cut is too short")
    window = Box(resized((0,) * len(tensor.shape), dim, start), resized(tensor.shape, dim, length))
    pieces = []
    for piece in tensor.pieces:
        inside = piece.box.intersect(window)
        if inside is not None:
            pieces.append(_moved_piece(_narrowed(piece, inside), dim, -start))
    return Mosaic(dtype=tensor.dtype, shape=window.sizes, pieces=tuple(pieces))


def crop(tensor: Mosaic, box: Box) -> Mosaic:
    """Return the elements of a box."""
    for dim, (start, length) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = part_of(tensor, dim, start, length)
    return tensor


def chunk(tensor: Mosaic, dim: int, count: int) -> list[Mosaic]:
    """Return `count` equal parts along one dim; unequal ones, as `torch.chunk` gives them, are refused."""
    if dim >= len(tensor.shape) or tensor.shape[dim] % count:
        raise ValueError(f"a tensor cannot be cut into {count} equal parts")
    length = tensor.shape[dim] // count
    return [part_of(tensor, dim, length * at, length) for at in range(count)]


def unstack(tensor: Mosaic, dim: int) -> list[Mosaic]:
    """Return the tensors along one dim, without that dim."""
    found = []
    for at in range(tensor.shape[dim]):
        layer = part_of(tensor, dim, at, 1)
        pieces = tuple(
            replace(piece, box=without_dim(piece.box, dim), axes=(*piece.axes[:dim], *piece.axes[dim + 1 :]))
            for piece in layer.pieces
        )
        found.append(Mosaic(dtype=tensor.dtype, shape=without_at(tensor.shape, dim), pieces=pieces))
    return found


def transpose(tensor: Mosaic, one: int, other: int) -> Mosaic:
    """Return the tensor with two dims in each other's place."""
    order = list(range(len(tensor.shape)))
    order[one], order[other] = order[other], order[one]

    def ordered(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values[dim] for dim in order)

    pieces = tuple(
        replace(piece, box=Box(ordered(piece.box.offsets), ordered(piece.box.sizes)), axes=ordered(piece.axes))
        for piece in tensor.pieces
    )
    return Mosaic(dtype=tensor.dtype, shape=ordered(tensor.shape), pieces=pieces)


def regroup(tensor: Mosaic, dim: int, groups: int, outer: int, inner: int) -> Mosaic:
    """Return the tensor with one dim seen as (groups, outer, inner), and the last two of them exchanged.

    That is ``view(groups, outer, inner).transpose(1, 2).reshape(-1)`` along the dim, as rotary embeddings and
    interleaved halves need it.
    """
    if dim >= len(tensor.shape) or tensor.shape[dim] != groups * outer * inner:
        raise ValueError(f"a dim is not {groups} x {outer} x {inner} long")
    runs = [
        _every(tensor, dim, group * outer * inner + at, inner, outer) for group in range(groups) for at in range(inner)
    ]
    return join(runs, dim)


def flatten(tensor: Mosaic, dim: int, count: int) -> Mosaic:
    """Return the tensor with `count` dims from `dim` on as one, in row-major order."""
    sizes = tensor.shape[dim : dim + count]
    if len(sizes) < count:
        raise ValueError(f"a tensor has no {count} dims from {dim} on")
    run = _running(sizes)
    _check_runs(math.prod(sizes[:run]))
    strides, end = row_major(sizes), dim + run
    pieces = []
    for piece in tensor.pieces:
        offsets, lengths = piece.box.offsets, piece.box.sizes
        for at in product(*(range(offsets[d], offsets[d] + lengths[d]) for d in range(dim, end))):
            inside = Box((*offsets[:dim], *at, *offsets[end:]), (*lengths[:dim], *(1 for _ in at), *lengths[end:]))
            start = sum(map(mul, inside.offsets[dim : dim + count], strides))
            box = Box(
                (*offsets[:dim], start, *offsets[dim + count :]),
                (*lengths[:dim], lengths[end], *lengths[dim + count :]),
            )
            axes = (*piece.axes[:dim], piece.axes[end], *piece.axes[dim + count :])
            pieces.append(replace(_narrowed(piece, inside), box=box, axes=axes))
    shape = (*tensor.shape[:dim], math.prod(sizes), *tensor.shape[dim + count :])
    return Mosaic(dtype=tensor.dtype, shape=shape, pieces=tuple(pieces))


def unflatten(tensor: Mosaic, dim: int, sizes: Sequence[int]) -> Mosaic:
    """Return the tensor with one dim as several, in row-major order."""
    if dim >= len(tensor.shape) or tensor.shape[dim] != math.prod(sizes):
        raise ValueError(f"a dim is not {' x '.join(map(str, sizes))} long")
    run = _running(sizes)
    _check_runs(math.prod(sizes[:run]))
    strides = row_major(sizes)
    pieces = []
    for piece in tensor.pieces:
        first, last = piece.box.offsets[dim], piece.box.offsets[dim] + piece.box.sizes[dim]
        while first < last:  # one run of the last of the new dims after another
            length = min(last, (first // sizes[run] + 1) * sizes[run]) - first
            inside = Box(resized(piece.box.offsets, dim, first), resized(piece.box.sizes, dim, length))
            at = [first // stride % size for stride, size in zip(strides, sizes, strict=True)]
            box = Box(
                (*inside.offsets[:dim], *at, *inside.offsets[dim + 1 :]),
                (*inside.sizes[:dim], *resized((1,) * len(sizes), run, length), *inside.sizes[dim + 1 :]),
            )
            new_axes = resized((STACKED,) * len(sizes), run, piece.axes[dim])
            axes = (*piece.axes[:dim], *new_axes, *piece.axes[dim + 1 :])
            pieces.append(replace(_narrowed(piece, inside), box=box, axes=axes))
            first += length
    shape = (*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :])
    return Mosaic(dtype=tensor.dtype, shape=shape, pieces=tuple(pieces))


def _running(sizes: Sequence[int]) -> int:
    """Return the last of these dims that is longer than 1: a piece can run along it."""
    return max((at for at, size in enumerate(sizes) if size > 1), default=0)


def _check_runs(count: int) -> None:
    if count > MAX_RUNS:
        raise ValueError(f"it would consist of {count} runs; {MAX_RUNS} are allowed")


def _every(tensor: Mosaic, dim: int, start: int, step: int, count: int) -> Mosaic:
    """Return every `step`-th element along one dim, `count` of them."""
    pieces = []
    for piece in tensor.pieces:
        offset, size = piece.box.offsets[dim], piece.box.sizes[dim]
        first = max(0, -(-(offset - start) // step))
        last = min(count, -(-(offset + size - start) // step))
        if first >= last:
            continue
        axis = piece.axes[dim]
        starts, steps = list(piece.starts), list(piece.steps)
        if axis != STACKED:
            starts[axis] += (start + step * first - offset) * steps[axis]
            steps[axis] *= step
        elif last - first > 1:
            raise ValueError("a stacked dim cannot be regrouped")  # its pieces have one element: never with step > 0
        box = Box(resized(piece.box.offsets, dim, first), resized(piece.box.sizes, dim, last - first))
        pieces.append(replace(piece, box=box, starts=tuple(starts), steps=tuple(steps)))
    return Mosaic(dtype=tensor.dtype, shape=resized(tensor.shape, dim, count), pieces=tuple(pieces))


def invert(
    mosaics: Mapping[str, Mosaic], sources: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Mosaic], list[tuple[Mosaic, Mosaic]]]:
    """Return the sources as mosaics of what was made of them, and pairs of mosaics that must be equal for that.

    `sources` has the shape of everything that they are made of. Where an element was left out, or stands in two places,
    there is no way back, and a `ValueError` is raised.
    """
    pieces: dict[str, dict[Box, Piece]] = defaultdict(dict)
    dtypes = {}
    copies = []
    for fqn, mosaic in mosaics.items():
        for piece in mosaic.pieces:
            dtypes[piece.source] = mosaic.dtype
            for back in _inverted(fqn, piece):
                first = pieces[piece.source].setdefault(back.box, back)
                if first is not back:
                    copies.append((_alone(first, mosaic.dtype), _alone(back, mosaic.dtype)))
    for source, shape in sources.items():
        if not pieces[source] or check_tiling(shape, pieces[source]) is not None:
            raise ValueError(f"not every element of {source!r} has one place")
    made = {
        source: Mosaic(dtype=dtypes[source], shape=shape, pieces=tuple(pieces[source].values()))
        for source, shape in sources.items()
    }
    return made, copies


def _alone(piece: Piece, dtype: DType) -> Mosaic:
    """Return one piece as a tensor of its own."""
    box = Box((0,) * len(piece.box.sizes), piece.box.sizes)
    return Mosaic(dtype=dtype, shape=box.sizes, pieces=(replace(piece, box=box),))


def _inverted(fqn: str, piece: Piece) -> Iterator[Piece]:
    """Yield a piece from the other side; where it takes every n-th element, element by element."""
    dims = {axis: dim for dim, axis in enumerate(piece.axes) if axis != STACKED}
    stepped = [dim for axis, dim in dims.items() if piece.steps[axis] != 1 and piece.box.sizes[dim] > 1]
    for at in product(*(range(piece.box.sizes[dim]) for dim in stepped)):
        offsets, sizes = list(piece.box.offsets), list(piece.box.sizes)
        starts, lengths = list(piece.starts), [1] * len(piece.starts)
        for dim, index in zip(stepped, at, strict=True):
            offsets[dim], sizes[dim] = offsets[dim] + index, 1
            starts[piece.axes[dim]] += index * piece.steps[piece.axes[dim]]
        for axis, dim in dims.items():
            lengths[axis] = sizes[dim]
        yield Piece(
            box=Box(tuple(starts), tuple(lengths)),
            source=fqn,
            axes=tuple(dims.get(axis, STACKED) for axis in range(len(piece.starts))),
            starts=tuple(offsets),
            steps=(1,) * len(offsets),
        )


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor, in elements."""
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def resized(values: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    """Return `values` with another one at `dim`."""
    return (*values[:dim], value, *values[dim + 1 :])


def without_at(values: Sequence[int], dim: int) -> tuple[int, ...]:
    """Return `values` without the one at `dim`."""
    return (*values[:dim], *values[dim + 1 :])


def _without(tensor: Mosaic, dim: int) -> tuple[int, ...]:
    return without_at(tensor.shape, dim)


def _with_dim(box: Box, dim: int, at: int) -> Box:
    return Box((*box.offsets[:dim], at, *box.offsets[dim:]), (*box.sizes[:dim], 1, *box.sizes[dim:]))


def without_dim(box: Box, dim: int) -> Box:
    """Return a box without one of its dims."""
    return Box(without_at(box.offsets, dim), without_at(box.sizes, dim))


def _moved(box: Box, dim: int, by: int) -> Box:
    return Box(resized(box.offsets, dim, box.offsets[dim] + by), box.sizes)


def _moved_piece(piece: Piece, dim: int, by: int) -> Piece:
    return replace(piece, box=_moved(piece.box, dim, by))


def _narrowed(piece: Piece, inside: Box) -> Piece:
    """Return the part of a piece that lies in a box inside its own."""
    starts = list(piece.starts)
    for dim, axis in enumerate(piece.axes):
        if axis != STACKED:
            starts[axis] += (inside.offsets[dim] - piece.box.offsets[dim]) * piece.steps[axis]
    return replace(piece, box=inside, starts=tuple(starts))
