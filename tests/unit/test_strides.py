"""Boxes as bytes, and tensors that are not stored row-major."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.transfer.box_bytes import StridedPart, byte_box, is_contiguous, move, row_major, start_of


@pytest.mark.parametrize(
    ("box", "dtype", "expected"),
    [
        (Box((), ()), "F64", Box((0,), (8,))),
        (Box((2,), (3,)), "BF16", Box((4,), (6,))),
        (Box((1, 2), (4, 6)), "F4", Box((1, 1), (4, 3))),
        (Box((1, 4), (2, 8)), "F6_E2M3", Box((1, 3), (2, 6))),
    ],
)
def test_byte_box_counts_the_last_dim_in_bytes(box: Box, dtype: str, expected: Box) -> None:
    assert byte_box(box, BY_NAME[dtype]) == expected


@pytest.mark.parametrize(
    ("sizes", "strides"), [((), ()), ((5,), (1,)), ((2, 3, 4), (12, 4, 1)), ((2, 0, 4), (0, 4, 1))]
)
def test_row_major_strides(sizes, strides) -> None:
    assert row_major(sizes) == strides


@st.composite
def parts(draw):
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    offsets = [draw(st.integers(0, n - 1)) for n in sizes]
    return tuple(sizes), Box(
        tuple(offsets), tuple(draw(st.integers(1, n - o)) for n, o in zip(sizes, offsets, strict=True))
    )


@given(parts())
def test_start_and_contiguity_equal_numpys(case) -> None:
    sizes, part = case
    whole = Box((0,) * len(sizes), sizes)
    positions = np.arange(np.prod(sizes)).reshape(sizes)
    chosen = positions[tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))].ravel()
    assert start_of(part, whole) == chosen[0]
    assert is_contiguous(part, whole) == (chosen[-1] - chosen[0] + 1 == len(chosen))


@given(parts(), parts())
def test_move_copies_the_part_and_nothing_else(one, other) -> None:
    if len(one[0]) != len(other[0]):
        return
    boxes = [Box((0,) * len(sizes), sizes) for sizes, _ in (one, other)]
    part = boxes[0].intersect(boxes[1])
    source = np.arange(boxes[0].num_elems, dtype=np.uint8) + 1
    target = np.zeros(boxes[1].num_elems, np.uint8)
    move(part, memoryview(source), boxes[0], memoryview(target), boxes[1])
    expected = np.zeros(boxes[1].sizes, np.uint8)
    at = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))
    expected[at] = source.reshape(boxes[0].sizes)[at]
    assert (target.reshape(boxes[1].sizes) == expected).all()


@given(
    parts(),
    st.permutations(range(3)),
    st.sampled_from((np.uint8, np.uint16, np.uint32, np.uint64, np.complex128)),
    st.integers(0, 2),
)
def test_strided_part_gives_the_row_major_bytes(case, order, kind, gap) -> None:
    """A transposed tensor with gaps, read run by run, equals numpy's own copy."""
    sizes, part = case
    order = [dim for dim in order if dim < len(sizes)]
    strides = [0] * len(sizes)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * sizes[dim] + gap
    storage = np.arange(step, dtype=np.int64).astype(kind)
    itemsize = storage.itemsize
    logical = np.lib.stride_tricks.as_strided(storage, sizes, [s * itemsize for s in strides])
    whole = Box((0,) * len(sizes), sizes)
    strided = StridedPart(part, whole, tuple(strides), itemsize)
    raw = storage.tobytes()
    runs = list(strided.runs())
    assert sum(nbytes for _, nbytes in runs) == strided.nbytes
    assert all(offset >= 0 and offset + nbytes <= len(raw) for offset, nbytes in runs)
    assert sorted(runs) == runs
    gathered = b"".join(raw[offset : offset + nbytes] for offset, nbytes in runs)
    target = bytearray(whole.num_elems * itemsize)
    strided.scatter(memoryview(gathered), memoryview(target), whole)
    expected = np.zeros(sizes, kind)
    at = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))
    expected[at] = logical[at]
    assert bytes(target) == expected.tobytes()
    inner = Box(part.offsets, (*part.sizes[:-1], 1))
    target = bytearray(whole.num_elems * itemsize)
    strided.scatter(memoryview(gathered), memoryview(target), whole, part=inner)
    expected = np.zeros(sizes, kind)
    at = tuple(slice(o, o + n) for o, n in zip(inner.offsets, inner.sizes, strict=True))
    expected[at] = logical[at]
    assert bytes(target) == expected.tobytes()
