"""bitsandbytes: 4 bits with a table of 16 values and a scale for each block, and 8-bit integers with one for each row.

Beside `X` lie `X.absmax` (scales), `X.quant_map` (the table) and `X.quant_state.bitsandbytes__nf4` (JSON: sizes and
shape); two elements in a byte, the high half first, in any storage dtype. Scales that are quantised too (U8) have
`X.nested_absmax` and `X.nested_quant_map`. Beside `X.weight` of 8 bits lies `X.SCB`, 127 times the scales. Source:
bitsandbytes 0.50 `functional.py:QuantState` and its default kernels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.errors import UnreadableError
from ckpt_tools.transfer.quantised.parts import as_in_model, check_shape, companions, read_bytes, with_ending
from ckpt_tools.transfer.quantised.scheme import Found, Quantised, ReadRun, Scheme, Settings, Tensors

if TYPE_CHECKING:
    from ckpt_tools.transfer.quantised.scheme import F32

_STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
_MAX_STATE_BYTES = 1 << 16
_FORMAT = "weight_format"  # Beside 8-bit weights: how they are laid out; 0 is row by row
_RECIPROCAL = 7.874015718698502e-3  # 1/127 as bitsandbytes has it


def _find_all(tensors: Tensors, settings: Settings, read: ReadRun) -> Found:
    """By the endings of names; see `Find`."""
    four = [_four_bits(fqn, state, tensors, read) for end in _STATES for fqn, state in with_ending(tensors, end)]
    eight = [_eight_bits(stem, scale, tensors, read) for stem, scale in with_ending(tensors, ".SCB")]
    found = as_in_model((*four, *eight), settings)
    known = {entry.fqn for one in found for entry in one.stored}
    for entry in tensors.values():
        if entry.fqn not in known and entry.fqn.rpartition(".")[2] in ("absmax", "quant_map", "nested_absmax"):
            raise UnreadableError(f"{entry.fqn!r} belongs to no tensor", hint="its quant_state is missing")
    return Found(what="4 or 8 bits (bitsandbytes)", tensors=found)


SCHEME = Scheme(method="bitsandbytes", find=_find_all)


def _four_bits(fqn: str, state: TensorEntry, tensors: Tensors, read: ReadRun) -> Quantised:
    packed = companions(tensors, fqn, of=state.fqn)
    values = _parse_state(state, read)
    shape = values.get("shape")
    block = values.get("blocksize")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape) or type(block) is not int:
        raise UnreadableError(f"{state.fqn!r} has no shape, or no blocksize")
    count = prod(shape)
    if packed.dtype.bits % 8 or block < 1 or packed.nbytes != -(-count // 2):
        raise UnreadableError(f"{fqn!r} has {packed.nbytes} bytes, which are not {shape} in 4 bits each")
    scales, table = (companions(tensors, f"{fqn}.{name}", of=fqn) for name in ("absmax", "quant_map"))
    check_shape(scales, (-(-count // block),), of=packed)
    check_shape(table, (16,), of=packed)
    stored = [packed, state, scales, table]
    nested = None
    if scales.dtype.name == "U8":
        inner, offset = values.get("nested_blocksize"), values.get("nested_offset")
        if type(inner) is not int or inner < 1 or not isinstance(offset, (int, float)):
            raise UnreadableError(f"{state.fqn!r} has no nested_blocksize, or no nested_offset")
        outer = companions(tensors, f"{fqn}.nested_absmax", of=fqn)
        outer_table = companions(tensors, f"{fqn}.nested_quant_map", of=fqn)
        check_shape(outer, (-(-scales.num_elems // inner),), of=scales)
        check_shape(outer_table, (256,), of=scales)
        stored += [outer, outer_table]
        nested = (outer, outer_table, inner, float(offset))
    for entry in stored[2:]:
        if entry.dtype.name != "F32" and not (entry is scales and nested):
            raise UnreadableError(f"{entry.fqn!r} must be F32, got {entry.dtype.name}")
    decode = partial(_decode_four, packed, scales, table, block, nested)
    return Quantised(fqn=fqn, shape=tuple(shape), stored=tuple(stored), decode=decode)


def _parse_state(state: TensorEntry, read: ReadRun) -> Mapping[str, object]:
    if state.dtype.name != "U8" or state.num_elems > _MAX_STATE_BYTES:
        raise UnreadableError(f"{state.fqn!r} is {state.dtype.name} {list(state.shape)}, not a short text")
    try:
        values = json.loads(read(state, 0, state.num_elems).tobytes())
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{state.fqn!r} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise UnreadableError(f"{state.fqn!r} is not a JSON object")
    return values


_Nested = tuple[TensorEntry, TensorEntry, int, float]
"""Scales of scales, their table, how many share one, and what is added."""


def _decode_four(
    packed: TensorEntry,
    scales: TensorEntry,
    table: TensorEntry,
    block: int,
    nested: _Nested | None,
    read: ReadRun,
    first: int,
    count: int,
) -> F32:
    import numpy as np

    start, stop = first // 2, (first + count + 1) // 2
    pairs = read_bytes(read, packed, start, stop)
    halves = np.stack([pairs >> 4, pairs & 15], axis=1).reshape(-1)[first - 2 * start :][:count]
    values = np.take(_floats(read, table, 0, 16), halves)
    low, high = first // block, -(-(first + count) // block)
    each = _scales(scales, nested, read, low, high - low)
    values *= np.repeat(each, block)[first - low * block :][:count]
    return values


def _scales(scales: TensorEntry, nested: _Nested | None, read: ReadRun, first: int, count: int) -> F32:
    import numpy as np

    if nested is None:
        return _floats(read, scales, first, count)
    outer, table, block, offset = nested
    values = np.take(_floats(read, table, 0, 256), read(scales, first, count))
    low, high = first // block, -(-(first + count) // block)
    values *= np.repeat(_floats(read, outer, low, high - low), block)[first - low * block :][:count]
    values += np.float32(offset)
    return values


def _floats(read: ReadRun, entry: TensorEntry, first: int, count: int) -> F32:
    import numpy as np

    return read(entry, first, count).view(np.float32)


def _eight_bits(stem: str, scale: TensorEntry, tensors: Tensors, read: ReadRun) -> Quantised:
    weight = companions(tensors, f"{stem}.weight", of=scale.fqn)
    if weight.dtype.name != "I8" or len(weight.shape) != 2 or scale.dtype.name != "F32":
        what = f"{weight.fqn!r} is {weight.dtype.name} {list(weight.shape)}, {scale.fqn!r} is {scale.dtype.name}"
        raise UnreadableError(f"{what}: not a matrix of I8 and its scales in F32")
    check_shape(scale, weight.shape[:1], of=weight)
    stored = [weight, scale]
    if (layout := tensors.get(f"{stem}.{_FORMAT}")) is not None:
        if layout.num_elems != 1 or any(read(layout, 0, 1)):
            raise UnreadableError(f"{weight.fqn!r} is laid out for a GPU", hint="save it from a newer bitsandbytes")
        stored.append(layout)
    decode = partial(_decode_eight, weight, scale)
    return Quantised(fqn=weight.fqn, shape=weight.shape, stored=tuple(stored), decode=decode)


def _decode_eight(weight: TensorEntry, scale: TensorEntry, read: ReadRun, first: int, count: int) -> F32:
    import numpy as np

    columns = weight.shape[1]
    low, high = first // columns, -(-(first + count) // columns)
    values = read(weight, first, count).view(np.int8).astype(np.float32)
    values *= np.repeat(_floats(read, scale, low, high - low), columns)[first - low * columns :][:count]
    values *= np.float32(_RECIPROCAL)
    return values
