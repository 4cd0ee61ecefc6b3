"""Boxes as bytes: where a part of a box lies in its row-major bytes, and how to move it between layouts.

A byte box has the dims of its box, the last one counted in bytes; a 0-d box has one dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from ckpt_tools.description.dtypes import DType
from ckpt_tools.description.layout import Box


def byte_box(box: Box, dtype: DType) -> Box:
    """Return `box` with its last dim counted in bytes."""
    if not box.sizes:
        return Box((0,), (dtype.num_bytes(1),))
    return Box(
        (*box.offsets[:-1], dtype.num_bytes(box.offsets[-1])),
        (*box.sizes[:-1], dtype.num_bytes(box.sizes[-1])),
    )


def row_major(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a row-major array of `sizes`."""
    strides = [1] * len(sizes)
    for dim in reversed(range(len(sizes) - 1)):
        strides[dim] = strides[dim + 1] * sizes[dim + 1]
    return tuple(strides)


def start_of(part: Box, whole: Box) -> int:
    """Return the position of the first element of `part` in `whole`, row-major; of byte boxes, of its first byte."""
    start = 0
    for offset, origin, size in zip(part.offsets, whole.offsets, whole.sizes, strict=True):
        start = start * size + offset - origin
    return start


def is_contiguous(part: Box, whole: Box) -> bool:
    """Is `part` one run in the row-major elements of `whole`? The same for byte boxes."""
    full = True
    for size, length in zip(reversed(part.sizes), reversed(whole.sizes), strict=True):
        if full:
            full = size == length
        elif size != 1:
            return False
    return True


def move(part: Box, source: memoryview, source_box: Box, target: memoryview, target_box: Box) -> None:
    """Copy `part` from the row-major bytes of one byte box to those of another."""
    import numpy as np

    arrays = (
        np.ndarray(part.sizes, np.uint8, view, start_of(part, box), row_major(box.sizes))
        for view, box in ((source, source_box), (target, target_box))
    )
    from_array, to_array = arrays
    to_array[...] = from_array


class StridedPart:
    """A part of a chunk whose elements are not stored row-major (DCP keeps a tensor's strides).

    Part and chunk are in elements of the global tensor, strides in elements, `itemsize` is bytes per element.
    """

    def __init__(self, part: Box, chunk_box: Box, strides: tuple[int, ...], itemsize: int) -> None:
        self.part = part
        self.itemsize = itemsize
        self._start = itemsize * sum(
            (offset - origin) * stride
            for offset, origin, stride in zip(part.offsets, chunk_box.offsets, strides, strict=True)
        )
        # Outermost first, as the bytes lie.
        self._order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
        self._strides = [strides[dim] * itemsize for dim in self._order]
        self._sizes = [part.sizes[dim] for dim in self._order]

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield (offset in the payload, bytes) of every contiguous run, in the order of the bytes."""
        run = self.itemsize
        outer = len(self._sizes)
        while outer and (self._strides[outer - 1] == run or self._sizes[outer - 1] == 1):
            run *= self._sizes[outer - 1]
            outer -= 1
        for indices in product(*map(range, self._sizes[:outer])):
            skip = sum(index * stride for index, stride in zip(indices, self._strides, strict=False))
            yield self._start + skip, run

    def scatter(self, runs: memoryview, target: memoryview, target_box: Box) -> None:
        """Move the concatenated runs to the row-major bytes of `target_box` (in elements)."""
        import numpy as np

        kind = np.dtype((np.void, self.itemsize))
        stored = np.ndarray(self._sizes, kind, runs)
        logical = stored.transpose([self._order.index(dim) for dim in range(len(self._order))])
        strides = tuple(stride * self.itemsize for stride in row_major(target_box.sizes))
        start = start_of(self.part, target_box) * self.itemsize
        np.ndarray(self.part.sizes, kind, target, start, strides)[...] = logical

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return math.prod(self.part.sizes) * self.itemsize
