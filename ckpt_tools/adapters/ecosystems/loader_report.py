"""What a loader is given, and what it makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Literal

from ckpt_tools.adapters.adapter import AdapterModule
from ckpt_tools.adapters.architectures.architecture import ModelFamily
from ckpt_tools.adapters.read.sidecars import ADAPTER_CONFIG
from ckpt_tools.checkpoint.entries import Finding, Severity, TensorEntry

Loader = Literal["peft", "diffusers", "comfyui", "kohya", "invokeai", "vllm", "sglang", "llama.cpp", "mlx"]
APART: Mapping[str, str] = {"llama.cpp": "gguf", "mlx": "mlx"}
"""Loaders that read files of one format, which no other loader reads → what the format is called."""
EXPORTS: Mapping[str, str] = {**APART, "vllm": "peft", "sglang": "peft", "invokeai": "kohya"}  # Loader → target


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFile:
    """An adapter as a loader finds it: the names in its file, not yet understood."""

    file: str
    tensors: Mapping[str, TensorEntry]  # Name → tensor, in the order of the file
    metadata: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, object] | None = None  # adapter_config.json beside the file; None where there is none
    siblings: tuple[str, ...] = ()  # Other safetensors files in its directory
    is_named: bool = False  # The loader is told the file, not its directory alone
    architecture: ModelFamily | None = None
    base: Mapping[str, tuple[int, ...]] | None = None
    """Names and shapes of the base model's parameters, where it was given."""
    base_class: str | None = None  # diffusers' class of the base model
    base_type: str | None = None  # transformers' type of the base model
    base_config: Mapping[str, object] = field(default_factory=dict)  # config.json of the base model
    modules: tuple[AdapterModule[TensorEntry], ...] = ()  # What the adapter was trained to be, as ckpt reads it


NEEDS_BASE = "loader-unchecked-base"  # Code of what a loader decides by the base model, which was not given


class RejectedError(Exception):
    """The loader raises; the message says on what."""


@dataclass(slots=True)
class Loading:
    """What became of every tensor: used for a module, or left out."""

    used: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensor → modules of the model: several where a fused one is split."""
    ignored: dict[str, str] = field(default_factory=dict)  # Tensor → why the loader leaves it out
    findings: list[Finding] = field(default_factory=list)
    spreads_alphas: bool = False  # A module without an alpha gets the one that most others have

    def use(self, name: str, module: str) -> None:
        """Note that a tensor goes into a module."""
        self.used[name] = tuple(dict.fromkeys((*self.used.get(name, ()), module)))

    def say_scale(self, alpha: str, value: object) -> None:
        """Say that a configuration's alpha of 0 makes a loader's every change 0 (verl#5325)."""
        if isinstance(value, int | float) and value == 0:
            what = f"{alpha} is 0, and every change is multiplied by it: the adapter changes nothing"
            hint = "write the alpha of the training run: ckpt export-lora SRC DST --alpha VALUE"
            self.say("loader-no-op", "error", ADAPTER_CONFIG, what, hint)

    @property
    def modules(self) -> tuple[str, ...]:
        """Every module that gets something."""
        return tuple(dict.fromkeys(module for modules in self.used.values() for module in modules))

    def say(self, code: str, severity: Severity, where: str, what: str, hint: str | None = None) -> None:
        """Add a finding."""
        self.findings.append(Finding(code=code, severity=severity, where=where, what=what, hint=hint))

    misreads = partialmethod(say, "loader-misreads", "error")  # It loads, and computes something else
    incomplete = partialmethod(say, "loader-incomplete", "error")
    """What the file lacks, or has too much, goes unnoticed."""
    needs = partialmethod(say, "loader-needs", "warning")  # It loads on a condition
    unchecked = partialmethod(say, "loader-unchecked", "warning")  # The rules here do not tell
    needs_base = partialmethod(say, NEEDS_BASE, "info")  # The base model decides, which was not given


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderReport:
    """Will a loader take the adapter, and will it change anything?"""

    loader: Loader
    loads: bool | None  # Does it end without an error? None when the rules do not tell
    matched: tuple[str, ...]
    num_matched: int
    unmatched: tuple[str, ...]
    findings: tuple[Finding, ...]
    factor: float | None = None
    """How many times the scale that was meant it applies, to the module where that is farthest from 1; None where it
    loads no module whose scale is known."""

    @property
    def is_proven(self) -> bool:
        """Do the rules tell everything, or would the base model decide?"""
        return self.loads is not None and not any(each.code == NEEDS_BASE for each in self.findings)

    @property
    def is_whole(self) -> bool:
        """Is everything loaded, and as it is meant?"""
        return self.changes and self.loads is True and not any(each.severity == "error" for each in self.findings)

    @property
    def changes(self) -> bool:
        """Is anything loaded at all?"""
        return bool(self.matched) and self.loads is not False
