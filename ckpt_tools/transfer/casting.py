"""Casts between floating-point dtypes: to nearest even, bit for bit as torch rounds.

numpy casts float16 one element at a time, so that is done here, by arithmetic on bit patterns that numpy does many at a
time. Two things may differ from torch: which of the values that are NaN a NaN becomes, and that what is too large for
float8_e4m3fn, which has no infinity, becomes NaN and not the largest value.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ckpt_tools.checkpoint.dtypes import DType

if TYPE_CHECKING:
    from ckpt_tools.transfer.arrays import Array

_PIECE_ELEMS = 1 << 17
"""Cast at once: half a megabyte. Less stays in the cache, and more threads wait for Python's lock (a merge took 13 %
longer)."""
_ROOM = threading.local()  # Of each thread: what casts use again and again
_SUBNORMAL = 113 << 23  # Exponent bits in float32 of 2**-14, below which float16 has steps of one size
_TOO_LARGE = 143 << 23  # Those of 2**16, beyond float16


def cast(source: memoryview, source_dtype: DType, target: memoryview, target_dtype: DType) -> None:
    """Convert every element of `source` into `target`, both row-major bytes."""
    from ckpt_tools.transfer.arrays import array_of

    cast_array(array_of(source, source_dtype, (-1,)), array_of(target, target_dtype, (-1,)))


def cast_array(source: Array, target: Array) -> None:
    """Convert every element of `source` into `target`; both are C-contiguous, and of as many elements."""
    import numpy as np

    half = np.dtype(np.float16)
    with np.errstate(all="ignore"):  # what is too large becomes infinite, as it does for torch
        if (source.dtype == half) == (target.dtype == half):
            np.copyto(target, source, casting="unsafe")
            return
        before, after = source.reshape(-1), target.reshape(-1)
        wide, spare = _room()
        for at in range(0, before.size, _PIECE_ELEMS):
            piece, result = before[at : at + _PIECE_ELEMS], after[at : at + _PIECE_ELEMS]
            between = wide[: len(piece)]
            if piece.dtype == half:
                direct = result if result.dtype == wide.dtype else between
                _widen(piece.view(np.int16), direct)
                if direct is not result:
                    np.copyto(result, direct, casting="unsafe")
                continue
            if piece.dtype != wide.dtype:
                np.copyto(between, piece, casting="unsafe")  # float64 is rounded twice: torch does that, too
                piece = between
            _narrow(piece.view(np.uint32), result.view(np.uint16), spare[:, : len(piece)])


def _room() -> tuple[Array, Array]:
    """Return a thread's room for a piece of float32, and that of `_narrow`; making it takes as long as a cast."""
    import numpy as np

    if not hasattr(_ROOM, "arrays"):
        _ROOM.arrays = np.empty(_PIECE_ELEMS, np.float32), np.full((4, _PIECE_ELEMS), _SUBNORMAL, np.uint32)
    arrays: tuple[Array, Array] = _ROOM.arrays
    return arrays


def _widen(half: Array, wide: Array) -> None:
    """Write into `wide` (float32) what patterns of float16, as int16, stand for.

    In the place of float32's bits the exponent of float16 lacks 112. A product with 2**112 mends that, of subnormals
    too; infinity and NaN become what is too large, and get float32's highest exponent.
    """
    import numpy as np

    bits = wide.view(np.int32)
    np.copyto(bits, half)  # repeats the sign
    np.left_shift(bits, 13, out=bits)
    np.bitwise_and(bits, np.int32(-0x70002000), out=bits)  # the sign, and 15 bits from 13 on
    np.multiply(wide, np.float32(2.0**112), out=wide)
    if half.max() >= 0x7C00 or half.view(np.uint16).max() >= 0xFC00:
        np.bitwise_or(bits, np.int32(0x7F800000), out=bits, where=np.abs(wide) >= 65536)


def _narrow(wide: Array, half: Array, spare: Array) -> None:
    """Write into `half` patterns of float16, as uint16, for those of float32, as uint32.

    Beside a power of two whose last bit is float16's step, the processor rounds an element to that step. What the sum
    has more than the power of two, as an integer, is the number of steps. `spare` has room for three times as many
    elements, and as often `_SUBNORMAL`: numpy compares with an array many at a time.
    """
    import numpy as np

    magnitude, exponent, power, subnormal = spare
    np.bitwise_and(wide, np.uint32(0x7FFFFFFF), out=magnitude)
    np.bitwise_and(magnitude, np.uint32(0x7F800000), out=exponent)
    np.maximum(exponent, subnormal, out=exponent)
    is_large = magnitude.max() >= _TOO_LARGE
    if is_large:
        strange = magnitude > np.uint32(0x7F800000)
        np.minimum(exponent, np.uint32(_TOO_LARGE), out=exponent)
    np.add(exponent, np.uint32(13 << 23), out=power)
    total = magnitude.view(np.float32)
    np.add(total, power.view(np.float32), out=total)
    np.subtract(magnitude, power, out=magnitude)
    np.subtract(exponent, np.uint32(_SUBNORMAL), out=exponent)
    np.right_shift(exponent, 13, out=exponent)
    np.add(magnitude, exponent, out=magnitude)
    if is_large:
        np.minimum(magnitude, np.uint32(0x7C00), out=magnitude)
        magnitude[strange] = 0x7E00
    np.right_shift(wide, 16, out=power)
    np.bitwise_and(power, np.uint32(0x8000), out=power)
    np.bitwise_or(magnitude, power, out=magnitude)
    np.copyto(half, magnitude, casting="unsafe")
