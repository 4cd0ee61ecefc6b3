"""What goes into the file of an ecosystem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt_tools.adapters.families.family import Module
    from ckpt_tools.moving.arrays import Array

_TRAPS = ("checkpoint", "optimizer", "scheduler")
"""diffusers overlooks a file with one of these in its name, and fails when no other is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """An adapter in the names of its target."""

    file: str
    """Name of the file."""
    tensors: Mapping[str, Array]
    """Name → tensor, row-major; some may be the adapter's own arrays, or share memory."""
    metadata: Mapping[str, str]
    """The header's `__metadata__`."""
    notes: tuple[str, ...] = ()
    """What was done, for people."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Module → largest error of what was written for it, relative to the largest element; exact modules are not in."""


def file_name(adapter_name: str) -> str:
    """Return the name of a single-file adapter: PEFT's adapter name where it says something, and no trap."""
    plain = "".join(char if char.isalnum() or char in "-_" else "_" for char in adapter_name).strip("_") or "lora"
    if plain == "default" or not plain.isascii() or any(trap in plain.lower() for trap in _TRAPS):
        plain = "lora"
    return f"{plain[:100]}.safetensors"


def put(tensors: dict[str, Array], name: str, module: Module, suffixes: Mapping[str, str]) -> None:
    """Add a module's factors under its name and the suffixes of their roles."""
    import numpy as np

    for role, factor in module.factors.items():
        tensors[f"{name}.{suffixes[role]}"] = np.asarray(factor, order="C")
