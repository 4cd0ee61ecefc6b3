"""Runs of a tensor's elements, in row-major order, as boxes: what ranks hold of a tensor that was laid flat and cut."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ckpt_tools.checkpoint.layout import Box


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that elements [start, stop) of a row-major tensor are, in order.

    Every box is contiguous too: it follows the one before it in the run. A tensor of n dims has at most 2n - 1 of them;
    none for an empty run.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, begin = divmod(start, row)
    last, end = divmod(stop, row)
    if begin and first == last:  # within one row
        yield from _within(first, shape[1:], begin, end)
        return
    if begin:
        yield from _within(first, shape[1:], begin, row)
        first += 1
    if first < last:
        yield Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:]))
    if end:
        yield from _within(last, shape[1:], 0, end)


def _within(index: int, shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of a run inside of one row."""
    return (Box((index, *box.offsets), (1, *box.sizes)) for box in flat_boxes(shape, start, stop))
