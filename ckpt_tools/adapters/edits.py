"""The arithmetic of a merge on the bytes of blocks (torch): read as stored, computed in float32, cast once.

Imported by the first block that needs it, so that others move meanwhile.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ckpt_tools.adapters.adapter import Adapter
from ckpt_tools.adapters.changes import Change
from ckpt_tools.adapters.delta import Setting, change_of
from ckpt_tools.adapters.matching import Part
from ckpt_tools.dtypes import DType
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.text import escape_name

_PIECE_ELEMS = 1 << 18
"""Elements that are computed at once: small enough for a core's cache, large enough for its vector units."""


class Arithmetic:
    """What an adapter makes of one tensor.

    Args:
        name: Of the tensor, for messages.
        before: Its dtype as it is stored.
        after: And as it is to be.
        parts: What changes which rows.
        adapter: Loaded.
        scale: Multiplies what the adapter adds.

    Raises:
        CkptError: The factors do not fit, or something that the result depends on is not known.
    """

    def __init__(
        self, name: str, before: DType, after: DType, parts: Sequence[Part], adapter: Adapter[Tensor], scale: float
    ) -> None:
        self._name = name
        self._before, self._after = _torch_dtype(before), _torch_dtype(after)
        self._work = torch.promote_types(self._before, torch.float32)
        self._parts = tuple((part, _change(part, adapter, scale)) for part in parts)
        self.columns = self._parts[0][1].columns
        """Of the tensor as a matrix."""
        if any(change.columns != self.columns for _, change in self._parts):
            raise UsageError(f"what changes {escape_name(name)} does not agree on its rows", where=escape_name(name))
        self.is_rowwise = all(change.is_rowwise for _, change in self._parts)
        self.has_changed = [False] * len(self._parts)
        """By part: has an element become another one?"""
        self.should_change = [False] * len(self._parts)
        """By part: is there an element that it should change?"""

    def apply(self, row: int, content: memoryview, result: memoryview) -> None:
        """Compute rows from `row` on.

        Args:
            row: The first one.
            content: The rows as they are stored.
            result: Takes them as they are to be; may be the same memory.

        Raises:
            CkptError: The result is not finite where the base is.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "the buffer is not writable": it is only read
            before = torch.frombuffer(content, dtype=self._before).view(-1, self.columns)
            after = torch.frombuffer(result, dtype=self._after).view(-1, self.columns)
        step = max(1, _PIECE_ELEMS // self.columns) if self.is_rowwise else max(1, before.shape[0])
        for start in range(0, before.shape[0], step):
            stop = min(start + step, before.shape[0])
            self._piece(row + start, before[start:stop], after[start:stop])

    def _piece(self, row: int, before: Tensor, after: Tensor) -> None:
        weight = before.to(self._work, copy=True)
        for part, change in self._parts:
            first, last = max(row, part.start), min(row + len(weight), part.start + part.count)
            if first < last:
                rows = weight[first - row : last - row]
                offset = part.offset + first - part.start
                if change.is_additive:  # into a weight of float64 without rounding it
                    rows.add_(change.delta(offset, offset + len(rows)))
                    continue
                new = change.apply(rows.to(torch.float32), offset)
                if new.data_ptr() != rows.data_ptr():
                    rows.copy_(new)
        self._check_range(before, weight)
        if not all(self.has_changed):
            self._look(row, before, weight)
        after.copy_(weight)

    def _check_range(self, before: Tensor, weight: Tensor) -> None:
        """Refuse what is not finite, or would not be after the cast, unless the base is not finite either."""
        flat = weight.flatten()
        # The sum of squares bounds every element, and costs next to nothing; only beyond it is every one looked at.
        largest = torch.finfo(self._after).max
        if float(torch.dot(flat, flat)) <= min(largest * largest, torch.finfo(torch.float32).max):
            return
        if not _is_finite(weight.to(self._after)) and _is_finite(before):
            raise self._not_finite(weight)

    def _not_finite(self, weight: Tensor) -> CkptError:
        what = "values that are not finite"
        if _is_finite(weight):
            what = f"values too large for {str(self._after).removeprefix('torch.')}"
        return CkptError(
            f"tensor {escape_name(self._name)!r} would get {what}",
            where=escape_name(self._name),
            hint="`ckpt check-lora ADAPTER` looks for broken factors; --dtype bf16 or f32 has the range of float32",
        )

    def _look(self, row: int, before: Tensor, weight: Tensor) -> None:
        """Has anything changed, and should it have?"""
        for i, (part, change) in enumerate(self._parts):
            first, last = max(row, part.start) - row, min(row + len(weight), part.start + part.count) - row
            if first >= last or self.has_changed[i]:
                continue
            old, new = before[first:last], weight[first:last]
            if not torch.equal(old.to(self._after), new.to(self._after)):
                self.has_changed[i] = self.should_change[i] = True
            elif not self.should_change[i]:
                offset = part.offset + row + first - part.start
                self.should_change[i] = _differs(change, old, new, offset)


def _differs(change: Change, old: Tensor, new: Tensor, offset: int) -> bool:
    if change.is_additive:
        return bool(change.delta(offset, offset + len(old)).any())
    return not torch.equal(old.to(torch.float32), new)


def _change(part: Part, adapter: Adapter[Tensor], scale: float) -> Change:
    setting = Setting(
        scale=scale,
        transposed=part.transposed,
        num_experts=part.num_experts,
        convention=adapter.convention,
        settings=adapter.settings,
    )
    return change_of(adapter.modules[part.module], part.shape, setting, part.role)


def _is_finite(tensor: Tensor) -> bool:
    """Several times as fast as torch.isfinite: 0 times what is not finite is not 0."""
    return float((tensor * 0).sum(dtype=torch.float32)) == 0.0


def _torch_dtype(dtype: DType) -> torch.dtype:
    found: torch.dtype = getattr(torch, str(dtype.torch_name))
    return found
