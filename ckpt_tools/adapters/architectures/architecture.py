"""What a model family says of itself: which parts it has, and where the names of each are."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ModelFamily = str
"""Whatever `--architecture` takes: the name of an `Architecture`, or "llm" for language models, whose paths are their
names."""
Spelling = Literal["native", "alias", "diffusers"]
"""Whose names: the authors', those of another implementation of theirs, diffusers'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """One model of a pipeline."""

    component: str = "transformer"  # What diffusers calls it: transformer, unet, text_encoder, …
    sections: tuple[str, ...] = ()  # Of names/comfyui.txt, with its names
    comfyui: str = "diffusion_model"  # What ComfyUI puts in front of the native path
    kohya: tuple[str, ...] = ("lora_unet", "lora_transformer", "lycoris")
    """What kohya and its relatives put in front of the underscored path; the first is written."""
    is_in_diffusers: bool = True
    is_encoder: bool = False
    ratios: Mapping[str, float] = field(default_factory=dict)
    """End of a native path → rows of its weight to its columns, where that tells families apart that share a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComfyUI:
    """What ComfyUI maps for a model beside diffusion_model.<native path>.

    Source: ComfyUI, comfy/lora.py `model_lora_keys_unet`.
    """

    dotted: tuple[str, ...] = ()  # In front of diffusers' paths
    flat: tuple[str, ...] = ()  # In front of diffusers' paths with underscores
    aliases: tuple[str, ...] = ()  # In front of the paths of another implementation of the authors'
    flat_native: tuple[str, ...] = ("lora_unet_",)  # In front of native paths with underscores
    lacks: tuple[str, ...] = ()  # Parts of diffusers' paths that its map does not have
    has_processors: bool = False
    """Of dotted paths it takes only those from before PEFT: attn1.processor.to_q, attn1.processor.to_out."""

    def has(self, path: str) -> bool:
        """Does it map this path of diffusers to rows of the native weight?"""
        return bool(self.flat or self.dotted) and not any(each in path for each in self.lacks)

    def name(self, path: str) -> str:
        """Return its name for a path of diffusers."""
        return f"{self.flat[0]}{path.replace('.', '_')}" if self.flat else f"{self.dotted[0]}{path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyConversion:
    """Names that diffusers' pipeline of a model renames before it loads an adapter.

    Source: diffusers, loaders/lora_pipeline.py (`lora_state_dict`), loaders/lora_conversion_utils.py.
    """

    when: str
    """Regular expression: where one name of the file contains it, all are converted."""
    beside: str = ""
    """Regular expression: one name contains that as well."""
    prefixes: tuple[str, ...]
    """What is taken off every name that begins with it; a flat one ends with an underscore."""
    spellings: tuple[Spelling, ...] = ("native",)
    """Whose paths follow."""
    suffixes: str = r"lora_(?:A|B|down|up)\.weight"
    """Regular expression of what it understands behind a path; "alpha" is one of them."""
    lacks: str = "(?!)"
    """Regular expression of native or diffusers paths, as they are spelled, or of a path with its suffix, that it does
    not convert."""
    strips: str = ""
    """What it takes out of every name first."""
    ignores: str = "(?!)"
    """Regular expression of names, without a prefix, that it leaves out."""
    refuses: str = "(?!)"
    """Regular expression of names, without a prefix, on which it raises."""
    others: Literal["raise", "keep", "leave"] = "keep"
    """What it does with other paths: raise, keep them, then no module's, or leave them. It raises on other suffixes."""
    needs_blocks: bool = False
    """It raises where one of a block's modules has no adapter."""
    needs_alpha: bool = False
    """It raises where a module has no alpha."""
    needs: str = ""
    """Regular expression of native paths of which it must find one, or raises; "" for none."""
    optional: str = "(?!)"
    """Regular expression of native paths that not every model has: of all blocks or none."""
    together: tuple[str, ...] = ()
    """Parts of native paths: it raises where a file has some of them and not the others."""
    encoders: tuple[str, ...] = ()  # What stands in front of the encoders' flattened paths, in their order
    joins: str = "(?!)"  # Regular expression of diffusers paths, of which it joins three with an equal group, or raises

    def applies(self, names: Collection[str]) -> bool:
        """Does it convert a file with these names?"""
        return all(any(re.search(each, name) for name in names) for each in (self.when, self.beside))

    def why_not(self, paths: Collection[str]) -> str | None:
        """Return why it raises on a file with these native paths; None where it does not."""
        if self.needs and not any(re.match(self.needs, path) for path in paths):
            return "it finds no block"
        present = [part for part in self.together if any(part in path for path in paths)]
        if present and len(present) < len(self.together):
            return f"it converts {' and '.join(self.together)} together, but finds only {' and '.join(present)} alone"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kohya:
    """Who reads kohya's names for a model, and how these are spelled."""

    tool: str = "sd-scripts"
    spelling: Spelling = "native"
    blocks: tuple[str, ...] = ()  # Beginnings of the native paths that its networks look for by themselves
    outside: tuple[str, ...] = ()  # Beginnings among these that they do not
    takes_rank: bool = False  # Takes the rank for an alpha that is missing, instead of an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model family: a table of families.toml."""

    name: str  # As `--architecture` and the notes have it
    title: str
    parts: tuple[ModelPart, ...]  # The main model first
    classes: tuple[str, ...]  # `_class_name` in diffusers' config.json
    config: Mapping[str, object] = field(default_factory=dict)
    """Values in that file which tell families of one class apart; "" for null."""
    skeleton: str = ""
    """End of native paths of which a base has all or, where only some of its weights are there, none: with fewer blocks
    others have other numbers."""
    is_told_by_names: bool = True  # False where another family has the same names, and only the base tells
    is_known_elsewhere: bool = True  # False where other tools may have it under names that are not known here
    sizes: tuple[Mapping[str, int], ...] = ()
    """How wide and deep published models are: end of a diffusers path → columns of its weight, and list of blocks →
    number of its last one."""
    rivals: Mapping[str, str] = field(default_factory=dict)
    """Models without a table that share its names → regular expression of diffusers paths that they have not."""
    reader: Literal["ldm", "flux1", "flux2"] | None = None
    """Which rules of their own diffusers' conversions have; None where `conversions` says everything."""
    conversions: tuple[KeyConversion, ...] = ()
    """What diffusers' pipeline converts, the first that applies; its own names are always read."""
    lokr: tuple[Spelling, ...] = ()  # Spellings in which diffusers loads LoKr; none where it does not
    invokeai: tuple[KeyConversion, ...] = ()
    """What InvokeAI reads, the first that applies. Source: InvokeAI 6.14, patches/lora_conversions, configs/lora.py."""
    tools: tuple[tuple[str, ...], ...] = ()  # Names by which ComfyUI recognises formats of tools, and converts all
    comfyui: ComfyUI | None = None  # None where ComfyUI does not support the model
    kohya: Kohya | None = None  # None where no tool that is known here reads kohya's names for it
    model_spec: str = ""  # Value of modelspec.architecture; "" where none is known
    bases: Mapping[str, str] = field(default_factory=dict)
    """Hub id of a published base → the license that its card named: "other NAME" for one of its own, "" for neither."""
    base_version: str = ""  # Value of ss_base_model_version
    implementation: str = ""  # Value of modelspec.implementation: whose names the native ones are
    resolution: str = "1024x1024"
    """Value of modelspec.resolution where nothing says that of the training: what kohya's tools write then."""

    @property
    def main(self) -> ModelPart:
        """The transformer or U-Net."""
        return self.parts[0]

    @classmethod
    def from_table(cls, name: str, table: Mapping[str, Any]) -> Architecture:
        """Return the family that a table of families.toml describes."""
        fields: dict[str, Any] = {key: frozen(value) for key, value in table.items()}
        main = ModelPart(sections=fields.pop("sections"), ratios=fields.pop("ratios", {}), **fields.pop("main", {}))
        encoders = [
            ModelPart(**{**each, "comfyui": f"text_encoders.{each['comfyui']}.transformer"}, is_encoder=True)
            for each in fields.pop("encoders", ())
        ]
        made = {"comfyui": ComfyUI, "kohya": Kohya}
        fields |= {key: kind(**fields[key]) for key, kind in made.items() if key in fields}
        fields |= {
            key: tuple(KeyConversion(**each) for each in fields.pop(key, ())) for key in ("conversions", "invokeai")
        }
        return cls(name=name, parts=(main, *encoders), **fields)


def frozen(value: object) -> object:
    """Return what TOML holds with tuples for its lists."""
    if isinstance(value, dict):
        return {key: frozen(each) for key, each in value.items()}
    return tuple(map(frozen, value)) if isinstance(value, list) else value
