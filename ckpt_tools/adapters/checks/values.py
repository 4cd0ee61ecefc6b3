"""What the numbers of a tensor are like: all zero, all one, finite. By their bits."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_tools.description.dtypes import DType

_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Values:
    """What was seen of a tensor's values; an empty tensor is everything."""

    is_zero: bool
    """Every element is 0 or -0."""
    is_one: bool
    is_finite: bool


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where sign, exponent and fraction lie in an element; letters as in IEEE 754."""

    width: int
    """Bytes of an element."""
    fraction: int
    """Bits of the fraction."""
    bias: int
    """Of the exponent."""
    nan_only: bool = False
    """No infinities, and one pattern for what is not a number (E4M3)."""

    @property
    def magnitude(self) -> int:
        """Every bit but the sign."""
        return (1 << (8 * self.width - 1)) - 1

    @property
    def exponent(self) -> int:
        """Bits of the exponent; all are set in what is not finite."""
        return self.magnitude if self.nan_only else self.magnitude >> self.fraction << self.fraction

    @property
    def one(self) -> int:
        """The bits of 1."""
        return self.bias << self.fraction


_LAYOUTS = {
    "F64": _Layout(8, 52, 1023),
    "F32": _Layout(4, 23, 127),
    "BF16": _Layout(2, 7, 127),
    "F16": _Layout(2, 10, 15),
    "F8_E5M2": _Layout(1, 2, 15),
    "F8_E4M3": _Layout(1, 3, 7, nan_only=True),
}
"""Source: IEEE 754; OCP 8-bit floating point specification 1.0."""


def is_float(dtype: DType) -> bool:
    """Can the elements of a factor be of this type?"""
    return dtype.name in _LAYOUTS


def look_at(content: memoryview, dtype: DType) -> Values | None:
    """Return what the elements are like; None for a type that is no floating-point one.

    Memory: a few copies of 4 MiB.
    """
    import numpy as np

    layout = _LAYOUTS.get(dtype.name)
    if layout is None:
        return None
    kind = np.dtype(f"<u{layout.width}")
    zero = one = finite = True
    for start in range(0, len(content), _BLOCK_BYTES):
        bits = np.frombuffer(content[start : start + _BLOCK_BYTES], kind)
        magnitude = bits & kind.type(layout.magnitude)
        zero = zero and not magnitude.any()
        one = one and bool((bits == kind.type(layout.one)).all())
        exponent = kind.type(layout.exponent)
        finite = finite and not bool(((magnitude & exponent) == exponent).any())
    return Values(is_zero=zero, is_one=one, is_finite=finite)
