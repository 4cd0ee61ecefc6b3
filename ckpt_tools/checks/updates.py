"""By how much training has changed the weights of a checkpoint since another one, and whether it should have."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from ckpt_tools.checkpoint.entries import Finding, TensorEntry
from ckpt_tools.checkpoint.globs import NameIndex, Names, find_named
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.checks.sibling_tensors import gathered
from ckpt_tools.checks.values import place_of
from ckpt_tools.results import as_json
from ckpt_tools.text import first_few
from ckpt_tools.transfer.box_bytes import start_of
from ckpt_tools.transfer.paired_reader import PairedReader
from ckpt_tools.units import format_number

if TYPE_CHECKING:
    from ckpt_tools.transfer.arrays import Array

_PIECE_ELEMS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What lies between two checkpoints' elements, in float64. Updates of several tensors are added."""

    num_elems: int = 0
    num_changed: int = 0  # Elements with other bits; with another value, where the dtypes differ
    change: float = 0.0  # Sum of the squares of the differences
    ours: float = 0.0  # Sum of the squares here
    theirs: float = 0.0  # Sum of the squares in the other
    product: float = 0.0  # Sum of the products

    def __add__(self, other: Update) -> Update:
        return Update(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})

    @property
    def relative(self) -> float | None:
        """|new - old| / |old|; None where that is no number, because an element is not or the old one is zero."""
        found = math.sqrt(self.change / self.theirs) if self.theirs > 0 else math.nan
        return found if math.isfinite(found) else None

    @property
    def cosine(self) -> float | None:
        """Of the angle between the two; None where that is no number."""
        size = math.sqrt(self.ours * self.theirs)
        found = self.product / size if size > 0 else math.nan
        return max(-1.0, min(1.0, found)) if math.isfinite(found) else None

    def to_json(self) -> dict[str, object]:
        """Return it as JSON holds it."""
        return as_json(self, "changed=num_changed relative cosine")


class Updating:
    """Takes the blocks of one tensor and reads those of the other; see `transfer.execute.Look`.

    Without `numbers` only bits are compared, as of types that are no numbers. With a `tolerance` (absolute, relative to
    the other's) it is also counted what lies farther apart; NaNs equal NaNs.
    """

    def __init__(
        self,
        entry: TensorEntry,
        companion: PairedReader,
        *,
        numbers: bool = True,
        tolerance: tuple[float, float] | None = None,
    ) -> None:
        self.fqn, self._dtype = entry.fqn, entry.dtype
        self._whole = Box((0,) * len(entry.shape), entry.shape)
        self._companion = companion
        self._numbers = numbers
        self._tolerance = tolerance
        self.num_far, self.farthest = 0, 0.0
        self._lock = threading.Lock()
        self._parts: list[tuple[float, ...]] = []
        self._num_changed = 0
        self._first = entry.num_elems
        self.update = Update(num_elems=entry.num_elems)
        """What lies between, once the last block is done."""

    @property
    def is_cast(self) -> bool:
        """Have the two different dtypes?"""
        return self._dtype != self._companion.entry.dtype

    @property
    def first(self) -> tuple[int, ...] | None:
        """Where the first element is whose bits differ; None where none do, or the dtypes differ."""
        return place_of(self._first, self._whole.sizes) if self._first < self.update.num_elems else None

    def see(self, block: Box, content: memoryview) -> None:
        """Take a block, as row-major bytes."""
        import numpy as np

        from ckpt_tools.transfer.arrays import array_of

        other = self._companion.read(block)
        if not self.is_cast:
            self._compare(content, other, start_of(block, self._whole))
        if not self._numbers:
            return
        ours, theirs = array_of(content, self._dtype, (-1,)), array_of(other, self._companion.entry.dtype, (-1,))
        for at in range(0, len(ours), _PIECE_ELEMS):
            with np.errstate(all="ignore"):
                a, b = (each[at : at + _PIECE_ELEMS].astype(np.float64) for each in (ours, theirs))
                num_cast = int(np.count_nonzero((a != b) & ~(np.isnan(a) & np.isnan(b)))) if self.is_cast else 0
                pairs = ((a, a), (b, b), (a, b))  # einsum makes no threads, as BLAS does for every dot
                sums = [float(np.einsum("i,i", *pair)) for pair in pairs]
                a -= b
                part = (float(np.einsum("i,i", a, a)), *sums)
                if self._tolerance is not None:
                    atol, rtol = self._tolerance
                    far = ~((np.abs(a) <= atol + rtol * np.abs(b)) & np.isfinite(b))
                    if far.any():
                        self._count_far(a[far], ours[at : at + _PIECE_ELEMS][far].astype(np.float64), b[far])
            with self._lock:
                self._num_changed += num_cast
                self._parts.append(part)

    def _count_far(self, apart: Array, one: Array, other: Array) -> None:
        import numpy as np

        unequal = (one != other) & ~(np.isnan(one) & np.isnan(other))
        found = np.nan_to_num(np.abs(apart[unequal]), nan=np.inf, posinf=np.inf)
        with self._lock:
            self.num_far += len(found)
            self.farthest = max(self.farthest, float(found.max(initial=0.0)))

    def _compare(self, content: memoryview, other: memoryview, start: int) -> None:
        """Count what differs in bits; of types that share bytes, bytes."""
        import numpy as np

        unit = max(8, self._dtype.bits) // 8
        word = min(8, unit)
        one, two = (np.frombuffer(each, f"u{word}") for each in (content, other))
        unequal = one != two
        if unit > word:
            unequal = unequal.reshape(-1, unit // word).any(axis=1)
        if count := int(np.count_nonzero(unequal)):
            first = start + int(unequal.argmax()) * (8 * unit // self._dtype.bits)
            with self._lock:
                self._num_changed, self._first = self._num_changed + count, min(self._first, first)

    def finish(self) -> None:
        """Add up what was seen: the same sums, whichever block came first."""
        self._companion.finish()
        change, ours, theirs, product = map(_total, zip(*self._parts or [(0.0,) * 4], strict=True))
        joint = Update(change=change, ours=ours, theirs=theirs, product=product, num_changed=self._num_changed)
        self.update = replace(joint, num_elems=self.update.num_elems)
        self._parts = []


def _total(column: Sequence[float]) -> float:
    return math.fsum(column) if all(map(math.isfinite, column)) else math.inf


def check_updates(
    updates: Mapping[str, Update], trained: Collection[str], frozen: Sequence[str], names: Names
) -> Iterator[Finding]:
    """Yield what was frozen (by any of its `names`) and changed, and what should have been trained and was not.

    Without `frozen` nobody says what should have changed: what did not is only told.
    """
    index = NameIndex(names)
    chosen = set().union(*(find_named(f"--frozen {glob}", glob, index) for glob in frozen))
    held = [fqn for fqn in updates if fqn in chosen]
    changed = {fqn: _describe(updates[fqn]) for fqn in held if updates[fqn].num_changed}
    hint = "was it left out of the frozen parameters, or did the optimizer's weight decay reach it?"
    yield from gathered(changed, "error", "frozen-changed", hint)
    free = [fqn for fqn in updates if fqn in trained and fqn not in set(held)]
    same = [fqn for fqn in free if not updates[fqn].num_changed]
    if not same:
        return
    if len(same) == len(free):
        what = f"none of the {len(free):,} weights" + (" that are not frozen" if frozen else "") + " has changed"
        make = Finding.error if frozen else Finding.info
        yield make("nothing-trained", "--against", what, "are these two steps of one run, and did the optimizer step?")
    elif frozen:
        hint = "has it a gradient, and is it in the optimizer? An update below a step of its dtype is lost as well"
        yield from gathered(dict.fromkeys(same, "not one element has changed"), "warning", "not-trained", hint)
    else:
        what = f"{len(same):,} of {len(free):,} weights have not changed: {first_few(same)}"
        yield Finding.info("unchanged", "--against", what, "--frozen GLOB says which should not")


def _describe(update: Update) -> str:
    by = "" if update.relative is None else f", relative change {format_number(update.relative, 2)}"
    return f"{update.num_changed} of {update.num_elems} elements have changed{by}"
