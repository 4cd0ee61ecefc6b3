"""8-bit floats in the single files of image and video models, which have no config.json.

`weight` is F8_E4M3 or F8_E5M2; `scale_weight` or `weight_scale` beside it is one number that multiplies it, and without
one the weight is what it says. `scaled_fp8` marks a file, `comfy_quant` (JSON as bytes) a layer. Source: ComfyUI 0.19,
comfy/utils.py (`convert_old_quants`), comfy/ops.py (`MixedPrecisionOps`), comfy/quant_ops.py (`QUANT_ALGOS`).
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.transfer.quantised.fp8 import as_float32
from ckpt_tools.transfer.quantised.scheme import Found, Quantised, ReadRun, Scheme, Settings, Tensors

if TYPE_CHECKING:
    from ckpt_tools.transfer.quantised.scheme import F32

_FLOATS = ("F8_E4M3", "F8_E5M2")
_FORMATS = ("float8_e4m3fn", "float8_e5m2")
_MARKS = ("scaled_fp8", "comfy_quant")
_SCALES = ("scale_weight", "weight_scale")
_OF_INPUTS = ("scale_input", "input_scale")
_MAX_BYTES = 4096


def is_there(tensors: Tensors) -> bool:
    """Are there 8-bit floats, or a mark of ComfyUI's?"""
    return any(entry.dtype.name in _FLOATS or fqn.endswith(_MARKS) for fqn, entry in tensors.items())


def _find_all(tensors: Tensors, settings: Settings, read: ReadRun) -> Found:  # noqa: ARG001
    """By dtype and the names beside; see `Find`."""
    marks = {fqn for fqn in tensors if fqn.rpartition(".")[2] in _MARKS}
    for fqn in marks:
        _check_format(tensors[fqn], read)
    found = tuple(
        _quantised(entry, tensors) for fqn, entry in tensors.items() if entry.dtype.name in _FLOATS and fqn not in marks
    )
    inputs = (fqn for fqn in tensors if fqn.rpartition(".")[2] in _OF_INPUTS)
    what = "8-bit floats of a file without a config" + (", scaled" if any(len(one.stored) > 1 for one in found) else "")
    return Found(what=what, tensors=found, dropped=(*sorted(marks), *inputs))


SCHEME = Scheme(method="comfyui", find=_find_all)


def _check_format(mark: TensorEntry, read: ReadRun) -> None:
    if mark.fqn.endswith("scaled_fp8"):
        return
    try:
        said = json.loads(bytes(read(mark, 0, min(mark.num_elems, _MAX_BYTES)))).get("format")
    except (ValueError, AttributeError):
        raise UnreadableError(f"{mark.fqn!r} is not ComfyUI's description of a layer") from None
    if said not in _FORMATS:
        what = f"{mark.fqn!r} has the format {said!r}, which ckpt does not decode"
        raise UsageError(what, hint=f"supported: {', '.join(_FORMATS)}")


def _quantised(entry: TensorEntry, tensors: Tensors) -> Quantised:
    root = entry.fqn.rpartition(".")[0]
    known = {f"{root}.{name}" for name in (*_SCALES, *_OF_INPUTS)}
    is_weight = entry.fqn == f"{root}.weight"
    strange = (fqn for fqn in tensors if is_weight and fqn.startswith(f"{entry.fqn}_scale") and fqn not in known)
    if (other := next(strange, None)) is not None:
        hint = "put the model's config.json beside the weights"
        raise UsageError(f"{other!r} scales {entry.fqn!r} in a way that only a config.json defines", hint=hint)
    scale = next((tensors[fqn] for name in _SCALES if is_weight and (fqn := f"{root}.{name}") in tensors), None)
    if scale is not None and (scale.num_elems != 1 or not scale.dtype.is_float):
        what = f"{scale.fqn!r} is {scale.dtype.name} {list(scale.shape)}, but must be one number"
        raise UsageError(what, hint="put the model's config.json beside the weights if it has one")
    stored = (entry,) if scale is None else (entry, scale)
    return Quantised(fqn=entry.fqn, shape=entry.shape, stored=stored, decode=partial(_decode, stored))


def _decode(stored: tuple[TensorEntry, ...], read: ReadRun, first: int, count: int) -> F32:
    entry, *scales = stored
    values = as_float32(read(entry, first, count), entry.dtype)
    for scale in scales:
        values *= as_float32(read(scale, 0, 1), scale.dtype)
    return values
