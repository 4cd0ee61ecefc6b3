"""The same change of a weight, said by another family: exact, with the error that rounding leaves.

Letters: r rank, out and in the dims of the weight, k a kernel's, l and m the dims of LoKr's first factor.

Source: the mixed-product rules (a·b) ⊗ (c·d) = (a ⊗ c)·(b ⊗ d) for Kronecker products, and a·b ⊙ c·d = (a • c)·(b * d)
for Hadamard products, with the row-wise and the column-wise Khatri-Rao product; LyCORIS 4.1.3 `functional/general.py`
for Tucker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from ckpt_tools.adapters.adapter import Shape, Sourced
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.families.changes import change_of
from ckpt_tools.adapters.families.dora import COMPANIONS, without_magnitude
from ckpt_tools.adapters.families.family import Module
from ckpt_tools.errors import UsageError
from ckpt_tools.transfer.arrays import Array, is_finite

_ROWS_AT_ONCE = 512  # Rows of two changes that are compared at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalent:
    """A module that says the same as another one."""

    module: Module  # Factors in float32
    error: float
    """max |Δ before - Δ after| / max |Δ before|, over the elements of the change; 0 when nothing was computed."""
    how: str


def as_lora(module: Module, shape: Shape | None = None, *, svd_rank: int | None = None) -> Equivalent:
    """Return a LoRA without a core that changes the weight as `module` does. A magnitude (DoRA) is kept.

    `module` is a lora, loha or lokr, or with `svd_rank`, the rank of the best approximation, any additive family.
    `shape` is the weight's; convolutions whose factors are stored flat need it.
    """
    family = family_of(module)
    if family.why_not_a_sum is not None:
        raise _refuse(module, family.why_not_a_sum)
    shape = shape or _own_shape(module)
    pair = family.low_rank({name: factor.astype(np.float64) for name, factor in module.factors.items()}, shape)
    if svd_rank is not None and (pair is None or pair[0].shape[1] > svd_rank):
        return by_svd(module, svd_rank, shape)
    if pair is None:
        why = family.why_not_low_rank.format(list(shape))
        raise _refuse(module, why, hint="approximate it with --svd-rank R, which reports the error")
    return _from_pair(module, pair, shape, family.how_as_lora.format(family, pair[0].shape[1]))


def by_svd(module: Module, rank: int, shape: Shape | None = None) -> Equivalent:
    """Return the LoRA of `rank` that comes nearest (in the sum of squares), with its error.

    Memory: a few times the weight.
    """
    why = family_of(module).why_not_a_sum
    if why is not None:
        raise _refuse(module, why)
    if rank < 1:
        raise UsageError(f"a rank of {rank}", where="--svd-rank", hint="1 or more")
    shape = shape or _own_shape(module)
    change = change_of(without_magnitude(module), shape)
    try:
        left, singular, right = np.linalg.svd(change.delta(0, change.rows), full_matrices=False)
    except np.linalg.LinAlgError as error:
        raise _refuse(module, "its singular values cannot be computed: are all elements numbers?") from error
    rank = min(rank, len(singular))
    root = np.sqrt(singular[:rank])
    pair = (left[:, :rank] * root, root[:, None] * right[:rank])
    return _from_pair(module, pair, shape, f"approximated by SVD with rank {rank}", scale=1.0)


def error_between(before: Module, after: Module, shape: Shape | None = None) -> float:
    """Return max |Δ before - Δ after| / max |Δ before|; what they add, magnitudes apart. Infinite where one is."""
    shape = shape or _own_shape(before)
    one, other = change_of(without_magnitude(before), shape), change_of(without_magnitude(after), shape)
    largest = difference = 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, one.rows, _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, one.rows)
            part = one.delta(start, stop)
            gap = float(np.abs(part - other.delta(start, stop)).max())
            if math.isnan(gap):
                return math.inf
            largest = max(largest, float(np.abs(part).max()))
            difference = max(difference, gap)
    return difference / largest if largest else difference


def _from_pair(
    module: Module, pair: tuple[Array, Array], shape: Shape, how: str, scale: float | None = None
) -> Equivalent:
    with np.errstate(over="ignore"):
        left, right = (factor.astype(np.float32, order="C") for factor in pair)
    if not (is_finite(left) and is_finite(right)):
        raise _refuse(module, "products of its factors are too large for 32 bits")
    rank = left.shape[1]
    ones = (1,) * (len(shape) - 2)
    factors = {"A": right.reshape(rank, *shape[1:]), "B": left.reshape(shape[0], rank, *ones)}
    factors |= {name: factor for name, factor in module.factors.items() if name in COMPANIONS}
    if scale is None:
        scale = family_of(module).scale(module)
    source = "scale 1" if module.alpha is None else module.alpha.source
    if scale * rank != (module.alpha.value if module.alpha is not None else rank):
        source = f"{source}, such that alpha/r stays {scale:g}"
    lora = replace(
        module,
        family="lora",
        factors=factors,
        rank=Sourced(rank, how),
        alpha=Sourced(scale * rank, source),
        use_rslora=False,
    )
    return Equivalent(module=lora, error=error_between(module, lora, shape), how=how)


def _own_shape(module: Module) -> Shape:
    """Return the weight's shape as far as the factors tell: flat factors make a matrix."""
    shape = family_of(module).shape(module.shapes)
    if shape is None:
        raise _refuse(module, "its factors do not show the shape of the weight")
    return shape


def _refuse(module: Module, why: str, hint: str | None = None) -> UsageError:
    what = f"{module.path} ({module.family}) cannot be written as asked: {why}"
    return UsageError(what, where=module.path, hint=hint or "ckpt merge-lora applies every family to the base itself")
