"""Read boxes of tensors from an open checkpoint into torch tensors, and no byte more.

Shape legend: a box has offsets and sizes in elements of the global tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ckpt_tools.description.checkpoint import TensorEntry
from ckpt_tools.description.dtypes import BY_TORCH_NAME, DType
from ckpt_tools.description.layout import Box
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.opening import Opened
from ckpt_tools.moving.boxes import BytesReader


@dataclass(frozen=True, slots=True)
class Piece:
    """A source tensor as a part of a tensor that the checkpoint stores in parts (experts of one layer)."""

    entry: TensorEntry
    offsets: tuple[int, ...]
    """Where its first element lies in the whole."""
    new_dims: tuple[int, ...]
    """Dims of the whole that the piece does not have; it has size 1 there."""

    @property
    def box(self) -> Box:
        """Its elements of the whole."""
        sizes = list(self.entry.shape)
        for dim in sorted(self.new_dims):
            sizes.insert(dim, 1)
        return Box(self.offsets, tuple(sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A tensor to read: one of the checkpoint's, or several put together."""

    shape: tuple[int, ...]
    dtype: DType
    pieces: tuple[Piece, ...]


def as_whole(entry: TensorEntry) -> Whole:
    """Return a tensor that the checkpoint stores under one name."""
    piece = Piece(entry, (0,) * len(entry.shape), ())
    return Whole(shape=entry.shape, dtype=entry.dtype, pieces=(piece,))


class BoxReader:
    """Reads boxes of the tensors of one open checkpoint."""

    def __init__(self, opened: Opened) -> None:
        self._bytes = BytesReader(opened)

    @property
    def bytes_read(self) -> int:
        """Payload bytes read so far."""
        return self._bytes.bytes_read

    def read(self, whole: Whole, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """Return the elements of `box` as a contiguous tensor on the CPU, cast to `dtype`.

        Raises:
            UnreadableError: The bytes are damaged, missing, or of a type that torch lacks.
            UsageError: A cast that is not between floating-point types.
        """
        wanted = _dtype_of(dtype)
        if len(whole.pieces) == 1 and not whole.pieces[0].new_dims:
            return self._read_entry(whole.pieces[0].entry, box, wanted)
        result = torch.empty(box.sizes, dtype=dtype)
        for piece in whole.pieces:
            part = piece.box.intersect(box) if 0 not in box.sizes else None
            if part is None:
                continue
            dims = [dim for dim in range(len(part.sizes)) if dim not in piece.new_dims]
            own = Box(
                tuple(part.offsets[dim] - piece.offsets[dim] for dim in dims), tuple(part.sizes[dim] for dim in dims)
            )
            target = tuple(
                slice(o - b, o - b + n) for o, b, n in zip(part.offsets, box.offsets, part.sizes, strict=True)
            )
            result[target] = self._read_entry(piece.entry, own, wanted).reshape(part.sizes)
        return result

    def read_whole(self, whole: Whole, dtype: torch.dtype) -> torch.Tensor:
        """Return all elements, as `read`."""
        return self.read(whole, Box((0,) * len(whole.shape), whole.shape), dtype)

    def _read_entry(self, entry: TensorEntry, box: Box, dtype: DType) -> torch.Tensor:
        if entry.dtype is not dtype and not (entry.dtype.is_float and dtype.is_float):
            raise UsageError(
                f"tensor {entry.fqn!r} is {entry.dtype.name} in the checkpoint and {dtype.name} in the "
                "model; only floating-point types are cast",
            )
        if entry.dtype.torch_name is None or entry.dtype.pack > 1:
            raise UsageError(f"tensor {entry.fqn!r}: a model cannot take {entry.dtype.name} elements")
        result = torch.empty(box.sizes, dtype=getattr(torch, str(dtype.torch_name)))
        if result.numel():
            self._bytes.read_into(entry, box, dtype, result.reshape(-1).view(torch.uint8).numpy().data)
        return result


def _dtype_of(dtype: torch.dtype) -> DType:
    found = BY_TORCH_NAME.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise UsageError(f"{dtype} is not a type that checkpoints hold")
    return found
