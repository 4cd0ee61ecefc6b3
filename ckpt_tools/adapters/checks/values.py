"""What the numbers of a tensor are like: all zero, all one, finite."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_tools.description.dtypes import DType
from ckpt_tools.moving.counts import count_values


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
    """Return what the elements are like; None for a type that is no floating-point one."""
    counts = count_values(content, dtype) if is_float(dtype) else None
    if counts is None:
        return None
    import numpy as np

    from ckpt_tools.moving.arrays import numpy_dtype

    one = np.ones(1, numpy_dtype(dtype)).tobytes()
    is_one = not content or (content[: len(one)] == one and content[len(one) :] == content[: -len(one)])
    return Values(is_zero=counts.is_zero, is_one=is_one, is_finite=counts.is_finite)
