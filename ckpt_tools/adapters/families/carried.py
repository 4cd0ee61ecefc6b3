"""Types of PEFT's that ckpt carries: their tensors keep PEFT's names and bytes, their configuration must be known.

A type is a row of the table in `carried_types`. A role is the end of the tensor's name, without the adapter's own name.

Source: peft 0.21 `tuners/*/{config,layer,model}.py`, `utils/save_and_load.py`.
"""

from __future__ import annotations

import math
import os.path
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

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


class Numbers:
    """A configuration of which whole numbers are asked."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self.values = config

    def __getitem__(self, name: str) -> int:
        """Return one.

        Raises:
            KeyError: The configuration does not have it.
        """
        value = self.values[name]
        if isinstance(value, bool) or not isinstance(value, int):
            raise KeyError(name)
        return value


def share(whole: int, parts: int, what: str) -> int:
    """Return whole / parts.

    Raises:
        PeftRefusesError: They do not divide.
    """
    if parts < 1 or whole % parts:
        raise PeftRefusesError(f"{what} is {parts}, which does not divide {whole}")
    return whole // parts


def shape_in(formula: str, config: Numbers, letters: Mapping[str, int]) -> Shape:
    """Return the dims that a formula says: "r,i*k" or "o/block_size,2*r", of letters, fields and numbers.

    Raises:
        KeyError: The configuration lacks a field.
        PeftRefusesError: A quotient is not whole.
    """

    def number(name: str) -> int:
        return letters[name] if name in letters else int(name) if name.isdecimal() else config[name]

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
    """Of a module's tensors, as formulas (`shape_in`): "hra_u=i*k,r", with the letters o outputs, i inputs, k elements
    of the kernel."""
    shapes_of: ClassVar[Callable[..., Ways] | None] = None
    """(configuration, out, in, kernel) → role → shape, in every way that something allows: where formulas are not
    enough."""
    shared_of: ClassVar[Callable[..., Mapping[str, Shape]] | None] = None
    """(configuration, shapes of all weights that it targets) → shared role → shape."""
    ranks: ClassVar[Mapping[str, int]] = {}
    idle: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Groups of roles: where one of them is zero altogether, nothing changes."""
    ones: ClassVar[str] = ""
    """A role that changes nothing where it is 1."""
    turns_outputs: ClassVar[bool] = False
    """Does it change what the module returns, its bias included, where its factors are of the outputs?"""
    merges: ClassVar[bool] = False
    """Does `carried_changes` know what it does to a weight?"""

    is_carried = True
    why_not_a_sum = "it is of PEFT alone: what it adds may depend on the base"

    def peft_suffix(self, role: str) -> str | None:
        """Return the role, which is PEFT's own name."""
        return role

    def shared_name(self, role: str) -> str | None:
        """Return the whole name of a tensor that all modules share; None for one of a module."""
        if any(re.fullmatch(head + (rf"\.{rest}" if rest else ""), role) for head, rest in self.shared):
            return self.root + role
        return None

    def missing(self, roles: Collection[str]) -> list[str]:
        """What every module has."""
        return [role for role in self.required if role not in roles]

    def rank_dims(self, roles: Collection[str]) -> Mapping[str, int]:
        """Return those of the table."""
        return self.ranks

    def matrix(self, shapes: Shapes) -> Matrix | None:
        """Return what the formulas tell; the arithmetic refuses what does not fit."""
        dims: dict[str, int | None] = {}
        for role, formula in (each.split("=") for each in self.shapes.split()):
            dims |= zip(formula.split(","), shapes[role], strict=False) if role in shapes else ()
        return dims.get("o"), dims.get("i*k", dims.get("i"))

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
        return "fan_in_fan_out" in self.peft_fields

    def is_idle(self, roles: Collection[str], seen: Mapping[str, Values]) -> bool:
        """Are all of a group zero, or is what multiplies one?"""
        groups = [[seen.get(role) for role in group if role in roles] for group in self.idle]
        if any(group and all(values is not None and values.is_zero for values in group) for group in groups):
            return True
        return self.ones in seen and seen[self.ones].is_one

    def peft_config(self, adapter: Adapter[F], modules: Sequence[AdapterModule[F]], base: Shapes) -> Fields:
        """Return the type's own fields, as they are known."""
        settings = adapter.settings
        unknown = [name for name in self.needs if name not in settings]
        if unknown and "peft_type" not in settings:  # in a configuration that is there, they are null
            raise UsageError(
                f"the tensors of {self.title} do not show its configuration, which changes what they do: "
                + ", ".join(unknown),
                where=modules[0].path or None,
                hint="put the adapter_config.json of the training run beside the source, or give its fields: "
                + " ".join(f"--config {name}=VALUE" for name in unknown),
            )
        own = self.peft_fields - set(PEFT_COMMON.split()) - {"bias"}
        return {name: found for name, found in settings.items() if name in own}

    def peft_shapes(self, config: Mapping[str, object], rank: int, weight: Shape) -> Ways:
        """Return what the table says; () where it says nothing, or the configuration lacks what it needs."""
        if len(weight) < 2:
            return ()
        is_flipped = bool(config.get("fan_in_fan_out")) and len(weight) == 2
        try:
            ways = (weight, weight[::-1])[: 1 + is_flipped]
            return tuple(each for way in ways for each in self._shapes(Numbers(config), way[0], way[1], way[2:]))
        except KeyError:
            return ()

    def _shapes(self, config: Numbers, out: int, inputs: int, kernel: Shape) -> Ways:
        if self.shapes_of is not None:
            return self.shapes_of(config, out, inputs, kernel)
        letters = {"o": out, "i": inputs, "k": math.prod(kernel)}
        formulas = [each.split("=") for each in self.shapes.split()]
        return ({role: shape_in(formula, config, letters) for role, formula in formulas},) if formulas else ()

    def change(self, module: Module, factors: Factors, shape: Shape, setting: Setting, role: str) -> Change:
        """Return what `carried_changes` says."""
        from ckpt_tools.adapters.families.carried_changes import change

        return change(self.name, module, factors, shape, setting)


def carried(
    peft_type: str,
    title: str,
    names: str,
    fields: str,
    *,
    needs: str = "",
    shared: str = "",
    idle: str = "",
    **others: object,
) -> Carried:
    """Return a type of the table.

    Args:
        peft_type: As the configuration has it; in small letters the family's name.
        title: For people.
        names: Ends of the tensors' names, as patterns: what stands behind the adapter's own name follows an "@"; with
            "~" in front it may lack, with "?" it proves nothing.
        fields: Of its configuration, beside those of every type.
        needs: Those of them on which the result depends, and that no tensor shows.
        shared: As `names`, of tensors that all modules share.
        idle: Roles that change nothing where they are zero; those joined by "+" together.
        others: Further attributes of `Carried`.
    """
    parts = [_parts(name) for name in names.split()]
    heads = [_parts(name)[0] for name in f"{names} {shared}".split()]
    attributes = {
        "name": peft_type.lower(),
        "title": title,
        "peft_type": peft_type,
        "marker": os.path.commonprefix(heads).partition("[")[0],  # noqa: RUF071 - letters, not parts of paths
        "names": tuple(parts),
        "weak": frozenset(_parts(name)[0] for name in names.split() if name.startswith("?")),
        "required": tuple(
            ".".join(filter(None, _parts(name)))
            for name in names.split()
            if not name.startswith("~") and _LITERAL.fullmatch("".join(_parts(name)))
        ),
        "peft_fields": frozenset((PEFT_COMMON + " " + fields).split()),
        "needs": tuple(needs.split()),
        "shared": tuple(map(_parts, shared.split())),
        "idle": tuple(tuple(group.split("+")) for group in idle.split()),
    }
    functions = {name: staticmethod(each) if callable(each) else each for name, each in others.items()}
    made = type(title, (Carried,), attributes | functions)
    return made()  # type: ignore[no-any-return]  # of a class that is made here


def _parts(name: str) -> tuple[str, str]:
    head, _, rest = name.lstrip("?~").partition("@")
    return head, rest
