"""Casts against torch's, bit for bit: every 16-bit value, and float32 and float64 on and around every rounding step."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from arrays import to_array, to_tensor

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.transfer.arrays import Array, array_of, bytes_of, dtype_of, is_finite, numpy_dtype
from ckpt_tools.transfer.casting import cast, cast_array

FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


def float32s() -> Array:
    """Every sign, exponent and upper bits of the fraction, with the lower bits below, on and above half a step."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    halves = np.arange(1 << 19, dtype=np.uint32) << 13
    random = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint64).astype(np.uint32)
    near = [upper, upper + 0x7FFF, upper + 0x8000, upper + 0x8001, halves + 0xFFF, halves + 0x1000, halves + 0x1001]
    return np.concatenate([*near, random]).view(np.float32)


def values(name: str) -> Array:
    kind = numpy_dtype(BY_NAME[name])
    assert kind is not None
    if kind.itemsize < 4:
        return np.arange(1 << (8 * kind.itemsize), dtype=f"u{kind.itemsize}").view(kind)
    if name == "F32":
        return float32s()
    with np.errstate(invalid="ignore"):
        wide = float32s().astype(np.float64)
        random = np.random.default_rng(1).integers(0, 1 << 64, 1 << 16, dtype=np.uint64).view(np.float64)
        return np.concatenate([wide, wide * (1 + 2.0**-40), wide * (1 - 2.0**-40), random])


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(FLOATS, 2)])
def test_cast_rounds_as_torch_does(before: str, after: str) -> None:
    source, kind = values(before), numpy_dtype(BY_NAME[after])
    target = np.empty(source.shape, kind)
    cast_array(source, target)
    expected = to_array(to_tensor(source).to(getattr(torch, str(BY_NAME[after].torch_name))))
    bits = f"u{target.itemsize}"
    different = target.view(bits) != expected.view(bits)
    with np.errstate(invalid="ignore"):
        both_nan = np.isnan(target.astype(np.float64)) & np.isnan(expected.astype(np.float64))
        if after == "F8_E4M3":  # torch takes its largest value, 448, for what is too large
            both_nan |= np.isnan(target.astype(np.float64)) & (np.abs(source.astype(np.float64)) > 464)
    assert not np.any(different & ~both_nan)


def test_cast_of_bytes_fills_the_target_in_place() -> None:
    source = np.array([1.0, -2.5, 3.0e-40, np.inf], np.float32)
    target = bytearray(8)
    cast(bytes_of(source), BY_NAME["F32"], memoryview(target), BY_NAME["BF16"])
    assert bytes(target) == bytes.fromhex("803f20c00300807f")


def test_arrays_know_every_type_that_torch_has_but_packed_ones() -> None:
    for dtype in BY_NAME.values():
        kind = numpy_dtype(dtype)
        if dtype.torch_name is None or dtype.pack > 1:
            assert kind is None
            continue
        assert kind is not None
        assert kind.itemsize * 8 == dtype.bits
        assert dtype_of(np.zeros(2, kind)) is dtype
    with pytest.raises(TypeError, match="F4"):
        array_of(memoryview(b"\0"), BY_NAME["F4"], (2,))


def test_bytes_of_an_array_are_row_major_whatever_its_strides() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    assert bytes(bytes_of(array.T)) == array.T.copy().tobytes()
    assert len(bytes_of(np.zeros((0, 3), np.float32))) == 0
    assert bytes(bytes_of(np.float32(1).reshape(()))) == bytes.fromhex("0000803f")


@pytest.mark.parametrize("name", [*FLOATS, "F8_E4M3FNUZ", "F8_E5M2FNUZ"])
def test_is_finite_sees_one_value_that_is_not(name: str) -> None:
    kind = numpy_dtype(BY_NAME[name])
    array = np.ones(1000, kind)
    assert is_finite(array)
    array[777] = np.nan
    assert not is_finite(array)
    if name not in ("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2FNUZ"):
        array[777] = -np.inf
        assert not is_finite(array)
