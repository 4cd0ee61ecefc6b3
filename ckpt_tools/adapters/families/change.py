"""What an adapter makes of a weight, for every family (float32).

A weight is looked at as a matrix: `rows` × `columns`. Rows are the dims that a factor has one row for (out of a linear
layer or a convolution, num_embeddings of an embedding, experts × out of a stack), columns all others.
"""

from __future__ import annotations

import numpy as np

from ckpt_tools.adapters.adapter import Shape
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.families.changes import Change, Decomposed, Replacement
from ckpt_tools.adapters.families.family import PLAIN, Module, Setting, geometry
from ckpt_tools.errors import UnreadableError, UsageError


def change_of(module: Module, shape: Shape, setting: Setting = PLAIN, role: str = "weight") -> Change:
    """Return what `module` makes of a tensor of `shape`.

    Args:
        module: Its factors may have any floating dtype; they are taken as float32.
        shape: Of the tensor in the base.
        setting: What else must be known.
        role: "weight" for the adapted parameter, "bias" for the bias beside it; for whole tensors (saved) their role.

    Raises:
        UsageError: Something that the result depends on is not known, or cannot be done for this family.
        UnreadableError: The factors do not go together, or make another shape.
    """
    whose = module.path
    factors = module.factors
    try:
        with np.errstate(all="ignore"):  # whether numbers are finite is looked at in the result
            factors = {name: factor.astype(np.float32) for name, factor in factors.items()}
            change = family_of(module).change(module, factors, shape, setting, role)
    except KeyError as error:
        raise UnreadableError(f"{whose} lacks the factor {error.args[0]}", where=whose) from error
    except (ValueError, IndexError, np.linalg.LinAlgError) as error:
        shapes = ", ".join(f"{name} {list(factor.shape)}" for name, factor in factors.items())
        raise UnreadableError(f"the factors of {whose} do not go together: {shapes}", where=whose) from error
    if (change.rows, change.columns) != geometry(shape, setting.num_experts):
        made = f"{change.rows} × {change.columns}"
        raise UnreadableError(f"{whose} makes {made} elements of a tensor of shape {list(shape)}", where=whose)
    if setting.scale != 1.0 and not change.is_additive and not isinstance(change, Replacement):
        what = "a magnitude (DoRA)" if isinstance(change, Decomposed) else "a rotation"
        raise UsageError(
            f"{whose} is {what}, of which a multiple is not defined", where=whose, hint="leave out --scale"
        )
    return change
