"""What the numbers of a tensor are like in figures: mean, spread, extremes, histogram. Blocks come in any order.

Of types of 8 and 16 bits every pattern is counted, from which every figure follows exactly. Of wider ones the means and
squared deviations of pieces, in float64, are joined as Chan, Golub and LeVeque do (1979); in the order of the tensor,
so that a result does not depend on the threads.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.transfer.box_bytes import start_of
from ckpt_tools.transfer.value_counts import Counts, count_values

if TYPE_CHECKING:
    from ckpt_tools.transfer.arrays import Array

_PIECE_ELEMS = 1 << 16  # What is counted, or computed in float64, at once stays in a core's cache
MAX_EXPONENT = 127
"""Histograms have a bin for every power of two from here down to its negative, where everything smaller is too."""
_BINS = 256  # Of a sign: exponents as float32 has them, biased by `MAX_EXPONENT`


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Figures of the finite elements of a tensor, in float64."""

    num_elems: int  # Finite elements; the figures of none are 0
    min: float
    max: float
    mean: float
    std: float  # Of these elements as the whole population
    histogram: tuple[tuple[int, int, int], ...]
    """(sign, exponent e, elements with 2**e <= |x| < 2**(e+1)), from the smallest to the largest; zeros are in none.
    The lowest exponent has all that is smaller as well, the highest all that is larger."""

    @property
    def absmax(self) -> float:
        """Largest magnitude."""
        return max(abs(self.min), abs(self.max))

    @property
    def rms(self) -> float:
        """Root of the mean square."""
        return math.hypot(self.mean, self.std)


_Part = tuple[int, int, float, float]  # (first element, elements, mean, sum of squared deviations)


def measures(dtype: DType) -> bool:
    """Have elements of this type such figures? Complex ones and those that share bytes have not."""
    from ckpt_tools.transfer.arrays import numpy_dtype

    return numpy_dtype(dtype) is not None and not dtype.name.startswith("C")


class Tally:
    """Takes the blocks of one tensor, from any thread; see `moving.execute.Look`.

    Memory: of a 16-bit type half a megabyte while its blocks come.
    """

    def __init__(self, entry: TensorEntry) -> None:
        self._dtype = entry.dtype
        self._whole = Box((0,) * len(entry.shape), entry.shape)
        self._itemsize = entry.dtype.num_bytes(1)
        self._lock = threading.Lock()
        self._parts: list[_Part] = []
        self._low, self._high = math.inf, -math.inf
        self._counts: Array | None = None
        self.moments = Moments(num_elems=0, min=0.0, max=0.0, mean=0.0, std=0.0, histogram=())
        """The figures, once the last block is done."""
        self.counts = Counts()
        """Then also how many elements are not finite, or zero."""

    def see(self, block: Box, content: memoryview) -> None:
        """Take a block, as row-major bytes."""
        import numpy as np

        from ckpt_tools.transfer.arrays import array_of

        start, one = start_of(block, self._whole), np.int64(1)
        if self._itemsize <= 2:
            bits = np.frombuffer(content, f"<u{self._itemsize}")
            counts, index = np.zeros(1 << 8 * self._itemsize, np.int64), np.empty(min(len(bits), _PIECE_ELEMS), np.intp)
            for at in range(0, len(bits), len(index)):
                piece = bits[at : at + len(index)]
                np.copyto(index[: len(piece)], piece)
                np.add.at(counts, index[: len(piece)], one)  # two thirds of the time of `bincount`, to these indices
            if counts[_values_of(self._dtype)[1]].any():  # where, the patterns do not say
                self._count(content, start)
            self._add(counts)
            return
        self._count(content, start)
        values = array_of(content, self._dtype, (-1,))
        with np.errstate(all="ignore"):
            for at in range(0, len(values), _PIECE_ELEMS):
                self._see_piece(values[at : at + _PIECE_ELEMS], start + at)

    def _see_piece(self, piece: Array, start: int) -> None:
        import numpy as np

        wide = piece.astype(np.float64)
        total = float(wide.sum())
        if not math.isfinite(total):
            finite = np.isfinite(wide)
            wide, piece = wide[finite], piece[finite]
            if not len(wide):
                return
        low, high, mean = float(piece.min()), float(piece.max()), float(wide.mean())
        bins = _bins_of(piece)
        wide -= mean
        part = (start, len(wide), mean, float(np.einsum("i,i", wide, wide)))
        self._add(bins)
        with self._lock:
            self._parts.append(part)
            self._low, self._high = min(self._low, low), max(self._high, high)

    def _count(self, content: memoryview, start: int) -> None:
        found = count_values(content, self._dtype, start=start)
        with self._lock:
            self.counts += Counts() if found is None else found

    def _add(self, counts: Array) -> None:
        with self._lock:
            self._counts = counts if self._counts is None else self._counts + counts

    def finish(self) -> None:
        """Compute the figures."""
        import numpy as np

        if self._counts is None:
            return
        if self._itemsize > 2:
            num_elems, mean, squares = _joined(self._parts)
            bins, low, high = self._counts, self._low, self._high
        else:
            there = np.flatnonzero(self._counts)
            values, counts = _values_of(self._dtype)[0][there], self._counts[there]
            num_nan, num_inf, num_zero = (
                int(counts[each].sum()) for each in (np.isnan(values), np.isinf(values), values == 0)
            )
            seen = Counts(num_elems=int(counts.sum()), num_nan=num_nan, num_inf=num_inf, num_zero=num_zero)
            self.counts = replace(seen, first_bad=self.counts.first_bad)
            finite = np.isfinite(values)
            values, counts = values[finite], counts[finite]
            num_elems = int(counts.sum())
            if not num_elems:
                return
            mean = float(np.dot(values, counts)) / num_elems
            squares = float(np.dot(np.square(values - mean), counts))
            bins, low, high = _bins_of(values, counts), float(values.min()), float(values.max())
        std = math.sqrt(squares / num_elems) if low < high else 0.0
        mean = mean if low < high else low
        histogram = tuple(_histogram(bins))
        self.moments = Moments(num_elems=num_elems, min=low, max=high, mean=mean, std=std, histogram=histogram)
        self._counts, self._parts = None, []


def _joined(parts: Iterable[_Part]) -> tuple[int, float, float]:
    """Return elements, mean and sum of squared deviations of all parts together."""
    num_elems, mean, squares = 0, 0.0, 0.0
    for _, count, own, spread in sorted(parts):
        gap, before = own - mean, num_elems
        num_elems += count
        mean += gap * (count / num_elems)
        squares += spread + gap * gap * (before * (count / num_elems))
    return num_elems, mean, squares


@functools.cache
def _values_of(dtype: DType) -> tuple[Array, Array]:
    """Return what every pattern of a type of 8 or 16 bits stands for, and which are not finite."""
    import numpy as np

    from ckpt_tools.transfer.arrays import array_of, bytes_of

    patterns = np.arange(1 << dtype.bits, dtype=f"<u{dtype.bits // 8}")
    values = (patterns != 0) if dtype.name == "BOOL" else array_of(bytes_of(patterns), dtype, (-1,))
    with np.errstate(all="ignore"):
        wide = values.astype(np.float64)
    return wide, np.flatnonzero(~np.isfinite(wide))


def _bins_of(values: Array, counts: Array | None = None) -> Array:
    """Return how many finite elements lie in every bin, to judge by the exponents of what float32 makes of them.

    `counts` says how often each of them is there; once, without.
    """
    import numpy as np

    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    found = np.bincount(bits >> 23, weights=counts, minlength=2 * _BINS).astype(np.int64)  # exact: below 2**53
    if found[0] or found[_BINS]:  # also zeros
        zero = values == 0
        found -= np.bincount(
            bits[zero] >> 23, weights=None if counts is None else counts[zero], minlength=2 * _BINS
        ).astype(np.int64)
    for last in (_BINS - 1, 2 * _BINS - 1):  # too large for float32
        found[last - 1], found[last] = found[last - 1] + found[last], 0
    return found


def _histogram(bins: Array) -> Iterable[tuple[int, int, int]]:
    """Yield the bins that are not empty in the order of their values."""
    for sign, order in ((-1, range(_BINS - 1, -1, -1)), (1, range(_BINS))):
        first = _BINS if sign < 0 else 0
        yield from ((sign, i - MAX_EXPONENT, int(bins[first + i])) for i in order if bins[first + i])
