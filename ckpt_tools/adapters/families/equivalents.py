"""The same change of a weight, said by another family: exact, with the error that rounding leaves.

Letters: r rank, out and in the dims of the weight, k a kernel's, l and m the dims of LoKr's first factor.

Source: the mixed-product rules (a·b) ⊗ (c·d) = (a ⊗ c)·(b ⊗ d) for Kronecker products, and a·b ⊙ c·d = (a • c)·(b * d)
for Hadamard products, with the row-wise and the column-wise Khatri-Rao product; LyCORIS 4.1.3 `functional/general.py`
for Tucker.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ckpt_tools.adapters.adapter import Sourced
from ckpt_tools.adapters.families.change import (
    Module,
    change_of,
    hadamard_pair,
    kronecker_second,
    low_rank_pair,
    rank_of,
    scale_of,
)
from ckpt_tools.errors import UsageError
from ckpt_tools.moving.arrays import Array, is_finite
from ckpt_tools.text import escape_name

_ROWS_AT_ONCE = 512
"""Rows of two changes that are compared at once."""
_NOT_A_SUM: Mapping[str, str] = {
    "oft": "it rotates the weight: what it adds depends on the base",
    "boft": "it rotates the weight: what it adds depends on the base",
    "saved": "it replaces the weight: what it adds depends on the base",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalent:
    """A module that says the same as another one."""

    module: Module
    """Factors in float32."""
    error: float
    """max |Δ before - Δ after| / max |Δ before|, over the elements of the change; 0 when nothing was computed."""
    how: str
    """For people: what was done."""


def as_lora(module: Module, shape: tuple[int, ...] | None = None, *, svd_rank: int | None = None) -> Equivalent:
    """Return a LoRA without a core that changes the weight as `module` does. A magnitude (DoRA) is kept.

    Args:
        module: lora (with or without a Tucker core), loha or lokr; any additive family with `svd_rank`.
        shape: Of the weight; needed for convolutions whose factors are stored flat.
        svd_rank: When nothing exact and smaller than the weight exists: the rank of the best approximation.

    Raises:
        UsageError: There is none, with the reason.
    """
    if module.family == "lora" and "mid" not in module.factors:
        return Equivalent(module=module, error=0.0, how="as it is")
    if module.family in _NOT_A_SUM:
        raise _refuse(module, _NOT_A_SUM[module.family])
    shape = shape or _own_shape(module)
    pair = _exact_pair(module, shape)
    if pair is None and svd_rank is None:
        raise _refuse(module, _reason(module, shape), hint="--svd-rank R approximates it, and reports the error")
    if pair is None or (svd_rank is not None and pair[0].shape[1] > svd_rank):
        if svd_rank is None:
            raise _refuse(module, _reason(module, shape))
        return by_svd(module, svd_rank, shape)
    return _from_pair(module, pair, shape, _how(module, pair[0].shape[1]))


def by_svd(module: Module, rank: int, shape: tuple[int, ...] | None = None) -> Equivalent:
    """Return the LoRA of `rank` that comes nearest (in the sum of squares), with its error.

    Memory: a few times the weight.

    Raises:
        UsageError: A family that does not add to the weight, or a rank below 1.
    """
    if module.family in _NOT_A_SUM:
        raise _refuse(module, _NOT_A_SUM[module.family])
    if rank < 1:
        raise UsageError(f"a rank of {rank}", where="--svd-rank", hint="1 or more")
    shape = shape or _own_shape(module)
    change = change_of(_undecomposed(module), shape)
    try:
        left, singular, right = np.linalg.svd(change.delta(0, change.rows), full_matrices=False)
    except np.linalg.LinAlgError as error:
        raise _refuse(module, "its singular values cannot be computed: are all elements numbers?") from error
    rank = min(rank, len(singular))
    root = np.sqrt(singular[:rank])
    pair = (left[:, :rank] * root, root[:, None] * right[:rank])
    return _from_pair(module, pair, shape, f"approximated by SVD with rank {rank}", scale=1.0)


def with_plain_alpha(module: Module) -> Equivalent:
    """Return the module with alpha such that alpha/r is its scale, for readers that know no rsLoRA. Nothing is lost.

    Raises:
        UsageError: Its alpha is not known.
    """
    rank = rank_of(module)
    if rank is None or not module.use_rslora:
        return Equivalent(module=module, error=0.0, how="as it is")
    source = "" if module.alpha is None else f"{module.alpha.source}, times √r"
    plain = replace(module, alpha=Sourced(scale_of(module) * rank, source), use_rslora=False)
    return Equivalent(module=plain, error=0.0, how="alpha/√r written as a larger alpha")


def error_between(before: Module, after: Module, shape: tuple[int, ...] | None = None) -> float:
    """Return max |Δ before - Δ after| / max |Δ before|; what they add, magnitudes apart. Infinite where one is."""
    shape = shape or _own_shape(before)
    one, other = change_of(_undecomposed(before), shape), change_of(_undecomposed(after), shape)
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


def _exact_pair(module: Module, shape: tuple[int, ...]) -> tuple[Array, Array] | None:
    """Return (out, R) and (R, columns) of which the product is the unscaled change; None when R would not be small."""
    factors = {name: factor.astype(np.float64) for name, factor in module.factors.items()}
    if module.family == "lora":
        return low_rank_pair(factors)
    if module.family == "loha":
        (left1, right1), (left2, right2) = hadamard_pair(factors, 1), hadamard_pair(factors, 2)
        left = (left1[:, :, None] * left2[:, None, :]).reshape(left1.shape[0], -1)
        right = (right1[:, None, :] * right2[None, :, :]).reshape(-1, right1.shape[1])
        return left, right
    if module.family != "lokr":
        return None
    (left1, right1), (left2, right2) = _halves(factors, 1), _halves(factors, 2)
    rank, columns = left1.shape[1] * left2.shape[1], math.prod(shape[1:])
    if {"w1", "w2"} <= factors.keys() and rank * (shape[0] + columns) >= shape[0] * columns:
        return None
    return np.kron(left1, left2), np.kron(right1, right2)


def _halves(factors: Mapping[str, Array], number: int) -> tuple[Array, Array]:
    """Return two matrices of which the product is one half of a LoKr, the inner dim as small as can be."""
    whole = factors.get(f"w{number}")
    if whole is None:
        if number == 2:
            return kronecker_second(factors)
        return factors["w1_a"], factors["w1_b"]
    matrix = whole.reshape(whole.shape[0], -1)
    rows, columns = matrix.shape
    if rows <= columns:
        return np.eye(rows, dtype=matrix.dtype), matrix
    return matrix, np.eye(columns, dtype=matrix.dtype)


def _from_pair(
    module: Module, pair: tuple[Array, Array], shape: tuple[int, ...], how: str, scale: float | None = None
) -> Equivalent:
    with np.errstate(over="ignore"):
        left, right = (factor.astype(np.float32, order="C") for factor in pair)
    if not (is_finite(left) and is_finite(right)):
        raise _refuse(module, "products of its factors are too large for 32 bits")
    rank = left.shape[1]
    ones = (1,) * (len(shape) - 2)
    factors = {"A": right.reshape(rank, *shape[1:]), "B": left.reshape(shape[0], rank, *ones)}
    factors |= {name: factor for name, factor in module.factors.items() if name in ("magnitude", "B_bias")}
    if scale is None:
        scale = scale_of(module)
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


def _own_shape(module: Module) -> tuple[int, ...]:
    """Return the weight's shape as far as the factors tell: flat factors make a matrix."""
    factors = module.factors
    if module.family == "full":
        return tuple(factors["diff"].shape)
    if module.family == "lora":
        left, right = low_rank_pair({name: factor.astype(np.float32) for name, factor in factors.items()})
        kernel = factors["mid"].shape[2:] if "mid" in factors else factors["A"].shape[2:] if "A" in factors else ()
    elif module.family == "loha":
        left, right = hadamard_pair({name: factor.astype(np.float32) for name, factor in factors.items()}, 1)
        kernel = factors["t1"].shape[2:] if "t1" in factors else ()
    else:
        halves = {name: factor.astype(np.float32) for name, factor in factors.items()}
        first, second = _halves(halves, 1), _halves(halves, 2)
        kernel = factors["t2"].shape[2:] if "t2" in factors else factors["w2"].shape[2:] if "w2" in factors else ()
        columns = first[1].shape[1] * second[1].shape[1]
        return (first[0].shape[0] * second[0].shape[0], columns // math.prod(kernel), *kernel)
    return (left.shape[0], right.shape[1] // math.prod(kernel), *kernel)


def _undecomposed(module: Module) -> Module:
    factors = {name: factor for name, factor in module.factors.items() if name not in ("magnitude", "B_bias")}
    return replace(module, factors=factors)


def _how(module: Module, rank: int) -> str:
    if module.family == "lora":
        return "Tucker core multiplied into A"
    return f"{'LoHa' if module.family == 'loha' else 'LoKr'} as LoRA of rank {rank}"


def _reason(module: Module, shape: tuple[int, ...]) -> str:
    if module.family == "full":
        return "it is a full difference, which no LoRA smaller than the weight can be relied on to say"
    return f"its factors are full: an exact LoRA would be as large as the weight of shape {list(shape)}"


def _refuse(module: Module, why: str, hint: str | None = None) -> UsageError:
    where = escape_name(module.path)
    return UsageError(
        f"{where} ({module.family}) cannot be written as asked: {why}",
        where=where,
        hint=hint or "ckpt merge-lora applies every family to the base itself",
    )
