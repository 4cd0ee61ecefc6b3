"""How many rows and columns the weight of a module has, as far as its factors tell."""

from __future__ import annotations

import re
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


_KERNELS = (
    (r"(?:.*\.)?(?:conv_in|conv_out|conv1|conv2|(?:down|up)samplers\.\d+\.conv)", 3),
    (r"(?:.*\.)?conv_shortcut", 1),
    (r"input_blocks\.0\.0|out\.2|.*\.in_layers\.2|.*\.out_layers\.3|.*\.op|output_blocks\.\d+\.\d+\.conv", 3),
    (r".*\.skip_connection", 1),
)
"""Convolutions of SDXL's UNet by diffusers' names and the authors' → size of the kernel.
Source: diffusers 0.42 `models/resnet.py`, `models/unets/unet_2d_condition.py`; generative-models `openaimodel.py`."""


def conv_shape(module: AdapterModule[S]) -> tuple[int, ...] | None:
    """Return (out, in, k, k) of a convolution's weight where its factors are flat and do not show it, else None."""
    size = next((size for pattern, size in _KERNELS if re.fullmatch(pattern, module.path)), None)
    rows, columns = rows_of(module), columns_of(module)
    is_flat = all(len(factor.shape) <= 2 for factor in module.factors.values())
    if size is None or rows is None or columns is None or not is_flat or columns % (size * size):
        return None
    return rows, columns // (size * size), size, size


def _dim(shape: Sequence[int], dim: int) -> int | None:
    return shape[dim] if len(shape) > dim else None
