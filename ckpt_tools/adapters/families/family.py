"""What every family of adapters says of itself: `Family`, of which each has a subclass in a file of its own.

Headers alone need no numpy: what does arithmetic on factors imports it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal

from ckpt_tools.adapters.adapter import (
    Adapter,
    AdapterModule,
    Convention,
    F,
    FamilyName,
    Fields,
    Shape,
    Shapes,
    Sourced,
)
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    from ckpt_tools.adapters.families.changes import WeightChange
    from ckpt_tools.adapters.integrity import Values
    from ckpt_tools.transfer.arrays import Array


Style = Literal["peft", "lycoris", "diffusers-old", "trainer"]
"""Whose suffix a name has; "peft" is also what diffusers and ai-toolkit write."""
Matrix = tuple[int | None, int | None]
"""(rows, columns) of what a module changes; None in the place of a number where any will do."""
Ways = tuple[Mapping[str, Shape | None], ...]
"""Role → shape, None where several are right: in every way that something allows."""
Factors = Mapping[str, "Array"]
Module = AdapterModule["Array"]  # With its factors loaded
NONE: Mapping[str, str] = MappingProxyType({})
_FLAT = ("magnitude", "B_bias", "rescale", "diff_b", "diff", "alpha")
MERGE_HINT = "merge the adapter into the base: ckpt merge-lora BASE ADAPTER DST"

PEFT_COMMON = (
    "task_type auto_mapping peft_version base_model_name_or_path revision inference_mode target_modules "
    "exclude_modules layers_to_transform layers_pattern modules_to_save"
)
"""Fields of every configuration of PEFT's. Source: peft 0.21 `config.py`, `tuners/*/config.py`."""
PEFT_LYCORIS = (
    f"{PEFT_COMMON} r alpha rank_pattern alpha_pattern rank_dropout module_dropout use_effective_conv2d init_weights"
)
"""Fields of PEFT's LoHa, which its LoKr has as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What must be known beside a module to compute its change."""

    scale: float = 1.0  # Multiplies what is added to the weight
    transposed: bool = False  # The weight is stored as (in, out): GPT-2's Conv1D, PEFT's fan_in_fan_out
    num_experts: int = 1  # Experts whose factors are stacked (PEFT's target_parameters of a 3-d parameter)
    convention: Convention | None = None  # Whose tensors these are: decides on the axis of a magnitude that fits both
    settings: Mapping[str, Sourced[object]] = field(default_factory=dict)

    def bool_of(self, name: str, default: bool | None = None) -> bool:
        """Return a setting that is true or false; `default` counts only beside a configuration without it."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise UsageError(f"{name} must be true or false, got {value!s}")
        return value

    def number_of(self, name: str, default: float | None = None) -> float:
        """Return a setting that is a number; errors as `bool_of`."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f"{name} must be a number, got {value!r}")
        return float(value)

    def _value(self, name: str, default: object) -> object:
        if name in self.settings:
            return self.settings[name].value
        if default is None or "peft_type" not in self.settings:
            hint = f"give the training run's value: --config {name}=VALUE, or put its adapter_config.json beside it"
            raise UsageError(f"{name} is not known, and the result depends on it", hint=hint)
        return default


PLAIN = Setting()


def geometry(shape: Shape, num_experts: int = 1) -> tuple[int, int]:
    """Return (rows, columns) of a tensor as a matrix; a vector is one column."""
    lead = 2 if num_experts > 1 else 1
    return math.prod(shape[:lead]), math.prod(shape[lead:])


class InexpressibleError(UsageError):
    """What is asked for cannot be said in the factors that the target has."""


def refuse(module: AdapterModule[F], reason: str, hint: str | None = None) -> InexpressibleError:
    """Return the error that `module` cannot be written, and why."""
    kind = "DoRA" if module.is_dora else module.family
    return InexpressibleError(f"{module.path!r} ({kind}) cannot be written: {reason}", where=module.path, hint=hint)


def refuse_roles(modules: Iterable[AdapterModule[F]], roles: Sequence[str], reason: str) -> None:
    """Raise InexpressibleError when a module has one of `roles`."""
    for module in modules:
        for role in roles:
            if role in module.factors:
                what = f"PEFT cannot express the factor {role} of {module.path!r}: {reason}"
                raise InexpressibleError(what, hint=MERGE_HINT)


def missing_halves(pairs: Iterable[tuple[str, str]], roles: Collection[str]) -> list[str]:
    """Return what lacks of pairs of which one half is there."""
    sides = (side for one, two in pairs for side in ((one, two), (two, one)))
    return [other for role, other in sides if role in roles and other not in roles]


class Family:
    """One way in which factors change a weight. What a family does not say, it does not have."""

    name: ClassVar[FamilyName]
    title: ClassVar[str]

    # The names of its tensors

    marker: ClassVar[str] = ""  # What the names of its factors hold, and no other tensor's
    peft_names: ClassVar[Mapping[str, str]] = NONE
    """Role → the end of the name as `PeftModel.save_pretrained` writes it, without the adapter's own name; diffusers
    takes these over for transformers and U-Nets."""
    lycoris_names: ClassVar[Mapping[str, str]] = NONE
    """Role → the end of the name as kohya, LyCORIS and ComfyUI have it; beside them stands an `alpha`."""
    needs_own_paths: ClassVar[bool] = False
    """Do these names prove an adapter only in an ecosystem's own paths (lycoris_…), as a base model may have them?"""
    lycoris_algorithm: ClassVar[str]  # What LyCORIS calls it
    also_read: ClassVar[tuple[tuple[Style, str, str], ...]] = ()
    """(style, pattern, role) of names that are read, and that ckpt writes otherwise."""

    # PEFT's configuration

    peft_type: ClassVar[str | None] = None
    also_types: ClassVar[tuple[str, ...]] = ()  # Further types of PEFT's with the same tensors
    peft_fields: ClassVar[frozenset[str]] = frozenset()
    alpha_field: ClassVar[str] = "alpha"
    init_field: ClassVar[str] = "init_weights"
    peft_checks_bias: ClassVar[bool] = False  # Does PEFT refuse an unknown value of `bias`?
    peft_checks_layers: ClassVar[bool] = False
    """Does PEFT refuse layers_to_transform beside a pattern in target_modules?"""
    peft_checks_rank: ClassVar[bool] = False
    """Are all factors matrices of which a dim is the rank, whatever the weight?"""
    peft_either: ClassVar[tuple[str, str, int] | None] = None
    """Two fields of which exactly one must be set, and the second one's default."""
    peft_switches: ClassVar[tuple[tuple[str, str, str], ...]] = ()
    """(field, role, what it is) of settings that stand for a factor in every module."""

    # What kind of change it is

    is_scaled: ClassVar[bool] = False  # Has it a rank and an alpha, of which the quotient multiplies the change?
    is_rotation: ClassVar[bool] = False
    is_carried: ClassVar[bool] = False  # Has it PEFT's names, bytes and configuration alone? See `carried`
    may_prune: ClassVar[bool] = False  # May a module's rank be 0?
    is_own: ClassVar[bool] = True  # Must it be the only one in a module?
    why_not_a_sum: ClassVar[str | None] = None
    """Why what it adds to a weight depends on the weight; None where it does not."""
    how_as_lora: ClassVar[str] = "{0.title} as LoRA of rank {1}"  # What is done to say a module exactly as a LoRA
    why_not_low_rank: ClassVar[str] = "its factors are full: an exact LoRA would be as large as the weight of shape {}"
    """Why there is no exact LoRA, where `low_rank` has none."""
    joins: ClassVar[bool] = False  # Can modules be put together into one of the same family?
    required: ClassVar[tuple[str, ...]] = ()  # Roles that every module has
    core: ClassVar[str | None] = None  # The role of a Tucker core, without which the shapes tell the weight's
    row_roles: ClassVar[tuple[str, ...]] = ()  # Factors whose first dim is the weight's rows

    def kind(self, module: AdapterModule[F]) -> str:
        """Return what reports and notes call a module: loha, dora-loha."""
        return f"dora-{self.name}" if module.is_dora else self.name

    def why_no_lora(self, shapes: Shapes) -> str | None:
        """Return why the factors change more than a LoRA can; None where they do not."""
        return None

    # What the shapes of the factors tell

    def shape(self, shapes: Shapes) -> Shape | None:
        """Return the shape of the weight, as far as the factors show it: flat ones of a convolution make a matrix."""
        return None

    def matrix(self, shapes: Shapes) -> Matrix | None:
        """Return (rows, columns) of what the factors change, of one expert where there are several."""
        shape = self.shape(shapes)
        return None if shape is None else (shape[0], math.prod(shape[1:]))

    def is_matrix_sure(self, shapes: Shapes) -> bool:
        """Is `matrix` compared with the base's weight wherever an adapter is checked, and not by a merge alone?"""
        return self.core is not None and self.core not in shapes

    def may_be_flat(self, role: str) -> bool:
        """May this factor have one dim?"""
        return role in _FLAT

    def may_be_whole(self, role: str) -> bool:
        """Are its elements whole numbers?"""
        return False

    def is_low_rank_pair(self, roles: Collection[str]) -> bool:
        """Is the change the product of two matrices, as every ecosystem has it?"""
        return False

    def fits_parameter(self, shapes: Shapes, parameter: Shape) -> bool:
        """Can the factors change a parameter of this shape, which may be a stack of experts?"""
        return False

    def hides_kernel(self, roles: Collection[str]) -> bool:
        """Can the factors be those of a linear layer and of a convolution alike?"""
        return False

    def is_unranked(self, roles: Collection[str]) -> bool:
        """Are the factors whole? LyCORIS and ComfyUI scale no such module, whatever its alpha."""
        return False

    def missing(self, roles: Collection[str]) -> list[str]:
        """Return the roles that lack."""
        return [role for role in self.required if role not in roles]

    def rank_dims(self, roles: Collection[str]) -> Mapping[str, int]:
        """Return role → the dim of the factor that is the rank, the surest first."""
        return {}

    def ranked_together(self, roles: Collection[str]) -> tuple[tuple[str, ...], ...]:
        """Return groups of roles that have one rank."""
        return (tuple(roles),)

    def refuse_weight(self, module: AdapterModule[F], shape: Shape) -> None:
        """Raise UsageError for a weight of which the family has no change that weights can express."""

    def is_idle(self, roles: Collection[str], seen: Mapping[str, Values]) -> bool:
        """Do the factors change nothing, by what was seen of their values? There is no magnitude among them."""
        return False

    # PEFT

    def peft_suffix(self, role: str) -> str | None:
        """Return the end of a factor's name in PEFT's file; None where it has none."""
        return self.peft_names.get(role)

    def shared_name(self, role: str) -> str | None:
        """Return the whole name of a factor that all modules share; None for one of the module's own."""
        return None

    def peft_config(self, adapter: Adapter[F], modules: Sequence[AdapterModule[F]], base: Shapes) -> Fields:
        """Return the fields of PEFT's configuration that this family needs beside ranks, alphas and targets.

        One configuration describes all `modules`; `base` is empty when the base model's shapes are not known.
        """
        return {}

    def peft_shapes(self, config: Mapping[str, object], rank: int, weight: Shape) -> Ways:
        """Return the factors that PEFT makes for a module, as its weight's shape allows; () where that is not known.

        `weight` has 2 to 5 dims: a matrix may be a Linear's (out, in), GPT-2's (in, out) or an embedding's (n, dim).
        """
        return ()

    # Arithmetic

    def rank(self, module: Module, num_experts: int = 1) -> int | None:
        """Return r, from the factors where they tell it; None for a family without one."""
        return None

    def scale(self, module: Module, num_experts: int = 1) -> float:
        """Return what the product of the factors is multiplied by; raise UsageError if alpha is not known."""
        return 1.0

    def change(self, module: Module, factors: Factors, shape: Shape, setting: Setting, role: str) -> WeightChange:
        """Return what the factors make of a tensor, for `change_of`; raise KeyError or ValueError if they misfit."""
        raise NotImplementedError

    def low_rank(self, factors: Factors, shape: Shape) -> tuple[Array, Array] | None:
        """Return (out, R) and (R, columns) of which the product is the unscaled change; None when R is not small."""
        return None

    def split(self, module: Module, sizes: Sequence[int], paths: Sequence[str]) -> tuple[Module, ...]:
        """Cut a module by rows into sizes[0], sizes[1], …; raise InexpressibleError if its factors have other rows."""
        from ckpt_tools.adapters.families import factor_rows as rows

        return rows.split(module, self.roles_of_rows(module), sizes, paths)

    def swap_halves(self, module: Module) -> Module:
        """Exchange the upper and the lower half of the rows; raise InexpressibleError if the factors have no halves."""
        from ckpt_tools.adapters.families import factor_rows as rows

        return rows.swap_halves(module, self.roles_of_rows(module))

    def join(self, parts: Mapping[int, Module], sizes: Sequence[int], path: str) -> Module:
        """Put modules of this family together, where it `joins`, into one; parts that lack stay unchanged.

        `parts` are by their position, `sizes` the rows of every part, also of those that lack.
        """
        raise NotImplementedError

    def roles_of_rows(self, module: AdapterModule[F]) -> tuple[str, ...]:
        """Return the factors of a module whose first dim is the weight's rows, or raise InexpressibleError."""
        if not self.row_roles:
            raise refuse(module, "none of its factors has the weight's rows")
        return tuple(role for role in self.row_roles if role in module.factors)


# Families that add a product of their factors, times alpha/r: LoRA, LoHa, LoKr.


class ScaledFamily(Family):
    """A family that adds a product of its factors, multiplied by alpha/r; there may be a magnitude beside it (DoRA)."""

    is_scaled = True

    def rank(self, module: Module, num_experts: int = 1) -> int | None:
        """Return r, from the factors where they tell it."""
        for role, dim in self.rank_dims(module.factors).items():
            if role in module.factors:
                return int(module.factors[role].shape[dim]) // num_experts
        return None if module.rank is None else module.rank.value

    def scale(self, module: Module, num_experts: int = 1) -> float:
        """Return alpha/r, or alpha/√r with rsLoRA; 1 where there is no rank (LoKr of two whole factors)."""
        rank = self.rank(module, num_experts)
        if rank is None:
            return 1.0
        if module.alpha is None:
            what = f"alpha of {module.path} is not known, and the result depends on it"
            raise UsageError(what, hint="pass --alpha VALUE, from the trainer's configuration")
        return module.alpha.value / (math.sqrt(rank) if module.use_rslora else rank)

    def change(self, module: Module, factors: Factors, shape: Shape, setting: Setting, role: str) -> WeightChange:
        """Return the product, with its magnitude around it where there is one."""
        from ckpt_tools.adapters.families import dora

        inner = self.product(factors, shape, self.scale(module, setting.num_experts) * setting.scale, setting)
        if not module.is_dora:
            return inner
        if setting.num_experts > 1:
            raise UsageError(f"{module.path}: DoRA of stacked experts is not defined")
        return dora.decomposed(module, inner, factors, shape, setting)

    def is_idle(self, roles: Collection[str], seen: Mapping[str, Values]) -> bool:
        """A factor is zero."""
        return any(role in seen and seen[role].is_zero for role in self.peft_names)

    def product(self, factors: Factors, shape: Shape, scale: float, setting: Setting) -> WeightChange:
        """Return what is added to the weight, magnitudes apart."""
        raise NotImplementedError
