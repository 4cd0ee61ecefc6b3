"""The arithmetic of a merge on the bytes of blocks: read as stored, computed in float32, cast once.

Imported by the first block that needs it.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np  # first, as in transfer/arrays.py

# isort: split
import ml_dtypes

from ckpt_tools.adapters.base.tensor_edit import TensorEdit
from ckpt_tools.adapters.families.changes import WeightChange
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.transfer.arrays import Array, array_of, is_finite, numpy_dtype
from ckpt_tools.transfer.casting import cast_array

_PIECE_ELEMS = 1 << 18
"""Elements that are computed at once: small enough for a core's cache, large enough for its vector units."""


class Arithmetic:
    """What adapters make of one tensor."""

    def __init__(self, edit: TensorEdit) -> None:
        self._name = name = edit.entry.fqn
        self._before, self._after = edit.entry.dtype, edit.dtype
        self.has_changed, self.should_change = edit.has_changed, edit.should_change
        self._work = np.float64 if self._before.name == "F64" else np.float32
        largest = float(ml_dtypes.finfo(numpy_dtype(self._after)).max)  # type: ignore[no-untyped-call]
        self._safe_square = min(largest * largest, float(np.finfo(np.float32).max))
        changes = [part.change(part.rows) for part in edit.parts]
        self._parts = tuple((part.rows, change) for part, change in zip(edit.parts, changes, strict=True))
        self.columns = self._parts[0][1].columns
        """Of the tensor as a matrix."""
        if any(change.columns != self.columns for _, change in self._parts):
            raise UsageError(f"the changes of {name} disagree on its rows", where=name)
        for (one, change), (other, _) in permutations(zip(edit.parts, changes, strict=True), 2):
            if one.owner != other.owner and one.meets(other) and not change.is_additive:
                raise UsageError(f"{one.owner} and {other.owner} both change {name} and cannot be added", where=name)
        self.is_rowwise = all(change.is_rowwise for _, change in self._parts)

    def apply(self, row: int, content: memoryview, result: memoryview) -> None:
        """Compute the rows from `row` on into `result`, which may be the memory of `content`."""
        with np.errstate(all="ignore"):  # what is not finite is looked for in the result
            whole = array_of(content, self._before, (-1, self.columns))
            after = array_of(result, self._after, (-1, self.columns))
            step = max(1, _PIECE_ELEMS // self.columns) if self.is_rowwise else max(1, len(whole))
            for start in range(0, len(whole), step):
                stop = min(start + step, len(whole))
                self._piece(row + start, whole[start:stop], after[start:stop])

    def _piece(self, row: int, before: Array, after: Array) -> None:
        weight = np.empty(before.shape, self._work)
        cast_array(before, weight)
        for part, change in self._parts:
            first, last = max(row, part.start), min(row + len(weight), part.start + part.count)
            if first < last:
                rows = weight[first - row : last - row]
                offset = part.offset + first - part.start
                if change.is_additive:  # into a weight of float64 without rounding it
                    rows += change.delta(offset, offset + len(rows))
                else:
                    rows[:] = change.apply(rows.astype(np.float32), offset)
        self._check_range(before, weight)
        if not all(self.has_changed):
            self._look(row, before, weight)
        cast_array(weight, after)

    def _check_range(self, before: Array, weight: Array) -> None:
        """Refuse what is not finite, or would not be after the cast, unless the base is not finite either."""
        flat = weight.reshape(-1)
        # The sum of squares bounds every element, and costs next to nothing; only beyond it is every one looked at.
        if float(np.dot(flat, flat)) <= self._safe_square:
            return
        cast = self._cast(weight)
        if is_finite(cast):
            return
        if is_finite(before):
            raise self._not_finite(weight)
        if self.is_rowwise:  # rows of the base that are not finite stay so, and only these
            sound = np.isfinite(before.astype(np.float32)).all(axis=1)
            if not is_finite(cast[sound]):
                raise self._not_finite(weight[sound])

    def _not_finite(self, weight: Array) -> CkptError:
        what = "values that are not finite"
        if is_finite(weight):
            what = f"values too large for {self._after.torch_name}"
        hint = "look for broken factors with `ckpt check-lora ADAPTER`; --dtype bf16 or f32 has the range of float32"
        return CkptError(f"tensor {self._name!r} would get {what}", where=self._name, hint=hint)

    def _look(self, row: int, before: Array, weight: Array) -> None:
        """Has anything changed, and should it have?"""
        for i, (part, change) in enumerate(self._parts):
            first, last = max(row, part.start) - row, min(row + len(weight), part.start + part.count) - row
            if first >= last or self.has_changed[i]:
                continue
            old, new = before[first:last], weight[first:last]
            if not np.array_equal(self._cast(old), self._cast(new)):
                self.has_changed[i] = self.should_change[i] = True
            elif not self.should_change[i]:
                offset = part.offset + row + first - part.start
                self.should_change[i] = _differs(change, old, new, offset)

    def _cast(self, array: Array) -> Array:
        """Return the elements as they are to be."""
        result = np.empty(array.shape, numpy_dtype(self._after))
        cast_array(array, result)
        return result


def _differs(change: WeightChange, old: Array, new: Array, offset: int) -> bool:
    if change.is_additive:
        return bool(change.delta(offset, offset + len(old)).any())
    return not np.array_equal(old.astype(np.float32), new)
