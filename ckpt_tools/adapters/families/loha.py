"""LoHa: W + s·(w1_a·w1_b ⊙ w2_a·w2_b).

Roles: w1_a (out, r), w1_b (r, in), w2_a and w2_b alike; with a Tucker core t1, t2 (r, r, k, k) the halves are (r, out)
and (r, in); magnitude (see `dora`). Letters: r rank, out and in the dims of the weight, k a kernel's.

Source: peft 0.21 `tuners/loha/{config,layer}.py`; lycoris-lora 4.1 `modules/loha.py`, its forward (merge_to applies
alpha/r twice).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from ckpt_tools.adapters.adapter import Adapter, AdapterModule, F, Fields, Shape, Shapes, Sourced
from ckpt_tools.adapters.families.family import (
    PEFT_LYCORIS,
    Factors,
    Module,
    ScaledFamily,
    Ways,
    missing_halves,
    refuse,
    refuse_roles,
)

if TYPE_CHECKING:
    from ckpt_tools.adapters.families.changes import WeightChange
    from ckpt_tools.adapters.families.family import Setting
    from ckpt_tools.transfer.arrays import Array

_NAMES = {role: f"hada_{role}" for role in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")}


class Loha(ScaledFamily):
    """A Hadamard product of two products."""

    name = "loha"
    title = "LoHa"
    lycoris_algorithm = "loha"
    marker = "hada_"
    peft_names: ClassVar = _NAMES
    lycoris_names: ClassVar = {**_NAMES, "magnitude": "dora_scale"}
    peft_type = "LOHA"
    peft_fields = frozenset(PEFT_LYCORIS.split())
    core = "t1"
    row_roles = ("w1_a", "w2_a", "magnitude")

    def shape(self, shapes: Shapes) -> Shape | None:
        """Return (out, in[, k, k]); a kernel shows in a core alone."""
        left, right = shapes.get("w1_a", ()), shapes.get("w1_b", ())
        if len(left) < 2 or len(right) < 2:
            return None
        return (left[1], right[1], *shapes["t1"][2:]) if "t1" in shapes else (left[0], *right[1:])

    def hides_kernel(self, roles: Collection[str]) -> bool:
        """Without a core."""
        return "t1" not in roles

    def missing(self, roles: Collection[str]) -> list[str]:
        """Half a pair, or both halves of one."""
        lone = missing_halves((("w1_a", "w1_b"), ("w2_a", "w2_b")), roles)
        return [*lone, *(f"{half}_a" for half in ("w1", "w2") if not {f"{half}_a", f"{half}_b"} & set(roles))]

    def rank_dims(self, roles: Collection[str]) -> Mapping[str, int]:
        """Both halves have one rank."""
        side = 0 if {"t1", "t2"} & set(roles) else 1  # with a core, both halves are (r, …)
        return {"w1_b": 0, "w2_b": 0, "w1_a": side, "w2_a": side, "t1": 0, "t2": 0}

    # PEFT

    def peft_config(self, adapter: Adapter[F], modules: Sequence[AdapterModule[F]], base: Shapes) -> Fields:
        """Return use_effective_conv2d."""
        return effective_conv2d(adapter, modules)

    def peft_shapes(self, config: Mapping[str, object], rank: int, weight: Shape) -> Ways:
        """Source: peft 0.21 `tuners/loha/layer.py`, `create_adapter_parameters`."""
        out, inputs, *kernel = weight
        half: dict[str, Shape | None] = {"w{}_a": (out, rank), "w{}_b": (rank, inputs * math.prod(kernel))}
        if (core := peft_core(config, rank, kernel)) is not None:
            half = {"w{}_a": (rank, out), "w{}_b": (rank, inputs), "t{}": core}
        return ({role.format(number): shape for number in (1, 2) for role, shape in half.items()},)

    # Arithmetic

    def product(self, factors: Factors, shape: Shape, scale: float, setting: Setting) -> WeightChange:
        """Return the product of the halves' products."""
        from ckpt_tools.adapters.families.changes import Hadamard

        return Hadamard((half(factors, 1), half(factors, 2)), scale)

    def low_rank(self, factors: Factors, shape: Shape) -> tuple[Array, Array]:
        """Return the row-wise and the column-wise Khatri-Rao product: a·b ⊙ c·d = (a • c)·(b * d)."""
        (left1, right1), (left2, right2) = half(factors, 1), half(factors, 2)
        left = (left1[:, :, None] * left2[:, None, :]).reshape(left1.shape[0], -1)
        right = (right1[:, None, :] * right2[None, :, :]).reshape(-1, right1.shape[1])
        return left, right

    def split(self, module: Module, sizes: Sequence[int], paths: Sequence[str]) -> tuple[Module, ...]:
        """Cut the left factors."""
        if "t1" in module.factors:
            raise refuse(module, "a Tucker decomposition has no rows to split")
        return super().split(module, sizes, paths)


def effective_conv2d(adapter: Adapter[F], modules: Sequence[AdapterModule[F]]) -> Fields:
    """Return use_effective_conv2d, of PEFT's LoHa and LoKr: is there a core?

    A configuration may say more than the tensors only where these leave it open.
    """
    refuse_roles(modules, ("magnitude",), "PEFT supports DoRA only for LoRA")
    has_core = any({"t1", "t2"} & module.factors.keys() for module in modules)
    known = adapter.settings.get("use_effective_conv2d")
    is_set = has_core or bool(known and known.value is True)
    return {"use_effective_conv2d": Sourced(is_set, "Tucker factors" if has_core else "no Tucker factors")}


def peft_core(config: Mapping[str, object], rank: int, kernel: Sequence[int]) -> Shape | None:
    """Return the shape of the core that PEFT makes for a kernel; None where it makes none."""
    if not kernel or not config.get("use_effective_conv2d") or math.prod(kernel) == 1:
        return None
    return (rank, rank, *kernel) if len(kernel) > 1 else (rank, rank, *kernel, 1)


def with_core(core: Array, left: Array, right: Array) -> tuple[Array, Array]:
    """Return (out, r) and (r, columns) of a product with a core (r, r, k, k) between the two, which are (r, …)."""
    import numpy as np

    tucker = np.einsum("ij...,jr->ir...", core, right)
    return left.T, tucker.reshape(tucker.shape[0], -1)


def half(factors: Factors, number: int) -> tuple[Array, Array]:
    """Return (rows, r) and (r, columns) of one of two factored halves, with or without a core."""
    left, right = factors[f"w{number}_a"], factors[f"w{number}_b"]
    if f"t{number}" in factors:
        return with_core(factors[f"t{number}"], left, right)
    return left, right.reshape(right.shape[0], -1)
