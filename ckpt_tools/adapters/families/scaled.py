"""Families that add a product of their factors, times alpha/r: LoRA, LoHa, LoKr."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from ckpt_tools.adapters.adapter import Shape
from ckpt_tools.adapters.families.family import Factors, Family, Module, Setting
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    from ckpt_tools.adapters.checks.values import Values
    from ckpt_tools.adapters.families.changes import Change


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
            raise UsageError(
                f"alpha of {module.path} is not known, and the result depends on it",
                hint="give it with --alpha; the trainer's configuration has it",
            )
        return module.alpha.value / (math.sqrt(rank) if module.use_rslora else rank)

    def change(self, module: Module, factors: Factors, shape: Shape, setting: Setting, role: str) -> Change:
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

    def product(self, factors: Factors, shape: Shape, scale: float, setting: Setting) -> Change:
        """Return what is added to the weight, magnitudes apart."""
        raise NotImplementedError
