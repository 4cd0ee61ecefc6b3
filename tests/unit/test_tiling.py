"""Exact tiling by interval arithmetic."""

from itertools import product

import pytest
from hypothesis import given, strategies as st

from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.checkpoint.tiling import check_tiling


def _problem(shape, *boxes):
    problem = check_tiling(shape, [Box(*box) for box in boxes])
    return None if problem is None else (problem.kind, problem.describe(shape))


PINWHEEL = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((), [((), ())]),
        ((), [((), ()), ((), ())]),
        ((0, 4), []),
        ((0, 4), [((0, 0), (0, 4))]),
        ((4,), [((0,), (4,))]),
        ((4,), [((0,), (2,)), ((2,), (2,))]),
        ((4,), [((2,), (2,)), ((0,), (2,)), ((4,), (0,))]),
        ((4, 6), [((0, 0), (4, 3)), ((0, 3), (4, 3))]),
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 2)), ((2, 2), (2, 2))]),  # no grid
        ((3, 3), PINWHEEL),
        ((4,), [((0,), (4,)), ((0,), (4,))]),  # replicas
        ((1 << 40, 1 << 20), [((0, 0), (1 << 39, 1 << 20)), ((1 << 39, 0), (1 << 39, 1 << 20))]),
    ],
)
def test_tiling_of_whole_shapes_is_no_problem(shape, boxes) -> None:
    assert _problem(shape, *boxes) is None


@pytest.mark.parametrize(
    ("shape", "boxes", "kind", "text"),
    [
        ((), [], "missing", "all elements have no chunk"),
        ((4,), [], "missing", "all elements have no chunk"),
        ((4096,), [((0,), (1024,)), ((1536,), (2560,))], "missing", "rows 1024..1536 of 4096 have no chunk"),
        ((4,), [((0,), (3,))], "missing", "rows 3..4 of 4 have no chunk"),
        ((4,), [((1,), (3,))], "missing", "rows 0..1 of 4 have no chunk"),
        ((4, 6), [((0, 0), (4, 3))], "missing", "columns 3..6 of 6 have no chunk"),
        ((4, 6), [((0, 0), (2, 6)), ((2, 0), (2, 3))], "missing", "rows 2..4 of 4 × columns 3..6 of 6 have no chunk"),
        ((4,), [((0,), (3,)), ((2,), (2,))], "overlap", "rows 2..3 of 4 are in two different chunks"),
        ((2, 2), [((0, 0), (2, 2)), ((0, 0), (1, 1))], "overlap", "rows 0..1 of 2 × columns 0..1 of 2"),
        ((4,), [((0,), (4,)), ((3,), (2,))], "outside", "rows 3..5 of 4 lie outside"),
        ((4,), [((0,), (4,)), ((-1,), (1,))], "outside", "rows -1..0 of 4 lie outside"),
        ((4,), [((0,), (4,)), ((5,), (0,))], "outside", "rows 5..5 of 4"),
        ((4,), [((0, 0), (4, 1))], "num-dims", "a chunk has 2 dims, the tensor has 1"),
        ((2, 2, 4), [((0, 0, 0), (2, 2, 3))], "missing", "dim 2: 3..4 of 4 have no chunk"),
        ((0,), [((0,), (1,))], "outside", "rows 0..1 of 0"),
    ],
)
def test_tiling_of_others_names_the_place(shape, boxes, kind: str, text: str) -> None:
    found = _problem(shape, *boxes)
    assert found is not None
    assert found[0] == kind
    assert text in found[1]


@given(shape=st.lists(st.integers(0, 4), max_size=3), data=st.data())
def test_tiling_equals_counting_elements(shape, data) -> None:
    """Random boxes against a count of every element, in both directions."""
    boxes = []
    for _ in range(data.draw(st.integers(0, 5))):
        offsets = tuple(data.draw(st.integers(0, n)) for n in shape)
        sizes = tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True))
        boxes.append(Box(offsets, sizes))
    counts = dict.fromkeys(product(*map(range, shape)), 0)
    for box in set(boxes):
        for element in product(*(range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))):
            counts[element] += 1
    problem = check_tiling(tuple(shape), boxes)
    assert (problem is None) == all(count == 1 for count in counts.values())
    if problem is not None:
        inside = product(*(range(o, o + n) for o, n in zip(problem.box.offsets, problem.box.sizes, strict=True)))
        expected = {"missing": lambda n: n == 0, "overlap": lambda n: n > 1}[problem.kind]
        assert all(expected(counts[element]) for element in inside)


@pytest.mark.full
def test_tiling_of_many_boxes_is_quick() -> None:
    boxes = [Box((i, 0), (1, 8)) for i in range(50_000)]
    assert check_tiling((50_000, 8), boxes) is None
    assert check_tiling((50_000, 8), boxes[:-1]) is not None
