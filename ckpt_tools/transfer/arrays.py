"""Tensors in memory as numpy arrays, whose types numpy lacks come from ml_dtypes (bfloat16, 8-bit floats).

Both load in a tenth of a second, where torch takes seconds. Imported where arithmetic begins.
"""

from __future__ import annotations

from typing import Any

import numpy as np  # first: beside a thread that is importing it, ml_dtypes, which reaches into it, fails

# isort: split
import ml_dtypes
from numpy.typing import NDArray

from ckpt_tools.checkpoint.dtypes import BY_TORCH_NAME, DType
from ckpt_tools.transfer.value_counts import count_values

Array = NDArray[Any]  # Of any of the types below


def numpy_dtype(dtype: DType) -> np.dtype[Any] | None:
    """Return the type of an array whose elements are `dtype`; None for those that neither library has."""
    name = dtype.torch_name
    if name is None or dtype.pack > 1:
        return None
    found = getattr(np, name, None) if name != "bool" else np.bool_
    found = found or getattr(ml_dtypes, name, None)
    return None if found is None else np.dtype(found)


def dtype_of(array: Array) -> DType:
    """Return the element type of an array, which has one of ours."""
    return BY_TORCH_NAME[array.dtype.name]


def array_of(content: memoryview, dtype: DType, shape: tuple[int, ...]) -> Array:
    """Return row-major bytes as an array, in the same memory; raise `TypeError` for elements that no array has."""
    kind = numpy_dtype(dtype)
    if kind is None:
        raise TypeError(f"no array has elements of {dtype.name}")
    return np.frombuffer(content, kind).reshape(shape)


def bytes_of(array: Array) -> memoryview:
    """Return the row-major bytes of an array, in its own memory where these are in order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def is_finite(array: Array) -> bool:
    """Is every element a number?"""
    counts = count_values(bytes_of(array), dtype_of(array))
    return counts is None or counts.is_finite
