"""Types of PEFT's that ckpt carries: their tensors keep PEFT's names and bytes, their configuration must be known.

A type is a row of the table in `carried_types`. A role is the end of the tensor's name, without the adapter's own name.

Source: peft 0.21 `tuners/*/{config,layer,model}.py`, `utils/save_and_load.py`.
"""

from __future__ import annotations

import math
import os.path
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ckpt_tools.adapters.adapter import Adapter, AdapterModule, F, Fields, Shape, Shapes
from ckpt_tools.adapters.families.family import (
    PEFT_COMMON,
    Factors,
    Family,
    Matrix,
    Module,
    PeftRefusesError,
    Setting,
    Ways,
)
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    from ckpt_tools.adapters.checks.values import Values
    from ckpt_tools.adapters.families.changes import Change

_LITERAL = re.compile(r"[\w.]+")
_DERIVED = frozenset(f"{PEFT_COMMON} peft_type bias".split())
"""Fields that are worked out as for every type."""


class Numbers(dict[str, Any]):
    """A configuration; calling it gives a field that must be a whole number, or raises KeyError."""

    def __call__(self, name: str) -> int:
        """Return it."""
        value = self[name]
        if isinstance(value, bool) or not isinstance(value, int):
            raise KeyError(name)
        return value


def share(whole: int, parts: int, what: str) -> int:
    """Return whole / parts; raises PeftRefusesError where they do not divide."""
    if parts < 1 or whole % parts:
        raise PeftRefusesError(f"{what} is {parts}, which does not divide {whole}")
    return whole // parts


def _dims(formula: str, config: Numbers, letters: Mapping[str, int]) -> Shape:
    """Return the shape that a formula says, of letters, fields and numbers; raises KeyError, PeftRefusesError."""

    def number(name: str) -> int:
        return letters[name] if name in letters else int(name) if name.isdecimal() else config(name)

    dims = []
    for dim in formula.split(","):
        first, *parts = dim.split("/")
        size = math.prod(map(number, first.split("*")))
        for part in parts:
            size = share(size, number(part), part)
        dims.append(size)
    return tuple(dims)


class Carried(Family):
    """Factors that PEFT alone computes with, unless `carried_changes` says how."""

    is_carried = True
    names: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(pattern before the adapter's own name, pattern behind it) of every tensor in a module."""
    weak: ClassVar[frozenset[str]] = frozenset()
    """Of these patterns those that prove no such type: others have them as well."""
    required: ClassVar[tuple[str, ...]] = ()
    """Roles that every module has."""
    root: ClassVar[str] = "base_model."
    """What stands in front of tensors that all modules share."""
    shared: ClassVar[tuple[tuple[str, str], ...]] = ()
    """As `names`, of these tensors; a live model has them in its modules as well."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Fields on which the result depends, and that no tensor shows."""
    shapes: ClassVar[str] = ""
    """Of a module's tensors, "hra_u=i*k,r": fields, numbers, and of the weight o outputs, i inputs, s = o + i, k its
    kernel's elements."""
    shapes_of: ClassVar[Callable[..., Ways] | None] = None
    """(configuration, out, in, kernel) → role → shape, in every way that something allows; before `shapes`."""
    shared_of: ClassVar[Callable[..., Mapping[str, Shape]] | None] = None
    """(configuration, shapes of all weights that it targets) → shared role → shape."""
    idle: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Groups of roles: where one of them is zero altogether, nothing changes."""
    ones: ClassVar[str] = ""
    """A role that changes nothing where it is 1."""
    turns_outputs: ClassVar[bool] = False
    """Does it change what the module returns, its bias included, where its factors are of the outputs?"""
    merges: ClassVar[bool] = False
    """Does `carried_changes` know what it does to a weight?"""

    why_not_a_sum = "it is of PEFT alone: what it adds may depend on the base"

    def peft_suffix(self, role: str) -> str | None:
        """Return the role, which is PEFT's own name."""
        return role

    def shared_name(self, role: str) -> str | None:
        """Return the whole name of a tensor that all modules share; None for one of a module."""
        is_shared = any(re.fullmatch(head + (rf"\.{rest}" if rest else ""), role) for head, rest in self.shared)
        return self.root + role if is_shared else None

    def missing(self, roles: Collection[str]) -> list[str]:
        """What every module has."""
        return [role for role in self.required if role not in roles]

    def _formulas(self) -> list[tuple[str, list[str]]]:
        pairs = (each.split("=") for each in self.shapes.split())
        return [(role, formula.split(",")) for role, formula in pairs]

    def rank_dims(self, roles: Collection[str]) -> Mapping[str, int]:
        """Return where the formulas have a rank."""
        return {role: at for role, dims in self._formulas() for at, dim in enumerate(dims) if dim in ("r", "init_r")}

    def matrix(self, shapes: Shapes) -> Matrix | None:
        """Return what the formulas tell; the arithmetic refuses what does not fit."""
        sizes: dict[str, int | None] = {}
        for role, dims in self._formulas():
            sizes |= zip(dims, shapes.get(role, ()), strict=False)
        return sizes.get("o"), sizes.get("i*k", sizes.get("i"))

    def changes_bias(self, shapes: Shapes) -> bool:
        """Not by (1, inputs)."""
        return self.turns_outputs and not any(len(shape) == 2 and shape[0] == 1 for shape in shapes.values())

    def may_be_flat(self, role: str) -> bool:
        """Many are vectors."""
        return True

    def may_be_whole(self, role: str) -> bool:
        """Places in a weight."""
        return "indices" in role

    def may_be_transposed(self, roles: Collection[str]) -> bool:
        """As the configuration says."""
        return True

    def is_idle(self, roles: Collection[str], seen: Mapping[str, Values]) -> bool:
        """Are all of a group zero, or is what multiplies one?"""
        groups = [[seen.get(role) for role in group if role in roles] for group in self.idle]
        is_zero = any(group and all(values is not None and values.is_zero for values in group) for group in groups)
        return is_zero or (self.ones in seen and seen[self.ones].is_one)

    def peft_config(self, adapter: Adapter[F], modules: Sequence[AdapterModule[F]], base: Shapes) -> Fields:
        """Return what the configuration has beyond what all types have."""
        settings = adapter.settings
        unknown = [name for name in self.needs if name not in settings]
        if unknown and "peft_type" not in settings:  # in a configuration that is there, they are null
            raise UsageError(
                f"the tensors of {self.title} do not show fields of its configuration: {', '.join(unknown)}",
                where=modules[0].path or None,
                hint="put the adapter_config.json of the training run beside the source, or give them: "
                + " ".join(f"--config {name}=VALUE" for name in unknown),
            )
        return {
            name: found for name, found in settings.items() if name not in _DERIVED and not name.startswith("ckpt_")
        }

    def peft_shapes(self, config: Mapping[str, object], rank: int, weight: Shape) -> Ways:
        """Return what the table says; () where it says nothing, or the configuration lacks what it needs."""
        sides = [weight[:2], weight[1::-1]] if config.get("fan_in_fan_out") and len(weight) == 2 else [weight[:2]]
        try:
            return tuple(way for o, i in sides for way in self._ways(Numbers(config), o, i, weight[2:]))
        except KeyError:
            return ()

    def _ways(self, config: Numbers, o: int, i: int, kernel: Shape) -> Ways:
        if self.shapes_of is not None:
            return self.shapes_of(config, o, i, kernel)
        letters = {"o": o, "i": i, "k": math.prod(kernel), "s": o + i}
        way = {role: _dims(",".join(dims), config, letters) for role, dims in self._formulas()}
        return (way,) if way else ()

    def change(self, module: Module, factors: Factors, shape: Shape, setting: Setting, role: str) -> Change:
        """Return what `carried_changes` says."""
        from ckpt_tools.adapters.families.carried_changes import change

        return change(self.name, module.path, factors, shape, setting)


def carried(
    peft_type: str, title: str, names: str, needs: str = "", idle: str = "", patterns: str = "", **others: object
) -> Carried:
    """Return a type of the table; in small letters `peft_type` is the family's name.

    `names` are ends of the tensors' names, as patterns: what stands behind the adapter's own name follows an "@"; with
    "~" in front it may lack, with "?" it proves nothing. `needs` are fields on which the result depends, and that no
    tensor shows. `idle` are roles that change nothing where they are zero; those joined by "+" together. `patterns` are
    "field:table" or "field:table:suffix", as `peft_patterns`; `shared` is like `names`.
    """
    shared = str(others.pop("shared", ""))
    tables = [tuple(f"{each}:".split(":")[:3]) for each in patterns.split()]
    parts = [_parts(name) for name in names.split()]
    must = [name.lstrip("?").replace("@", ".") for name in names.split() if name[0] != "~"]
    heads = [_parts(name)[0] for name in f"{names} {shared}".split()]
    attributes = {
        "name": peft_type.lower(),
        "title": title,
        "peft_type": peft_type,
        "marker": os.path.commonprefix(heads).partition("[")[0],  # noqa: RUF071 - letters, not parts of paths
        "names": tuple(parts),
        "weak": frozenset(_parts(name)[0] for name in names.split() if name[0] == "?"),
        "required": tuple(filter(_LITERAL.fullmatch, must)),
        "peft_fields": frozenset(f"{PEFT_COMMON} {needs} bias fan_in_fan_out".split())
        | {table for _, table, _ in tables},
        "peft_patterns": tuple(tables),
        "needs": tuple(needs.split()),
        "shared": tuple(map(_parts, shared.split())),
        "idle": tuple(tuple(group.split("+")) for group in idle.split()),
    } | {name: staticmethod(each) if callable(each) else each for name, each in others.items()}
    return type(title, (Carried,), attributes)()  # type: ignore[no-any-return]  # of a class that is made here


def _parts(name: str) -> tuple[str, str]:
    head, _, rest = name.lstrip("?~").partition("@")
    return head, rest
