"""Boxes as bytes: where a part of a box lies in its row-major bytes, and how to move it between layouts.

A byte box has the dims of its box, the last one counted in bytes; a 0-d box has one dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.layout import Box


def byte_box(box: Box, dtype: DType) -> Box:
    """Return `box` with its last dim counted in bytes."""
    if not box.sizes:
        return Box((0,), (dtype.num_bytes(1),))
    return Box((*box.offsets[:-1], dtype.num_bytes(box.offsets[-1])), (*box.sizes[:-1], dtype.num_bytes(box.sizes[-1])))


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


_SHORT_BYTES = 4 << 10  # Reading a run takes as long as copying about so much
MAX_WASTE = 2  # Bytes that are read for one that is wanted, where runs are short and the next one is near


class StridedPart:
    """A part of a chunk whose elements are not stored row-major (DCP keeps a tensor's strides).

    Part and chunk are in elements of the global tensor, strides in elements, `itemsize` is bytes per element. It is
    read in runs: contiguous bytes, or a few more with what lies between them.
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
        self._outer = len(self._sizes)
        """Dims that runs are counted by; the others are inside of a run."""
        self.run_bytes = wanted = itemsize
        for dim in reversed(range(len(self._sizes))):
            wanted *= self._sizes[dim]
            reach = self.run_bytes + (self._sizes[dim] - 1) * self._strides[dim]
            if reach != wanted and (self.run_bytes >= _SHORT_BYTES or not wanted <= reach <= MAX_WASTE * wanted):
                break
            self.run_bytes, self._outer = reach, dim

    @property
    def num_runs(self) -> int:
        """How many runs there are."""
        return math.prod(self._sizes[: self._outer])

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield (offset in the payload, bytes) of every run, in the order of the bytes."""
        for indices in product(*map(range, self._sizes[: self._outer])):
            skip = sum(index * stride for index, stride in zip(indices, self._strides, strict=False))
            yield self._start + skip, self.run_bytes

    def scatter(self, runs: memoryview, target: memoryview, target_box: Box, *, part: Box | None = None) -> None:
        """Move the concatenated runs, or just `part`, to the row-major bytes of `target_box` (in elements)."""
        import numpy as np

        part = self.part if part is None else part
        kind = np.dtype((np.void, self.itemsize))
        counts = self._sizes[: self._outer]
        steps = [self.run_bytes * count for count in row_major(tuple(counts))] + self._strides[self._outer :]
        stored = np.ndarray(self._sizes, kind, runs, strides=tuple(steps))
        logical = stored.transpose([self._order.index(dim) for dim in range(len(self._order))])
        window = tuple(
            slice(offset - origin, offset - origin + size)
            for offset, origin, size in zip(part.offsets, self.part.offsets, part.sizes, strict=True)
        )
        strides = tuple(stride * self.itemsize for stride in row_major(target_box.sizes))
        start = start_of(part, target_box) * self.itemsize
        np.ndarray(part.sizes, kind, target, start, strides)[...] = logical[window]

    @property
    def nbytes(self) -> int:
        """Bytes of the runs."""
        return self.num_runs * self.run_bytes
