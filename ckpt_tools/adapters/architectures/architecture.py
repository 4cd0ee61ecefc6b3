"""What a model family says of itself: which parts it has, and what each part is called."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ckpt_tools.adapters.architectures.rule import Names, Spelling, rename, same

ModelFamily = str
"""Whatever `--architecture` takes: the name of an `Architecture`, or "llm" for language models, whose paths are their
names."""
PEFT_PAIR = ("lora_A.weight", "lora_B.weight")
KOHYA_PAIR = ("lora_down.weight", "lora_up.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One model of a pipeline."""

    component: str
    """What diffusers calls it: transformer, unet, text_encoder, …"""
    names: Names
    comfyui: str
    """What ComfyUI puts in front of the native path."""
    kohya: tuple[str, ...]
    """What kohya and its relatives put in front of the underscored path; the first is written."""
    is_in_diffusers: bool = True
    is_encoder: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ComfyUI:
    """What ComfyUI maps for a model beside diffusion_model.<native path>.

    Source: ComfyUI, comfy/lora.py `model_lora_keys_unet`.
    """

    dotted: tuple[str, ...] = ()
    """In front of diffusers' paths."""
    flat: tuple[str, ...] = ()
    """In front of diffusers' paths with underscores."""
    aliases: tuple[str, ...] = ()
    """In front of the paths of `Rule.aliases`."""
    flat_native: tuple[str, ...] = ("lora_unet_",)
    """In front of native paths with underscores."""
    lacks: tuple[str, ...] = ()
    """Parts of diffusers' paths that its map does not have."""
    has_processors: bool = False
    """Of dotted paths it takes only those from before PEFT: attn1.processor.to_q, attn1.processor.to_out."""

    def has(self, path: str) -> bool:
        """Does it map this path of diffusers to rows of the native weight?"""
        return bool(self.flat or self.dotted) and not any(each in path for each in self.lacks)

    def name(self, path: str) -> str:
        """Return its name for a path of diffusers."""
        return f"{self.flat[0]}{path.replace('.', '_')}" if self.flat else f"{self.dotted[0]}{path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Names that diffusers' pipeline of a model renames before it loads an adapter.

    Source: diffusers, loaders/lora_pipeline.py (`lora_state_dict`), loaders/lora_conversion_utils.py.
    """

    when: str
    """Regular expression: where one name of the file contains it, all are converted."""
    prefixes: tuple[str, ...]
    """What is taken off every name that begins with it; a flat one ends with an underscore."""
    spellings: tuple[Spelling, ...] = ("native",)
    """Whose paths follow."""
    suffixes: tuple[str, ...] = (*PEFT_PAIR, *KOHYA_PAIR)
    """What it understands behind a path; "alpha" is one of them."""
    lacks: str = "(?!)"
    """Regular expression of native or diffusers paths, as they are spelled, or of a path with its suffix, that it does
    not convert."""
    ignores: str = "(?!)"
    """Regular expression of names, without a prefix, that it leaves out."""
    refuses: str = "(?!)"
    """Regular expression of names, without a prefix, on which it raises."""
    others: Literal["raise", "keep"] = "keep"
    """What it does with other paths: raise, or keep them, which then are no module's. It raises on other suffixes."""
    needs_blocks: bool = False
    """It raises where one of a block's modules has no adapter."""
    needs: str = ""
    """Regular expression of native paths of which it must find one, or raises."""
    optional: str = "(?!)"
    """Regular expression of native paths that not every model has: of all blocks or none."""
    together: tuple[str, ...] = ()
    """Parts of native paths: it raises where a file has some of them and not the others."""

    def why_not(self, paths: Collection[str]) -> str | None:
        """Return why it raises on a file with these native paths; None where it does not."""
        if not any(re.match(self.needs, path) for path in paths):
            return "it finds no block"
        present = [part for part in self.together if any(part in path for path in paths)]
        if present and len(present) < len(self.together):
            return f"it converts {' and '.join(self.together)} together, and finds {' and '.join(present)} alone"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kohya:
    """Who reads kohya's names for a model, and how these are spelled."""

    tool: str = "sd-scripts"
    spelling: Spelling = "native"
    blocks: tuple[str, ...] = ()
    """Beginnings of the native paths that its networks look for by themselves."""
    outside: tuple[str, ...] = ()
    """Beginnings among these that they do not."""
    takes_rank: bool = False
    """Takes the rank for an alpha that is missing, instead of an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How deep and wide a published model is: tells it from others of the same names."""

    columns: Mapping[str, int]
    """End of a diffusers path → columns of its weight."""
    last: Mapping[str, int] = field(default_factory=dict)
    """List of blocks → number of its last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model family: one file of this directory, and an entry of `ARCHITECTURES`."""

    name: str
    """As `--architecture` and the notes have it."""
    title: str
    parts: tuple[Part, ...]
    """The main model first."""
    classes: tuple[str, ...]
    """`_class_name` in diffusers' config.json."""
    config: Mapping[str, object] = field(default_factory=dict)
    """Values in that file which tell families of one class apart."""
    skeleton: frozenset[str] = frozenset()
    """Native paths of which a base has all or, where only some of its weights are there, none: with fewer blocks others
    have other numbers."""
    is_told_by_names: bool = True
    """False where another family has the same names, and only the base tells."""
    sizes: tuple[Size, ...] = ()
    rivals: Mapping[str, str] = field(default_factory=dict)
    """Models without a table that share its names → regular expression of diffusers paths that they have not."""
    reader: Literal["ldm", "flux1", "flux2"] | None = None
    """Which rules of their own diffusers' conversions have; None where `conversions` says everything."""
    conversions: tuple[Conversion, ...] = ()
    """What diffusers' pipeline converts, the first that applies; its own names are always read."""
    lokr: tuple[Spelling, ...] = ()
    """Spellings in which diffusers loads LoKr; none where it does not."""
    comfyui: ComfyUI | None
    """None where ComfyUI does not support the model."""
    kohya: Kohya | None
    """None where no tool that is known here reads kohya's names for it."""
    model_spec: str = ""
    """Value of modelspec.architecture; "" where none is known."""
    base_version: str = ""
    """Value of ss_base_model_version."""
    implementation: str = ""
    """Value of modelspec.implementation: whose names the native ones are."""
    resolution: str = "1024x1024"
    """Value of modelspec.resolution where nothing says that of the training: what kohya's tools write then."""

    @property
    def main(self) -> Part:
        """The transformer or U-Net."""
        return self.parts[0]


def transformer(names: Names) -> Part:
    """Return the main model of a pipeline of diffusers', where that is a transformer."""
    kohya = ("lora_unet", "lora_transformer", "lycoris")
    return Part(component="transformer", names=names, comfyui="diffusion_model", kohya=kohya)


def encoder(component: str, names: Names, comfyui: str, *kohya: str, is_in_diffusers: bool = True) -> Part:
    """Return a text encoder."""
    return Part(
        component=component,
        names=names,
        comfyui=f"text_encoders.{comfyui}.transformer",
        kohya=kohya,
        is_in_diffusers=is_in_diffusers,
        is_encoder=True,
    )


# What all ecosystems call as transformers does. transformers 5 has taken CLIP's `text_model.` away: the short path is
# the second spelling of the same module. Adapters keep the long one, which diffusers and ComfyUI understand both before
# and after.
_CLIP_LAYER = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")),
    "mlp.fc1",
    "mlp.fc2",
)
_T5_LAYER = (
    *(f"layer.0.SelfAttention.{name}" for name in "qkvo"),
    *(f"layer.1.DenseReluDense.{name}" for name in ("wi_0", "wi_1", "wo")),
)

CLIP = Names(
    (
        *(rename(f"text_model.encoder.layers.{{i}}.{name}", f"encoder.layers.{{i}}.{name}") for name in _CLIP_LAYER),
        rename("text_projection", "text_projection"),
    )
)
"""CLIPTextModel and CLIPTextModelWithProjection."""

T5 = Names(same(*(f"encoder.block.{{i}}.{name}" for name in _T5_LAYER)))
