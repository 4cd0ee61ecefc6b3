"""DoRA: a magnitude beside the factors of LoRA, LoHa or LoKr, m·(W + Δ)/‖W + Δ‖ by row or by column.

Role: magnitude (out,), (out, 1, …), (1, out, 1, …) or (1, in, 1, …).

Source: peft 0.21 `tuners/lora/dora.py`; lycoris-lora 4.1 `modules/*.py` (`wd_on_out`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ckpt_tools.adapters.adapter import AdapterModule, F, Shape
from ckpt_tools.adapters.families.family import MERGE_HINT, PLAIN, Factors, Setting
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    from ckpt_tools.adapters.families.changes import WeightChange

COMPANIONS = ("magnitude", "B_bias")  # Factors that are not of what is added to the weight


def without_magnitude(module: AdapterModule[F]) -> AdapterModule[F]:
    """Return the module with the factors alone of what is added to the weight."""
    return module.with_factors({role: factor for role, factor in module.factors.items() if role not in COMPANIONS})


def is_by_column(module: AdapterModule[F], magnitude: Shape, weight: Shape, setting: Setting = PLAIN) -> bool:
    """Return True if a magnitude belongs to the columns (dim 1 of the weight) instead of the rows.

    PEFT's, and diffusers', belong to the outputs: (out,), or (1, out, 1, 1) of a convolution. LyCORIS' are (out, 1, …),
    or (1, in, 1, …) without wd_on_out. Raise UsageError for (1, n, 1, 1) of a square convolution of unknown origin.
    """
    if len(magnitude) == 1:
        return setting.transposed or "A_embedding" in module.factors
    if magnitude[0] != 1 or weight[0] == 1:
        return False
    if len(magnitude) == 2 or magnitude[1] != weight[0]:
        return True
    if magnitude[1] != weight[1] or setting.convention in ("peft", "diffusers"):
        return False
    if setting.convention is None:
        raise UsageError(f"the magnitude of {module.path} fits both inputs and outputs: its axis is not known")
    return True


def decomposed(
    module: AdapterModule[F], inner: WeightChange, factors: Factors, weight: Shape, setting: Setting
) -> WeightChange:
    """Return a change with the module's magnitude around it; raise ValueError for a magnitude of another length."""
    from ckpt_tools.adapters.families.changes import Decomposed

    magnitude = factors["magnitude"]
    by_column = is_by_column(module, magnitude.shape, weight, setting)
    if magnitude.size != (weight[1] if by_column else weight[0]):
        raise ValueError("the magnitude has the wrong length")
    return Decomposed(inner, magnitude, by_column=by_column, num_spatial=math.prod(weight[2:]) if by_column else 1)


def peft_shape(path: str, magnitude: Shape) -> Shape:
    """Return the shape that PEFT gives a magnitude: LyCORIS and others write the same one with other dims."""
    if len(magnitude) < 2:
        return magnitude
    length = max(magnitude)
    if sum(size != 1 for size in magnitude) > 1:
        raise UsageError(f"the magnitude has the shape {list(magnitude)}", where=path)
    kernel = len(magnitude) - 2
    if magnitude[0] == 1 and magnitude[1] != 1 and kernel == 0:
        what = "its magnitudes are norms over the columns of the weight, and PEFT's over the rows"
        raise UsageError(what, where=path, hint=MERGE_HINT)
    return (1, length, *(1,) * kernel) if kernel else (length,)
