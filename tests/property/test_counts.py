"""Counts of values are torch's own, whatever the dtype, the cut and the way they were counted."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from samples import content, examples, memory_directory, small_blocks, write_model

from ckpt_tools import api
from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.transfer import value_counts as counting
from ckpt_tools.transfer.value_counts import Counts, count_values, has_values

DTYPES = [name for name, dtype in BY_NAME.items() if has_values(dtype)]
SPECIAL = (0x00, 0x80, 0x7F, 0xFF, 0x7C, 0xFC, 0xC0, 0xF8)
"""Bytes of which zeros, infinities and NaN of all widths are made."""


@st.composite
def raws(draw, most: int = 40) -> tuple[str, bytes]:
    """A dtype, and elements of which many are strange."""
    name = draw(st.sampled_from(DTYPES))
    itemsize = BY_NAME[name].num_bytes(1)
    single = st.sampled_from((0, 1)) if name == "BOOL" else st.sampled_from(SPECIAL) | st.integers(0, 255)
    odd = st.lists(single, min_size=itemsize, max_size=itemsize).map(bytes)
    tops = (0x7F80, 0xFF80, 0x7C00, 0xFC00, 0x8000, 0x3F80) if itemsize > 1 else ()
    ends = [st.just(bytes(itemsize - 2) + struct.pack("<H", top)) for top in tops]
    elements = st.one_of(odd, st.just(bytes(itemsize)), *ends)
    return name, b"".join(draw(st.lists(elements, max_size=most)))


def oracle(name: str, raw: bytes) -> Counts:
    """Ask torch."""
    if not raw:
        return Counts()
    dtype = getattr(torch, str(BY_NAME[name].torch_name))
    tensor = torch.frombuffer(bytearray(raw), dtype=dtype)
    if not dtype.is_floating_point:
        elements = [raw[at : at + tensor.itemsize] for at in range(0, len(raw), tensor.itemsize)]
        return Counts(num_elems=len(tensor), num_zero=elements.count(bytes(tensor.itemsize)))
    wide = tensor.to(torch.float64)
    bad = (~torch.isfinite(wide)).nonzero().flatten().tolist()
    return Counts(
        num_elems=len(tensor),
        num_nan=int(torch.isnan(wide).sum()),
        num_inf=int(torch.isinf(wide).sum()),
        num_zero=int((wide == 0).sum()),
        first_bad=bad[0] if bad else None,
    )


@settings(max_examples=examples(150), deadline=None)
@given(case=raws(), piece_bytes=st.sampled_from((8, 24, 4 << 20)), has_numpy=st.booleans())
def test_counts_are_those_of_torch(case, piece_bytes, has_numpy) -> None:
    name, raw = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "_PIECE_BYTES", piece_bytes)
        if not has_numpy:
            patch.setattr(counting, "_count", counting._count_few)
        assert count_values(memoryview(raw), BY_NAME[name]) == oracle(name, raw)


@settings(max_examples=examples(12), deadline=None)
@given(case=raws(96), ranks=st.integers(1, 5), columns=st.booleans(), block_bytes=st.sampled_from((16, 4 << 20)))
def test_counts_of_a_pass_are_those_of_the_tensor(case, ranks, columns, block_bytes) -> None:
    name, raw = case
    num = len(raw) // BY_NAME[name].num_bytes(1) // 4
    raw = raw[: BY_NAME[name].num_bytes(4 * num)]
    expected = {"t": oracle(name, raw)} if num else {}
    layout = {"mesh": "tp=4", "set": ["t=tp:S(1)"]} if columns else {"mesh": f"dp_shard={ranks}"}
    with memory_directory() as directory, small_blocks(block_bytes):
        model, run, back = (Path(directory) / part for part in ("model", "run", "back"))
        write_model(model, {"t": (name, (num, 4), raw)})
        assert api.shard(model, run, **layout).counts == expected
        assert api.verify(run, level="values").counts == expected
        assert api.gather(run, back).counts == expected
        assert api.verify(back, level="data").counts == {}


@pytest.mark.parametrize("at", [0, 5, 25, 31])
def test_place_is_in_the_whole_tensor_whatever_the_block(tmp_path, at) -> None:
    raw = bytearray(struct.pack("<32f", *[1.0] * 32))
    raw[4 * at : 4 * at + 4] = struct.pack("<f", -math.inf)
    expected = {"t": Counts(num_elems=32, num_inf=1, first_bad=at)}
    with small_blocks(16):
        model = write_model(tmp_path / "model", {"t": ("F32", (8, 4), bytes(raw))})
        assert api.verify(model, level="values").counts == expected
        assert api.shard(model, tmp_path / "run", mesh="tp=4", set=["t=tp:S(1)"]).counts == expected


def test_types_that_share_bytes_or_are_pairs_are_not_looked_at() -> None:
    assert {name for name in BY_NAME if name not in DTYPES} == {"F4", "F6_E2M3", "F6_E3M2", "C32", "C64", "C128"}
    assert count_values(memoryview(bytes(8)), BY_NAME["C64"]) is None


def test_counts_of_parts_add_up() -> None:
    raw = struct.pack("<6f", 0.0, -0.0, 1.0, math.nan, -math.inf, 2.0)
    parts = [count_values(memoryview(raw[at : at + 8]), BY_NAME["F32"], start=at // 4) for at in (16, 0, 8)]
    assert sum(parts, Counts()) == Counts(num_elems=6, num_nan=1, num_inf=1, num_zero=2, first_bad=3)


def test_counting_needs_little_memory() -> None:
    import tracemalloc

    raw = bytearray(content(64 << 20 >> 4) * 16)
    count_values(memoryview(raw)[:64], BY_NAME["BF16"])
    tracemalloc.start()
    try:
        assert not count_values(memoryview(raw), BY_NAME["BF16"]).is_finite
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20
