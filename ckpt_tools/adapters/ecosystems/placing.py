"""Modules under the names of the target: renamed, cut into parts or put together as the tables say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ckpt_tools.adapters.adapter import Adapter
from ckpt_tools.adapters.architectures.architecture import Architecture, Part, Spelling
from ckpt_tools.adapters.architectures.choose import BaseFamily
from ckpt_tools.adapters.architectures.names import Place, place
from ckpt_tools.adapters.families import FAMILIES, columns_of, family_of, rows_of
from ckpt_tools.adapters.families.family import InexpressibleError, Module, refuse
from ckpt_tools.errors import UsageError
from ckpt_tools.transfer.arrays import Array

R = TypeVar("R")
AsLora = Callable[[Module], Module]
"""Makes an exact lora of a module, or raises `InexpressibleError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A module with its place in the target."""

    part: Part
    module: Module
    """Its path is the one inside that model, in the target's spelling."""
    is_apart: bool = False
    """Is it part of a fused module of the authors', under diffusers' name?"""


def place_all(adapter: Adapter[Array], architecture: Architecture) -> list[tuple[Place, Module]]:
    """Return every module with its place; raise UsageError for a name that the tables lack, or have twice."""
    return [(place(module.path, architecture), module) for module in adapter.modules]


def unchanged(adapter: Adapter[Array], base: BaseFamily) -> list[Placed]:
    """Place modules where they are, for a model without tables: their paths are those of the base."""
    part = Part(component=base.component or "transformer")
    return [Placed(part=part, module=module) for module in adapter.modules]


def in_diffusers(places: Sequence[tuple[Place, Module]], *, as_lora: AsLora) -> list[Placed]:
    """Return the modules as diffusers has them: split where the authors fuse."""
    placed: list[Placed] = []
    for where, module in places:
        paths = where.diffusers
        if where.at is not None:
            placed.append(Placed(part=where.part, module=replace(module, path=paths[where.at])))
        elif len(paths) > 1:
            placed += [Placed(part=where.part, module=each) for each in _split(where, module, paths, as_lora)]
        else:
            placed.append(Placed(part=where.part, module=_moved(where, replace(module, path=paths[0]), as_lora)))
    return _once(placed)


def in_native(
    places: Sequence[tuple[Place, Module]],
    *,
    as_lora: AsLora,
    spelling: Spelling = "native",
    takes_parts: Callable[[str], bool] = lambda _: False,
) -> list[Placed]:
    """Return the modules as their authors have them: fused where diffusers splits.

    `spelling` "alias" is that of another implementation, which may have parts apart. `takes_parts` tells which may stay
    apart, under these names of diffusers, where they cannot be put together exactly.
    """
    placed: list[Placed] = []
    groups: dict[tuple[str, str, bool], dict[int, Module]] = {}
    wheres: dict[tuple[str, str, bool], Place] = {}
    for where, module in places:
        moved = replace(module, path=where.spelled(spelling))
        parts = where.parts if spelling == "alias" else ()
        part = where.at
        if parts and part is None:
            placed += [Placed(part=where.part, module=each) for each in _split(where, module, parts, as_lora)]
        elif parts and part is not None:
            placed.append(Placed(part=where.part, module=replace(module, path=parts[part])))
        elif part is None or where.part.is_encoder:
            placed.append(Placed(part=where.part, module=moved))
        elif len(where.diffusers) == 1:
            placed.append(Placed(part=where.part, module=_moved(where, moved, as_lora)))
        else:
            key = (where.part.component, where.native, _is_bias(module))
            group = groups.setdefault(key, {})
            if part in group:
                raise _twice(module.path)
            group[part] = module
            wheres[key] = where
    for key, group in groups.items():
        where = wheres[key]
        may_stay = all(takes_parts(where.diffusers[index]) for index in group)
        path = where.spelled(spelling)
        modules = _together(where, group, path, as_lora, may_stay=may_stay)
        placed += [Placed(part=where.part, module=each, is_apart=each.path != path) for each in modules]
    return _once(placed)


def _together(where: Place, group: Mapping[int, Module], path: str, as_lora: AsLora, *, may_stay: bool) -> list[Module]:
    """Return one module of several parts; the parts as they are, where that is not possible and they may stay."""
    apart = [replace(part, path=where.diffusers[index]) for index, part in group.items()]
    families = {part.family for part in apart}
    joins = len(families) == 1 and FAMILIES[min(families)].joins
    if may_stay and not joins and any(rows_of(part) is None for part in apart):
        return apart  # rotations, of which only the base tells
    sizes = _sizes(where, group)
    if may_stay and not joins:
        return apart
    parts = group if joins else {index: as_lora(part) for index, part in group.items()}
    try:
        return [family_of(next(iter(parts.values()))).join(parts, sizes, path)]
    except InexpressibleError:
        if not may_stay:
            raise
        return apart


def _once(placed: list[Placed]) -> list[Placed]:
    seen: set[tuple[str, str, bool]] = set()
    for each in placed:
        key = (each.part.component, each.module.path, _is_bias(each.module))
        if key in seen:
            raise _twice(each.module.path)
        seen.add(key)
    return placed


def _is_bias(module: Module) -> bool:
    """Is it the change of a bias, which LyCORIS keeps beside that of the weight?"""
    return module.factors.keys() == {"diff_b"}


def _twice(path: str) -> UsageError:
    return UsageError(
        f"{path!r} is adapted twice, under two names",
        where=path,
        hint="an adapter has one module per weight: remove one of them",
    )


def _split(where: Place, module: Module, paths: Sequence[str], as_lora: AsLora) -> tuple[Module, ...]:
    rows = rows_of(module)
    if rows is None:
        raise refuse(module, f"its rows cannot be split into {', '.join(paths)}")
    sizes = where.split(rows, columns_of(module))
    if sizes is None:
        raise refuse(module, f"{rows} rows are not those of {', '.join(paths)}")
    return _perhaps_as_lora(module, as_lora, lambda each: family_of(each).split(each, sizes, paths))


def _sizes(where: Place, parts: Mapping[int, Module]) -> Sequence[int]:
    """Rows of every part, also of those that the adapter leaves alone."""
    some = next(iter(parts.values()))
    known = {index: rows for index, part in parts.items() if (rows := rows_of(part)) is not None}
    sizes = None if len(known) < len(parts) else where.complete(known, columns_of(some))
    if sizes is None:
        shown = ", ".join(where.diffusers[index].rpartition(".")[2] for index in parts)
        raise refuse(some, f"the rows of {shown} are not those of {where.native}")
    return sizes


def _moved(where: Place, module: Module, as_lora: AsLora) -> Module:
    """Return a module under its new path, its halves exchanged where the two spellings order them otherwise."""
    swaps = where.swaps(rows_of(module), columns_of(module))
    if swaps is None:
        raise refuse(module, "its shape does not tell whether it is the last block, whose halves are swapped")
    return _perhaps_as_lora(module, as_lora, lambda each: family_of(each).swap_halves(each)) if swaps else module


def _perhaps_as_lora(module: Module, as_lora: AsLora, move: Callable[[Module], R]) -> R:
    """Move a module's rows as they are; where its family has none, those of the LoRA that it can be."""
    try:
        return move(module)
    except InexpressibleError:
        if family_of(module).is_low_rank_pair(module.factors):
            raise
        return move(as_lora(module))
