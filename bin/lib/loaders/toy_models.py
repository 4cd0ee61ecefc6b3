"""Toy models of every architecture, in the authors' names and in diffusers'."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

Tensors = dict[str, torch.Tensor]
TABLE = Path(__file__).with_name("toys.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    """One architecture: a row of toys.yaml, which says what each field is."""

    diffusers: str
    mixin: str
    settings: dict[str, Any]
    component: str = "transformer"
    architecture: str | None = None
    converter: str = ""
    widths: Mapping[int, int] = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)
    kohya: dict[str, Any] = field(default_factory=dict)
    ai_toolkit: dict[str, str] = field(default_factory=dict)
    comfyui: str = ""
    invokeai: str = ""
    unet: dict[str, Any] = field(default_factory=dict)
    wider: dict[str, Any] = field(default_factory=dict)
    shorter: dict[str, Any] = field(default_factory=dict)

    def build(self, **changes: Any) -> nn.Module:
        """Return the model of diffusers, with random weights."""
        import diffusers

        torch.manual_seed(0)
        return getattr(diffusers, self.diffusers)(**(self.settings | changes)).eval()

    def of_authors(self, name: str) -> str:
        """Return the authors' name of a tensor that ComfyUI's model has."""
        for old, new in self.renames.items():
            name = re.sub(old, new, name)
        return name

    def to_diffusers(self, native: Tensors) -> Tensors:
        """Return a state dict under diffusers' names, converted by diffusers."""
        import diffusers.loaders.single_file_utils as converters

        if not self.converter:
            return dict(native)
        convert = resized(getattr(converters, self.converter), self.widths)
        if self.component == "unet":
            given = {f"model.diffusion_model.{name}": tensor for name, tensor in native.items()}
            return convert(given, config=self.build().config)
        return convert(dict(native))


def toys() -> dict[str, Toy]:
    """Return every architecture by its name."""
    rows = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return {name: Toy(**row) for name, row in rows.items()}


def resized(function: Any, widths: Mapping[int, int]) -> Any:
    """Return a converter that assumes the toy's widths where it assumes those of the published model."""

    def constant(value: Any) -> Any:
        if isinstance(value, types.CodeType):
            return value.replace(co_consts=tuple(constant(each) for each in value.co_consts))
        if isinstance(value, tuple):
            return tuple(constant(each) for each in value)
        return widths.get(value, value) if type(value) is int else value

    code = constant(function.__code__)
    return types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
