"""The model families whose adapters have names of their own: which parts they have, and what each part is called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ckpt_tools.adapters.architectures.encoders import CLIP, T5
from ckpt_tools.adapters.architectures.flux1 import FLUX1
from ckpt_tools.adapters.architectures.flux2 import FLUX2
from ckpt_tools.adapters.architectures.rule import Names
from ckpt_tools.adapters.architectures.sd3 import SD3
from ckpt_tools.adapters.architectures.sdxl import SDXL

ArchitectureName = Literal["flux1", "flux2", "sdxl", "sd3"]
"""Families with tables; language models are named by their paths and need none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One model of a pipeline."""

    component: str
    """What diffusers calls it: transformer, unet, text_encoder, …"""
    names: Names
    """Its modules."""
    comfyui: str
    """What ComfyUI puts in front of the native path."""
    kohya: tuple[str, ...]
    """What kohya and its relatives put in front of the underscored path; the first is written."""
    is_in_diffusers: bool = True
    """Does diffusers load adapters of it?"""
    is_encoder: bool = False
    """Is it a text encoder?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model family."""

    name: ArchitectureName
    """As `--architecture` and the notes have it."""
    title: str
    """For people."""
    parts: tuple[Part, ...]
    """The main model first."""
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


def _transformer(names: Names) -> Part:
    kohya = ("lora_unet", "lora_transformer", "lycoris")
    return Part(component="transformer", names=names, comfyui="diffusion_model", kohya=kohya)


def _encoder(component: str, names: Names, comfyui: str, *kohya: str, is_in_diffusers: bool = True) -> Part:
    return Part(
        component=component,
        names=names,
        comfyui=f"text_encoders.{comfyui}.transformer",
        kohya=kohya,
        is_in_diffusers=is_in_diffusers,
        is_encoder=True,
    )


ARCHITECTURES: Mapping[ArchitectureName, Architecture] = MappingProxyType(
    {
        "flux1": Architecture(
            name="flux1",
            title="FLUX.1",
            parts=(
                _transformer(FLUX1),
                _encoder("text_encoder", CLIP, "clip_l", "lora_te1", "lora_te"),
                _encoder("text_encoder_2", T5, "t5xxl", "lora_te3", "lora_te2", is_in_diffusers=False),
            ),
            model_spec="flux-1/lora",
            base_version="flux1",
            implementation="https://github.com/black-forest-labs/flux",
        ),
        "flux2": Architecture(
            name="flux2",
            title="FLUX.2",
            parts=(_transformer(FLUX2),),
            model_spec="flux-2/lora",
            base_version="flux2",
            implementation="https://github.com/black-forest-labs/flux2",
        ),
        "sdxl": Architecture(
            name="sdxl",
            title="SDXL",
            parts=(
                Part(component="unet", names=SDXL, comfyui="diffusion_model", kohya=("lora_unet", "lycoris")),
                _encoder("text_encoder", CLIP, "clip_l", "lora_te1"),
                _encoder("text_encoder_2", CLIP, "clip_g", "lora_te2"),
            ),
            model_spec="stable-diffusion-xl-v1-base/lora",
            base_version="sdxl_base_v1-0",
            implementation="https://github.com/Stability-AI/generative-models",
        ),
        "sd3": Architecture(
            name="sd3",
            title="SD3",
            parts=(
                _transformer(SD3),
                _encoder("text_encoder", CLIP, "clip_l", "lora_te1"),
                _encoder("text_encoder_2", CLIP, "clip_g", "lora_te2"),
                _encoder("text_encoder_3", T5, "t5xxl", "lora_te3", is_in_diffusers=False),
            ),
            model_spec="stable-diffusion-3/lora",
            base_version="sd3",
            implementation="https://github.com/Stability-AI/sd3.5",
        ),
    }
)
"""By name."""


def candidates(paths: Iterable[str]) -> tuple[ArchitectureName, ...]:
    """Return the families that explain most of the names; more than one where names are shared.

    `transformer_blocks.0.attn.to_q` alone could be FLUX.1, FLUX.2 or SD3.

    Args:
        paths: Module paths in any spelling.
    """
    from ckpt_tools.adapters.architectures.resolve import readings

    names = list(dict.fromkeys(paths))
    counts = {
        name: sum(1 for path in names if readings(path, architecture)) for name, architecture in ARCHITECTURES.items()
    }
    best = max(counts.values(), default=0)
    return tuple(name for name, count in counts.items() if count == best) if best else ()


def detect_architecture(paths: Iterable[str]) -> ArchitectureName | Literal["llm"] | None:
    """Tell from module names which family a model is of, or None when that does not follow from them.

    Args:
        paths: Module paths in any spelling, of an adapter or of a base model.
    """
    from ckpt_tools.adapters.architectures.resolve import is_language_model_path

    names = list(dict.fromkeys(paths))
    found = candidates(names)
    if not found:
        return "llm" if any(is_language_model_path(path) for path in names) else None
    return found[0] if len(found) == 1 else None
