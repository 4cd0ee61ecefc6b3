"""Families of adapters: one file for each, with all that this one knows, and the table of them.

A new family is a file with a subclass of `Family`, its name in `FamilyName`, and a line of `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from types import MappingProxyType

from ckpt_tools.adapters.adapter import AdapterModule, F, FamilyName, Shape
from ckpt_tools.adapters.families.family import Family
from ckpt_tools.adapters.families.peft_only import CARRIED

__all__ = ["FAMILIES", "PEFT_TYPES", "Family", "columns_of", "family_of", "rows_of", "shape_of"]


def _made(table: str) -> Iterator[Family]:
    for module, kind in (row.split(".") for row in table.split()):
        yield getattr(import_module(f"{__name__}.{module}"), kind)()


_OWN = (*_made("lora.Lora loha.Loha lokr.Lokr oft.Oft oft.Boft tokens.Tokens"), *CARRIED)
FAMILIES: Mapping[FamilyName, Family] = MappingProxyType(
    {each.name: each for each in (*_OWN, *_made("glora.Glora full.Full full.Saved"))}
)
"""By name; those of PEFT first."""
PEFT_TYPES: Mapping[str, Family] = MappingProxyType(
    {kind: each for each in FAMILIES.values() for kind in (each.peft_type, *each.also_types) if kind is not None}
)


def family_of(module: AdapterModule[F]) -> Family:
    """Return the family of a module."""
    return FAMILIES[module.family]


def shape_of(module: AdapterModule[F]) -> Shape | None:
    """Return the shape of the weight that a module adds to, as far as its factors show it."""
    return family_of(module).shape(module.shapes)


def rows_of(module: AdapterModule[F]) -> int | None:
    """Return out of the weight that a module adds to, where its factors tell."""
    shape = shape_of(module)
    return None if shape is None else shape[0]


def columns_of(module: AdapterModule[F]) -> int | None:
    """Return in of the weight that a module adds to (without a kernel), where its factors tell."""
    shape = shape_of(module)
    return None if shape is None or len(shape) < 2 else shape[1]
