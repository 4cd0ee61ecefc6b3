"""The file that ComfyUI reads: its generic names, the authors' paths below diffusion_model and text_encoders.

What ComfyUI computes otherwise than the libraries that trained an adapter is said so that it does not. Source: ComfyUI,
comfy/weight_adapter/{base,oft,boft}.py: `weight_decompose` divides an output-axis dora_scale by the norm of W, LyCORIS
and PEFT by that of W+ΔW (ComfyUI PR #15458, open); oft and boft bound the norm of Q by alpha, LyCORIS by alpha times
the weight's rows; oft leaves out `rescale`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ckpt_tools.adapters.adapter import Adapter, Sourced
from ckpt_tools.adapters.architectures.architecture import Architecture
from ckpt_tools.adapters.architectures.of_base import BaseFamily
from ckpt_tools.adapters.ecosystems.fit import Fitting, require
from ckpt_tools.adapters.ecosystems.kohya.writer import for_lycoris, in_lycoris, kohya_metadata, put_alpha
from ckpt_tools.adapters.ecosystems.output import Written, file_name, put
from ckpt_tools.adapters.ecosystems.placing import Placed, unchanged
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.families.family import Module, refuse
from ckpt_tools.adapters.read.sidecars import DORA_SCALE
from ckpt_tools.moving.arrays import Array

SAME_IN_COMFYUI = frozenset({"QwenImageTransformer2DModel"})
"""Models without tables whose modules ComfyUI calls as diffusers does.
Source: ComfyUI, comfy/ldm/qwen_image/model.py, and comfy/lora.py `model_lora_keys_unet`, which maps
`diffusion_model.<path>` of every model."""
_WITHOUT_RESCALE = ("oft",)
"""Families of which ComfyUI leaves out `rescale`."""


def to_comfyui(adapter: Adapter[Array], architecture: Architecture, fitting: Fitting) -> Written:
    """Write ComfyUI's generic names: the authors' paths below diffusion_model and text_encoders.

    Plain loras of FLUX.2 are written as ai-toolkit does, lora_A and lora_B without an alpha: diffusers reads these as
    well, and fails on an alpha. Of the others diffusers, where it reads ComfyUI's names at all, wants lora_down and
    lora_up.

    Raises:
        UsageError: A module or family that ComfyUI has no name for.
    """
    placed = in_lycoris(adapter, architecture, fitting)
    is_bare = architecture.name == "flux2" and all(_is_plain(each.module) for each in placed)
    return _comfyui_file(adapter, placed, architecture, fitting, is_bare=is_bare)


def to_comfyui_unchanged(adapter: Adapter[Array], base: BaseFamily, fitting: Fitting) -> Written:
    """Write the modules of a model of `SAME_IN_COMFYUI` under its own names.

    Raises:
        UsageError: A module or family that ComfyUI has no name for.
    """
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
        if is_bare:
            put(tensors, name, fitting.baked(each.module), family.peft_names)
        else:
            put(tensors, name, each.module, family.lycoris_names)
            put_alpha(tensors, name, each.module)
    file = file_name(adapter.name)
    metadata = kohya_metadata(placed, architecture, title=file.removesuffix(".safetensors"))
    if is_bare:
        metadata.pop("ss_network_alpha", None)
    if DORA_SCALE in adapter.settings and any(each.module.is_dora for each in placed):
        metadata[DORA_SCALE] = str(adapter.settings[DORA_SCALE].value)
    return fitting.written(file, tensors, metadata)


def _is_plain(module: Module) -> bool:
    return module.factors.keys() == {"A", "B"}


def _computed_alike(module: Module, adapter: Adapter[Array], fitting: Fitting) -> Module:
    """Return the module as ComfyUI must be given it to compute what was trained; refuse what it cannot."""
    if module.is_dora and not fitting.has_columns(module) and DORA_SCALE not in adapter.settings:
        raise refuse(
            module,
            "ComfyUI divides dora_scale by the norm of W instead of W+ΔW, which is a different adapter (measured: 0.04 "
            "to 1.8 of the largest weight off)",
            hint="give the base model, whose weights make up for it: --base DIR",
        )
    if family_of(module).is_rotation and "blocks" in module.factors:
        return _rotation(module, fitting)
    return module


def _rotation(module: Module, fitting: Fitting) -> Module:
    """Put LyCORIS' constraint into the blocks, and write none: ComfyUI would bound them otherwise."""
    rescale = module.factors.get("rescale")
    if module.family in _WITHOUT_RESCALE and rescale is not None and not bool((rescale.astype(np.float32) == 1).all()):
        raise refuse(module, "ComfyUI leaves out rescale of diag-oft")
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
