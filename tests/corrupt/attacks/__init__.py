"""Attacks on every reader and writer, as functions that write a small checkpoint each; `recipe.ALL` has them."""

from __future__ import annotations

from corrupt.attacks import described, destinations, documents, files, headers, names, pickles, saved, zips  # noqa: F401
from corrupt.attacks.recipe import ALL, Case, Corpus, Recipe

__all__ = ["ALL", "Case", "Corpus", "Recipe"]
