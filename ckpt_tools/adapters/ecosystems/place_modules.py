"""Modules at the target: renamed, cut or put together as the tables say, and in a family that it has.

A family that a target does not have is said in one that it has: exactly, or, when asked for, by SVD.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from ckpt_tools.adapters.adapter import Adapter, Convention, Shape, Sourced
from ckpt_tools.adapters.architectures.architecture import Architecture, ModelPart, Spelling
from ckpt_tools.adapters.architectures.choose import BaseFamily
from ckpt_tools.adapters.architectures.names import ModulePlace, place
from ckpt_tools.adapters.ecosystems.output import Written
from ckpt_tools.adapters.families import FAMILIES, columns_of, dora, equivalents, family_of, rows_of, shape_of
from ckpt_tools.adapters.families.family import InexpressibleError, Module, Setting, refuse
from ckpt_tools.adapters.families.lokr import first_role
from ckpt_tools.adapters.families.lora import with_scale
from ckpt_tools.errors import UsageError
from ckpt_tools.text import escape_name
from ckpt_tools.transfer.arrays import Array, is_finite

R = TypeVar("R")
AsLora = Callable[[Module], Module]  # Makes an exact lora of a module, or raises `InexpressibleError`


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A module with its place in the target."""

    part: ModelPart
    module: Module  # Its path is the one inside that model, in the target's spelling
    is_apart: bool = False  # Is it part of a fused module of the authors', under diffusers' name?


def place_all(adapter: Adapter[Array], architecture: Architecture) -> list[tuple[ModulePlace, Module]]:
    """Return every module with its place; raise UsageError for a name that the tables lack, or have twice."""
    return [(place(module.path, architecture), module) for module in adapter.modules]


def unchanged(adapter: Adapter[Array], base: BaseFamily) -> list[Placed]:
    """Place modules where they are, for a model without tables: their paths are those of the base."""
    part = ModelPart(component=base.component or "transformer")
    return [Placed(part=part, module=module) for module in adapter.modules]


def in_diffusers(places: Sequence[tuple[ModulePlace, Module]], *, as_lora: AsLora) -> list[Placed]:
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
    places: Sequence[tuple[ModulePlace, Module]],
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
    wheres: dict[tuple[str, str, bool], ModulePlace] = {}
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


def _together(
    where: ModulePlace, group: Mapping[int, Module], path: str, as_lora: AsLora, *, may_stay: bool
) -> list[Module]:
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
    what = f"{path!r} is adapted twice, under two names"
    return UsageError(what, where=path, hint="an adapter has one module per weight: remove one of them")


def _split(where: ModulePlace, module: Module, paths: Sequence[str], as_lora: AsLora) -> tuple[Module, ...]:
    rows = rows_of(module)
    if rows is None:
        raise refuse(module, f"its rows cannot be split into {', '.join(paths)}")
    sizes = where.split(rows, columns_of(module))
    if sizes is None:
        raise refuse(module, f"{rows} rows do not match {', '.join(paths)}")
    return _perhaps_as_lora(module, as_lora, lambda each: family_of(each).split(each, sizes, paths))


def _sizes(where: ModulePlace, parts: Mapping[int, Module]) -> Sequence[int]:
    """Rows of every part, also of those that the adapter leaves alone."""
    some = next(iter(parts.values()))
    known = {index: rows for index, part in parts.items() if (rows := rows_of(part)) is not None}
    sizes = None if len(known) < len(parts) else where.complete(known, columns_of(some))
    if sizes is None:
        shown = ", ".join(where.diffusers[index].rpartition(".")[2] for index in parts)
        raise refuse(some, f"the rows of {shown} are not those of {where.native}")
    return sizes


def _moved(where: ModulePlace, module: Module, as_lora: AsLora) -> Module:
    """Return a module under its new path, its halves exchanged where the two spellings order them otherwise."""
    swaps = where.swaps(rows_of(module), columns_of(module))
    if swaps is None:
        raise refuse(module, "its shape does not show whether it is the last block, whose halves are swapped")
    return _perhaps_as_lora(module, as_lora, lambda each: family_of(each).swap_halves(each)) if swaps else module


def _perhaps_as_lora(module: Module, as_lora: AsLora, move: Callable[[Module], R]) -> R:
    """Move a module's rows as they are; where its family has none, those of the LoRA that it can be."""
    try:
        return move(module)
    except InexpressibleError:
        if family_of(module).is_low_rank_pair(module.factors):
            raise
        return move(as_lora(module))


_FLOAT32 = 2.0**-20  # Relative error that is not reported
_KERNELS = (
    (r"(?:.*\.)?(?:conv_in|conv_out|conv1|conv2|(?:down|up)samplers\.\d+\.conv)", 3),
    (r"(?:.*\.)?conv_shortcut", 1),
    (r"input_blocks\.0\.0|out\.2|.*\.in_layers\.2|.*\.out_layers\.3|.*\.op|output_blocks\.\d+\.\d+\.conv", 3),
    (r".*\.skip_connection", 1),
)
"""Convolutions of the U-Nets by diffusers' names and the authors' → size of the kernel.
Source: diffusers 0.42 `models/resnet.py`, `models/unets/unet_2d_condition.py`; generative-models `openaimodel.py`."""


@dataclass(slots=True)
class Fitting:
    """Brings modules into the target's families, and remembers what that cost."""

    svd_rank: int | None = None  # Rank of an approximation, where nothing exact exists; None to refuse
    convention: Convention | None = None  # Whose tensors they were: decides on the axis of a magnitude that fits both
    may_fuse: bool = True  # May modules be named that a model has only once its projections are fused?
    errors: dict[str, float] = field(default_factory=dict)
    """Module → error relative to the largest element of the change."""
    notes: list[str] = field(default_factory=list)
    _conversions: dict[str, int] = field(default_factory=dict)

    def as_lora(self, module: Module, shape: Shape | None = None) -> Module:
        """Return a lora that changes the weight as `module` does, or approximates it where a rank for that is given."""
        family = family_of(module)
        if family.is_low_rank_pair(module.factors):
            return module
        if (why := family.why_no_lora(module.shapes)) is not None:
            raise refuse(module, why)
        found = equivalents.as_lora(module, shape or _conv_shape(module), svd_rank=self.svd_rank)
        self.count(found.how)
        self._add_error(module.path, found.error)
        return found.module

    def baked(self, module: Module, wanted: float = 1.0) -> Module:
        """Return a lora of the wanted scale, with the rest multiplied into B.

        Ecosystems without an alpha take it for the rank; others have one for all modules. A factor that is no power of
        two would be rounded in 16 bits: such a B becomes float32.
        """
        scale, factors = family_of(module).scale(module) / wanted, dict(module.factors)
        if scale != 1.0:
            for role in ("B", "B_bias"):
                if role in factors:
                    factors[role] = self._times(module, role, scale)
            self.count("alpha/r multiplied into B")
        return with_scale(module, factors, wanted)

    def baked_lokr(self, module: Module) -> Module:
        """Return a LoKr with its scale multiplied into the first factor."""
        scale = family_of(module).scale(module)
        if scale == 1.0:
            return module
        role = first_role(module.factors)
        self.count("alpha/r multiplied into w1")
        return replace(module, factors={**module.factors, role: self._times(module, role, scale)})

    def _times(self, module: Module, role: str, scale: float) -> Array:
        factor = module.factors[role]
        with np.errstate(over="ignore", invalid="ignore"):  # too large for one type: the next one
            exact = factor.astype(np.float64) * scale
            for dtype in (factor.dtype, np.dtype(np.float32)):
                rounded = exact.astype(dtype)
                if bool((rounded.astype(np.float64) == exact).all()) and is_finite(rounded):
                    return rounded
        if not is_finite(rounded):
            raise refuse(module, f"{role} times alpha/r is too large for 32 bits")
        largest = float(np.abs(exact).max())
        error = float(np.abs(exact - rounded.astype(np.float64)).max()) / largest if largest else 0.0
        self._add_error(module.path, error)
        return rounded

    def with_plain_alpha(self, module: Module) -> Module:
        """Return the module with the alpha that says its scale as alpha/r, for readers that know no rsLoRA."""
        family = family_of(module)
        if not family.is_scaled:
            return module
        rank = family.rank(module)
        if rank is None:  # LoKr of two full factors: nothing scales it
            return module
        source = module.alpha.source if module.alpha is not None else ""
        if module.use_rslora:
            self.count("rsLoRA's scale alpha/√r was written as a larger alpha")
            source = f"{source}, times √r"
        scaled = replace(
            module,
            rank=Sourced(rank, "factors"),
            alpha=Sourced(family_of(module).scale(module) * rank, source),
            use_rslora=False,
        )
        if family.is_unranked(module.factors):
            # LyCORIS and ComfyUI scale no LoKr of two full factors, whatever its alpha.
            factor = self._times(module, "w1", family_of(module).scale(module))
            scaled = replace(scaled, factors={**module.factors, "w1": factor}, alpha=None, rank=None)
        return scaled

    def magnitude_by_row(self, module: Module) -> Array:
        """Return a DoRA's magnitude as (out,); raise InexpressibleError if it is one per column of the weight."""
        magnitude = module.factors["magnitude"]
        if self.has_columns(module) or magnitude.size != rows_of(module):
            raise refuse(module, "its magnitude is one per column of the weight, PEFT's and diffusers' is one per row")
        return magnitude.reshape(-1)

    def has_columns(self, module: Module) -> bool:
        """Is a DoRA's magnitude one per column of the weight?"""
        rows, columns = rows_of(module), columns_of(module)
        if rows is None or columns is None:
            raise refuse(module, "its shape does not show the axis of its magnitude")
        setting = Setting(convention=self.convention)
        return dora.is_by_column(module, tuple(module.factors["magnitude"].shape), (rows, columns), setting)

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.notes:
            self.notes.append(text)

    def written(self, file: str, tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> Written:
        """Return the file, with what was done for it."""
        return Written(file=file, tensors=tensors, metadata=metadata, notes=self.finish(), errors=self.errors)

    def finish(self) -> tuple[str, ...]:
        """Return the notes, one per kind of conversion."""
        counted = [f"{text} ({count} module{'s' if count > 1 else ''})" for text, count in self._conversions.items()]
        if self.errors:
            path = max(self.errors, key=lambda each: self.errors[each])
            counted.append(
                f"largest error, relative to the largest element: {self.errors[path]:.2g} ({escape_name(path)})"
            )
        return (*self.notes, *counted)

    def _add_error(self, path: str, error: float) -> None:
        # Rounding to the last bits of 32 is what every computation with the factors does anyway.
        if error > _FLOAT32:
            self.errors[path] = max(error, self.errors.get(path, 0.0))

    def count(self, text: str) -> None:
        """Note that something was done to a module."""
        self._conversions[text] = self._conversions.get(text, 0) + 1


def require(placed: Placed, suffixes: Mapping[str, str], where: str) -> None:
    """Raise InexpressibleError unless the target has a name for every factor."""
    module = placed.module
    lacking = sorted(module.factors.keys() - suffixes.keys())
    if lacking or not suffixes:
        what = f"{where} has no name for {', '.join(lacking)} of {module.path!r} ({module.family})"
        hint = "use ckpt merge-lora, which applies every family to the base itself"
        raise InexpressibleError(what, where=module.path, hint=hint)


def _conv_shape(module: Module) -> Shape | None:
    """Return (out, in, k, k) of a convolution's weight where its factors are flat and do not show it, else None."""
    size = next((size for pattern, size in _KERNELS if re.fullmatch(pattern, module.path)), None)
    shape = shape_of(module)
    is_flat = all(len(each) <= 2 for each in module.shapes.values())
    if size is None or shape is None or len(shape) != 2 or not is_flat or shape[1] % (size * size):
        return None
    return shape[0], shape[1] // (size * size), size, size
