"""Whole tensors of an adapter, and the numbers that some of them are.

Adapters are small; a tensor at a time is in memory.
"""

from __future__ import annotations

import struct

from ckpt_tools.description.checkpoint import TensorEntry
from ckpt_tools.description.dtypes import DType
from ckpt_tools.moving.boxes import BytesReader

_SCALARS = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i", "I16": "<h", "U8": "<B", "I8": "<b"}


class TensorReader(BytesReader):
    """Reads tensors of one open checkpoint, and scalars as numbers."""

    def read_scalar(self, entry: TensorEntry) -> float | None:
        """Return the number that a tensor of one element holds; None when it holds none, or of no known type."""
        if entry.num_elems != 1:
            return None
        return decode_scalar(self.read(entry), entry.dtype)


def decode_scalar(content: memoryview, dtype: DType) -> float | None:
    """Return the number in the bytes of one element; None for a type that is none."""
    if dtype.name == "BF16":
        return float(struct.unpack("<f", b"\0\0" + bytes(content))[0])
    code = _SCALARS.get(dtype.name)
    return None if code is None else float(struct.unpack(code, content)[0])
