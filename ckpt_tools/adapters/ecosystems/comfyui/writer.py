"""The file that ComfyUI reads: its generic names, the authors' paths below diffusion_model and text_encoders.

What ComfyUI computes otherwise than the libraries that trained an adapter is said so that it does not. Source: ComfyUI,
comfy/weight_adapter/{base,oft,boft}.py: `weight_decompose` divides an output-axis dora_scale by the norm of W, LyCORIS
and PEFT by that of W+ΔW (ComfyUI PR #15458, open); oft and boft bound the norm of Q by alpha, LyCORIS by alpha times
the weight's rows; oft leaves out `rescale`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ckpt_tools.adapters.adapter import Adapter, Sourced
from ckpt_tools.adapters.architectures.architecture import Architecture
from ckpt_tools.adapters.architectures.choose import BaseFamily
from ckpt_tools.adapters.ecosystems.fit import Fitting, require
from ckpt_tools.adapters.ecosystems.kohya.writer import for_lycoris, in_lycoris, put_alpha, unsupported
from ckpt_tools.adapters.ecosystems.output import Written, file_name, header_of, put
from ckpt_tools.adapters.ecosystems.placing import Placed, unchanged
from ckpt_tools.adapters.families import dora, family_of
from ckpt_tools.adapters.families.changes import change_of
from ckpt_tools.adapters.families.family import Module, Setting, refuse
from ckpt_tools.adapters.read.opening import TensorReader, to_array
from ckpt_tools.adapters.read.sidecars import BASE_NORM, DORA_SCALE
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.errors import UsageError
from ckpt_tools.transfer.arrays import Array

_ROWS_AT_ONCE = 512
_WITHOUT_RESCALE = ("oft",)


def to_comfyui(adapter: Adapter[Array], architecture: Architecture, fitting: Fitting) -> Written:
    """Write ComfyUI's generic names: the authors' paths below diffusion_model and text_encoders.

    Plain loras of FLUX.2 are written as ai-toolkit does, lora_A and lora_B without an alpha: diffusers reads these as
    well, and fails on an alpha. Of the others diffusers, where it reads ComfyUI's names at all, wants lora_down and
    lora_up.
    """
    if architecture.comfyui is None:
        raise unsupported(adapter, architecture, "ComfyUI has")
    placed = in_lycoris(adapter, architecture, fitting, takes_parts=architecture.comfyui.has)
    is_bare = architecture.reader == "flux2" and all(each.module.factors.keys() == {"A", "B"} for each in placed)
    return _comfyui_file(adapter, placed, architecture, fitting, is_bare=is_bare)


def to_comfyui_unchanged(adapter: Adapter[Array], base: BaseFamily, fitting: Fitting) -> Written:
    """Write the modules of a model without tables under its own names, which ComfyUI maps where they are its own."""
    placed = [replace(each, module=for_lycoris(each.module, fitting)) for each in unchanged(adapter, base)]
    return _comfyui_file(adapter, placed, None, fitting, is_bare=False)


def _comfyui_file(
    adapter: Adapter[Array], placed: list[Placed], architecture: Architecture | None, fitting: Fitting, *, is_bare: bool
) -> Written:
    placed = [replace(each, module=_computed_alike(each.module, adapter, fitting)) for each in placed]
    tensors: dict[str, Array] = {}
    for each in placed:
        family = family_of(each.module)
        require(each, family.lycoris_names, "ComfyUI")
        name = f"{each.part.comfyui}.{each.module.path}"
        if each.is_apart and architecture is not None and architecture.comfyui is not None:
            name = architecture.comfyui.name(each.module.path)
        if is_bare:
            put(tensors, name, fitting.baked(each.module), family.peft_names)
        else:
            put(tensors, name, each.module, family.lycoris_names)
            put_alpha(tensors, name, each.module)
    file = file_name(adapter.name)
    metadata = header_of([each.module for each in placed], architecture, title=file.removesuffix(".safetensors"))
    if is_bare:
        metadata.pop("ss_network_alpha", None)
    if DORA_SCALE in adapter.settings and any(each.module.is_dora for each in placed):
        metadata[DORA_SCALE] = str(adapter.settings[DORA_SCALE].value)
    return fitting.written(file, tensors, metadata)


def _computed_alike(module: Module, adapter: Adapter[Array], fitting: Fitting) -> Module:
    """Return the module as ComfyUI must be given it to compute what was trained; refuse what it cannot."""
    if module.is_dora and not fitting.has_columns(module) and DORA_SCALE not in adapter.settings:
        raise refuse(
            module,
            "ComfyUI divides dora_scale by the norm of W instead of W+ΔW, which is a different adapter (measured: 0.04 "
            "to 1.8 of the largest weight off)",
            hint="give the base model, whose weights compensate for it: --base DIR",
        )
    if family_of(module).is_rotation and "blocks" in module.factors:
        return _rotation(module, fitting)
    return module


def _rotation(module: Module, fitting: Fitting) -> Module:
    """Put LyCORIS' constraint into the blocks, and write none: ComfyUI would bound them otherwise."""
    rescale = module.factors.get("rescale")
    if module.family in _WITHOUT_RESCALE and rescale is not None and not bool((rescale.astype(np.float32) == 1).all()):
        raise refuse(module, "ComfyUI ignores rescale of diag-oft")
    constraint = 0.0 if module.alpha is None else module.alpha.value
    stored = module.factors["blocks"]
    bound = constraint * stored.shape[-3] * stored.shape[-1]
    blocks = stored.astype(np.float64)
    norm = float(np.linalg.norm((blocks - blocks.swapaxes(-1, -2)).reshape(-1))) + 1e-8
    factors = dict(module.factors)
    if 0 < bound < norm:
        factors["blocks"] = (blocks * (bound / norm)).astype(np.float32)
        fitting.count("LyCORIS' constraint was multiplied into the blocks")
    # Without any alpha ComfyUI's boft fails, and leaves the weight as it was.
    return replace(module, factors=factors, alpha=Sourced(0.0, "the constraint is in the blocks"))


def with_base_norms(
    adapter: Adapter[Array], tensors: Mapping[str, TensorEntry], reader: TensorReader, source: str
) -> Adapter[Array]:
    """Return the adapter with magnitudes that are divided by ‖W‖ instead of ‖W+ΔW‖, and say so in its settings.

    A DoRA is m·(W+ΔW)/‖W+ΔW‖ by row. ComfyUI computes m·(W+ΔW)/‖W‖ (its PR #15458 is open): with m·‖W‖/‖W+ΔW‖ in the
    place of m, that is the same. `tensors` are the base's, by the names that a plain model gives them.

    Memory: the largest adapted weight, and a few hundred rows of it.
    """
    modules = tuple(
        _with_base_norm(module, tensors.get(f"{module.path}.weight"), reader, adapter) if module.is_dora else module
        for module in adapter.modules
    )
    settings = {**adapter.settings, DORA_SCALE: Sourced(BASE_NORM, f"norms of the weights of {source}")}
    return replace(adapter.with_modules(modules), settings=settings)


def _with_base_norm(module: Module, entry: TensorEntry | None, reader: TensorReader, adapter: Adapter[Array]) -> Module:
    if entry is None or not entry.dtype.is_float:
        what = "has no weight of this module" if entry is None else f"has {entry.dtype.name} elements here"
        raise UsageError(
            f"ComfyUI's DoRA needs the norms of the base's weights, but the base {what}",
            where=module.path,
            hint="--base must be the model of the training run, unquantised and with the adapter's own module names",
        )
    setting = Setting(convention=adapter.convention, settings=adapter.settings)
    magnitude = module.factors["magnitude"]
    if dora.is_by_column(module, tuple(magnitude.shape), entry.shape, setting):
        return module  # by column ComfyUI computes as LyCORIS does
    change = change_of(dora.without_magnitude(module), entry.shape, setting)
    weight = to_array(reader, entry).reshape(change.rows, math.prod(entry.shape[1:]))
    ratios = np.empty(change.rows, np.float64)
    for start in range(0, change.rows, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, change.rows)
        part = weight[start:stop].astype(np.float64)
        before = np.linalg.norm(part, axis=1)
        part += change.delta(start, stop)
        after = np.linalg.norm(part, axis=1)
        ratios[start:stop] = np.divide(before, after, out=np.zeros_like(before), where=after > 0)
        if bool(((before == 0) & (after > 0) & (magnitude.reshape(-1)[start:stop] != 0)).any()):
            raise UsageError(
                "a row of the base's weight is zero: ComfyUI would divide by its norm",
                where=module.path,
                hint="merge the adapter into the base: ckpt merge-lora BASE ADAPTER DST",
            )
    folded = (magnitude.astype(np.float64) * ratios.reshape(magnitude.shape)).astype(np.float32)
    return replace(module, factors={**module.factors, "magnitude": folded})
