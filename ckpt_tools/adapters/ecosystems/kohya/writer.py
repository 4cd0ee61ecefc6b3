"""The file that kohya's tools and LyCORIS read: the authors' module names, and an alpha for every module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ckpt_tools.adapters.adapter import Adapter
from ckpt_tools.adapters.architectures.architecture import Architecture, Spelling
from ckpt_tools.adapters.ecosystems.fit import Fitting, require
from ckpt_tools.adapters.ecosystems.output import Written, file_name, header_of, put
from ckpt_tools.adapters.ecosystems.placing import Placed, in_diffusers, in_native, place_all
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.families.family import Module, refuse
from ckpt_tools.errors import UsageError
from ckpt_tools.transfer.arrays import Array


def to_kohya(adapter: Adapter[Array], architecture: Architecture, fitting: Fitting) -> Written:
    """Write kohya's names: the authors' paths with underscores, and an alpha for every module."""
    if architecture.kohya is None:
        raise unsupported(adapter, architecture, "kohya's trainers (sd-scripts, musubi-tuner) have")
    placed = in_lycoris(adapter, architecture, fitting, spelling=architecture.kohya.spelling)
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
        put(tensors, name, each.module, names)
        put_alpha(tensors, name, each.module)
        if family_of(each.module).is_unranked(each.module.factors):
            tensors[f"{name}.alpha"] = np.array(1, np.float32)  # which LyCORIS looks up, and does not use
    file = file_name(adapter.name)
    modules = [each.module for each in placed]
    metadata = header_of(modules, architecture, title=file.removesuffix(".safetensors"))
    return fitting.written(file, tensors, metadata)


def in_lycoris(
    adapter: Adapter[Array],
    architecture: Architecture,
    fitting: Fitting,
    *,
    spelling: Spelling = "native",
    takes_parts: Callable[[str], bool] = lambda _: False,
) -> list[Placed]:
    """Return the modules as kohya and ComfyUI have them: the authors' paths, and LyCORIS' factors."""
    places = place_all(adapter, architecture)
    if spelling == "diffusers":
        placed = in_diffusers(places, as_lora=fitting.as_lora)
    else:
        placed = in_native(places, as_lora=fitting.as_lora, spelling=spelling, takes_parts=takes_parts)
    return [replace(each, module=for_lycoris(each.module, fitting)) for each in placed]


def unsupported(adapter: Adapter[Array], architecture: Architecture, who: str) -> UsageError:
    """Return the error for a model that a target does not have."""
    return UsageError(
        f"{who} no names for the modules of {architecture.title}",
        where=adapter.modules[0].path,
        hint="--to diffusers and --to peft write what diffusers and PEFT read",
    )


def for_lycoris(module: Module, fitting: Fitting) -> Module:
    """Return a module with the alpha and the magnitude that LyCORIS has."""
    module = fitting.with_plain_alpha(module)
    magnitude = module.factors.get("magnitude")
    if magnitude is None or fitting.has_columns(module):
        return module
    rows = fitting.magnitude_by_row(module)
    dims = module.factors["A"].ndim if "A" in module.factors else 2
    shaped = rows.reshape(-1, *[1] * (dims - 1))
    return replace(module, factors={**module.factors, "magnitude": shaped})


def put_alpha(tensors: dict[str, Array], name: str, module: Module) -> None:
    """Alpha as a floating-point scalar: readers divide it by the rank, and diffusers refuses an integer."""
    if module.alpha is None:
        return
    if abs(module.alpha.value) > float(np.finfo(np.float32).max):
        raise refuse(module, f"its alpha of {module.alpha.value:g} is too large for 32 bits")
    tensors[f"{name}.alpha"] = np.array(module.alpha.value, np.float32)
