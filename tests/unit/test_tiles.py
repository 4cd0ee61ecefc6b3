"""Tensors that are stored in another order: what blocks need of a row together is read at once."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import pytest
from samples import small_blocks

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import ByteSpan, Chunk, TensorEntry
from ckpt_tools.checkpoint.formats.digest import digest_block, digest_tensor
from ckpt_tools.checkpoint.layout import Blocks, Box
from ckpt_tools.checkpoint.names import mosaic
from ckpt_tools.checkpoint.names.apply_mosaic import lay_out
from ckpt_tools.storage.source import LocalSource
from ckpt_tools.transfer.execute import scan
from ckpt_tools.transfer.plan import TILE_BLOCKS, blocks_at_once, blocks_of, buffer_bytes
from ckpt_tools.transfer.read import Buffers, read_blocks

BF16 = BY_NAME["BF16"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Two matrices of 9 MiB in a file: (source, {name: entry}, {name: array})."""
    root = tmp_path_factory.mktemp("tiles")
    arrays = {
        name: np.random.default_rng(at).integers(0, 60000, (2000, 2400), np.uint16) for at, name in enumerate("ab")
    }
    with open(root / "f", "wb") as file:
        file.writelines(array.tobytes() for array in arrays.values())
    entries = {}
    for at, (name, array) in enumerate(arrays.items()):
        span = ByteSpan(file="f", offset=at * array.nbytes, nbytes=array.nbytes)
        chunk = Chunk(box=Box((0, 0), array.shape), span=span)
        entries[name] = TensorEntry(fqn=name, dtype=BF16, shape=array.shape, chunks=(chunk,))
    with LocalSource(str(root)) as source:
        yield source, entries, arrays


def transposed(entries):
    return {name: mosaic.transpose(mosaic.whole(name, BF16, entry.shape), 0, 1) for name, entry in entries.items()}


def interleaved(entries):
    """The last dim of one, every second element first."""
    return mosaic.transpose(mosaic.regroup(transposed(entries)["a"], 0, 1, 1200, 2), 0, 1)


CASES = {
    "transposed": (lambda entries: transposed(entries)["a"], lambda a, _: a.T),
    "side by side": (
        lambda e: mosaic.join(list(transposed(e).values()), 1),
        lambda a, b: np.concatenate([a.T, b.T], 1),
    ),
    "one on the other": (
        lambda entries: mosaic.join(list(transposed(entries).values()), 0),
        lambda a, b: np.concatenate([a.T, b.T], 0),
    ),
    "every second": (interleaved, lambda a, _: np.concatenate([a[:, ::2], a[:, 1::2]], 1)),
}


@pytest.mark.parametrize("case", list(CASES))
def test_blocks_together_are_what_they_are_one_by_one(stored, case) -> None:
    source, entries, arrays = stored
    build, formula = CASES[case]
    entry = lay_out("t", build(entries), entries)
    expected = np.ascontiguousarray(formula(arrays["a"], arrays["b"])).tobytes()
    assert b"".join(bytes(content) for _, content in read_blocks(entry, source)) == expected
    blocks, start, digests = blocks_of(entry, BF16), 0, bytearray()
    for block in blocks:
        digests += digest_block(memoryview(expected)[start : start + 2 * block.num_elems])
        start += 2 * block.num_elems
    for num_workers in (1, 3):
        assert scan([entry], source, num_workers=num_workers).digests["t"] == digest_tensor(digests)


@pytest.mark.parametrize("case", ["transposed", "side by side"])
def test_tile_of_the_blocks_before_serves_no_others(stored, case) -> None:
    """One worker reads more blocks than a tile is for."""
    source, entries, arrays = stored
    build, formula = CASES[case]
    entry = lay_out("t", build(entries), entries)
    expected = memoryview(np.ascontiguousarray(formula(arrays["a"], arrays["b"])).tobytes())
    with small_blocks(1 << 20):
        ends = [0, *accumulate(2 * block.num_elems for block in blocks_of(entry, BF16))]
        assert len(ends) > 2 * TILE_BLOCKS
        digests = b"".join(digest_block(expected[start:end]) for start, end in pairwise(ends))
        assert scan([entry], source, num_workers=1).digests["t"] == digest_tensor(digests)


@pytest.mark.parametrize(("case", "most"), [("transposed", 1), ("every second", 4000)])
def test_rows_are_read_whole_for_blocks_that_share_them(stored, monkeypatch, case, most) -> None:
    """A transposed matrix at once; of one with every second element first, 2000 rows twice, not every element."""
    source, entries, _ = stored
    entry = lay_out("t", CASES[case][0](entries), entries)
    sizes = []
    read_into = type(source).read_into

    def counted(self, file, offset, target) -> None:
        sizes.append(len(target))
        read_into(self, file, offset, target)

    monkeypatch.setattr(type(source), "read_into", counted)
    scan([entry], source, num_workers=1)
    assert len(sizes) <= most
    assert entry.nbytes <= sum(sizes) <= 2 * entry.nbytes


@pytest.mark.parametrize("case", list(CASES))
def test_memory_is_what_the_plan_says(stored, case, monkeypatch) -> None:
    source, entries, _ = stored
    entry = lay_out("t", CASES[case][0](entries), entries)
    taken: dict[int, int] = {}
    get = Buffers.get

    def counted(self, which, nbytes, *, shift=0):
        taken[which] = max(taken.get(which, 0), nbytes)
        return get(self, which, nbytes, shift=shift)

    monkeypatch.setattr(Buffers, "get", counted)
    scan([entry], source, num_workers=1)
    assert sum(taken.values()) <= buffer_bytes(entry, BF16)
    assert buffer_bytes(entry, BF16) <= 64 << 20


def test_tensors_in_order_are_read_block_by_block(stored) -> None:
    _, entries, _ = stored
    assert blocks_at_once(entries["a"]) == 1
    rows = mosaic.regroup(mosaic.whole("a", BF16, entries["a"].shape), 0, 4, 250, 2)
    assert blocks_at_once(lay_out("t", rows, entries)) == 1


def test_rows_of_blocks_make_boxes() -> None:
    blocks = Blocks((2, 7, 3), 1, 3)
    rows = list(blocks.rows())
    assert rows == [range(3), range(3, 6)]
    assert blocks.span(rows[1]) == Box((1, 0, 0), (1, 7, 3))
    assert blocks.span(rows[0][1:]) == Box((0, 3, 0), (1, 4, 3))
    assert [*Blocks((4,), -1, 0).rows()] == [range(1)]
    assert [*Blocks((0, 4), 0, 1).rows()] == []
