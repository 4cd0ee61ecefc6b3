"""Casts between floating-point dtypes: to nearest even, bit for bit as torch rounds.

Two things may differ from torch: which of the values that are NaN a NaN becomes, and that what is too large for
float8_e4m3fn, which has no infinity, becomes NaN and not the largest value.
"""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING

from ckpt_tools.description.dtypes import DType

if TYPE_CHECKING:
    from ckpt_tools.moving.arrays import Array

_PIECE_ELEMS = 32704
"""Fewer than torch hands to threads of its own: those of several workers would wait for each other."""


def cast(source: memoryview, source_dtype: DType, target: memoryview, target_dtype: DType, *, bulk: bool) -> None:
    """Convert every element of `source` into `target`, both row-major bytes; `bulk` as in `cast_array`."""
    from ckpt_tools.moving.arrays import array_of

    cast_array(array_of(source, source_dtype, (-1,)), array_of(target, target_dtype, (-1,)), bulk=bulk)


def cast_array(source: Array, target: Array, *, bulk: bool) -> None:
    """Convert every element of `source` into `target`; both are C-contiguous, and of as many elements.

    Those of a `bulk` are a few of very many: then torch casts from and to float16, ten times as fast as numpy but
    seconds to import. It is not needed for anything else.
    """
    import numpy as np

    if bulk and (source.dtype == np.float16) != (target.dtype == np.float16) and _has_torch():
        _cast_by_torch(source, target)
        return
    with np.errstate(all="ignore"):  # what is too large becomes infinite, as it does for torch
        if target.dtype == np.float16 and source.dtype == np.float64:
            source = source.astype(np.float32)  # torch rounds twice
        np.copyto(target, source, casting="unsafe")


@functools.cache
def _has_torch() -> bool:
    """Can it be imported? Not where address space is scarce (ulimit -v); numpy is slower, with the same bits."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError):
        return False
    return True


def _cast_by_torch(source: Array, target: Array) -> None:
    import torch

    from ckpt_tools.moving.arrays import bytes_of

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "the buffer is not writable" is fine for a source
        values, result = (
            torch.frombuffer(bytes_of(array), dtype=getattr(torch, array.dtype.name)) for array in (source, target)
        )
    for start in range(0, len(values), _PIECE_ELEMS):
        result[start : start + _PIECE_ELEMS].copy_(values[start : start + _PIECE_ELEMS])
