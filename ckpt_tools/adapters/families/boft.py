"""BOFT: the weight times a product of butterfly rotations, PEFT's of the inputs or LyCORIS' of the outputs.

Roles: R (m, n, b, b) and s (out, 1) as PEFT has it; blocks (m, n, b, b) and rescale (out, …) as LyCORIS has it, whose
alpha is a constraint. Letters: m butterfly factors, n blocks of size b, out the rows of the weight.

Source: peft 0.21 `tuners/boft/{config,layer}.py`; lycoris-lora 4.1 `modules/boft.py`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from ckpt_tools.adapters.adapter import Adapter, AdapterModule, F, Fields, Shape, Shapes, Sourced
from ckpt_tools.adapters.families.family import PEFT_COMMON, Factors, Matrix, Module, Setting, Ways, refuse_roles
from ckpt_tools.adapters.families.oft import (
    LYCORIS_ROLES,
    WHY_NOT_PEFT,
    RotatingFamily,
    no_common_blocks,
    peft_block_size,
    peft_inputs,
)
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    from ckpt_tools.adapters.families.changes import Change


class Boft(RotatingFamily):
    """A product of rotations."""

    name = "boft"
    title = "BOFT"
    lycoris_algorithm = "boft"
    marker = "boft_"
    peft_names: ClassVar = {"R": "boft_R", "s": "boft_s"}
    peft_type = "BOFT"
    peft_fields = frozenset(
        f"{PEFT_COMMON} boft_block_size boft_block_num boft_n_butterfly_factor boft_dropout fan_in_fan_out bias "
        "init_weights".split()
    )
    peft_either = ("boft_block_num", "boft_block_size", 4)

    def matrix(self, shapes: Shapes) -> Matrix | None:
        """Return what the blocks cover."""
        if "blocks" in shapes:
            return super().matrix(shapes)
        if "R" not in shapes:
            return None
        return (math.prod(shapes["s"]) if "s" in shapes else None), math.prod(shapes["R"][1:3])

    def missing(self, roles: Collection[str]) -> list[str]:
        """The rotations, and PEFT's scale."""
        return [] if "blocks" in roles else [role for role in ("R", "s") if role not in roles]

    # PEFT

    def peft_config(self, adapter: Adapter[F], modules: Sequence[AdapterModule[F]], base: Shapes) -> Fields:
        """Return the number of factors, and the size or the number of the blocks."""
        refuse_roles(modules, LYCORIS_ROLES, WHY_NOT_PEFT)
        rotations = {module.shapes.get("R", ()) for module in modules}
        if any(len(shape) != 4 or shape[2] != shape[3] for shape in rotations):
            raise UsageError("R of BOFT must have four dims, the last two equal")
        factors, sizes, counts = ({shape[dim] for shape in rotations} for dim in (0, 2, 1))
        if len(factors) > 1 or (len(sizes) > 1 and len(counts) > 1):
            raise no_common_blocks()
        by_size = len(sizes) == 1
        return {
            "boft_n_butterfly_factor": Sourced(factors.pop(), "first dim of R"),
            "boft_block_size": Sourced(
                sizes.pop() if by_size else 0, "last dim of R" if by_size else "the number is set"
            ),
            "boft_block_num": Sourced(
                0 if by_size else counts.pop(), "the size is set" if by_size else "second dim of R"
            ),
        }

    def peft_shapes(self, config: Mapping[str, object], rank: int, weight: Shape) -> Ways:
        """Source: peft 0.21 `tuners/boft/layer.py`, `update_layer`."""
        inputs = peft_inputs(weight)
        size = peft_block_size(inputs, config.get("boft_block_size", 4), config.get("boft_block_num", 0))
        if size is None:
            return ()
        factor = config.get("boft_n_butterfly_factor", 1)
        scale = (1, weight[0]) if len(weight) > 2 else (weight[0], 1)
        numbers = {1, factor} if isinstance(factor, int) else {1}  # without its CUDA extension PEFT takes 1
        return tuple({"R": (number, inputs // size, size, size), "s": scale} for number in sorted(numbers))

    # Arithmetic

    def inputs_rotated(self, module: Module, factors: Factors, rows: int, columns: int, setting: Setting) -> Change:
        """Return the rotation, and PEFT's scale of the rows."""
        from ckpt_tools.adapters.families.changes import InputRotation

        stored = factors["R"]
        if stored.shape[1] * stored.shape[2] != columns:
            raise ValueError("the blocks do not cover the inputs")
        row_scale = factors["s"].reshape(-1) if "s" in factors else None
        if row_scale is not None and len(row_scale) != rows:
            raise ValueError("boft_s has the wrong length")
        return InputRotation(rows, columns, stored, row_scale)
