"""An adapter of an image model under the module names of its base: diffusers' or the authors', whichever these are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ckpt_tools.adapters.adapter import Adapter, AdapterModule
from ckpt_tools.adapters.base.matching import BaseMatch, match_modules
from ckpt_tools.adapters.read.assemble import known_shape
from ckpt_tools.adapters.read.tensors import LazyAdapter, entry_of
from ckpt_tools.description.checkpoint import TensorEntry
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    from ckpt_tools.moving.arrays import Array

_RESPELLED = ("kohya", "comfyui", "ai-toolkit", "diffusers")
"""Conventions whose names can be those of another implementation."""


def match_any_spelling(
    adapter: Adapter[TensorEntry],
    loading: LazyAdapter,
    tensors: Mapping[str, TensorEntry],
    config: Mapping[str, object],
) -> tuple[Adapter[TensorEntry], BaseMatch, list[str]]:
    """Find every module's tensors, under the adapter's own names or those of the base's implementation.

    Returns:
        The adapter as it was matched, the match, and notes.

    Raises:
        UsageError: No spelling fits.
    """
    try:
        return adapter, match_modules(adapter, tensors, config), []
    except UsageError as error:
        if adapter.convention not in _RESPELLED:
            raise
        for respelled, whose, notes in _respellings(loading.get(), tensors, config):
            described = respelled.with_factors(
                lambda module, role: entry_of(f"{module.path}.{role}", module.factors[role])
            )
            try:
                match = match_modules(described, tensors, config)
            except UsageError:
                continue
            loading.replace(respelled)
            return described, match, [f"took the modules by {whose} names", *notes]
        error.hint = (
            f"{error.hint or ''}; neither its own names nor those of another implementation of the model fit. Modules "
            "of other models (text encoders) can be left out with --exclude"
        ).removeprefix("; ")
        raise


def _respellings(
    loaded: Adapter[Array], tensors: Mapping[str, TensorEntry], config: Mapping[str, object]
) -> Iterator[tuple[Adapter[Array], str, tuple[str, ...]]]:
    from ckpt_tools.adapters.architectures import ARCHITECTURES
    from ckpt_tools.adapters.architectures.choose import choose_architectures
    from ckpt_tools.adapters.architectures.of_base import model_family_of
    from ckpt_tools.adapters.ecosystems.fit import Fitting
    from ckpt_tools.adapters.ecosystems.placing import in_diffusers, in_native, place_all

    try:
        base = model_family_of({name: known_shape(entry) for name, entry in tensors.items()}, config)
        families = choose_architectures(loaded, architecture=None, base=base)
    except UsageError:
        return
    for family in families:
        for spell, whose in ((in_diffusers, "diffusers'"), (in_native, "the authors'")):
            fitting = Fitting()
            try:
                placed = spell(place_all(loaded, ARCHITECTURES[family]), as_lora=fitting.as_lora)
            except UsageError:
                continue
            modules: tuple[AdapterModule[Array], ...] = tuple(each.module for each in placed)
            yield loaded.with_modules(modules), f"{whose} {ARCHITECTURES[family].title}", fitting.finish()
