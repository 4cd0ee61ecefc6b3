"""How many rows and columns the weight of a module has, as far as its factors tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from ckpt_tools.adapters.adapter import AdapterModule


class Shaped(Protocol):
    """A `TensorEntry` or an `Array`."""

    @property
    def shape(self) -> Sequence[int]:
        """Its dims."""


S = TypeVar("S", bound=Shaped)


def rows_of(module: AdapterModule[S]) -> int | None:
    """Return out, where the factors tell."""
    shapes = {role: tuple(factor.shape) for role, factor in module.factors.items()}
    if not all(shapes.values()):
        return None
    if module.family == "lora":
        return shapes["B"][0] if "B" in shapes else None
    if module.family == "loha" and "w1_a" in shapes:
        return _dim(shapes["w1_a"], 1 if "t1" in shapes else 0)
    if module.family == "lokr":
        left = shapes.get("w1", shapes.get("w1_a"))
        right = shapes["w2"][0] if "w2" in shapes else _dim(shapes.get("w2_a", ()), 1 if "t2" in shapes else 0)
        return None if left is None or right is None else left[0] * right
    if module.family == "full":
        return next((shapes[role][0] for role in ("diff", "diff_b") if role in shapes), None)
    return None


def columns_of(module: AdapterModule[S]) -> int | None:
    """Return in (without a kernel), where the factors tell."""
    shapes = {role: tuple(factor.shape) for role, factor in module.factors.items()}
    if module.family == "lora":
        return _dim(shapes.get("A", ()), 1)
    if module.family == "loha":
        return _dim(shapes.get("w1_b", ()), 1)
    if module.family == "lokr":
        left = _dim(shapes.get("w1", shapes.get("w1_b", ())), 1)
        right = _dim(shapes.get("w2", shapes.get("w2_b", ())), 1)
        return None if left is None or right is None else left * right
    if module.family == "full":
        return _dim(shapes.get("diff", ()), 1)
    return None


def _dim(shape: Sequence[int], dim: int) -> int | None:
    return shape[dim] if len(shape) > dim else None
