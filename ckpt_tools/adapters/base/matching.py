"""Find the base tensors that an adapter changes, and prove that every module fits."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from ckpt_tools.adapters.adapter import Adapter, AdapterModule
from ckpt_tools.adapters.base.slots import Slot, find_slots, num_rows, resolve, some
from ckpt_tools.adapters.ecosystems.peft.config_rules import MODEL_TYPES
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.families.family import Matrix
from ckpt_tools.adapters.read.assemble import known_shape
from ckpt_tools.adapters.read.opening import LazyAdapter, entry_of
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    from ckpt_tools.transfer.arrays import Array

Module = AdapterModule[TensorEntry]
_RESPELLED = ("kohya", "comfyui", "ai-toolkit", "diffusers", "diffsynth")
"""Conventions whose names can be those of another implementation."""
_BIAS = {"B_bias": "bias", "diff_b": "bias"}  # Factors that change the bias beside the weight


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedRows:
    """Rows of one base tensor that one module changes."""

    module: int  # Index in `Adapter.modules`
    role: str = "weight"
    """"weight" for the adapted parameter, "bias" for the bias beside it, of a whole tensor (saved) its name."""
    shape: tuple[int, ...]  # Of what the module changes: the tensor's, or that of the fused or stacked whole
    start: int = 0  # First row of the tensor
    count: int
    offset: int = 0  # The module's row that belongs to the first one
    transposed: bool = False  # The weight is stored as (in, out)
    num_experts: int = 1  # Experts whose rows follow each other in `shape`


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseMatch:
    """Which tensors of the base an adapter changes."""

    parts: Mapping[str, Sequence[ChangedRows]]  # FQN in the base → its parts
    notes: tuple[str, ...]


def match_modules(
    adapter: Adapter[TensorEntry], tensors: Mapping[str, TensorEntry], config: Mapping[str, object]
) -> BaseMatch:
    """Find every module's tensors, or raise UsageError with the names that match none, several or misfits.

    The arguments are those of `slots.find_slots`.
    """
    slots = find_slots(tensors, config)
    wanted = list(_wanted(adapter, slots))
    names, notes = resolve([name for _, _, name in wanted], slots, adapter.convention)
    given = {names[name]: adapter.modules[index] for index, role, name in wanted if role == "weight"}
    orientation = _Orientation(adapter, tensors, config)
    parts: dict[str, list[ChangedRows]] = defaultdict(list)
    problems: list[str] = []
    for index, role, name in wanted:
        module, slot = adapter.modules[index], slots[names[name]]
        try:
            for fqn, part in _parts(index, module, role, slot, names[name], given, orientation):
                parts[fqn].append(part)
        except _MismatchError as error:
            problems.append(f"{module.path}: {error}")
    if problems:
        what = f"{len(problems)} of {len(adapter.modules)} modules do not fit the base: {some(problems)}"
        raise UsageError(what, hint="is it the base that the adapter was trained on?")
    return BaseMatch(parts=parts, notes=tuple(notes))


class _MismatchError(Exception):
    """A module does not fit."""


def _wanted(adapter: Adapter[TensorEntry], slots: Mapping[str, Slot]) -> Iterable[tuple[int, str, str]]:
    """Yield (module, role, name) of everything that the adapter changes."""
    for index, module in enumerate(adapter.modules):
        if module.is_saved:
            yield from ((index, role, f"{module.path}.{role}") for role in module.factors)
            continue
        if set(module.factors) - set(_BIAS):
            yield index, "weight", f"{module.path}.{module.parameter or _only_parameter(module, slots)}"
        for factor, role in _BIAS.items():
            if factor in module.factors:
                yield index, role, f"{module.path}.bias"


def _only_parameter(module: Module, slots: Mapping[str, Slot]) -> str:
    """Return the one parameter of a module that the factors fit, where nothing says which it is."""
    family = family_of(module)
    named = ((*name.rpartition("."), slot) for name, slot in slots.items())
    own = [
        leaf
        for path, _, leaf, slot in named
        if path == module.path and family.fits_parameter(module.shapes, slot.shape)
    ]
    if len(own) == 1:
        return own[0]
    raise UsageError(
        f"{module.path} is adapted in {'several parameters' if own else 'a parameter'}, but the adapter does not "
        f"record which: {', '.join(own) or 'none of the base fits'}",
        where=module.path,
        hint="put PEFT's adapter_config.json beside the adapter: its target_parameters contain the name",
    )


def _matrix(module: Module) -> Matrix:
    """Return (rows, columns) of what a module changes, of one expert when there are several; None where any will do."""
    found = family_of(module).matrix(module.shapes)
    if found is None:
        what = f"the factors of {module.path} are incomplete: {', '.join(module.factors)}"
        raise UsageError(what, where=module.path, hint="save the adapter again")
    return found


class _Orientation:
    """Says whether weights are stored as (in, out), as GPT-2's are."""

    def __init__(
        self, adapter: Adapter[TensorEntry], tensors: Mapping[str, TensorEntry], config: Mapping[str, object]
    ) -> None:
        self._experts = config.get("model_type") in MODEL_TYPES["experts_in_out"] if "model_type" in config else None
        known = adapter.settings.get("fan_in_fan_out")
        if known is not None and not isinstance(known.value, bool | None):
            raise UsageError(f"fan_in_fan_out must be true or false, got {known.value!s}", where=known.source)
        self._setting = None if known is None else known.value
        self._seen: set[bool] = set()
        for module in adapter.modules:
            entry = tensors.get(f"{module.path}.{module.parameter}")
            if entry is None or len(entry.shape) != 2 or not module.is_linear:
                continue
            shape = _matrix(module)
            if shape in (entry.shape, entry.shape[::-1]) and shape[0] != shape[1]:
                self._seen.add(shape != entry.shape)

    def __call__(self, module: Module, shape: tuple[int, ...], made: Matrix) -> bool:
        """Is this weight stored as (in, out)?"""
        if not module.is_linear:
            return False
        if len(shape) == 3 and module.parameter != "weight":
            if made == shape[1:] and made[0] == made[1]:
                if self._experts is None:
                    raise _MismatchError("the experts are square, and no config.json tells whether they are transposed")
                return self._experts
            return made == shape[:0:-1]
        if len(shape) != 2 or made[0] != made[1]:
            return len(shape) == 2 and made != shape and made == shape[::-1]
        if self._seen == {True, False} or (self._seen == {True} and self._setting is False):
            raise _MismatchError("the weight is square, and the other weights disagree on how they are stored")
        return bool(self._setting) if not self._seen else self._seen == {True}


def _parts(
    index: int, module: Module, role: str, slot: Slot, name: str, given: Mapping[str, Module], orientation: _Orientation
) -> Iterable[tuple[str, ChangedRows]]:
    for rows in slot.rows:
        if not rows.entry.dtype.is_float:
            raise _MismatchError(
                f"the base's weight is {rows.entry.dtype.name}: quantised weights cannot be merged into; use the "
                "original ones"
            )
    if role != "weight" or module.is_saved:
        yield from _companion(index, module, role, slot)
        return
    made = _matrix(module)
    entry = slot.rows[0].entry
    family_of(module).refuse_weight(module, entry.shape)
    if len(slot.rows) > 1:
        yield from _scatter(index, slot, made)
        return
    if slot.parts:
        start, count = _within(slot, name, given, entry)
        _same(made, (count, math.prod(entry.shape[1:])), entry.shape)
        shape = (count, *entry.shape[1:])
        yield entry.fqn, ChangedRows(module=index, shape=shape, start=start, count=count)
        return
    transposed = orientation(module, entry.shape, made)
    stacked = len(entry.shape) == 3 and module.parameter != "weight"
    num_experts = entry.shape[0] if stacked else 1
    target = entry.shape[1:] if stacked else (entry.shape[0], math.prod(entry.shape[1:]))
    _same(made[::-1] if transposed else made, target, entry.shape)
    if stacked and module.factors["A"].shape[0] % max(num_experts, 1):
        raise _MismatchError(f"A has {module.factors['A'].shape[0]} rows, not a multiple of {num_experts} experts")
    count = num_rows(entry.shape, 2 if num_experts > 1 else 1)
    whole = ChangedRows(module=index, shape=entry.shape, count=count, transposed=transposed, num_experts=num_experts)
    yield entry.fqn, whole


def _companion(index: int, module: Module, role: str, slot: Slot) -> Iterable[tuple[str, ChangedRows]]:
    """Whole tensors, and biases."""
    is_whole = module.is_saved
    entries = [rows.entry for rows in slot.rows]
    factor = role if is_whole else next((name for name in _BIAS if name in module.factors), None)
    if slot.parts:
        raise _MismatchError(f"the base has it inside {entries[0].fqn}, fused with others")
    shape = entries[0].shape if len(entries) == 1 else (sum(rows.count for rows in slot.rows),)
    own = shape if factor is None else module.factors[factor].shape
    if (own != shape) if is_whole else (math.prod(own) != math.prod(shape) or len(shape) != 1):
        raise _MismatchError(f"its {role} is {list(own)}, the base's is {list(shape)}")
    yield from _one_after_the_other(ChangedRows(module=index, role=role, shape=shape, count=0), slot)


def _scatter(index: int, slot: Slot, made: Matrix) -> Iterable[tuple[str, ChangedRows]]:
    """A module whose rows are those of several tensors, one after the other."""
    total = sum(rows.count for rows in slot.rows)
    columns = math.prod(slot.rows[0].entry.shape[1:])
    per_expert = total // slot.num_experts
    _same(made, (per_expert, columns), (per_expert, columns))
    shape = (slot.num_experts, per_expert, columns) if slot.num_experts > 1 else (total, columns)
    yield from _one_after_the_other(ChangedRows(module=index, shape=shape, count=0, num_experts=slot.num_experts), slot)


def _one_after_the_other(part: ChangedRows, slot: Slot) -> Iterable[tuple[str, ChangedRows]]:
    for rows, end in zip(slot.rows, accumulate(rows.count for rows in slot.rows), strict=True):
        yield rows.entry.fqn, replace(part, count=rows.count, offset=end - rows.count)


def _within(slot: Slot, name: str, given: Mapping[str, Module], entry: TensorEntry) -> tuple[int, int]:
    """Return the rows of a fused tensor that one of its parts has."""
    total = num_rows(entry.shape)
    sizes = {part: _matrix(given[part])[0] for part in slot.parts if part in given}
    if None in sizes.values():
        raise _MismatchError(f"its rows in {entry.fqn} are not known")
    known = {part: size for part, size in sizes.items() if size is not None}
    if len(slot.parts) == 2:
        known |= dict.fromkeys(slot.parts, total // 2) if not set(known.values()) - {total // 2} else {}
    else:
        query, key, value = slot.parts
        for one, other in ((key, value), (value, key)):
            if one in known:
                known.setdefault(other, known[one])
        if key in known:
            known.setdefault(query, total - known[key] - known[value])
        elif query in known and (total - known[query]) % 2 == 0:
            known |= dict.fromkeys((key, value), (total - known[query]) // 2)
    if len(known) < len(slot.parts) or sum(known.values()) != total or min(known.values()) < 1:
        raise _MismatchError(f"the parts have {list(known.values())} rows, {entry.fqn} has {total}")
    return sum(known[part] for part in slot.parts[: slot.parts.index(name)]), known[name]


def _same(made: Matrix, target: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if any(own not in (None, wanted) for own, wanted in zip(made, target, strict=True)):
        shown = " × ".join("any" if size is None else str(size) for size in made)
        raise _MismatchError(f"it changes {shown} elements, the base's weight is {list(shape)}")


def match_any_spelling(
    adapter: Adapter[TensorEntry],
    loading: LazyAdapter,
    tensors: Mapping[str, TensorEntry],
    config: Mapping[str, object],
) -> tuple[Adapter[TensorEntry], BaseMatch, list[str]]:
    """Find every module's tensors, under the adapter's own names or those of the base's implementation."""
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
            return described, match, [f"matched the modules by {whose} names", *notes]
        error.hint = (
            f"{error.hint or ''}; neither its own names nor those of another implementation of the model fit. Modules "
            "of other models (text encoders) can be left out with --exclude"
        ).removeprefix("; ")
        raise


def _respellings(
    loaded: Adapter[Array], tensors: Mapping[str, TensorEntry], config: Mapping[str, object]
) -> Iterator[tuple[Adapter[Array], str, tuple[str, ...]]]:
    from ckpt_tools.adapters.architectures import ARCHITECTURES
    from ckpt_tools.adapters.architectures.choose import choose_architectures, model_family_of
    from ckpt_tools.adapters.ecosystems.place_modules import Fitting, in_diffusers, in_native, place_all

    try:
        base = model_family_of({name: known_shape(entry) for name, entry in tensors.items()}, config)
        families = choose_architectures(loaded, architecture=None, base=base)
    except UsageError:
        return
    in_alias = functools.partial(in_native, spelling="alias")
    for family in families:
        for spell, whose in ((in_diffusers, "diffusers'"), (in_native, "the authors'"), (in_alias, "the trainer's")):
            fitting = Fitting()
            try:
                placed = spell(place_all(loaded, ARCHITECTURES[family]), as_lora=fitting.as_lora)
            except UsageError:
                continue
            modules: tuple[AdapterModule[Array], ...] = tuple(each.module for each in placed)
            yield loaded.with_modules(modules), f"{whose} {ARCHITECTURES[family].title}", fitting.finish()
