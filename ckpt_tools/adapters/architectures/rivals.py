"""Models without tables whose modules are called like those of a family: names alone do not tell them apart.

Every diffusion transformer with two streams calls its blocks as FLUX.1 does. An adapter is only taken for a family by
its names where no other model has all of them; otherwise depth and width must be those of the published model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ckpt_tools.adapters.adapter import Adapter, F
from ckpt_tools.adapters.architectures import ARCHITECTURES
from ckpt_tools.adapters.architectures.architecture import ArchitectureName
from ckpt_tools.adapters.architectures.resolve import readings
from ckpt_tools.adapters.families import columns_of


@dataclass(frozen=True, slots=True)
class Rival:
    """Models that share a family's names."""

    title: str
    lacks: re.Pattern[str]
    """Paths in diffusers' spelling that the family has and these models have not: one of them tells."""


def _rival(title: str, lacks: str) -> Rival:
    return Rival(title, re.compile(lacks))


RIVALS: Mapping[ArchitectureName, tuple[Rival, ...]] = {
    "flux1": (
        _rival("HunyuanVideo", r"context_embedder|x_embedder"),
        _rival("Bria, LongCat-Image, Ovis-Image", r"time_text_embed\..*"),
        _rival(
            "Qwen-Image",
            r"(?:context|x)_embedder|single_.*|.*\.(?:ff|ff_context|norm1|norm1_context)\..*"
            r"|time_text_embed\.(?:text|guidance)_.*",
        ),
    ),
    "flux2": (
        _rival(
            "FLUX.1, Qwen-Image and others",
            r".*(?:linear_in|linear_out|_modulation(?:_\w+)?\.linear|to_qkv_mlp_proj)|time_guidance_embed\..*"
            r"|single_transformer_blocks\.\d+\.attn\.to_out",
        ),
    ),
    "sd3": (
        _rival("FLUX.1, HunyuanVideo and others", r"pos_embed\.proj|.*\.attn2\..*"),
        _rival("PixArt, Allegro, AuraFlow, DiT", r".*\.(?:attn\.(?:to|add)_.*|norm1_context\.linear|ff_context\..*)"),
    ),
    "sdxl": (
        _rival(
            "SD 1.x or 2.x", r"add_embedding\..*|.*\.transformer_blocks\.[1-9]\d*\..*|(?:text_encoder_2\.|lora_te2_).*"
        ),
    ),
}
"""Source: diffusers 0.42, the modules of all its transformers and U-Nets, of which these have most of a family's."""


@dataclass(frozen=True, slots=True)
class _Extent:
    """How deep and wide a published model is."""

    last: Mapping[str, int]
    """List of blocks → number of its last one."""
    width: int
    """Columns of the queries' weight."""


_EXTENTS: Mapping[ArchitectureName, tuple[_Extent, ...]] = {
    "flux1": (_Extent({"transformer_blocks": 18, "single_transformer_blocks": 37}, 3072),),
    "sd3": (_Extent({"transformer_blocks": 23}, 1536), _Extent({"transformer_blocks": 37}, 2432)),
}
"""Source: config.json of FLUX.1-dev, SD 3 medium and 3.5 large. Chroma is as large as FLUX.1, and has its names."""
_CROSS_WIDTH = {"sdxl": 2048}
"""Columns of the cross-attention's keys and values, where they tell. Source: config.json of SDXL's UNet."""
_BLOCK = re.compile(r"(\w+_blocks)\.(\d+)\..*")


def rivals_of(adapter: Adapter[F], name: ArchitectureName) -> tuple[str, ...]:
    """Return the models without tables that the adapter could be for as well as for the family `name`."""
    paths = _in_diffusers(adapter, name)
    if not paths:
        return ()
    own = {*paths.values(), *(module.path for module in adapter.modules)}
    found = [rival.title for rival in RIVALS[name] if not any(map(rival.lacks.fullmatch, own))]
    return () if not found or _has_extent(adapter, name, paths) else tuple(found)


def _in_diffusers(adapter: Adapter[F], name: ArchitectureName) -> Mapping[str, str]:
    """Return path → path as diffusers has it; {} where one of them is the authors', which are the family's own."""
    found = {}
    for module in adapter.modules:
        places = [each for each in readings(module.path, ARCHITECTURES[name]) if not each.part.is_encoder]
        if any(not each.match.is_diffusers for each in places):
            return {}
        for each in places:
            found[module.path] = each.diffusers[each.match.part or 0]
    return found


def _has_extent(adapter: Adapter[F], name: ArchitectureName, paths: Mapping[str, str]) -> bool:
    """Is the adapter as deep and as wide as the published model?"""
    columns = {paths[each.path]: columns_of(each) for each in adapter.modules if each.path in paths}
    cross = {width for path, width in columns.items() if path.endswith(("attn2.to_k", "attn2.to_v"))}
    if name in _CROSS_WIDTH and cross == {_CROSS_WIDTH[name]}:
        return True
    last = _last_blocks(columns)
    widths = {width for path, width in columns.items() if path.endswith(".attn.to_q")}
    return any(last == extent.last and widths == {extent.width} for extent in _EXTENTS.get(name, ()))


def _last_blocks(paths: Collection[str]) -> Mapping[str, int]:
    last: dict[str, int] = {}
    for path in paths:
        if hit := _BLOCK.fullmatch(path):
            last[hit[1]] = max(int(hit[2]), last.get(hit[1], 0))
    return last
