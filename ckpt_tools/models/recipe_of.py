"""Which library builds the model of a config.json: transformers or diffusers. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tools.models.config_recipe import ConfigRecipe
from ckpt_tools.models.diffusers_recipe import DiffusersRecipe
from ckpt_tools.models.hf_recipe import HfRecipe


def recipe_of(config: Mapping[str, Any], where: str, *, otherwise: str | None = None) -> ConfigRecipe:
    """Return how to build the model of a config.json; `otherwise` is the hint where there is no `--factory`."""
    is_diffusers = "_class_name" in config and not config.get("architectures")
    return (DiffusersRecipe if is_diffusers else HfRecipe)(config, where, otherwise=otherwise)
