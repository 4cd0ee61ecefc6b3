"""GPTQ (AutoGPTQ, GPTQModel) and AutoRound: 2, 3, 4 or 8 bits, with the inputs of a group anywhere.

`X.qweight` is I32 [in x bits / 32, out], `X.qzeros` I32 [groups, out x bits / 32], `X.scales` [groups, out]; `X.g_idx`
has the group of each input. The first format stores zeros less one, `gptq_v2` as they are. Source: GPTQModel 7.7,
`qlinear/torch.py`, `utils/model.py`; AutoGPTQ 0.7; AutoRound 0.16, `qlinear_torch{,_zp}.py`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.transfer.quantised import awq
from ckpt_tools.transfer.quantised.packing import (
    WORD,
    PackedLayer,
    Parts,
    find_layers,
    group_size,
    num_words,
    unpack_bytes,
)
from ckpt_tools.transfer.quantised.parts import OTHER_CONFIG, refuse
from ckpt_tools.transfer.quantised.scheme import Found, ReadRun, Scheme, Settings, Tensors

if TYPE_CHECKING:
    from ckpt_tools.transfer.quantised.scheme import F32

_BITS = (2, 3, 4, 8)


def _find_all(tensors: Tensors, settings: Settings, read: ReadRun) -> Found:  # noqa: ARG001 - names say it all
    """By the endings of names; see `Find`."""
    form = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise UsageError(f"quantization_config has checkpoint_format {form!r}, which ckpt does not decode")
    return _find("GPTQ", tensors, settings, is_less_one=form == "gptq")


def _find_auto_round(tensors: Tensors, settings: Settings, read: ReadRun) -> Found:
    """By `packing_format`; see `Find`."""
    packing = str(settings.get("packing_format", "auto_round:auto_gptq")).removeprefix("auto_round").lstrip(":")
    if packing in ("awq", "auto_awq"):
        return awq.SCHEME.find(tensors, settings, read)
    if packing not in ("gptq", "auto_gptq", "gptqmodel", ""):
        raise UsageError(f"quantization_config has packing_format {packing!r}, which ckpt does not decode")
    return _find("AutoRound", tensors, settings, is_less_one=packing in ("gptq", "auto_gptq"))


SCHEME = Scheme(method="gptq", find=_find_all)
AUTO_ROUND = Scheme(method="auto-round", find=_find_auto_round)


def _find(name: str, tensors: Tensors, settings: Settings, *, is_less_one: bool) -> Found:
    unpack = partial(_unpack, is_less_one, "gptqmodel" in str(settings.get("meta")).lower())
    return find_layers(f"integers of a few bits ({name})", tensors, settings, _layer, unpack)


def _layer(stem: str, parts: Parts, tensors: Tensors, settings: Settings) -> PackedLayer:
    weight, zeros, scales = parts
    refuse(settings, "bits", *_BITS)
    order = tensors.get(f"{stem}.g_idx")
    if order is not None and (order.dtype.name not in ("I32", "I64") or len(order.shape) != 1 or not order.num_elems):
        raise UnreadableError(f"{order.fqn!r} is {order.dtype.name} {list(order.shape)}, not the groups of inputs")
    if order is None and settings.get("desc_act"):
        raise UnreadableError(f"'{stem}.g_idx' is missing: with desc_act it defines which inputs share a scale")
    num_groups, num_outputs = scales.shape
    fitting = {}
    for bits in _BITS:
        num_inputs = weight.shape[0] * WORD // bits if order is None else order.num_elems
        wanted = (num_words(num_inputs, bits), num_outputs), (num_groups, num_words(num_outputs, bits))
        is_whole = WORD % bits == 0 or num_inputs % WORD == num_outputs % WORD == 0
        if (weight.shape, zeros.shape) == wanted and is_whole:
            fitting[bits] = num_inputs
    wished = settings["bits"]
    if wished not in fitting and settings.get("dynamic"):  # layers differ
        wished = next(iter(fitting)) if len(fitting) == 1 else wished
    bits = next((each for each in fitting if each == wished), 0)
    if not bits:
        shown = ", ".join(f"{entry.fqn!r} {list(entry.shape)}" for entry in (*parts, *([order] if order else [])))
        raise UnreadableError(f"{shown}: not a weight in {wished} bits", hint=OTHER_CONFIG)
    is_plain = order is None or (settings.get("desc_act") is False and not settings.get("dynamic"))
    size = group_size(settings, fitting[bits], weight, scales) if is_plain else 0
    return PackedLayer(
        weight=weight, zeros=zeros, scales=scales, order=order, bits=bits, num_inputs=fitting[bits], group_size=size
    )


def _unpack(
    is_less_one: bool, is_by_word: bool, layer: PackedLayer, read: ReadRun, low: int, high: int
) -> tuple[F32, F32]:
    import numpy as np

    bits = layer.bits
    values = unpack_bytes(read.columns(layer.weight, low, high), bits)[:, : layer.num_inputs]
    start, stop = low // WORD * bits, min(layer.zeros.shape[1], -(-high // WORD) * bits)
    words = np.ascontiguousarray(read.columns(layer.zeros, start, stop).view(np.uint32).T)
    zeros = unpack_bytes(words.view(np.uint8), bits)
    if is_less_one:
        largest = (1 << bits) - 1
        if is_by_word and WORD % bits == 0:
            ones = sum(1 << shift for shift in range(0, WORD, bits))
            zeros = unpack_bytes((words + np.uint32(ones)).view(np.uint8), bits)
        elif not is_by_word and (zeros == largest).any():
            what = f"{layer.zeros.fqn!r} has zeros that readers of this format take for different numbers"
            raise UnreadableError(what, hint="write it as gptq_v2, with the library that made it")
        else:
            zeros = (zeros + 1) % (largest + 1)
    first = low % WORD
    return values, zeros[:, first : first + high - low].T
