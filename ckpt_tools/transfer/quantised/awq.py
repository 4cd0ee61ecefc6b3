"""AWQ: 4 bits, eight outputs in a word in an order of their own.

`X.qweight` is I32 [in, out / 8], `X.qzeros` I32 [groups, out / 8], `X.scales` [groups, out]. Source: AutoAWQ 0.2.9,
`utils/packing_utils.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.transfer.quantised.packing import PackedLayer, Parts, find_layers, group_size
from ckpt_tools.transfer.quantised.parts import check_shape
from ckpt_tools.transfer.quantised.scheme import Found, ReadRun, Scheme, Settings, Tensors

if TYPE_CHECKING:
    from ckpt_tools.transfer.quantised.scheme import F32

_BITS = 4
_IN_WORD = 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # Where in a word, in steps of 4 bits, the outputs lie


def _find_all(tensors: Tensors, settings: Settings, read: ReadRun) -> Found:  # noqa: ARG001 - names say it all
    """By the endings of names; see `Find`."""
    version = settings.get("version") or settings.get("checkpoint_format") or settings.get("format") or "gemm"
    if settings.get("quant_method") == "awq" and str(version).lower() != "gemm":
        raise UsageError(f"quantization_config has version {version!r}, but ckpt only decodes AWQ's 'gemm'")
    return find_layers("integers of 4 bits (AWQ)", tensors, settings, _layer, _unpack)


SCHEME = Scheme(method="awq", find=_find_all)


def _layer(stem: str, parts: Parts, tensors: Tensors, settings: Settings) -> PackedLayer:
    weight, zeros, scales = parts
    bits = settings.get("bits", settings.get("w_bit"))
    if bits != _BITS:
        raise UsageError(f"quantization_config has bits {bits!r}, but ckpt only decodes AWQ of {_BITS}")
    if (order := tensors.get(f"{stem}.g_idx")) is not None:
        raise UnreadableError(f"{order.fqn!r} is present, but AWQ has no order of inputs")
    num_inputs, num_words = weight.shape
    size = group_size(settings, num_inputs, weight, scales)
    check_shape(scales, (scales.shape[0], num_words * _IN_WORD), of=weight)
    check_shape(zeros, (scales.shape[0], num_words), of=weight)
    return PackedLayer(
        weight=weight, zeros=zeros, scales=scales, order=None, bits=_BITS, num_inputs=num_inputs, group_size=size
    )


def _unpack(layer: PackedLayer, read: ReadRun, low: int, high: int) -> tuple[F32, F32]:
    return _outputs(layer.weight, read, low, high), _outputs(layer.zeros, read, low, high)


def _outputs(entry: TensorEntry, read: ReadRun, low: int, high: int) -> F32:
    import numpy as np

    first = low // _IN_WORD
    words = read.columns(entry, first, -(-high // _IN_WORD)).view(np.uint32)
    shifts = np.array(_PLACES, np.uint32) * np.uint32(_BITS)
    numbers = words[:, None] >> shifts[:, None]
    numbers &= np.uint32((1 << _BITS) - 1)
    numbers = numbers.reshape(-1, words.shape[1])[low - first * _IN_WORD :][: high - low]
    return numbers.view(np.int32).astype(np.float32)  # which is faster than of unsigned ones
