"""Which model family an adapter is for: said, or following from its names, its header, its shapes or its base."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ckpt_tools.adapters.adapter import Adapter, F, Shapes
from ckpt_tools.adapters.architectures import ARCHITECTURES, candidates
from ckpt_tools.adapters.architectures.architecture import Architecture, ModelFamily
from ckpt_tools.adapters.architectures.names import find_as, is_language_model_path, lines_of, readings
from ckpt_tools.adapters.families import columns_of, rows_of
from ckpt_tools.errors import UsageError
from ckpt_tools.text import escape_name

_MOST_FOREIGN = 0.05
"""Share of an adapter's modules that a family's tables may not name: one that is damaged is still of this family."""


def family_named(name: str | None) -> ModelFamily | None:
    """Return the model family that the user names."""
    known = ("llm", *ARCHITECTURES)
    if name is not None and name not in known:
        raise UsageError(f"unknown model family {name!r}", hint=f"--architecture takes {', '.join(known)}")
    return name


def is_native(adapter: Adapter[F]) -> bool:
    """Do names with a prefix of pipelines go on as the authors' do, so that diffusers' model has no such modules?"""
    paths = [module.path for module in adapter.modules]
    if any(path.startswith("diffusion_model.") for path in paths):
        return True
    families = candidates(paths) if adapter.convention == "diffusers" else ()
    places = [each for name in families for path in paths for each in readings(path, ARCHITECTURES[name])]
    return any(not each.is_spelled("diffusers") and not each.part.is_encoder for each in places)


def choose_families(adapter: Adapter[F], *, base: BaseFamily | None) -> tuple[ModelFamily, ...]:
    """Return the families that an adapter can be for; none where that is not known, or ckpt has no tables for it.

    The base goes before everything else; without one the names, the header and the shapes count.
    """
    if base is not None and len(base.possible) < 2:
        return () if base.name is None else (base.name,)
    paths = [module.path for module in adapter.modules]
    possible = _possible(paths, base)
    if base is None:
        possible = tuple(name for name in possible if _explains(ARCHITECTURES[name], adapter))
    if not possible:
        return ("llm",) if any(is_language_model_path(path) for path in paths) else ()
    said = family_in_header(adapter)
    if said in possible:
        return (said,)
    possible = _by_shape(adapter, _by_trainer(adapter, possible))
    return () if base is None and any(rivals_of(adapter, name) for name in possible) else possible


def _explains(architecture: Architecture, adapter: Adapter[F]) -> bool:
    """Are nearly all names those of the family? ComfyUI's prefix stands before native ones; others are another's."""
    part, maps = architecture.main, architecture.comfyui
    takes_diffusers = maps is not None and f"{part.comfyui}." in maps.dotted
    unknown = 0
    for module in adapter.modules:
        places = readings(module.path, architecture)
        takes_any = takes_diffusers or adapter.convention != "comfyui" or not module.path.startswith(part.comfyui)
        unknown += not module.is_saved and not any(
            takes_any or each.part.is_encoder or each.is_spelled("native", "alias") for each in places
        )
    return unknown <= _MOST_FOREIGN * len(adapter.modules)


def _by_trainer(adapter: Adapter[F], found: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of several families whose trainers with kohya's names spell the modules so."""
    paths = [module.path for module in adapter.modules if module.path.startswith("lora_unet_")]
    spelled = []
    for name in found:
        part, kohya = ARCHITECTURES[name].main, ARCHITECTURES[name].kohya
        names = (path.removeprefix("lora_unet_") for path in paths)
        if kohya is not None and all(find_as(each, part, kohya.spelling) for each in names):
            spelled.append(name)
    return tuple(spelled) if paths and spelled else found


def _possible(paths: Sequence[str], base: BaseFamily | None) -> tuple[str, ...]:
    found = candidates(paths)
    return found if base is None else tuple(name for name in found if name in base.possible)


def choose_architectures(
    adapter: Adapter[F], *, architecture: ModelFamily | None, base: BaseFamily | None
) -> tuple[str, ...]:
    """Return the families that the adapter can be for; several only where nothing tells them apart.

    Whether models without tables have the same names is another question (`rivals_of`).
    """
    paths = [module.path for module in adapter.modules]
    where = paths[0] if paths else None
    if architecture is None and base is not None and len(base.possible) < 2:
        architecture = base.name
        if architecture is None:
            raise UsageError(
                f"ckpt has no tables to convert the module names of {base.title} ({base.source})",
                where=where,
                hint="--to peft and --to diffusers keep the model's own names, and so does --to comfyui if --base is "
                "the file that ComfyUI loads",
            )
    if architecture == "llm":
        what = "diffusers, kohya and ComfyUI have no names for the modules of a language model"
        raise UsageError(what, where=where, hint="use --to peft, which transformers, vLLM and PEFT read")
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


def family_in_header(adapter: Adapter[F]) -> str | None:
    """Return the family that the file's header names."""
    for key, field in (("ss_base_model_version", "base_version"), ("modelspec.architecture", "model_spec")):
        said = str(adapter.settings[key].value) if key in adapter.settings else ""
        if found := [name for name, each in ARCHITECTURES.items() if said and getattr(each, field) == said]:
            return found[0]
    return None


def _by_shape(adapter: Adapter[F], found: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of several families whose rows and columns the adapter has: in proportion, then in number."""
    fitting = list(found)
    for module in adapter.modules:
        rows, columns = rows_of(module), columns_of(module)
        if rows is None or columns is None:
            continue
        for name in tuple(fitting):
            for each in readings(module.path, ARCHITECTURES[name]):
                ratio, is_whole = each.ratio, each.at is None or len(each.line.hub) == 1
                if ratio is not None and is_whole and rows != round(ratio * columns):
                    fitting.remove(name)
                    break
    fitting = fitting or list(found)
    sized = [name for name in fitting if _has_size(adapter, name)]
    return tuple(sized or fitting)


def rivals_of(adapter: Adapter[F], name: str) -> tuple[str, ...]:
    """Return the models without tables that the adapter could be for as well as for the family `name`."""
    paths = _in_diffusers(adapter, name)
    if not paths:
        return ()
    own = {*paths.values(), *(module.path for module in adapter.modules)}
    rivals = ARCHITECTURES[name].rivals
    found = [title for title, lacks in rivals.items() if not any(re.fullmatch(lacks, path) for path in own)]
    return () if not found or _has_size(adapter, name) else tuple(found)


def _in_diffusers(adapter: Adapter[F], name: str) -> Mapping[str, str]:
    """Return path → path as diffusers has it; {} where one of them is the authors', which are the family's own."""
    found = {}
    for module in adapter.modules:
        places = [each for each in readings(module.path, ARCHITECTURES[name]) if not each.part.is_encoder]
        if any(not each.is_spelled("diffusers") for each in places):
            return {}
        for each in places:
            found[module.path] = each.diffusers[each.at or 0]
    return found


def _has_size(adapter: Adapter[F], name: str) -> bool:
    """Is the adapter as deep and as wide as a published model of the family?"""
    sizes = ARCHITECTURES[name].sizes
    columns: dict[str, int | None] = {}
    for module in adapter.modules if sizes else ():
        for each in readings(module.path, ARCHITECTURES[name]):
            columns |= dict.fromkeys(each.diffusers, columns_of(module))
    last: dict[str, int] = {}
    for path in columns:
        if hit := _BLOCK.fullmatch(path):
            last[hit[1]] = max(int(hit[2]), last.get(hit[1], 0))
    return any(_has_columns(columns, size) and _blocks(size) in ({}, last) for size in sizes)


def _blocks(size: Mapping[str, int]) -> dict[str, int]:
    return {name: number for name, number in size.items() if not name.startswith(".")}


def _has_columns(columns: Mapping[str, int | None], size: Mapping[str, int]) -> bool:
    found = [(path, end) for path in columns for end in size if end.startswith(".") and path.endswith(end)]
    return bool(found) and all(columns[path] == size[end] for path, end in found)


_BLOCK = re.compile(r"((?:\w+_)?blocks|layers)\.(\d+)\..*")


# Which model family a base model is of: by the class in its config.json, else by its weights. Never by a part of them.

_INNER = "diffusion_model."  # In front of the diffusion model's names where a file holds a whole pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseFamily:
    """What a base model is."""

    possible: tuple[str, ...]
    """Families with tables that it can be of: one, or several for a base of few weights; none where it is of another
    family."""
    title: str  # For people: its class, or its family
    source: str
    component: Literal["transformer", "unet"] | None = None
    """What diffusers' pipelines call it; None where it is not known to be one of diffusers' models."""
    is_language_model: bool = False  # A model of transformers, whose adapters are PEFT's
    is_of_diffusers: bool = False  # Does its config.json name a class of diffusers'?

    @property
    def name(self) -> ModelFamily | None:
        """The one family that it is of; None when ckpt has no tables for it, or cannot tell."""
        if self.is_language_model:
            return "llm"
        return self.possible[0] if len(self.possible) == 1 else None


def model_family_of(shapes: Shapes, config: Mapping[str, object] | None = None) -> BaseFamily:
    """Tell a base model's family from its config.json, else from its parameters' shapes, of which () is not known."""
    config = config or {}
    kind, architectures = config.get("_class_name"), config.get("architectures")
    if isinstance(kind, str):
        possible = tuple(name for name, each in ARCHITECTURES.items() if kind in each.classes)
        if len(possible) > 1:
            possible = _by_config(_explaining(shapes, possible), config)
        component: Literal["transformer", "unet"] | None = (
            "unet" if "UNet" in kind else "transformer" if "Transformer" in kind else None
        )
        return BaseFamily(
            possible=possible,
            title=escape_name(kind),
            source="_class_name in the base's config.json",
            is_of_diffusers=True,
            component=component,
        )
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        return BaseFamily(
            possible=(),
            title=escape_name(architectures[0]),
            source="architectures in the base's config.json",
            is_language_model=True,
        )
    possible = _explaining(shapes, [name for name, each in ARCHITECTURES.items() if each.is_told_by_names])
    is_language_model = not possible and any(map(is_language_model_path, _matrices(shapes)))
    title = " or ".join(ARCHITECTURES[name].title for name in possible) or "the base model"
    return BaseFamily(
        possible=possible,
        title=title,
        source="the names and shapes of the base's weights",
        is_language_model=is_language_model and not any(map(_is_diffusion, _matrices(shapes))),
    )


def _is_diffusion(path: str) -> bool:
    """Is it a module that models which denoise have, whatever their family, and language models have not?"""
    return path.startswith(("x_embedder", "patch_embed", "img_in", "time_embed", "condition_embedder", "proj_in")) or (
        "timestep_embedder" in path
    )


def _explaining(shapes: Shapes, among: Collection[str]) -> tuple[str, ...]:
    """Return the families whose tables have every matrix of the model."""
    paths = _matrices(shapes)
    if not paths:
        return ()
    return tuple(name for name in among if _is_explained(ARCHITECTURES[name], paths))


def _is_explained(architecture: Architecture, paths: Sequence[str]) -> bool:
    natives: set[str] = set()
    for path in paths:
        found = readings(path, architecture)
        if not found:
            return False
        natives.update(each.native for each in found)
    lines = lines_of(architecture.main.sections) if architecture.skeleton else ()
    skeleton = {name for each in lines if (name := each.spellings[0].names[0]).endswith(architecture.skeleton)}
    return skeleton.isdisjoint(natives) or skeleton <= natives


def _by_config(possible: tuple[str, ...], config: Mapping[str, object]) -> tuple[str, ...]:
    """Return those of several families of one class of whom most is in config.json."""
    agreeing = {
        name: sum(
            config.get(key) == (None if value == "" else value) for key, value in ARCHITECTURES[name].config.items()
        )
        for name in possible
    }
    return tuple(name for name in possible if agreeing[name] == max(agreeing.values()))


def _matrices(shapes: Shapes) -> list[str]:
    """Return the modules with a weight that an adapter can change; of a file with a pipeline, the denoiser's."""
    weights = (name for name, shape in shapes.items() if name.endswith(".weight") and len(shape) != 1)
    paths = [name.removesuffix(".weight") for name in weights]
    inner = [path for path in paths if path.startswith((_INNER, f"model.{_INNER}"))]
    return inner or paths
