"""Which model family a base model is of: by the class in its config.json, else by its weights. Never by a part of them.

Models of different families share most of their modules' names (FLUX.1's blocks are called like those of Qwen-Image,
HunyuanVideo, Bria, …): a family is told from weights only where its tables explain every matrix among them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ckpt_tools.adapters.adapter import Shapes
from ckpt_tools.adapters.architectures import ARCHITECTURES
from ckpt_tools.adapters.architectures.architecture import Architecture, ModelFamily
from ckpt_tools.adapters.architectures.names import is_language_model_path, lines_of, readings
from ckpt_tools.text import escape_name

_INNER = "diffusion_model."
"""In front of the diffusion model's names where a file holds a whole pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseFamily:
    """What a base model is."""

    possible: tuple[str, ...]
    """Families with tables that it can be of: one, or several for a base of few weights; none where it is of another
    family."""
    title: str
    """For people: its class, or its family."""
    source: str
    component: Literal["transformer", "unet"] | None = None
    """What diffusers' pipelines call it; None where it is not known to be one of diffusers' models."""
    is_language_model: bool = False
    """A model of transformers, whose adapters are PEFT's."""
    is_of_diffusers: bool = False
    """Does its config.json name a class of diffusers'?"""

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
    return tuple(name for name in among if _explains(ARCHITECTURES[name], paths))


def _explains(architecture: Architecture, paths: Sequence[str]) -> bool:
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
