"""NVIDIA ModelOpt: 8-bit floats with one scale or one for each row, 4-bit floats with one for each 16 and one for all.

`weight` is F8_E4M3, and `weight_scale` beside it F32, or exponents (U8) of groups of 32; or `weight` is U8,
`weight_scale` F8_E4M3, and `weight_scale_2` F32. Source: ModelOpt 0.47, `torch/export/quant_utils.py`,
`quantization/qtensor/nvfp4_tensor.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from math import prod

from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.transfer.quantised.compressed import decode_plain
from ckpt_tools.transfer.quantised.mxfp4 import fp4
from ckpt_tools.transfer.quantised.parts import check_shape, companions, refuse, with_ending
from ckpt_tools.transfer.quantised.scheme import Found, Quantised, ReadRun, Scheme, Settings, Tensors

_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "MXFP8")
_MIXED = "MIXED_PRECISION"
_SCALE = "_scale"
_LEFT_OUT = ("input_scale", "k_scale", "v_scale", "k_bias", "v_bias")  # Of activations and caches
_CHANGES_INPUTS = ("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b")
_GROUP = 32


def _find_all(tensors: Tensors, settings: Settings, read: ReadRun) -> Found:  # noqa: ARG001 - names say it all
    """By `weight_scale` beside weights; see `Find`."""
    refuse(settings, "quant_algo", *_ALGORITHMS, _MIXED)
    layers = settings.get("quantized_layers")
    for layer in layers.values() if isinstance(layers, Mapping) else ():
        refuse(layer if isinstance(layer, Mapping) else {}, "quant_algo", *_ALGORITHMS)
    if strange := [fqn for fqn in tensors if fqn.rpartition(".")[2] in _CHANGES_INPUTS]:
        raise UsageError(f"{strange[0]!r} changes the inputs of a layer, which ckpt does not undo")
    found = tuple(_find(tensors))
    known = {entry.fqn for one in found for entry in one.stored}
    dropped = tuple(fqn for fqn in tensors if fqn.rpartition(".")[2] in _LEFT_OUT)
    for entry in tensors.values():
        is_part = entry.dtype.name in ("U8", "F8_E4M3") or "weight_scale" in entry.fqn
        if is_part and entry.fqn not in known and entry.fqn not in dropped:
            raise UnreadableError(f"{entry.fqn!r} belongs to no weight", hint="is the checkpoint whole?")
    return Found(what="4 or 8 bits (ModelOpt)", tensors=found, dropped=dropped)


SCHEME = Scheme(method="modelopt", find=_find_all)


def _find(tensors: Tensors) -> Iterator[Quantised]:
    for fqn, scale in with_ending(tensors, _SCALE):
        if fqn.rpartition(".")[2] != "weight":
            continue
        weight = companions(tensors, fqn, of=scale.fqn)
        if weight.dtype.name == "U8":
            yield fp4(fqn, weight, scale, (companions(tensors, f"{scale.fqn}_2", of=fqn), False))
        else:
            yield _eight_bits(weight, scale)


def _eight_bits(weight: TensorEntry, scale: TensorEntry) -> Quantised:
    if weight.dtype.name != "F8_E4M3" or len(weight.shape) < 2:
        raise UnreadableError(f"{weight.fqn!r} is {weight.dtype.name} {list(weight.shape)}, with a scale of its own")
    *outer, rows, columns = weight.shape
    if scale.dtype.name == "U8":
        check_shape(scale, (*outer, rows, -(-columns // _GROUP)), of=weight)
        grid = 1, _GROUP
    elif scale.dtype.name != "F32":
        raise UnreadableError(f"{scale.fqn!r} must be F32 or U8, got {scale.dtype.name}")
    elif scale.num_elems == prod(outer):
        grid = max(1, rows), max(1, columns)
    else:
        if scale.shape != (*outer, rows, 1):
            check_shape(scale, (*outer, rows), of=weight)
        grid = 1, max(1, columns)
    decode = partial(decode_plain, weight, scale, None, grid)
    return Quantised(fqn=weight.fqn, shape=weight.shape, stored=(weight, scale), decode=decode)
