"""What the numbers of a tensor are like: all zero, all one, finite."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_tools.description.dtypes import DType

_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Values:
    """What was seen of a tensor's values; an empty tensor is everything."""

    is_zero: bool
    """Every element is 0 or -0."""
    is_one: bool
    is_finite: bool


_FLOATS = ("F64", "F32", "BF16", "F16", "F8_E5M2", "F8_E4M3")


def is_float(dtype: DType) -> bool:
    """Can the elements of a factor be of this type?"""
    return dtype.name in _FLOATS


def look_at(content: memoryview, dtype: DType) -> Values | None:
    """Return what the elements are like; None for a type that is no floating-point one.

    Memory: a few copies of 4 MiB.
    """
    if not is_float(dtype):
        return None
    import numpy as np

    from ckpt_tools.moving.arrays import array_of

    zero = one = finite = True
    for start in range(0, len(content), _BLOCK_BYTES):
        stored = array_of(content[start : start + _BLOCK_BYTES], dtype, (-1,))
        with np.errstate(invalid="ignore"):
            block = stored if stored.dtype.kind == "f" else stored.astype(np.float32)  # exact
            zero = zero and not block.any()
            one = one and bool((block == 1).all())
            finite = finite and bool(np.isfinite(block).all())
    return Values(is_zero=zero, is_one=one, is_finite=finite)
