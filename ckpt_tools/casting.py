"""Casts between floating-point dtypes; the one place of the executor that imports torch, and only on use."""

from __future__ import annotations

import warnings

from ckpt_tools.dtypes import DType


def cast(source: memoryview, source_dtype: DType, target: memoryview, target_dtype: DType) -> None:
    """Convert every element of `source` into `target`, rounding to nearest even as torch does."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "the buffer is not writable" is fine for a source
        values = torch.frombuffer(source, dtype=getattr(torch, str(source_dtype.torch_name)))
        result = torch.frombuffer(target, dtype=getattr(torch, str(target_dtype.torch_name)))
    result.copy_(values)
