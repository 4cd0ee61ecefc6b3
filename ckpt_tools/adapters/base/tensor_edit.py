"""Edits of a merge as the executor sees them: block by block where the family allows it, else the whole tensor once.

`arithmetic`, and numpy with it, is imported by the first block that needs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ckpt_tools.adapters.base.matching import ChangedRows
from ckpt_tools.description.checkpoint import TensorEntry
from ckpt_tools.description.dtypes import DType
from ckpt_tools.description.layout import Blocks, Box
from ckpt_tools.moving.plan import blocks_of
from ckpt_tools.moving.read import read_blocks
from ckpt_tools.moving.strides import byte_box, start_of
from ckpt_tools.storage.source import Source

if TYPE_CHECKING:
    from ckpt_tools.adapters.adapter import Adapter
    from ckpt_tools.adapters.base.arithmetic import Arithmetic
    from ckpt_tools.moving.arrays import Array


class TensorEdit:
    """Changes one tensor of the base; see `moving.read.Edit`. `turns` lets one whole tensor be computed at a time."""

    def __init__(
        self,
        entry: TensorEntry,
        dtype: DType,
        parts: Sequence[ChangedRows],
        load: Callable[[], Adapter[Array]],
        scale: float,
        source: Source,
        turns: threading.Lock,
    ) -> None:
        self.entry = entry
        self.parts = tuple(parts)
        self.has_changed = [False] * len(self.parts)
        """By part: has an element become another one?"""
        self.should_change = [False] * len(self.parts)
        """By part: is there an element that it should change?"""
        self.dtype = dtype
        self._load = load
        self._scale = scale
        self._source = source
        self._turns = turns
        self._whole_box = Box((0,) * len(entry.shape), entry.shape)
        self._lock = threading.Lock()
        self._arithmetic: Arithmetic | None = None
        self._whole: memoryview | None = None

    @property
    def is_settled(self) -> bool:
        """Has every part changed something?"""
        return all(self.has_changed)

    def apply(self, block: Box, content: memoryview, result: memoryview) -> None:
        """Compute the new elements of a block."""
        arithmetic = self._prepared()
        if arithmetic.is_rowwise and _has_whole_rows(blocks_of(self.entry, self.dtype), arithmetic.columns):
            row = start_of(block, self._whole_box) // arithmetic.columns
            arithmetic.apply(row, content, result)
            return
        whole = self._computed(arithmetic)
        start = start_of(byte_box(block, self.dtype), byte_box(self._whole_box, self.dtype))
        result[:] = whole[start : start + len(result)]

    def finish(self) -> None:
        """Free the factors and the tensor."""
        self._arithmetic = self._whole = None

    def _prepared(self) -> Arithmetic:
        with self._lock:
            if self._arithmetic is None:
                from ckpt_tools.adapters.base.arithmetic import Arithmetic

                self._arithmetic = Arithmetic(
                    self.entry.fqn, self.entry.dtype, self.dtype, self.parts, self._load(), self._scale
                )
                self._arithmetic.has_changed, self._arithmetic.should_change = self.has_changed, self.should_change
            return self._arithmetic

    def _computed(self, arithmetic: Arithmetic) -> memoryview:
        """Return the new tensor, computed by whoever comes first."""
        with self._lock:
            if self._whole is None:
                with self._turns:
                    content = bytearray(self.entry.nbytes)
                    position = 0
                    for _, view in read_blocks(self.entry, self._source):
                        content[position : position + len(view)] = view
                        position += len(view)
                    result = memoryview(bytearray(self.dtype.num_bytes(self.entry.num_elems)))
                    arithmetic.apply(0, memoryview(content), result)
                    self._whole = result
            return self._whole


def _has_whole_rows(blocks: Blocks, columns: int) -> bool:
    """Does every block hold whole rows?"""
    if blocks.dim < 0:
        return True
    inner = 1
    for length in blocks.shape[blocks.dim + 1 :]:
        inner *= length
    return inner % columns == 0
