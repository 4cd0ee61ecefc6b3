"""Flat parts of ranks, laid out as DeepSpeed's source says, and fitted together again: every element in its place."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import ByteSpan
from ckpt_tools.checkpoint.formats.deepspeed_fp32 import Flat, Rank, build_entry, find_runs
from ckpt_tools.errors import UnreadableError

F32 = BY_NAME["F32"]
shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=5)
PADDING = -1


def numbered(groups: list[list[tuple[int, ...]]]) -> tuple[list[dict[str, tuple[int, ...]]], dict[str, np.ndarray]]:
    """Parameters whose elements are all different."""
    named = [{f"{g}.{i}": shape for i, shape in enumerate(group)} for g, group in enumerate(groups)]
    whole, start = {}, 0
    for name, shape in ((name, shape) for group in named for name, shape in group.items()):
        whole[name] = np.arange(start, start + math.prod(shape)).reshape(shape)
        start += math.prod(shape)
    return named, whole


def rank_of(number: int, stage: int, vectors: list[np.ndarray], **said: object) -> Rank:
    """A rank whose vectors lie one after the other in a file of its own."""
    masters, offset = {}, 0
    for group, vector in enumerate(vectors):
        span = ByteSpan(file=str(number), offset=offset, nbytes=4 * len(vector))
        masters[group] = Flat(span=span, dtype=F32, shape=(len(vector),))
        offset += span.nbytes
    return Rank(file=str(number), stage=stage, masters=masters, **said)


def check(ranks: list[Rank], contents: list[list[np.ndarray]], groups: list, whole: dict[str, np.ndarray]) -> None:
    runs = find_runs(ranks, groups)
    flats = {(n, group): flat for n, rank in enumerate(ranks) for group, flat in rank.masters.items()}
    files = {str(n): np.concatenate([*vectors, np.zeros(0, int)]) for n, vectors in enumerate(contents)}
    for name, wanted in whole.items():
        found = np.full(wanted.shape, PADDING - 1)
        for chunk in build_entry((name,), wanted.shape, runs[name], flats, F32).chunks:
            place = tuple(slice(o, o + n) for o, n in zip(chunk.box.offsets, chunk.box.sizes, strict=True))
            first = chunk.span.offset // 4
            assert (found[place] == PADDING - 1).all()
            found[place] = files[chunk.span.file][first : first + chunk.box.num_elems].reshape(chunk.box.sizes)
        assert (found == wanted).all()


@given(st.lists(shapes, min_size=1, max_size=3), st.integers(1, 4), st.data())
def test_stretches_of_groups_are_their_parameters(groups, world, data) -> None:
    named, whole = numbered(groups)
    is_padded, has_addresses = data.draw(st.booleans()), data.draw(st.booleans())
    vectors: list[list[np.ndarray]] = [[] for _ in range(world)]
    said: list[list[dict[str, tuple[int, int]]]] = [[] for _ in range(world)]
    paddings = []
    for group in named:
        between = [data.draw(st.integers(0, 3)) if is_padded else 0 for _ in group]
        paddings.append(between)
        laid = [np.concatenate([whole[n].ravel(), [PADDING] * pad]) for n, pad in zip(group, between, strict=True)]
        flat = np.concatenate([*laid, np.zeros(0, int)]).astype(int)
        total = -(-len(flat) // (2 * world)) * 2 * world
        part = total // world
        for rank in range(world):
            vectors[rank].append(flat[rank * part : (rank + 1) * part])  # the last ones without their padding
            held = vectors[rank][-1]
            places = {n: np.flatnonzero(np.isin(held, whole[n])) for n in group}
            said[rank].append({n: (int(at[0]), len(at)) for n, at in places.items() if len(at)})
    ranks = [
        rank_of(n, 2, vectors[n], paddings=paddings if is_padded else [], addresses=said[n] if has_addresses else [])
        for n in range(world)
    ]
    check(ranks, vectors, named, whole)


@given(st.lists(shapes, min_size=1, max_size=3), st.integers(1, 4), st.data())
def test_parts_of_parameters_are_them(groups, world, data) -> None:
    named, whole = numbered(groups)
    flats: list[list[int]] = [[] for _ in range(world)]
    for wanted in whole.values():
        part = -(-wanted.size // world)
        padded = np.concatenate([wanted.ravel(), [PADDING] * (part * world - wanted.size)]).astype(int)
        for rank in range(world):
            flats[rank] += padded[rank * part : (rank + 1) * part].tolist()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(flats[0])), max_size=3)))
    vectors = [np.split(np.array(flat, int), cuts) for flat in flats]
    ranks = [rank_of(n, 3, vectors[n]) for n in range(world)]
    check(ranks, vectors, named, whole)
    if flats[0]:
        longer = [*vectors[:-1], [*vectors[-1], np.zeros(1, int)]]
        with pytest.raises(UnreadableError, match="its vectors have"):
            find_runs([rank_of(n, 3, each) for n, each in enumerate(longer)], named)
