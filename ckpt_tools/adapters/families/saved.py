"""Whole tensors that replace the base's: PEFT's modules_to_save, trained biases.

Roles: weight, bias, …: the parameter's name below the path. Such a module may stand beside another one with the same
path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tools.adapters.adapter import Shape
from ckpt_tools.adapters.families.family import Factors, Family, Module, Setting, geometry
from ckpt_tools.adapters.families.full import of_shape

if TYPE_CHECKING:
    from ckpt_tools.adapters.families.changes import Change


class Saved(Family):
    """No change of a weight, but another one in its place."""

    name = "saved"
    title = "whole tensor"
    is_own = False
    why_not_a_sum = "it replaces the weight: what it adds depends on the base"

    def change(self, module: Module, factors: Factors, shape: Shape, setting: Setting, role: str) -> Change:
        """Return the tensor."""
        from ckpt_tools.adapters.families.changes import Replacement

        return Replacement(of_shape(factors[role], shape).reshape(geometry(shape, setting.num_experts)))
