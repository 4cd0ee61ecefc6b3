"""LoKr for FLUX.2 in diffusers, the one family beside LoRA that one of its loaders takes.

diffusers rebuilds PEFT's LoKr configuration from the shapes alone: one `decompose_factor` must give the factors of
every module, and PEFT must come to the same choice of full and low-rank halves. Fused projections stay fused: diffusers
fuses the model's own when it meets them.

Source: diffusers 0.42, utils/peft_utils.py (`_create_lokr_config`), loaders/lora_conversion_utils.py; peft 0.21,
tuners/lokr/layer.py (`update_layer`, `factorization`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckpt_tools.adapters.architectures.architecture import Architecture
from ckpt_tools.adapters.architectures.resolve import Place
from ckpt_tools.adapters.ecosystems.placing import Placed
from ckpt_tools.adapters.families import family_of, lokr
from ckpt_tools.adapters.families.family import InexpressibleError, Module

_FUSED = {"img_attn": "to_qkv", "txt_attn": "to_added_qkv"}


def place_lokr(places: Sequence[tuple[Place, Module]], architecture: Architecture) -> list[Placed] | None:
    """Return an adapter of LoKr modules alone as diffusers' loader of FLUX.2 takes it, or None when it would not."""
    if architecture.name != "flux2" or not places:
        return None
    if any(module.family != lokr.Lokr.name or module.is_dora or "t2" in module.factors for _, module in places):
        return None
    placed = []
    try:
        for where, module in places:
            is_swapped = where.match.rule.step == "swap" and where.match.part is None
            moved = family_of(module).swap_halves(module) if is_swapped else module
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
    if where.match.part is not None:
        return paths[where.match.part]
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
