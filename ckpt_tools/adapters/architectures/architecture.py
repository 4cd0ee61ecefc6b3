"""What a model family says of itself: which parts it has, and what each part is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckpt_tools.adapters.architectures.rule import Names, rename

ArchitectureName = Literal["flux1", "flux2", "sdxl", "sd3"]
"""Families with tables; language models are named by their paths and need none."""
ModelFamily = ArchitectureName | Literal["llm"]
"""Whatever `--architecture` takes."""


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
class Architecture:
    """A model family."""

    name: ArchitectureName
    """As `--architecture` and the notes have it."""
    title: str
    parts: tuple[Part, ...]
    """The main model first."""
    diffusers_class: str | None = None
    """`_class_name` in diffusers' config.json; None where that of other families is the same."""
    model_spec: str
    """Value of modelspec.architecture."""
    base_version: str
    """Value of ss_base_model_version."""
    implementation: str
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

T5 = Names(tuple(rename(path, path) for path in (f"encoder.block.{{i}}.{name}" for name in _T5_LAYER)))
