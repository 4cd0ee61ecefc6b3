"""The file that `pipe.load_lora_weights` reads: loras under diffusers' module names, and their configuration.

Source: diffusers 0.42, loaders/lora_base.py (`_load_sft_state_dict_metadata`), utils/peft_utils.py.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpt_tools.adapters.adapter import Adapter
from ckpt_tools.adapters.architectures.architecture import Architecture
from ckpt_tools.adapters.architectures.choose import BaseFamily
from ckpt_tools.adapters.architectures.names import Place
from ckpt_tools.adapters.ecosystems.fit import Fitting, require
from ckpt_tools.adapters.ecosystems.output import Written, put
from ckpt_tools.adapters.ecosystems.placing import Placed, in_diffusers, place_all, unchanged
from ckpt_tools.adapters.families import family_of, lokr
from ckpt_tools.adapters.families.family import InexpressibleError, Module, refuse
from ckpt_tools.adapters.read.sidecars import DIFFUSERS_FILE, DIFFUSERS_KEY
from ckpt_tools.transfer.arrays import Array

_FUSED = {"img_attn": "to_qkv", "txt_attn": "to_added_qkv"}
_TEXT_ENCODER = {"A": "lora_linear_layer.down.weight", "B": "lora_linear_layer.up.weight"}
"""diffusers' text encoders: with PEFT's names an adapter of the MLP alone is not recognised.
Source: diffusers 0.42 utils/state_dict_utils.py."""


def to_diffusers(adapter: Adapter[Array], architecture: Architecture, fitting: Fitting) -> Written:
    """Write loras under diffusers' module names, alpha/r multiplied into B: most of its loaders refuse an alpha."""
    places = place_all(adapter, architecture)
    whole = _place_lokr(places, architecture) if fitting.may_fuse else None
    if whole is not None:
        return _lokr_file(whole, fitting)
    return _diffusers_file(in_diffusers(places, as_lora=fitting.as_lora), architecture.title, fitting)


def to_diffusers_unchanged(adapter: Adapter[Array], base: BaseFamily, fitting: Fitting) -> Written:
    """Write loras of a model without tables under its own module names."""
    return _diffusers_file(unchanged(adapter, base), base.title, fitting)


def _diffusers_file(placed: list[Placed], title: str, fitting: Fitting) -> Written:
    fitted = [replace(each, module=_for_diffusers(each, title, fitting)) for each in placed]
    tensors: dict[str, Array] = {}
    for each in fitted:
        names = _TEXT_ENCODER if each.part.is_encoder else family_of(each.module).peft_names
        require(each, names, "diffusers")
        put(tensors, f"{each.part.component}.{each.module.path}", each.module, names)
    return fitting.written(DIFFUSERS_FILE, tensors, _metadata(fitted))


def _lokr_file(placed: list[Placed], fitting: Fitting) -> Written:
    """LoKr of FLUX.2; diffusers takes alpha for the rank here as well, and rebuilds the configuration by itself."""
    tensors: dict[str, Array] = {}
    for each in placed:
        module = fitting.baked_lokr(each.module)
        put(tensors, f"{each.part.component}.{module.path}", module, family_of(module).peft_names)
    return fitting.written(DIFFUSERS_FILE, tensors, {"format": "pt"})


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


def _metadata(placed: Sequence[Placed]) -> dict[str, str]:
    """Return the header of a diffusers file of loras whose scale is 1: alpha is the rank, for every module."""
    # diffusers takes PEFT's LoraConfig from there, all of it: a component that is not in it would get PEFT's defaults
    # (rank 8).
    document: dict[str, object] = {}
    for component in dict.fromkeys(each.part.component for each in placed):
        those = [each for each in placed if each.part.component == component]
        config = _lora_config([each.module for each in those], short=those[0].part.is_encoder)
        document |= {f"{component}.{key}": value for key, value in config.items()}
    return {"format": "pt", DIFFUSERS_KEY: json.dumps(document, indent=2, sort_keys=True)}


def _lora_config(modules: Sequence[Module], *, short: bool) -> Mapping[str, object]:
    """LoraConfig of one component; `short` paths fit CLIP with and without `text_model.`."""
    ranks = {
        module.path.removeprefix("text_model.") if short else module.path: module.factors["A"].shape[0]
        for module in modules
    }
    rank = Counter(ranks.values()).most_common(1)[0][0]
    others = {path: each for path, each in ranks.items() if each != rank}
    anchored = others if short else {f"^{path}": each for path, each in others.items()}
    return {
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": anchored,
        "alpha_pattern": anchored,
        "target_modules": sorted(ranks),
        "use_dora": any(module.is_dora for module in modules),
        "lora_bias": any("B_bias" in module.factors for module in modules),
        "peft_type": "LORA",
    }


def _place_lokr(places: Sequence[tuple[Place, Module]], architecture: Architecture) -> list[Placed] | None:
    """Return an adapter of LoKr modules alone as diffusers' loaders that know it take it, or None when they would not.

    It rebuilds PEFT's LoKr configuration from the shapes alone: one `decompose_factor` must give the factors of every
    module, and PEFT must come to the same choice of full and low-rank halves. Fused projections stay fused: diffusers
    fuses the model's own when it meets them. Source: diffusers 0.42, utils/peft_utils.py (`_create_lokr_config`),
    loaders/lora_conversion_utils.py; peft 0.21, tuners/lokr/layer.py (`update_layer`, `factorization`).
    """
    if not architecture.lokr or not places:
        return None
    if "native" not in architecture.lokr and any(where.at is None and len(where.diffusers) > 1 for where, _ in places):
        return None
    if any(module.family != lokr.Lokr.name or module.is_dora or "t2" in module.factors for _, module in places):
        return None
    placed = []
    try:
        for where, module in places:
            moved = family_of(module).swap_halves(module) if where.is_swapped and where.at is None else module
            placed.append(Placed(part=where.part, module=replace(moved, path=_path(where))))
    except InexpressibleError:
        return None
    fused = {each.module.path.rpartition(".")[0] for each in placed if each.module.path.endswith("qkv")}
    if any(each.module.path.rpartition(".")[0] in fused and _is_part(each.module.path) for each in placed):
        return None  # the model's projections cannot be fused and apart
    if len({each.module.path for each in placed}) < len(placed):
        return None
    return placed if _is_rebuilt([each.module for each in placed]) else None


def _path(where: Place) -> str:
    paths = where.diffusers
    if where.at is not None:
        return paths[where.at]
    if len(paths) == 1:
        return paths[0]
    stream = where.native.split(".")[2]
    return f"{paths[0].rpartition('.')[0]}.{_FUSED[stream]}"


def _is_part(path: str) -> bool:
    return path.rpartition(".")[2] in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")


def _is_rebuilt(modules: Sequence[Module]) -> bool:
    """Would PEFT make factors of these very shapes?"""
    halves = [lokr.halves_of(module) for module in modules]
    candidates = [*sorted({each.first[0] for each in halves}), -1]
    if not any(lokr.is_rebuilt(halves, factor) for factor in candidates):
        return False
    both = any("w1_a" in module.factors for module in modules)
    for module, each in zip(modules, halves, strict=True):
        ranks = [module.factors[role].shape[1] for role in ("w2_a", "w1_a") if role in module.factors]
        rank = ranks[0] if ranks else max(each.second)
        if lokr.half_built_otherwise(module.factors, each, rank, both=both) is not None:
            return False
    return True
