"""Runs of a row-major tensor as boxes, against numpy's own order."""

import numpy as np
from hypothesis import given, strategies as st

from ckpt_tools.checkpoint.layout import Box, flat_boxes

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(shape=shapes, data=st.data())
def test_flat_boxes_of_a_run_are_its_elements_in_order(shape, data):
    whole = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    start = data.draw(st.integers(0, whole.size))
    stop = data.draw(st.integers(start, whole.size))
    boxes = list(flat_boxes(shape, start, stop))
    parts = [whole[tuple(slice(o, o + n) for o, n in zip(b.offsets, b.sizes, strict=True))].ravel() for b in boxes]
    assert [int(i) for part in parts for i in part] == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    assert all(box.num_elems for box in boxes)


def test_flat_boxes_of_nothing_are_none():
    assert list(flat_boxes((3, 0, 2), 0, 0)) == []
    assert list(flat_boxes((), 0, 0)) == []
    assert list(flat_boxes((4, 4), 5, 5)) == []
    assert list(flat_boxes((), 0, 1)) == [Box((), ())]
    assert list(flat_boxes((4, 4), 2, 11)) == [Box((0, 2), (1, 2)), Box((1, 0), (1, 4)), Box((2, 0), (1, 3))]
