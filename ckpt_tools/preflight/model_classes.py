"""Builds a model on meta to see its real module classes. Imports torch and transformers: for a process behind walls."""

from __future__ import annotations

from typing import Any

from ckpt_tools.errors import RefusedConfigError, UsageError
from ckpt_tools.models.config import ModelConfig
from ckpt_tools.preflight.model_facts import Built

EMBEDDINGS = ("get_input_embeddings", "get_output_embeddings")


def build_on_meta(config: ModelConfig) -> Built | None:
    """Return what the model that a config.json describes is made of; nothing is allocated.

    Returns:
        None where transformers is not installed, or has no such model.

    Raises:
        RefusedConfigError: Nothing may be built of it.
    """
    try:
        import torch

        from ckpt_tools.models.hf_recipe import HfRecipe
    except ModuleNotFoundError:
        return None
    plain: dict[str, Any] = dict(config.values)
    plain.pop("quantization_config", None)  # classes and names of modules are those of the plain model
    try:
        with torch.device("meta"):
            model: Any = HfRecipe(plain, config.where).build()
    except RefusedConfigError:
        raise
    except UsageError:
        return None
    ends = [getattr(getattr(model, name, lambda: None)(), "weight", None) for name in EMBEDDINGS]
    return Built(
        blocks=tuple(sorted(getattr(model, "_no_split_modules", None) or ())),
        module_classes=tuple(dict.fromkeys(type(module).__name__ for module in model.modules())),
        shapes={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        tied_embeddings=ends[0] is not None and ends[0] is ends[1],
    )
