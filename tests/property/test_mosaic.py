"""Mosaics hold what numpy makes of the same steps, whatever the chunks are, and lead back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import ByteSpan, Chunk, TensorEntry
from ckpt_tools.checkpoint.layout import Shard, cut_tensor, parse_mesh
from ckpt_tools.checkpoint.names import mosaic
from ckpt_tools.checkpoint.names.apply_mosaic import lay_out
from ckpt_tools.checkpoint.names.mosaic import Mosaic

DTYPE = BY_NAME["I32"]
SHAPE = (4, 6)


def stored(fqn: str, array: np.ndarray, dim: int, parts: int, data: bytearray) -> TensorEntry:
    """Put an array, cut along one dim, into the bytes of a file; every other part column-major."""
    grid = cut_tensor(array.shape, parse_mesh(f"dp_shard={parts}"), {"dp_shard": Shard(dim)})
    chunks = []
    for at, (_, box) in enumerate(grid.cells):
        if not box.num_elems:
            continue
        part = array[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        strides = None
        if at % 2:
            strides = tuple(np.empty(part.shape, np.uint8, order="F").strides)
        raw = part.tobytes(order="F" if at % 2 else "C")
        span = ByteSpan(file="file", offset=len(data), nbytes=len(raw))
        chunks.append(Chunk(box=box, span=span, strides=strides, crc32=at if strides is None else None))
        data += raw
    return TensorEntry(fqn=fqn, dtype=DTYPE, shape=array.shape, chunks=tuple(chunks))


def content(entry: TensorEntry, data: bytearray) -> np.ndarray:
    """Read an entry; every element must come exactly once."""
    result = np.full(entry.shape, -1, np.int32)
    for chunk in entry.chunks:
        sizes = chunk.box.sizes
        strides = chunk.strides or mosaic.row_major(sizes)
        assert chunk.span.nbytes == 4 * (1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)))
        view = np.ndarray(sizes, np.int32, data, chunk.span.offset, tuple(4 * stride for stride in strides))
        where = tuple(slice(o, o + s) for o, s in zip(chunk.box.offsets, sizes, strict=True))
        assert (result[where] == -1).all()
        result[where] = view
    assert (result >= 0).all()
    return result


Step = tuple[Mosaic, np.ndarray]


def steps(draw, parts: list[Step]) -> list[Step]:
    """Do one thing to tensors of one shape that together hold every element."""
    shape = parts[0][0].shape
    dim = draw(st.integers(0, len(shape) - 1))
    kind = draw(st.sampled_from(["stack", "join", "chunk", "unstack", "transpose", "regroup", "flatten", "unflatten"]))
    tensors, arrays = [one for one, _ in parts], [array for _, array in parts]
    if kind == "stack" and len(shape) < 4:
        return [(mosaic.stack(tensors, dim), np.stack(arrays, dim))]
    if kind == "join":
        return [(mosaic.join(tensors, dim), np.concatenate(arrays, dim))]
    if kind == "chunk":
        count = draw(st.sampled_from([n for n in (1, 2, 3) if shape[dim] % n == 0]))
        cut = [zip(mosaic.chunk(t, dim, count), np.split(a, count, dim), strict=True) for t, a in parts]
        return [pair for pairs in cut for pair in pairs]
    if kind == "unstack" and len(shape) > 1 and shape[dim] < 7:
        return [(part, np.take(a, at, dim)) for t, a in parts for at, part in enumerate(mosaic.unstack(t, dim))]
    if kind == "transpose":
        other = draw(st.integers(0, len(shape) - 1))
        return [(mosaic.transpose(t, dim, other), np.swapaxes(a, dim, other)) for t, a in parts]
    if kind == "flatten" and dim + 1 < len(shape):
        count = draw(st.integers(2, len(shape) - dim))
        new = (*shape[:dim], -1, *shape[dim + count :])
        return [(mosaic.flatten(t, dim, count), a.reshape(new)) for t, a in parts]
    if kind == "unflatten" and len(shape) < 4:
        first = draw(st.sampled_from([n for n in (1, 2, 3) if shape[dim] % n == 0]))
        sizes = draw(st.permutations([first, shape[dim] // first]))
        new = (*shape[:dim], *sizes, *shape[dim + 1 :])
        return [(mosaic.unflatten(t, dim, sizes), a.reshape(new)) for t, a in parts]
    if kind == "regroup":
        ways = [(g, o, shape[dim] // g // o) for g in (1, 2) for o in (1, 2, 3) if shape[dim] % (g * o) == 0]
        ways = ways if all(piece.axes[dim] != mosaic.STACKED for t in tensors for piece in t.pieces) else []
        if ways:
            way = draw(st.sampled_from(ways))
            return [(mosaic.regroup(t, dim, *way), regrouped(a, dim, *way)) for t, a in parts]
    return parts


def regrouped(array: np.ndarray, dim: int, *way: int) -> np.ndarray:
    """As torch would: view, transpose, reshape."""
    split = array.reshape(*array.shape[:dim], *way, *array.shape[dim + 1 :])
    return np.swapaxes(split, dim + 1, dim + 2).reshape(array.shape)


@given(st.data())
def test_mosaic_of_any_steps_holds_what_numpy_makes_and_leads_back(data) -> None:
    raw = bytearray()
    arrays = {f"t{i}": np.arange(24 * i, 24 * (i + 1), dtype=np.int32).reshape(SHAPE) for i in range(2)}
    entries = {
        fqn: stored(fqn, array, data.draw(st.integers(0, 1)), data.draw(st.integers(1, 3)), raw)
        for fqn, array in arrays.items()
    }
    parts: list[Step] = [(mosaic.whole(fqn, DTYPE, SHAPE), array) for fqn, array in arrays.items()]
    for _ in range(data.draw(st.integers(0, 4))):
        parts = steps(data.draw, parts)
    made = {f"m{at}": tensor for at, (tensor, _) in enumerate(parts)}
    laid = {fqn: lay_out(fqn, tensor, entries) for fqn, tensor in made.items()}
    for entry, (_, array) in zip(laid.values(), parts, strict=True):
        assert entry.shape == array.shape
        np.testing.assert_array_equal(content(entry, raw), array)
    back, copies = mosaic.invert(made, dict.fromkeys(arrays, SHAPE))
    assert not copies
    for fqn, array in arrays.items():
        np.testing.assert_array_equal(content(lay_out(fqn, back[fqn], laid), raw), array)


def test_mosaic_without_an_element_has_no_way_back() -> None:
    tensor = mosaic.whole("a", DTYPE, SHAPE)
    with pytest.raises(ValueError, match="'a'"):
        mosaic.invert({"b": mosaic.part_of(tensor, 0, 0, 3)}, {"a": SHAPE})
    _, copies = mosaic.invert({"b": tensor, "c": tensor}, {"a": SHAPE})
    assert [(one.sources, other.sources) for one, other in copies] == [(("b",), ("c",))]


def test_mosaic_keeps_the_checksums_of_chunks_that_are_seen_whole() -> None:
    raw = bytearray()
    entries = {
        "a": stored("a", np.zeros(SHAPE, np.int32), 0, 1, raw),
        "b": stored("b", np.ones(SHAPE, np.int32), 0, 1, raw),
    }
    whole = {fqn: mosaic.whole(fqn, DTYPE, SHAPE) for fqn in entries}
    joined = lay_out("c", mosaic.join(list(whole.values()), 0), entries)
    assert [chunk.crc32 for chunk in joined.chunks] == [0, 0]
    halves = mosaic.chunk(whole["a"], 0, 2)
    laid = [chunk for half in halves for chunk in lay_out("h", half, entries).chunks]
    assert [chunk.crc32 for chunk in laid] == [None, None]
