"""What the numbers of a tensor are like: how many are NaN, infinite, zero. One function; its results add up.

Elements are looked at as bit patterns, as they lie in memory: no arithmetic, no copy, and no type that numpy lacks. A
block in which nothing is strange costs four passes that find a largest or smallest integer (20 GB/s together).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.results import as_json
from ckpt_tools.transfer.threads import make_room_for_numpy

_PIECE_BYTES = 4 << 20  # What is looked at together: temporary memory is twice as much
_FEW_BYTES = 16 << 10
"""So few are counted in Python where numpy is not there yet: to import it takes a tenth of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What was seen of some elements of a tensor; those of its parts are added."""

    num_elems: int = 0
    """Elements that were looked at."""
    num_nan: int = 0
    """Of them not a number."""
    num_inf: int = 0
    """Of them infinite, of either sign."""
    num_zero: int = 0
    """Of them 0 or -0."""
    first_bad: int | None = None
    """Where the first one lies that is NaN or infinite, in row-major elements of the tensor; None without one."""

    def __add__(self, other: Counts) -> Counts:
        found = [place for place in (self.first_bad, other.first_bad) if place is not None]
        counted = ("num_elems", "num_nan", "num_inf", "num_zero")
        sums = {name: getattr(self, name) + getattr(other, name) for name in counted}
        return Counts(**sums, first_bad=min(found, default=None))

    @property
    def is_finite(self) -> bool:
        """Is every element a finite number?"""
        return not (self.num_nan or self.num_inf)

    @property
    def is_zero(self) -> bool:
        """Is every element 0 or -0? An empty tensor is."""
        return self.num_zero == self.num_elems


def counts_to_json(counts: Mapping[str, Counts]) -> dict[str, int]:
    """Return what all tensors together are like, for JSON documents."""
    total = as_json(sum(counts.values(), Counts()), "elements=num_elems nan=num_nan inf=num_inf zero=num_zero")
    return {"tensors": len(counts), **total}


class _BitPattern(NamedTuple):
    """Which bits of an element are what."""

    strange: int | None = None
    """The smallest magnitude that is not finite: an infinity, or NaN of a type without one; None where all are."""
    has_inf: bool = False  # It is an infinity, and what lies above is NaN
    nan: int | None = None  # The only NaN of a type that has no magnitudes
    has_zero: bool = True


_FLOATS = {
    "F64": _BitPattern(0x7FF << 52, has_inf=True),
    "F32": _BitPattern(0x7F800000, has_inf=True),
    "F16": _BitPattern(0x7C00, has_inf=True),
    "BF16": _BitPattern(0x7F80, has_inf=True),
    "F8_E5M2": _BitPattern(0x7C, has_inf=True),
    "F8_E4M3": _BitPattern(0x7F),
    "F8_E8M0": _BitPattern(nan=0xFF, has_zero=False),
    "F8_E4M3FNUZ": _BitPattern(nan=0x80),
    "F8_E5M2FNUZ": _BitPattern(nan=0x80),
}
"""Source: IEEE 754; for 8 bits the OCP's OFP8 and MX, and the names in ml_dtypes."""


def _pattern_of(dtype: DType) -> _BitPattern | None:
    found = _FLOATS.get(dtype.name)
    return _BitPattern() if found is None and dtype.name[0] in "BIU" else found


def has_values(dtype: DType) -> bool:
    """Can elements of this type be looked at? Not those of complex numbers, nor of types that share bytes."""
    return _pattern_of(dtype) is not None


def count_values(content: memoryview, dtype: DType, *, start: int = 0) -> Counts | None:
    """Count what the elements are like; None for a type that `has_values` knows nothing of.

    Of integers and booleans only zeros are counted. `content` is row-major, when `first_bad` shall mean something; its
    first element has the position `start` in the tensor.
    """
    pattern = _pattern_of(dtype)
    if pattern is None:
        return None
    itemsize = dtype.num_bytes(1)
    few = len(content) <= _FEW_BYTES and "numpy" not in sys.modules
    pieces = (
        (_count_few if few else _count)(content[at : at + _PIECE_BYTES], itemsize, pattern, start + at // itemsize)
        for at in range(0, len(content), _PIECE_BYTES)
    )
    return sum(pieces, Counts())


def _count(content: memoryview, itemsize: int, pattern: _BitPattern, start: int) -> Counts:
    make_room_for_numpy()
    import numpy as np

    bits = np.frombuffer(content, f"<u{itemsize}")
    zeros = nans = infs = 0
    first = None
    sign = 1 << (8 * itemsize - 1)
    if pattern.has_zero and not bits.min():
        zeros = bits.size - int(np.count_nonzero(bits))
    if pattern.nan is not None:
        strange = bits == pattern.nan
        nans = int(np.count_nonzero(strange))
    elif pattern.strange is not None:
        signed = bits.view(f"<i{itemsize}")  # the negative ones stand above all others in one, below in the other
        if signed.min() == -sign:
            zeros += int(np.count_nonzero(bits == sign))
        if signed.max() >= pattern.strange or bits.max() >= pattern.strange | sign:
            magnitudes = bits & bits.dtype.type(sign - 1)
            strange = magnitudes >= pattern.strange
            infs = int(np.count_nonzero(magnitudes == pattern.strange)) if pattern.has_inf else 0
            nans = int(np.count_nonzero(strange)) - infs
    if nans or infs:
        first = start + int(strange.argmax())
    return Counts(num_elems=bits.size, num_nan=nans, num_inf=infs, num_zero=zeros, first_bad=first)


def _count_few(content: memoryview, itemsize: int, pattern: _BitPattern, start: int) -> Counts:
    """Do the same without numpy."""
    formats: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}
    bits = content.cast("B").cast(formats[itemsize])
    mask = (1 << 8 * itemsize) - 1 if pattern.strange is None else (1 << 8 * itemsize - 1) - 1
    magnitudes = [value & mask for value in bits]
    lowest = pattern.strange if pattern.nan is None else pattern.nan
    bad: list[int] = []
    if lowest is not None:
        is_single = pattern.nan is not None
        bad = [at for at, value in enumerate(magnitudes) if value >= lowest and (value == lowest or not is_single)]
    infs = magnitudes.count(lowest) if pattern.has_inf and lowest is not None else 0
    zeros, first = magnitudes.count(0) if pattern.has_zero else 0, start + bad[0] if bad else None
    return Counts(num_elems=len(bits), num_nan=len(bad) - infs, num_inf=infs, num_zero=zeros, first_bad=first)
