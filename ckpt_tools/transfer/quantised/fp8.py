"""8-bit floats with a scale for each block: DeepSeek-V3, Qwen3-FP8, and what transformers writes with FineGrainedFP8.

`weight` is F8_E4M3 [M, N], or experts [E, M, N]; `weight_scale_inv` beside it has one scale for each block, blocks at
the ends may be smaller: F32, BF16, or an exponent alone (F8_E8M0, U8). The weight is their product. Without blocks the
tensor, or each expert, has one scale. Source: `Fp8Dequantize` of transformers 5.23; the releases of DeepSeek-V3, V4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING

from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.transfer.quantised.parts import check_shape, companions, refuse
from ckpt_tools.transfer.quantised.scheme import Found, Quantised, ReadRun, Scheme, Settings, Tensors

if TYPE_CHECKING:
    import numpy as np

    from ckpt_tools.transfer.quantised.scheme import F32, Bytes

_SCALE = "_scale_inv"
_STATIC = "activation_scale"
_SCALES = ("F32", "BF16", "F16", "F8_E8M0", "U8")


def _find_all(tensors: Tensors, settings: Settings, read: ReadRun) -> Found:  # noqa: ARG001
    """By dtype and `weight_block_size`; see `Find`."""
    refuse(settings, "fmt", None, "e4m3", "float8_e4m3fn")
    block = _block_size(settings)
    found = tuple(_quantised(entry, tensors, block) for entry in tensors.values() if entry.dtype.name == "F8_E4M3")
    scales = {entry.fqn for one in found for entry in one.stored[1:]}
    if strange := [fqn for fqn in tensors if fqn.endswith(_SCALE) and fqn not in scales]:
        raise UnreadableError(f"{strange[0]!r} is a scale without an 8-bit tensor", hint="is the checkpoint whole?")
    static = tuple(fqn for fqn in tensors if fqn.endswith(_STATIC))
    what = "8-bit floats" + (f" in blocks of {block[0]}×{block[1]}" if block else " with one scale")
    return Found(what=what, tensors=found, dropped=static)


SCHEME = Scheme(method="fp8", find=_find_all)


def _block_size(settings: Settings) -> tuple[int, int] | None:
    value = settings.get("weight_block_size")
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
        raise UsageError(f"weight_block_size is {value!r}, but must be two positive numbers")
    return value[0], value[1]


def _quantised(entry: TensorEntry, tensors: Tensors, block: tuple[int, int] | None) -> Quantised:
    scale = companions(tensors, entry.fqn + _SCALE, of=entry.fqn)
    if len(entry.shape) < 2:
        raise UnreadableError(f"{entry.fqn!r} is {list(entry.shape)}: only matrices are stored in blocks")
    if scale.dtype.name not in _SCALES:
        raise UnreadableError(f"{scale.fqn!r} is {scale.dtype.name}, but scales must be {', '.join(_SCALES)}")
    *outer, rows, columns = entry.shape
    height, width = block or (max(1, rows), max(1, columns))
    wanted = (*outer, -(-rows // height), -(-columns // width))
    if block is not None or scale.num_elems != prod(outer):
        check_shape(scale, wanted, of=entry)
    decode = partial(_decode, entry, scale, height, width)
    return Quantised(fqn=entry.fqn, shape=entry.shape, stored=(entry, scale), decode=decode)


def _decode(
    entry: TensorEntry, scale: TensorEntry, height: int, width: int, read: ReadRun, first: int, count: int
) -> F32:
    import numpy as np

    values = as_float32(read(entry, first, count), entry.dtype)
    grid = partial(read_row, read, scale, -(-entry.shape[-1] // width))
    over_blocks(np.multiply, values, grid, entry.shape, (height, width), first)
    return values


def read_row(read: ReadRun, scale: TensorEntry, length: int, row: int) -> F32:
    """Return one row of scales; several matrices have theirs one after the other."""
    return as_float32(read(scale, row * length, length), scale.dtype)


def over_blocks(
    operation: np.ufunc,
    values: F32,
    grid: Callable[[int], F32],
    shape: tuple[int, ...],
    block: tuple[int, int],
    first: int,
) -> None:
    """Change elements of a matrix, or of several, by what their block has, in place.

    `values` are the elements from number `first` on, in row-major order; `shape` is of the whole. `grid` returns what
    belongs to the blocks of a row of blocks.
    """
    import numpy as np

    (rows, columns), (height, width) = shape[-2:], block
    for row, start, stop in _groups(first, len(values), rows, columns, height):
        along = np.repeat(grid(row), width)[:columns]
        at = start % columns
        run = values[start - first : stop - first]
        head = min(len(run), -at % columns)
        tail = head + (len(run) - head) // columns * columns
        for part, own in (
            (run[:head], along[at : at + head]),
            (run[head:tail].reshape(-1, columns), along),
            (run[tail:], along[: len(run) - tail]),
        ):
            operation(part, own, out=part)


def _groups(first: int, count: int, rows: int, columns: int, height: int) -> Iterator[tuple[int, int, int]]:
    """Yield (row of scales, first element, last element + 1) of what has the same row of scales, in order."""
    per_matrix = -(-rows // height)
    stop = first + count
    while first < stop:
        matrix, row = divmod(first // columns, rows)
        group = row // height
        end = (matrix * rows + min((group + 1) * height, rows)) * columns
        yield matrix * per_matrix + group, first, min(stop, end)
        first = end


def as_float32(content: Bytes, dtype: DType) -> F32:
    """Return stored floats as float32 in memory of their own, exactly; U8 are exponents, as F8_E8M0 are."""
    import numpy as np

    from ckpt_tools.transfer.arrays import array_of

    if dtype.bits == 8:
        return np.take(_values(dtype.name), content)
    return array_of(content.data, dtype, (-1,)).astype(np.float32)


@cache
def _values(name: str) -> F32:
    """Return what each of the 256 bytes stands for."""
    import numpy as np

    from ckpt_tools.checkpoint.dtypes import BY_NAME
    from ckpt_tools.transfer.arrays import array_of

    every = np.arange(256, dtype=np.uint8)
    if name in ("U8", "F8_E8M0"):
        exponents = np.ldexp(np.float32(1), every.astype(np.int32) - 127).astype(np.float32)
        exponents[255] = np.nan
        return exponents
    return array_of(every.data, BY_NAME[name], (-1,)).astype(np.float32)
