"""What a model family says of itself: which parts it has, and what each part is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckpt_tools.adapters.architectures.rule import Names

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
