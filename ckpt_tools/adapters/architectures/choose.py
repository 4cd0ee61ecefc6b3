"""Which model family an adapter is for: said, or following from its names, its header, its shapes or its base."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.adapters.adapter import Adapter, F
from ckpt_tools.adapters.architectures import ARCHITECTURES, candidates
from ckpt_tools.adapters.architectures.architecture import ArchitectureName, ModelFamily
from ckpt_tools.adapters.architectures.of_base import BaseFamily
from ckpt_tools.adapters.architectures.resolve import is_language_model_path, readings
from ckpt_tools.adapters.families import columns_of, rows_of
from ckpt_tools.errors import UsageError

_HEADERS = {
    "ss_base_model_version": {each.base_version: name for name, each in ARCHITECTURES.items()},
    "modelspec.architecture": {each.model_spec: name for name, each in ARCHITECTURES.items()},
}


def family_named(name: str | None) -> ModelFamily | None:
    """Return the model family that the user names.

    Raises:
        UsageError: There is none of this name.
    """
    known = ("llm", *ARCHITECTURES)
    if name is not None and name not in known:
        raise UsageError(f"unknown model family {name!r}", hint=f"--architecture takes {', '.join(known)}")
    return name  # type: ignore[return-value]  # one of the literals


def choose_family(adapter: Adapter[F], *, base: BaseFamily | None) -> ModelFamily | None:
    """Return the one family that an adapter is for; None where that is not known, or ckpt has no tables for it.

    The base goes before everything else; without one the names, the header and the shapes count.
    """
    if base is not None and len(base.possible) < 2:
        return base.name
    paths = [module.path for module in adapter.modules]
    possible = _possible(paths, base)
    if not possible:
        return "llm" if any(is_language_model_path(path) for path in paths) else None
    said = family_in_header(adapter)
    if said in possible:
        return said
    possible = _by_shape(adapter, possible)
    return possible[0] if len(possible) == 1 and (base is not None or not rivals_of(adapter, possible[0])) else None


def _possible(paths: Sequence[str], base: BaseFamily | None) -> tuple[ArchitectureName, ...]:
    found = candidates(paths)
    return found if base is None else tuple(name for name in found if name in base.possible)


def choose_architectures(
    adapter: Adapter[F],
    *,
    architecture: ModelFamily | None,
    base: BaseFamily | None,
) -> tuple[ArchitectureName, ...]:
    """Return the families that the adapter can be for; several only where nothing tells them apart.

    Whether models without tables have the same names is another question (`rivals_of`).

    Raises:
        UsageError: A language model, or a family that ckpt has no names for.
    """
    paths = [module.path for module in adapter.modules]
    where = paths[0] if paths else None
    if architecture is None and base is not None and len(base.possible) < 2:
        architecture = base.name
        if architecture is None:
            raise UsageError(
                f"ckpt has no tables to convert the module names of {base.title} ({base.source})",
                where=where,
                hint="--to peft and --to diffusers keep the model's own names",
            )
    if architecture == "llm":
        raise UsageError(
            "diffusers, kohya and ComfyUI have no names for the modules of a language model",
            where=where,
            hint="use --to peft, which transformers, vLLM and PEFT read",
        )
    if architecture is not None:
        return (architecture,)
    found = _possible(paths, base)
    said = family_in_header(adapter)
    strange = next((path for path in paths if not any(readings(path, ARCHITECTURES[name]) for name in found)), None)
    if not found or (strange is not None and said not in found):
        raise UsageError(
            "the adapter's modules do not belong to a model family that ckpt has tables for (these are "
            f"{', '.join(each.title for each in ARCHITECTURES.values())})",
            where=where if strange is None else strange,
            hint="--to peft accepts the modules of any model under their own names, and so does --to diffusers with "
            "--base DIR",
        )
    if said in found:
        return (said,)
    return _by_shape(adapter, found) if len(found) > 1 else found


def family_in_header(adapter: Adapter[F]) -> ArchitectureName | None:
    """Return the family that the file's header names."""
    for key, names in _HEADERS.items():
        if key in adapter.settings and (name := names.get(str(adapter.settings[key].value))) is not None:
            return name
    return None


def _by_shape(adapter: Adapter[F], found: tuple[ArchitectureName, ...]) -> tuple[ArchitectureName, ...]:
    """FLUX.1 and FLUX.2 share names, but not the width of their MLPs."""
    fitting = list(found)
    for module in adapter.modules:
        rows, columns = rows_of(module), columns_of(module)
        if rows is None or columns is None:
            continue
        for name in tuple(fitting):
            for each in readings(module.path, ARCHITECTURES[name]):
                ratio = each.match.rule.ratio
                is_whole = each.match.part is None or len(each.match.rule.diffusers) == 1
                if ratio is not None and is_whole and rows != round(ratio * columns):
                    fitting.remove(name)
                    break
    return tuple(fitting) or found


@dataclass(frozen=True, slots=True)
class Rival:
    """Models without tables that share a family's names.

    Every diffusion transformer with two streams calls its blocks as FLUX.1 does. An adapter is only taken for a family
    by its names where no other model has all of them; otherwise depth and width must be those of the published model.
    """

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
