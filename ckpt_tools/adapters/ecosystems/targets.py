"""The files of diffusers, kohya and ComfyUI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ckpt_tools.adapters.adapter import Adapter
from ckpt_tools.adapters.architectures.architecture import Architecture, Part
from ckpt_tools.adapters.architectures.of_base import BaseFamily
from ckpt_tools.adapters.architectures.rule import Names
from ckpt_tools.adapters.ecosystems.comfyui.rotations import DORA_SCALE, comfyui_module
from ckpt_tools.adapters.ecosystems.diffusers.flux2_lokr import place_lokr
from ckpt_tools.adapters.ecosystems.fit import Fitting, require
from ckpt_tools.adapters.ecosystems.headers import diffusers_metadata, kohya_metadata
from ckpt_tools.adapters.ecosystems.placing import Placed, in_diffusers, in_native, place_all
from ckpt_tools.adapters.ecosystems.written import Written, file_name
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.families.family import Module, refuse
from ckpt_tools.adapters.read.locate import DIFFUSERS_FILE
from ckpt_tools.moving.arrays import Array

_TEXT_ENCODER = {"A": "lora_linear_layer.down.weight", "B": "lora_linear_layer.up.weight"}
"""diffusers' text encoders: with PEFT's names an adapter of the MLP alone is not recognised.
Source: diffusers 0.42 utils/state_dict_utils.py."""


def to_diffusers(adapter: Adapter[Array], architecture: Architecture, fitting: Fitting) -> Written:
    """Write loras under diffusers' module names, alpha/r multiplied into B: most of its loaders refuse an alpha.

    Raises:
        UsageError: A module that diffusers does not load, or not as it is meant.
    """
    places = place_all(adapter, architecture)
    whole = place_lokr(places, architecture) if fitting.may_fuse else None
    if whole is not None:
        return _lokr_file(whole, fitting)
    return _diffusers_file(in_diffusers(places, as_lora=fitting.as_lora), architecture.title, fitting)


def to_diffusers_unchanged(adapter: Adapter[Array], base: BaseFamily, fitting: Fitting) -> Written:
    """Write loras of a model without tables under its own module names.

    Raises:
        UsageError: A module that diffusers does not load.
    """
    return _diffusers_file(_unchanged(adapter, base), base.title, fitting)


def _unchanged(adapter: Adapter[Array], base: BaseFamily) -> list[Placed]:
    """Place modules where they are: their paths are those of the base."""
    part = Part(component=base.component or "transformer", names=Names(()), comfyui="diffusion_model", kohya=())
    return [Placed(part=part, module=module) for module in adapter.modules]


def _diffusers_file(placed: list[Placed], title: str, fitting: Fitting) -> Written:
    fitted = [replace(each, module=_for_diffusers(each, title, fitting)) for each in placed]
    tensors: dict[str, Array] = {}
    for each in fitted:
        names = _TEXT_ENCODER if each.part.is_encoder else family_of(each.module).peft_names
        require(each, names, "diffusers")
        _put(tensors, f"{each.part.component}.{each.module.path}", each.module, names)
    return Written(
        file=DIFFUSERS_FILE,
        tensors=tensors,
        metadata=diffusers_metadata(fitted),
        notes=fitting.finish(),
        errors=fitting.errors,
    )


def _lokr_file(placed: list[Placed], fitting: Fitting) -> Written:
    """LoKr of FLUX.2; diffusers takes alpha for the rank here as well, and rebuilds the configuration by itself."""
    tensors: dict[str, Array] = {}
    for each in placed:
        module = fitting.baked_lokr(each.module)
        _put(tensors, f"{each.part.component}.{module.path}", module, family_of(module).peft_names)
    return Written(
        file=DIFFUSERS_FILE, tensors=tensors, metadata={"format": "pt"}, notes=fitting.finish(), errors=fitting.errors
    )


def _for_diffusers(placed: Placed, title: str, fitting: Fitting) -> Module:
    module = placed.module
    if not placed.part.is_in_diffusers:
        raise refuse(module, f"diffusers loads no adapter of {placed.part.component} of {title}")
    module = fitting.as_lora(module)
    if "A_embedding" in module.factors:
        raise refuse(module, "diffusers loads no adapter of an embedding")
    module = fitting.baked(module)
    if module.is_dora:
        magnitude = fitting.magnitude_by_row(module)
        if module.factors["A"].ndim == 4:
            magnitude = magnitude.reshape(1, -1, 1, 1)
        module = replace(module, factors={**module.factors, "magnitude": magnitude})
    return module


def to_kohya(adapter: Adapter[Array], architecture: Architecture, fitting: Fitting) -> Written:
    """Write kohya's names: the authors' paths with underscores, and an alpha for every module.

    Raises:
        UsageError: A module or family that kohya and LyCORIS have no name for.
    """
    placed = _native(adapter, architecture, fitting)
    tensors: dict[str, Array] = {}
    for each in placed:
        names = family_of(each.module).lycoris_names
        require(each, names, "kohya")
        if each.module.is_dora and not fitting.has_columns(each.module):
            fitting.note(
                "dora_scale is LyCORIS', which divides by the norm of W+ΔW; ComfyUI divides by that of W "
                "(its PR #15458 is open): for ComfyUI use --to comfyui --base DIR"
            )
        name = f"{each.part.kohya[0]}_{each.module.path.replace('.', '_')}"
        _put(tensors, name, each.module, names)
        _put_alpha(tensors, name, each.module)
    file = file_name(adapter.name)
    metadata = kohya_metadata(placed, architecture, title=file.removesuffix(".safetensors"))
    return Written(file=file, tensors=tensors, metadata=metadata, notes=fitting.finish(), errors=fitting.errors)


def to_comfyui(adapter: Adapter[Array], architecture: Architecture, fitting: Fitting) -> Written:
    """Write ComfyUI's generic names: the authors' paths below diffusion_model and text_encoders.

    Plain loras of FLUX.2 are written as ai-toolkit does, lora_A and lora_B without an alpha: diffusers reads these as
    well, and fails on an alpha. Of the others diffusers, where it reads ComfyUI's names at all, wants lora_down and
    lora_up.

    Raises:
        UsageError: A module or family that ComfyUI has no name for.
    """
    placed = _native(adapter, architecture, fitting)
    is_bare = architecture.name == "flux2" and all(_is_plain(each.module) for each in placed)
    return _comfyui_file(adapter, placed, architecture, fitting, is_bare=is_bare)


SAME_IN_COMFYUI = frozenset({"QwenImageTransformer2DModel"})
"""Models without tables whose modules ComfyUI calls as diffusers does.
Source: ComfyUI, comfy/ldm/qwen_image/model.py, and comfy/lora.py `model_lora_keys_unet`, which maps
`diffusion_model.<path>` of every model."""


def to_comfyui_unchanged(adapter: Adapter[Array], base: BaseFamily, fitting: Fitting) -> Written:
    """Write the modules of a model of `SAME_IN_COMFYUI` under its own names.

    Raises:
        UsageError: A module or family that ComfyUI has no name for.
    """
    placed = [replace(each, module=_for_lycoris(each.module, fitting)) for each in _unchanged(adapter, base)]
    return _comfyui_file(adapter, placed, None, fitting, is_bare=False)


def _comfyui_file(
    adapter: Adapter[Array], placed: list[Placed], architecture: Architecture | None, fitting: Fitting, *, is_bare: bool
) -> Written:
    placed = [replace(each, module=comfyui_module(each.module, adapter, fitting)) for each in placed]
    tensors: dict[str, Array] = {}
    for each in placed:
        family = family_of(each.module)
        require(each, family.lycoris_names, "ComfyUI")
        name = f"{each.part.comfyui}.{each.module.path}"
        if is_bare:
            _put(tensors, name, fitting.baked(each.module), family.peft_names)
        else:
            _put(tensors, name, each.module, family.lycoris_names)
            _put_alpha(tensors, name, each.module)
    file = file_name(adapter.name)
    metadata = kohya_metadata(placed, architecture, title=file.removesuffix(".safetensors"))
    if is_bare:
        metadata.pop("ss_network_alpha", None)
    if DORA_SCALE in adapter.settings and any(each.module.is_dora for each in placed):
        metadata[DORA_SCALE] = str(adapter.settings[DORA_SCALE].value)
    return Written(file=file, tensors=tensors, metadata=metadata, notes=fitting.finish(), errors=fitting.errors)


def _is_plain(module: Module) -> bool:
    return module.factors.keys() == {"A", "B"}


def _native(adapter: Adapter[Array], architecture: Architecture, fitting: Fitting) -> list[Placed]:
    placed = in_native(place_all(adapter, architecture), as_lora=fitting.as_lora)
    return [replace(each, module=_for_lycoris(each.module, fitting)) for each in placed]


def _for_lycoris(module: Module, fitting: Fitting) -> Module:
    module = fitting.with_plain_alpha(module)
    magnitude = module.factors.get("magnitude")
    if magnitude is None or fitting.has_columns(module):
        return module
    rows = fitting.magnitude_by_row(module)
    dims = module.factors["A"].ndim if "A" in module.factors else 2
    shaped = rows.reshape(-1, *[1] * (dims - 1))
    return replace(module, factors={**module.factors, "magnitude": shaped})


def _put(tensors: dict[str, Array], name: str, module: Module, suffixes: Mapping[str, str]) -> None:
    for role, factor in module.factors.items():
        tensors[f"{name}.{suffixes[role]}"] = np.asarray(factor, order="C")


def _put_alpha(tensors: dict[str, Array], name: str, module: Module) -> None:
    """Alpha as a floating-point scalar: readers divide it by the rank, and diffusers refuses an integer."""
    if module.alpha is None:
        return
    if abs(module.alpha.value) > float(np.finfo(np.float32).max):
        raise refuse(module, f"its alpha of {module.alpha.value:g} is too large for 32 bits")
    tensors[f"{name}.alpha"] = np.array(module.alpha.value, np.float32)
