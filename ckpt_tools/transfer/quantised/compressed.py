"""compressed-tensors (llm-compressor, vLLM): 8 bits in a float or an integer each, or a few bits packed in 32.

`weight` (F8_E4M3, I8) or `weight_packed` (I32, with `weight_shape`) has `weight_scale` beside it: one scale, or one for
each row, group of columns, or block. The weight is (q - zero point) x scale. Packed ones are offset to be positive, and
rows begin at words. Source: compressed-tensors 0.20, `compressors/{naive,pack}_quantized`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.transfer.quantised.fp8 import as_float32, over_blocks, read_row
from ckpt_tools.transfer.quantised.mxfp4 import fp4
from ckpt_tools.transfer.quantised.packing import unpack_bytes
from ckpt_tools.transfer.quantised.parts import check_shape, companions, refuse
from ckpt_tools.transfer.quantised.scheme import Found, Quantised, ReadRun, Scheme, Settings, Tensors

if TYPE_CHECKING:
    from ckpt_tools.transfer.quantised.scheme import F32

_FORMATS = (
    *("dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision", None),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
_PACKED_BITS = (2, 4, 8)  # Those of which a whole number fits into 32
_WORD = 32
_LEFT_OUT = (
    *("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point"),
    *("q_scale", "k_scale", "v_scale", "weight_g_idx"),
)
"""What only a quantised model has."""
_Grid = tuple[int, int]
_Weights = list[Mapping[str, object]]


def _find_all(tensors: Tensors, settings: Settings, read: ReadRun) -> Found:
    """By `weight_scale` beside weights, and `config_groups`; see `Find`."""
    groups = settings.get("config_groups")
    weights = [group.get("weights") for group in _mappings(groups)]
    for part in (settings, *_mappings(groups)):
        refuse(part, "format", *_FORMATS)
    for key in ("transform_config", "sparsity_config"):
        inner = settings.get(key)
        if isinstance(inner, Mapping) and inner and inner.get("format") != "dense":
            raise UsageError(f"quantization_config has a {key}, which ckpt does not undo")
    own = [each for each in weights if isinstance(each, Mapping)]
    found = tuple(_find(tensors, own, read))
    known = {entry.fqn for one in found for entry in one.stored}
    dropped = tuple(fqn for fqn in tensors if fqn.rpartition(".")[2] in _LEFT_OUT)
    for fqn in dropped:
        if fqn.endswith("weight_g_idx") and any(value >= 0 for value in _integers(tensors[fqn], read)):
            raise UsageError(f"{fqn!r} orders columns by their activations, which ckpt does not undo")
    if strange := [fqn for fqn in tensors if ".weight_" in fqn and fqn not in known and fqn not in dropped]:
        raise UnreadableError(f"{strange[0]!r} belongs to no weight", hint="is the checkpoint complete?")
    return Found(what="8 bits or fewer (compressed-tensors)", tensors=found, dropped=dropped)


SCHEME = Scheme(method="compressed-tensors", find=_find_all)


def _mappings(groups: object) -> _Weights:
    return [each for each in groups.values() if isinstance(each, Mapping)] if isinstance(groups, Mapping) else []


def _find(tensors: Tensors, weights: _Weights, read: ReadRun) -> Iterator[Quantised]:
    for fqn in tensors:
        stem, dot, leaf = fqn.rpartition(".")
        if leaf != "weight_scale":
            continue
        name = f"{stem}{dot}weight"
        zero = tensors.get(f"{name}_zero_point")
        packed = tensors.get(f"{name}_packed")
        if packed is not None and packed.dtype.name == "U8" and zero is None:
            of_all = None
            if tensors[fqn].dtype.name == "F8_E4M3":
                of_all = companions(tensors, f"{name}_global_scale", of=packed.fqn), True
            yield fp4(name, packed, tensors[fqn], of_all)
        else:
            yield (_plain if packed is None else _packed)(name, tensors[fqn], zero, tensors, weights, read)


def _plain(
    name: str, scale: TensorEntry, zero: TensorEntry | None, tensors: Tensors, weights: _Weights, _: ReadRun
) -> Quantised:
    entry = companions(tensors, name, of=scale.fqn)
    if entry.dtype.name not in ("F8_E4M3", "I8") or len(entry.shape) != 2:
        raise UnreadableError(f"{name!r} is {entry.dtype.name} {list(entry.shape)}, with a scale of its own")
    grid = grid_of(entry, entry.shape, scale, weights)
    stored = [entry, scale]
    if zero is not None:
        check_shape(zero, scale.shape, of=entry)
        stored.append(zero)
    decode = partial(decode_plain, entry, scale, zero, grid)
    return Quantised(fqn=name, shape=entry.shape, stored=tuple(stored), decode=decode)


def decode_plain(
    entry: TensorEntry, scale: TensorEntry, zero: TensorEntry | None, grid: _Grid, read: ReadRun, first: int, count: int
) -> F32:
    """Decode elements, each (q - zero point) x scale of its block; see `Decode`."""
    import numpy as np

    values = as_float32(read(entry, first, count), entry.dtype)
    length = -(-entry.shape[-1] // grid[1])
    if zero is not None:
        over_blocks(np.subtract, values, partial(read_row, read, zero, length), entry.shape, grid, first)
    over_blocks(np.multiply, values, partial(read_row, read, scale, length), entry.shape, grid, first)
    return values


def _packed(
    name: str, scale: TensorEntry, zero: TensorEntry | None, tensors: Tensors, weights: _Weights, read: ReadRun
) -> Quantised:
    packed, told = (companions(tensors, f"{name}_{part}", of=scale.fqn) for part in ("packed", "shape"))
    if packed.dtype.name != "I32" or len(packed.shape) != 2 or told.num_elems != 2:
        raise UnreadableError(f"{packed.fqn!r} is {packed.dtype.name} {list(packed.shape)}, not words of a matrix")
    rows, columns = _integers(told, read)
    shape = rows, columns
    bits = {weight.get("num_bits") for weight in weights if weight.get("type", "int") == "int"}
    fitting = [n for n in _PACKED_BITS if n in bits and packed.shape == (rows, -(-columns * n // _WORD))]
    if len(fitting) != 1:
        what = f"{packed.fqn!r} is {list(packed.shape)}, but {told.fqn!r} has {list(shape)}"
        raise UnreadableError(f"{what}: not in {' or '.join(map(str, _PACKED_BITS))} bits as the config says")
    grid = grid_of(packed, shape, scale, weights)
    stored = [packed, told, scale]
    if zero is not None:
        if grid[0] != 1 or zero.dtype.name != "I32":
            raise UnreadableError(f"{zero.fqn!r} is not packed by rows")
        check_shape(zero, (-(-rows * fitting[0] // _WORD), -(-columns // grid[1])), of=packed)
        stored.append(zero)
    decode = partial(_decode_packed, packed, scale, zero, grid, shape, fitting[0])
    return Quantised(fqn=name, shape=shape, stored=tuple(stored), decode=decode)


def _decode_packed(
    packed: TensorEntry,
    scale: TensorEntry,
    zero: TensorEntry | None,
    grid: _Grid,
    shape: tuple[int, int],
    bits: int,
    read: ReadRun,
    first: int,
    count: int,
) -> F32:
    import numpy as np

    columns, words = shape[1], packed.shape[1]
    low, high = first // columns, -(-(first + count) // columns)
    each = unpack_bytes(read(packed, low * words, (high - low) * words).reshape(high - low, -1), bits)
    each -= np.float32(1 << (bits - 1))  # by which they are offset
    values = each[:, :columns].reshape(-1)[first - low * columns :][:count]
    length = -(-columns // grid[1])
    if zero is not None:
        per_word = _WORD // bits

        def zeros(row: int) -> F32:
            words = read(zero, row // per_word * length, length)
            return unpack_bytes(words, bits).reshape(length, per_word)[:, row % per_word] - np.float32(1 << (bits - 1))

        over_blocks(np.subtract, values, zeros, shape, grid, first)
    over_blocks(np.multiply, values, partial(read_row, read, scale, length), shape, grid, first)
    return values


def grid_of(entry: TensorEntry, shape: tuple[int, ...], scale: TensorEntry, weights: _Weights) -> _Grid:
    """Return rows and columns that share a scale: what fits, and the config says."""
    rows, columns = shape
    if scale.num_elems == 1:
        return rows, columns
    if scale.shape == (rows, 1):
        return 1, columns
    found: set[_Grid] = set()
    for weight in weights:
        group, block = weight.get("group_size"), weight.get("block_structure")
        if type(group) is int and group > 0:
            found.add((1, group))
        if isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
            found.add((block[0], block[1]))
    fitting = [(h, w) for h, w in found if scale.shape == (-(-rows // h), -(-columns // w))]
    if len(fitting) != 1:
        what = f"{scale.fqn!r} is {list(scale.shape)}, which is no grid of {entry.fqn!r} of {list(shape)}"
        raise UnreadableError(what, hint="group_size or block_structure in config.json says which columns share one")
    return fitting[0]


def _integers(entry: TensorEntry, read: ReadRun) -> list[int]:
    import numpy as np

    if entry.dtype.name not in ("I64", "I32") or entry.num_elems > 1 << 24:
        raise UnreadableError(f"{entry.fqn!r} is {entry.dtype.name} {list(entry.shape)}, not a list of numbers")
    kind = np.int64 if entry.dtype.name == "I64" else np.int32
    return [int(value) for value in read(entry, 0, entry.num_elems).view(kind)]
