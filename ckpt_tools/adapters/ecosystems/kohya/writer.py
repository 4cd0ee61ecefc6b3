"""The file that kohya's tools and LyCORIS read: the authors' module names, and an alpha for every module.

Source: kohya-ss/sd-scripts, library/train_util.py and library/sai_model_spec.py (ModelSpec 1.0.1).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ckpt_tools.adapters.adapter import Adapter
from ckpt_tools.adapters.architectures.architecture import Architecture
from ckpt_tools.adapters.architectures.rule import Spelling
from ckpt_tools.adapters.ecosystems.fit import Fitting, require
from ckpt_tools.adapters.ecosystems.output import Written, file_name, put
from ckpt_tools.adapters.ecosystems.placing import Placed, in_diffusers, in_native, place_all
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.families.family import Module, refuse
from ckpt_tools.errors import UsageError
from ckpt_tools.moving.arrays import Array


def to_kohya(adapter: Adapter[Array], architecture: Architecture, fitting: Fitting) -> Written:
    """Write kohya's names: the authors' paths with underscores, and an alpha for every module.

    Raises:
        UsageError: A module or family that kohya and LyCORIS have no name for.
    """
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
    file = file_name(adapter.name)
    metadata = kohya_metadata(placed, architecture, title=file.removesuffix(".safetensors"))
    return fitting.written(file, tensors, metadata)


def in_lycoris(
    adapter: Adapter[Array], architecture: Architecture, fitting: Fitting, *, spelling: Spelling = "native"
) -> list[Placed]:
    """Return the modules as kohya and ComfyUI have them: the authors' paths, and LyCORIS' factors."""
    spell = in_diffusers if spelling == "diffusers" else in_native
    placed = spell(place_all(adapter, architecture), as_lora=fitting.as_lora)
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


def kohya_metadata(placed: Sequence[Placed], architecture: Architecture | None, *, title: str) -> dict[str, str]:
    """Return the header that kohya's tools, LyCORIS and model managers read; tensors have the last word."""
    modules = [each.module for each in placed]
    algorithms = Counter(family_of(module).lycoris_algorithm for module in modules)
    is_plain = algorithms.keys() == {"locon"} and not any(module.is_dora for module in modules)
    metadata = {"format": "pt", "ss_network_module": "networks.lora" if is_plain else "lycoris.kohya"}
    if not is_plain:
        args = {"algo": algorithms.most_common(1)[0][0]}
        if any(module.is_dora for module in modules):
            args["dora_wd"] = "True"
        metadata["ss_network_args"] = json.dumps(args)
    ranks = Counter(module.rank.value for module in modules if module.rank is not None)
    if ranks:
        rank = ranks.most_common(1)[0][0]
        alphas = Counter(
            module.alpha.value for module in modules if module.alpha and module.rank and module.rank.value == rank
        )
        metadata["ss_network_dim"] = str(rank)
        if alphas:
            metadata["ss_network_alpha"] = _number(alphas.most_common(1)[0][0])
    if architecture is not None:
        known = {
            "ss_base_model_version": architecture.base_version,
            "modelspec.sai_model_spec": "1.0.1",
            "modelspec.architecture": architecture.model_spec,
            "modelspec.implementation": architecture.implementation,
            "modelspec.title": title,
            "modelspec.resolution": architecture.resolution,
        }
        metadata |= {key: value for key, value in known.items() if value}
    return metadata


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
