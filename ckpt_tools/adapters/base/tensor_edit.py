"""Edits of a merge as the executor sees them: block by block where the family allows it, else the whole tensor once.

`arithmetic`, and numpy with it, is imported by the first block that needs it.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt_tools.adapters.base.share import Part
from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.layout import Blocks, Box
from ckpt_tools.storage.source import Source
from ckpt_tools.transfer.plan import blocks_of
from ckpt_tools.transfer.read import read_blocks
from ckpt_tools.transfer.strides import byte_box, start_of

if TYPE_CHECKING:
    from ckpt_tools.adapters.base.arithmetic import Arithmetic


@dataclass(slots=True, eq=False)
class TensorEdit:
    """Changes one tensor of the base; see `moving.read.Edit`."""

    entry: TensorEntry
    dtype: DType
    """As what it is written."""
    parts: tuple[Part, ...]
    """Whole tensors first."""
    source: Source
    turns: threading.Lock
    """Shared by all edits of a merge: one whole tensor is computed at a time."""
    has_changed: list[bool] = field(init=False)
    """By part: has an element become another one?"""
    should_change: list[bool] = field(init=False)
    """By part: is there an element that it should change?"""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _arithmetic: Arithmetic | None = None
    _whole: memoryview | None = None

    def __post_init__(self) -> None:
        self.has_changed, self.should_change = ([False] * len(self.parts) for _ in range(2))

    @property
    def is_settled(self) -> bool:
        """Has every part changed something?"""
        return all(self.has_changed)

    def apply(self, block: Box, content: memoryview, result: memoryview) -> None:
        """Compute the new elements of a block."""
        arithmetic, whole_box = self._prepared(), Box((0,) * len(self.entry.shape), self.entry.shape)
        if arithmetic.is_rowwise and _has_whole_rows(blocks_of(self.entry, self.dtype), arithmetic.columns):
            row = start_of(block, whole_box) // arithmetic.columns
            arithmetic.apply(row, content, result)
            return
        whole = self._computed(arithmetic)
        start = start_of(byte_box(block, self.dtype), byte_box(whole_box, self.dtype))
        result[:] = whole[start : start + len(result)]

    def finish(self) -> None:
        """Free the factors and the tensor."""
        self._arithmetic = self._whole = None

    def _prepared(self) -> Arithmetic:
        with self._lock:
            if self._arithmetic is None:
                from ckpt_tools.adapters.base.arithmetic import Arithmetic

                self._arithmetic = Arithmetic(self)
            return self._arithmetic

    def _computed(self, arithmetic: Arithmetic) -> memoryview:
        """Return the new tensor, computed by whoever comes first."""
        with self._lock:
            if self._whole is None:
                with self.turns:
                    content = bytearray(self.entry.nbytes)
                    position = 0
                    for _, view in read_blocks(self.entry, self.source):
                        content[position : position + len(view)] = view
                        position += len(view)
                    result = memoryview(bytearray(self.dtype.num_bytes(self.entry.num_elems)))
                    arithmetic.apply(0, memoryview(content), result)
                    self._whole = result
            return self._whole


def _has_whole_rows(blocks: Blocks, columns: int) -> bool:
    """Does every block hold whole rows?"""
    return blocks.dim < 0 or math.prod(blocks.shape[blocks.dim + 1 :]) % columns == 0
