"""GLoRA of LyCORIS: W + s·(W·a1·a2 + b1·b2), the kernel of W apart in the first product.

Roles: a1 (in, r[, 1, 1]), a2 (r, in[, 1, 1]), b1 (out, r[, 1, 1]), b2 (r, in[, k, k]). Letters: r rank, s the scale
alpha/r, out and in the dims of the weight, k a kernel's. PEFT's type of the same name is another one: it is carried.

Source: lycoris-lora 4.1.3 `modules/glora.py`; ComfyUI, comfy/weight_adapter/glora.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, ClassVar

from ckpt_tools.adapters.adapter import Shape, Shapes
from ckpt_tools.adapters.families.family import Factors, ScaledFamily, Setting

if TYPE_CHECKING:
    from ckpt_tools.adapters.families.changes import WeightChange
    from ckpt_tools.adapters.integrity import Values
    from ckpt_tools.transfer.arrays import Array

_ROLES = ("a1", "a2", "b1", "b2")


class Glora(ScaledFamily):
    """A multiple of the weight, and a low rank."""

    name = "glora"
    title = "GLoRA"
    lycoris_algorithm = "glora"
    marker = ".a1.weight"
    lycoris_names: ClassVar = {role: f"{role}.weight" for role in _ROLES}
    needs_own_paths = True
    why_not_a_sum = "it adds a multiple of the base's weight"
    required = _ROLES
    row_roles = ("b1",)

    def shape(self, shapes: Shapes) -> Shape | None:
        """Return (out, in[, k, k])."""
        return (shapes["b1"][0], *shapes["b2"][1:]) if {"b1", "b2"} <= shapes.keys() and shapes["b1"] else None

    def rank_dims(self, roles: Collection[str]) -> Mapping[str, int]:
        """Inside of both products."""
        return {"a2": 0, "a1": 1, "b2": 0, "b1": 1}

    def is_idle(self, roles: Collection[str], seen: Mapping[str, Values]) -> bool:
        """Both products are zero."""
        pairs = (("a1", "a2"), ("b1", "b2"))
        return all(any(role in seen and seen[role].is_zero for role in pair) for pair in pairs)

    def product(self, factors: Factors, shape: Shape, scale: float, setting: Setting) -> WeightChange:
        """Return both products, of rows as they come."""
        import numpy as np

        from ckpt_tools.adapters.families.changes import Turned

        a1, a2, b1, b2 = (factors[role].reshape(len(factors[role]), -1) for role in _ROLES)
        inputs, rows, columns = len(a1), len(b1), b2.shape[1]

        def turn(weight: Array, start: int) -> Array:
            spatial = weight.reshape(len(weight), inputs, -1)
            own: Array = np.einsum("oik,ir,rj->ojk", spatial, a1, a2, optimize=True).reshape(weight.shape)
            new: Array = weight + (own + b1[start : start + len(weight)] @ b2) * np.float32(scale)
            return new

        return Turned(rows, columns, turn)
