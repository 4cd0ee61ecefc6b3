"""What an adapter changes of the base, and the edits of a merge as the executor sees them.

Block by block where the family allows it, else the whole tensor once. `arithmetic`, and numpy with it, is imported by
the first block that needs it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt_tools.adapters.adapter import Adapter, AdapterModule
from ckpt_tools.adapters.base.matching import BaseMatch, ChangedRows
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.read.opening import LazyAdapter, OpenedAdapter
from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.layout import Blocks, Box
from ckpt_tools.storage.source import Source
from ckpt_tools.transfer.box_bytes import byte_box, start_of
from ckpt_tools.transfer.plan import blocks_of
from ckpt_tools.transfer.read import read_blocks

if TYPE_CHECKING:
    from ckpt_tools.adapters.base.arithmetic import Arithmetic
    from ckpt_tools.adapters.families.changes import WeightChange


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One adapter as it goes into a base."""

    path: str  # As the user names it
    weight: float  # Multiplies what the adapter adds
    read: OpenedAdapter
    stored: Adapter[TensorEntry]
    adapter: Adapter[TensorEntry]  # What is stored, with the base's names
    match: BaseMatch
    settled: frozenset[str] = frozenset()  # Tensors of the base that are tied, and changed as their tie wants it
    loading: LazyAdapter

    def change(self, rows: ChangedRows) -> WeightChange:
        """Return what a module makes of its rows; imports numpy, and reads the adapter."""
        from ckpt_tools.adapters.families.changes import change_of
        from ckpt_tools.adapters.families.family import Setting

        adapter = self.loading.get()
        setting = Setting(
            scale=self.weight,
            transposed=rows.transposed,
            num_experts=rows.num_experts,
            convention=adapter.convention,
            settings=adapter.settings,
        )
        return change_of(adapter.modules[rows.module], rows.shape, setting, rows.role)


@dataclass(frozen=True, slots=True)
class TensorShare:
    """Rows of one tensor of the base, and what changes them."""

    rows: ChangedRows
    module: AdapterModule[TensorEntry]
    owner: str  # Path of the adapter, of the first one where several are combined
    change: Callable[[ChangedRows], WeightChange]  # Computes it; called when the tensor's first block is

    @property
    def needs_all(self) -> bool:
        """Does a row of the result depend on other rows?"""
        magnitude = self.module.factors.get("magnitude")
        return "blocks" in self.module.factors or (
            magnitude is not None and (len(magnitude.shape) > 1 or "A" not in self.module.factors)
        )

    @property
    def why_not_a_sum(self) -> str | None:
        """Why nothing can be added to the same rows; None where it can."""
        if self.module.is_dora and self.rows.role == "weight":
            return "it is DoRA: its change depends on the base's weights"
        return family_of(self.module).why_not_a_sum

    def meets(self, other: TensorShare) -> bool:
        """Do both change some row?"""
        one, two = self.rows, other.rows
        return one.start < two.start + two.count and two.start < one.start + one.count


@dataclass(slots=True, eq=False)
class TensorEdit:
    """Changes one tensor of the base; see `moving.read.Edit`."""

    entry: TensorEntry
    dtype: DType  # As what it is written
    parts: tuple[TensorShare, ...]  # Whole tensors first
    source: Source
    turns: threading.Lock  # Shared by all edits of a merge: one whole tensor is computed at a time
    has_changed: list[bool] = field(init=False)  # By part: has an element become another one?
    should_change: list[bool] = field(init=False)  # By part: is there an element that it should change?
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
