"""The file that ComfyUI reads: its generic names, the authors' paths below diffusion_model and text_encoders."""

from __future__ import annotations

from dataclasses import replace

from ckpt_tools.adapters.adapter import Adapter
from ckpt_tools.adapters.architectures.architecture import Architecture
from ckpt_tools.adapters.architectures.of_base import BaseFamily
from ckpt_tools.adapters.ecosystems.comfyui.rotations import comfyui_module
from ckpt_tools.adapters.ecosystems.fit import Fitting, require
from ckpt_tools.adapters.ecosystems.kohya.writer import for_lycoris, in_lycoris, kohya_metadata, put_alpha
from ckpt_tools.adapters.ecosystems.placing import Placed, unchanged
from ckpt_tools.adapters.ecosystems.written import Written, file_name, put
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.families.family import Module
from ckpt_tools.adapters.read.sidecars import DORA_SCALE
from ckpt_tools.moving.arrays import Array

SAME_IN_COMFYUI = frozenset({"QwenImageTransformer2DModel"})
"""Models without tables whose modules ComfyUI calls as diffusers does.
Source: ComfyUI, comfy/ldm/qwen_image/model.py, and comfy/lora.py `model_lora_keys_unet`, which maps
`diffusion_model.<path>` of every model."""


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
    placed = [replace(each, module=comfyui_module(each.module, adapter, fitting)) for each in placed]
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
    return Written(file=file, tensors=tensors, metadata=metadata, notes=fitting.finish(), errors=fitting.errors)


def _is_plain(module: Module) -> bool:
    return module.factors.keys() == {"A", "B"}
