"""Read boxes of tensors from an open checkpoint into torch tensors, and no byte more.

Shape legend: a box has offsets and sizes in elements of the global tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ckpt_tools.checkpoint.dtypes import BY_TORCH_NAME, DType
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.checkpoint.names.apply_mosaic import lay_out
from ckpt_tools.checkpoint.names.mosaic import Mosaic, crop, whole
from ckpt_tools.errors import UsageError
from ckpt_tools.transfer.box_reader import BytesReader
from ckpt_tools.transfer.plan import check_complete


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A tensor to read: one of the checkpoint's, or parts of several put together."""

    fqn: str
    mosaic: Mosaic  # How it is put together
    entries: Mapping[str, TensorEntry]  # FQN → tensor of the checkpoint; those of the mosaic are among them

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.mosaic.shape

    @property
    def dtype(self) -> DType:
        """Its dtype in the checkpoint."""
        return self.mosaic.dtype

    @property
    def only(self) -> TensorEntry | None:
        """The tensor of the checkpoint that it is, as it is; None where it is put together."""
        found = [self.entries[source] for source in self.mosaic.sources]
        return found[0] if len(found) == 1 and self.mosaic.is_only(found[0].shape) else None


def as_whole(entry: TensorEntry) -> Whole:
    """Return a tensor that the checkpoint stores under one name."""
    return Whole(fqn=entry.fqn, mosaic=whole(entry.fqn, entry.dtype, entry.shape), entries={entry.fqn: entry})


class BoxReader:
    """Reads boxes of the tensors of one open checkpoint."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._bytes = BytesReader(opened)
        self._raw: dict[str, TensorEntry] = {}

    @property
    def bytes_read(self) -> int:
        """Payload bytes read so far."""
        return self._bytes.bytes_read

    def read(self, whole: Whole, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """Return the elements of `box` as a contiguous CPU tensor; a cast to `dtype` is between floats only."""
        wanted = _dtype_of(dtype)
        if whole.dtype is not wanted and not (whole.dtype.is_float and wanted.is_float):
            raise UsageError(
                f"tensor {whole.fqn!r} is {whole.dtype.name} in the checkpoint and {wanted.name} in the "
                "model; only floating-point types are cast"
            )
        if whole.dtype.torch_name is None or whole.dtype.pack > 1:
            raise UsageError(f"tensor {whole.fqn!r}: a model cannot hold {whole.dtype.name} elements")
        result = torch.empty(box.sizes, dtype=dtype)
        if result.numel():
            memory = result.reshape(-1).view(torch.uint8).numpy().data
            entry = whole.only
            if entry is None:
                entry, box = self._lay_out(whole, box), Box((0,) * len(box.sizes), box.sizes)
            self._bytes.read_into(entry, box, wanted, memory)
        return result

    def read_whole(self, whole: Whole, dtype: torch.dtype) -> torch.Tensor:
        """Return all elements, as `read`."""
        return self.read(whole, Box((0,) * len(whole.shape), whole.shape), dtype)

    def _lay_out(self, whole: Whole, box: Box) -> TensorEntry:
        """Return the elements of a box as a tensor of their own: views of the tensors that they come from."""
        part = crop(whole.mosaic, box)
        for fqn in part.sources:
            if fqn not in self._raw:
                check_complete(whole.entries[fqn])
                self._raw[fqn] = self._opened.resolve(whole.entries[fqn])
        return lay_out(whole.fqn, part, self._raw)


def _dtype_of(dtype: torch.dtype) -> DType:
    found = BY_TORCH_NAME.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise UsageError(f"checkpoints cannot store {dtype}")
    return found
