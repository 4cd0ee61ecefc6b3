"""One adapter's share in a merge: what it changes of the base, and how much of that counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_tools.adapters.adapter import Adapter, AdapterModule
from ckpt_tools.adapters.base.matching import BaseMatch, ChangedRows
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.read.opening import LazyAdapter, OpenedAdapter
from ckpt_tools.checkpoint.entries import TensorEntry

if TYPE_CHECKING:
    from ckpt_tools.adapters.families.changes import Change


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One adapter as it goes into a base."""

    path: str
    """As the user names it."""
    weight: float
    """Multiplies what the adapter adds."""
    read: OpenedAdapter
    stored: Adapter[TensorEntry]
    adapter: Adapter[TensorEntry]
    """What is stored, with the base's names."""
    match: BaseMatch
    settled: frozenset[str] = frozenset()
    """Tensors of the base that are tied, and changed as their tie wants it."""
    loading: LazyAdapter

    def change(self, rows: ChangedRows) -> Change:
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
class Part:
    """Rows of one tensor of the base, and what changes them."""

    rows: ChangedRows
    module: AdapterModule[TensorEntry]
    owner: str
    """Path of the adapter, of the first one where several are combined."""
    change: Callable[[ChangedRows], Change]
    """Computes it; called when the tensor's first block is."""

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
            return "it is DoRA: what it adds depends on the base"
        return family_of(self.module).why_not_a_sum

    def meets(self, other: Part) -> bool:
        """Do both change some row?"""
        one, two = self.rows, other.rows
        return one.start < two.start + two.count and two.start < one.start + one.count
