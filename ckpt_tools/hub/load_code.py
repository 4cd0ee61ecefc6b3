"""The code that loads what was pushed, with its own names in it."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}", re.ASCII)
_PLAIN = re.compile(r"[\w./-]{1,255}", re.ASCII)

BASE_PLACEHOLDER = "path/or/id/of/the/base-model"
"""Stands in the code where the base model is not known by a hub id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFacts:
    """What the code needs to know beyond the names."""

    is_adapter: bool = False
    """There is a base model to load first."""
    auto_class: str | None = None
    """Class of transformers that loads the model (for an adapter: its base); AutoModel by default."""
    has_tokenizer: bool = False
    """Tokenizer files lie beside the weights."""
    weight_name: str | None = None
    """File name of a LoRA for diffusers, where it is not the one that diffusers looks for."""
    is_pipeline: bool = False
    """A whole diffusers pipeline, not one of its models."""
    model_class: str | None = None
    """Class of diffusers that loads a single model."""


def load_code(library: str | None, *, repo: str, base_model: str | None, load: LoadFacts) -> str | None:
    """Return Python that loads the weights, or None where nothing certain can be said.

    Args:
        library: Which one loads them.
        repo: Hub id of the weights.
        base_model: Hub id of the base, None when it is not known.
        load: What else matters.
    """
    base = base_model or BASE_PLACEHOLDER
    if library == "peft":
        return _peft(repo, base, load)
    if library == "diffusers":
        return _diffusers(repo, base, load)
    if library == "transformers":
        return _transformers(repo, load)
    return None


def _class(name: str | None, default: str) -> str:
    return name if name is not None and _is_class(name) else default


def _is_class(name: str) -> bool:
    return _IDENTIFIER.fullmatch(name) is not None and not keyword.iskeyword(name)


def _peft(repo: str, base: str, load: LoadFacts) -> str:
    auto = _class(load.auto_class, "AutoModel")
    return (
        "from peft import PeftModel\n"
        f"from transformers import {auto}\n"
        "\n"
        f'base = {auto}.from_pretrained("{base}")\n'
        f'model = PeftModel.from_pretrained(base, "{repo}")\n'
    )


def _diffusers(repo: str, base: str, load: LoadFacts) -> str | None:
    if load.is_adapter:
        weight = load.weight_name if load.weight_name is not None and _PLAIN.fullmatch(load.weight_name) else None
        argument = f', weight_name="{weight}"' if weight else ""
        return (
            "from diffusers import DiffusionPipeline\n"
            "\n"
            f'pipeline = DiffusionPipeline.from_pretrained("{base}")\n'
            f'pipeline.load_lora_weights("{repo}"{argument})\n'
        )
    if load.is_pipeline:
        return f'from diffusers import DiffusionPipeline\n\npipeline = DiffusionPipeline.from_pretrained("{repo}")\n'
    if load.model_class is not None and _is_class(load.model_class):
        return f'from diffusers import {load.model_class}\n\nmodel = {load.model_class}.from_pretrained("{repo}")\n'
    return None


def _transformers(repo: str, load: LoadFacts) -> str:
    auto = _class(load.auto_class, "AutoModel")
    names = f"{auto}, AutoTokenizer" if load.has_tokenizer else auto
    code = f'from transformers import {names}\n\nmodel = {auto}.from_pretrained("{repo}")\n'
    if load.has_tokenizer:
        code += f'tokenizer = AutoTokenizer.from_pretrained("{repo}")\n'
    return code
