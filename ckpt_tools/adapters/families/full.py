"""Full differences: W + s·diff, as LyCORIS writes them beside its other families.

Roles: diff (the weight's shape), diff_b (out,).

Source: lycoris-lora 4.1 `modules/full.py`, `modules/norms.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from ckpt_tools.adapters.adapter import Shape, Shapes
from ckpt_tools.adapters.families.family import Factors, Family, Module, Setting, geometry

if TYPE_CHECKING:
    from ckpt_tools.adapters.families.changes import WeightChange
    from ckpt_tools.adapters.integrity import Values
    from ckpt_tools.transfer.arrays import Array


class Full(Family):
    """A difference of whole tensors."""

    name = "full"
    title = "full difference"
    lycoris_algorithm = "full"
    lycoris_names: ClassVar = {"diff": "diff", "diff_b": "diff_b"}
    is_own = False
    why_not_low_rank = "it is a full difference, which no LoRA smaller than the weight can reliably express"
    joins = True
    row_roles = ("diff", "diff_b")

    def why_no_lora(self, shapes: Shapes) -> str | None:
        """Of norms and biases."""
        if len(shapes.get("diff", ())) < 2:
            return "it changes a bias or a norm, which a LoRA cannot do"
        return "it also changes the bias, which a LoRA cannot do" if "diff_b" in shapes else None

    def shape(self, shapes: Shapes) -> Shape | None:
        """Return that of the difference; of a bias alone the rows."""
        return shapes.get("diff", shapes.get("diff_b")) or None

    def is_matrix_sure(self, shapes: Shapes) -> bool:
        """Not of norms and biases."""
        return len(shapes.get("diff", ())) > 1

    def is_idle(self, roles: Collection[str], seen: Mapping[str, Values]) -> bool:
        """Every difference is zero."""
        return all(values.is_zero for values in seen.values()) and seen.keys() == set(roles)

    def change(self, module: Module, factors: Factors, shape: Shape, setting: Setting, role: str) -> WeightChange:
        """Return the difference."""
        from ckpt_tools.adapters.families.changes import WeightDifference

        if role == "bias":
            return WeightDifference(factors["diff_b"].reshape(-1, 1), setting.scale)
        diff = of_shape(factors["diff"], shape)
        return WeightDifference(diff.reshape(geometry(shape, setting.num_experts)), setting.scale)

    def join(self, parts: Mapping[int, Module], sizes: Sequence[int], path: str) -> Module:
        """Stack the differences; those of parts that lack are zero."""
        import numpy as np

        from ckpt_tools.adapters.families.factor_rows import stack

        factors: dict[str, Array] = {}
        for role in self.row_roles:
            like = next((part.factors[role] for part in parts.values() if role in part.factors), None)
            if like is None:
                continue
            factors[role] = stack(
                [
                    parts[i].factors[role]
                    if i in parts and role in parts[i].factors
                    else np.zeros((size, *like.shape[1:]), like.dtype)
                    for i, size in enumerate(sizes)
                ]
            )
        return replace(next(iter(parts.values())), path=path, factors=factors)


def of_shape(tensor: Array, shape: Shape) -> Array:
    """Return the tensor; raise ValueError if it has another shape."""
    if tensor.shape != shape:
        raise ValueError(f"{tensor.shape} instead of {shape}")
    return tensor


# Whole tensors that replace the base's: PEFT's modules_to_save, trained biases.


class Saved(Family):
    """No change of a weight, but another one in its place."""

    name = "saved"
    title = "whole tensor"
    is_own = False
    why_not_a_sum = "it replaces the weight: its change depends on the base's weights"

    def change(self, module: Module, factors: Factors, shape: Shape, setting: Setting, role: str) -> WeightChange:
        """Return the tensor."""
        from ckpt_tools.adapters.families.changes import Replacement

        return Replacement(of_shape(factors[role], shape).reshape(geometry(shape, setting.num_experts)))
