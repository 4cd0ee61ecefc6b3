"""Torch tensors as the arrays that adapters hold, and back; the same bits, in the same memory where that can be."""

from __future__ import annotations

import torch

from ckpt_tools.checkpoint.dtypes import BY_TORCH_NAME
from ckpt_tools.transfer.arrays import Array, dtype_of, numpy_dtype

_BITS = {1: torch.uint8, 2: torch.uint16}
"""For the types that numpy lacks, by bytes of an element."""


def to_array(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach().cpu()
    kind = numpy_dtype(BY_TORCH_NAME[str(tensor.dtype).removeprefix("torch.")])
    assert kind is not None, tensor.dtype
    if kind.type.__module__ == "numpy":
        return tensor.numpy()
    return tensor.view(_BITS[kind.itemsize]).numpy().view(kind)


def to_tensor(array: Array) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, str(dtype_of(array).torch_name))
    if array.dtype.type.__module__ == "numpy":
        return torch.from_numpy(array.copy(order="K"))
    bits = array.view(f"u{array.itemsize}").copy(order="K")
    return torch.from_numpy(bits).view(dtype)
