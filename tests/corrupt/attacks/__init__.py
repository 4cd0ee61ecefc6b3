"""Attacks on every reader and writer, as functions that write a small checkpoint each; `recipe.ALL` has them."""

from __future__ import annotations

from corrupt.attacks import (  # noqa: F401
    deepspeed,
    described,
    destinations,
    documents,
    files,
    headers,
    megatron,
    names,
    pickles,
    saved,
    zips,
)
from corrupt.attacks.recipe import ALL, Case, Corpus, Recipe

__all__ = ["ALL", "Case", "Corpus", "Recipe"]
