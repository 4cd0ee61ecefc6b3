"""4-bit floats with an exponent for each 32 of them: the experts of gpt-oss.

`X_blocks` is U8 [E, R, G, 16], two elements in a byte, the low half first; `X_scales` is U8 [E, R, G], exponents of two
with a bias of 127. The weight is [E, R, 32 G]; the model has it as [E, 32 G, R]. Source: transformers 5.23,
`integrations/mxfp4.py`, and the releases of gpt-oss.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING

from ckpt_tools.description.checkpoint import TensorEntry
from ckpt_tools.errors import UnreadableError
from ckpt_tools.quantised.fp8 import as_float32
from ckpt_tools.quantised.scheme import (
    Found,
    Quantised,
    ReadRun,
    Scheme,
    Settings,
    Tensors,
    beside,
    check_shape,
    with_ending,
)

if TYPE_CHECKING:
    from ckpt_tools.quantised.scheme import F32

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Mxfp4(Scheme):
    """See the module."""

    method = "mxfp4"

    def find(self, tensors: Tensors, settings: Settings, read: ReadRun) -> Found:  # noqa: ARG002
        """By the endings of names; see the protocol."""
        found = tuple(_quantised(fqn, entry, tensors) for fqn, entry in with_ending(tensors, _BLOCKS))
        names = {one.fqn for one in found}
        if strange := [fqn for fqn, _ in with_ending(tensors, _SCALES) if fqn not in names]:
            raise UnreadableError(
                f"{strange[0] + _SCALES!r} has no {_BLOCKS} beside it", hint="is the checkpoint whole?"
            )
        return Found(what="4-bit floats in groups of 32 (mxfp4)", tensors=found)


SCHEME = Mxfp4()


def _quantised(fqn: str, blocks: TensorEntry, tensors: Tensors) -> Quantised:
    scales = beside(tensors, fqn + _SCALES, of=blocks.fqn)
    for entry, dims in ((blocks, 4), (scales, 3)):
        if entry.dtype.name != "U8" or len(entry.shape) != dims:
            raise UnreadableError(f"{entry.fqn!r} is {entry.dtype.name} {list(entry.shape)}, not U8 of {dims} dims")
    check_shape(scales, blocks.shape[:-1], of=blocks)
    *outer, groups, half = blocks.shape
    if half * 2 != _GROUP:
        raise UnreadableError(f"{blocks.fqn!r} has groups of {half * 2}, not of {_GROUP}")
    decode = partial(_decode, blocks, scales)
    return Quantised(fqn=fqn, shape=(*outer, groups * _GROUP), stored=(blocks, scales), decode=decode, is_turned=True)


def _decode(blocks: TensorEntry, scales: TensorEntry, read: ReadRun, first: int, count: int) -> F32:
    import numpy as np

    low, high = first // _GROUP, -(-(first + count) // _GROUP)
    pairs = read(blocks, low * _GROUP // 2, (high - low) * _GROUP // 2)
    values = np.take(_pairs(), pairs, axis=0).reshape(-1, _GROUP)
    values *= as_float32(read(scales, low, high - low), scales.dtype)[:, None]
    start = first - low * _GROUP
    return values.reshape(-1)[start : start + count]


@cache
def _pairs() -> F32:
    """Return the two elements that each of the 256 bytes holds."""
    import numpy as np

    each = np.array([*_E2M1, *(-value for value in _E2M1)], np.float32)
    every = np.arange(256)
    return np.stack([each[every & 15], each[every >> 4]], axis=1)
