"""4-bit floats with a scale for each 32 of them (MXFP4), or for each 16 and one for all (NVFP4).

Two elements in a byte, the low half first. The experts of gpt-oss: `X_blocks` is U8 [E, R, G, 16], `X_scales` is U8
[E, R, G], exponents of two with a bias of 127. The weight is [E, R, 32 G]; the model has it as [E, 32 G, R]. Source:
transformers 5.23, `integrations/mxfp4.py`, and the releases of gpt-oss.
"""

from __future__ import annotations

from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING

from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.errors import UnreadableError
from ckpt_tools.transfer.quantised.fp8 import as_float32
from ckpt_tools.transfer.quantised.parts import check_shape, companions, with_ending
from ckpt_tools.transfer.quantised.scheme import Found, Quantised, ReadRun, Scheme, Settings, Tensors

if TYPE_CHECKING:
    from ckpt_tools.transfer.quantised.scheme import F32

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32
_Whole = tuple[TensorEntry, bool]  # What all scales are multiplied by, or (True) divided
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _find_all(tensors: Tensors, settings: Settings, read: ReadRun) -> Found:  # noqa: ARG001
    """By the endings of names; see `Find`."""
    found = tuple(_quantised(fqn, entry, tensors) for fqn, entry in with_ending(tensors, _BLOCKS))
    names = {one.fqn for one in found}
    if strange := [fqn for fqn, _ in with_ending(tensors, _SCALES) if fqn not in names]:
        raise UnreadableError(f"{strange[0] + _SCALES!r} has no {_BLOCKS} beside it", hint="is the checkpoint whole?")
    return Found(what="4-bit floats in groups of 32 (mxfp4)", tensors=found)


SCHEME = Scheme(method="mxfp4", find=_find_all)


def _quantised(fqn: str, blocks: TensorEntry, tensors: Tensors) -> Quantised:
    scales = companions(tensors, fqn + _SCALES, of=blocks.fqn)
    for entry, dims in ((blocks, 4), (scales, 3)):
        if entry.dtype.name != "U8" or len(entry.shape) != dims:
            raise UnreadableError(f"{entry.fqn!r} is {entry.dtype.name} {list(entry.shape)}, not U8 of {dims} dims")
    check_shape(scales, blocks.shape[:-1], of=blocks)
    *outer, groups, half = blocks.shape
    if half * 2 != _GROUP:
        raise UnreadableError(f"{blocks.fqn!r} has groups of {half * 2}, not of {_GROUP}")
    decode = partial(_decode, blocks, scales, _GROUP, None)
    return Quantised(
        fqn=fqn, shape=(*outer, groups * _GROUP), stored=(blocks, scales), decode=decode, is_transposed=True
    )


def fp4(fqn: str, packed: TensorEntry, scale: TensorEntry, whole: _Whole | None) -> Quantised:
    """Return a weight that is stored as U8 [..., columns / 2], with a scale for each group of a row.

    `whole` is what scales are to be multiplied by, or (True) divided: one number, or one for each matrix.
    """
    *outer, half = packed.shape
    group = _GROUP if whole is None else _GROUP // 2
    if packed.dtype.name != "U8" or not outer or 2 * half % group:
        shown = f"{packed.fqn!r} is {packed.dtype.name} {list(packed.shape)}"
        raise UnreadableError(f"{shown}, not 4-bit floats in groups of {group}")
    kinds = ("U8", "F8_E8M0") if whole is None else ("F8_E4M3",)
    if scale.dtype.name not in kinds:
        raise UnreadableError(f"{scale.fqn!r} is {scale.dtype.name}, but must be {' or '.join(kinds)}")
    check_shape(scale, (*outer, 2 * half // group), of=packed)
    stored = [packed, scale]
    if whole is not None:
        stored.append(whole[0])
        if whole[0].dtype.name != "F32" or whole[0].num_elems not in (1, prod(outer[:-1])):
            shown = f"{whole[0].fqn!r} is {whole[0].dtype.name} {list(whole[0].shape)}"
            raise UnreadableError(f"{shown}, not one F32 for each matrix of {packed.fqn!r}")
    decode = partial(_decode, packed, scale, group, whole)
    return Quantised(fqn=fqn, shape=(*outer, 2 * half), stored=tuple(stored), decode=decode)


def _decode(
    packed: TensorEntry, scales: TensorEntry, group: int, whole: _Whole | None, read: ReadRun, first: int, count: int
) -> F32:
    import numpy as np

    low, high = first // group, -(-(first + count) // group)
    content = read(packed, low * group // 2, (high - low) * group // 2)
    values = np.take(_pairs(), content, axis=0).reshape(-1, group)
    each = as_float32(read(scales, low, high - low), scales.dtype)
    if whole is not None:
        entry, is_divisor = whole
        of_all = as_float32(read(entry, 0, entry.num_elems), entry.dtype)
        matrices = np.arange(low, high) // (scales.num_elems // entry.num_elems)
        (np.divide if is_divisor else np.multiply)(each, of_all[matrices], out=each)
    values *= each[:, None]
    start = first - low * group
    return values.reshape(-1)[start : start + count]


@cache
def _pairs() -> F32:
    """Return the two elements that each of the 256 bytes holds."""
    import numpy as np

    each = np.array([*_E2M1, *(-value for value in _E2M1)], np.float32)
    every = np.arange(256)
    return np.stack([each[every & 15], each[every >> 4]], axis=1)
