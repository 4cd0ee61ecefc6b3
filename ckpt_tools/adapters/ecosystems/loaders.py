"""Loaders of adapters, simulated by their key rules: what they map, leave out silently, or refuse.

`simulate` says of a file whether a loader takes it and whether that changes anything, without the loader's library.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ckpt_tools.adapters.ecosystems import vllm
from ckpt_tools.adapters.ecosystems.comfyui import loader as comfyui
from ckpt_tools.adapters.ecosystems.diffusers import loader as diffusers
from ckpt_tools.adapters.ecosystems.kohya import loader as kohya
from ckpt_tools.adapters.ecosystems.peft import loader as peft
from ckpt_tools.adapters.ecosystems.simulation import (
    NEEDS_BASE,
    AdapterFile,
    Loader,
    LoaderReport,
    ModelFamily,
    Rules,
    TensorHead,
    report,
)

__all__ = ["LOADERS", "NEEDS_BASE", "AdapterFile", "Loader", "LoaderReport", "ModelFamily", "TensorHead", "simulate"]

LOADERS: Mapping[Loader, Rules] = MappingProxyType(
    {
        "peft": peft.load,
        "diffusers": diffusers.load,
        "comfyui": comfyui.load,
        "kohya": kohya.load,
        "vllm": vllm.load,
    }
)
"""Rules by loader."""


def simulate(file: AdapterFile, loader: Loader) -> LoaderReport:
    """Say what a loader would make of an adapter.

    Args:
        file: Its names, shapes and header, and what stands beside it.
        loader: Whose rules.
    """
    return report(loader, LOADERS[loader], file)
