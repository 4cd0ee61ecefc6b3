"""Whose format an adapter is in, and so which loaders decide on it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ckpt_tools.adapters.adapter import Convention
from ckpt_tools.adapters.ecosystems.loaders import AdapterFile, Loader
from ckpt_tools.adapters.read.locate import DIFFUSERS_FILE
from ckpt_tools.adapters.read.sidecars import DIFFUSERS_KEY

_OWN: Mapping[Convention, tuple[Loader, ...]] = MappingProxyType(
    {
        "peft": ("peft",),
        "diffusers": ("diffusers",),
        "kohya": ("kohya", "comfyui"),
        "comfyui": ("comfyui",),
        "ai-toolkit": ("comfyui", "diffusers"),
        "torchtitan": ("peft",),
    }
)
"""Convention → loaders of which one has to take the adapter: kohya's names are ComfyUI's as well, and ai-toolkit writes
the one's or the other's, by the model."""


def own_loaders(convention: Convention, file: AdapterFile) -> tuple[Loader, ...]:
    """Return the loaders of an adapter's own format.

    Args:
        convention: Whose names the tensors have.
        file: What stands beside these: a configuration of PEFT's, diffusers' name or header.
    """
    if file.config is not None:
        return ("peft",)
    if file.file == DIFFUSERS_FILE or DIFFUSERS_KEY in file.metadata:
        return ("diffusers",)
    return _OWN[convention]
