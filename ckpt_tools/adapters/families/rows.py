"""Rows of an adapted weight: cut a module into the modules of its parts, put parts together, swap halves. Exact.

Letters: r rank, out and in the dims of the weight, s the scale alpha/r. Imported where tensors are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from ckpt_tools.adapters.adapter import AdapterModule, Sourced
from ckpt_tools.adapters.families.change import scale_of
from ckpt_tools.errors import UsageError
from ckpt_tools.moving.arrays import Array, is_finite

Module = AdapterModule[Array]
"""With its factors loaded."""

_BY_OUT = {
    "lora": ("B", "B_bias", "magnitude"),
    "loha": ("w1_a", "w2_a", "magnitude"),
    "full": ("diff", "diff_b"),
}
"""Factors whose first dim is the weight's out."""


class InexpressibleError(UsageError):
    """What is asked for cannot be said exactly in the factors that the target has."""


def refuse(module: Module, reason: str, hint: str | None = None) -> InexpressibleError:
    """Return the error that `module` cannot be written, and why."""
    kind = "DoRA" if module.is_dora else module.family
    return InexpressibleError(f"{module.path!r} ({kind}) cannot be written: {reason}", where=module.path, hint=hint)


def with_scale(module: Module, factors: Mapping[str, Array], scale: float) -> Module:
    """Return a lora with new factors whose alpha says `scale`."""
    rank = factors["A"].shape[0]
    return replace(
        module,
        factors=factors,
        rank=Sourced(rank, f"A has {rank} rows"),
        alpha=Sourced(scale * rank, "converted"),
        use_rslora=False,
    )


def split(module: Module, sizes: Sequence[int], paths: Sequence[str]) -> tuple[Module, ...]:
    """Cut a module into the modules that hold sizes[0], sizes[1], … of its rows.

    Parts of a lora that change nothing are left out, and a part keeps only the ranks that reach it: a fused module that
    was put together from several gives these back.

    Args:
        module: Over out = sum(sizes) rows.
        sizes: Rows of each part.
        paths: Path of each part.

    Raises:
        InexpressibleError: The family's factors do not have one row per row of the weight.
    """
    if module.family == "lokr":
        return _split_lokr(module, sizes, paths)
    roles = _row_roles(module)
    if module.family == "loha" and "t1" in module.factors:
        raise refuse(module, "a Tucker decomposition has no rows to split")
    pieces: dict[str, list[Array]] = {}
    for role in roles:
        factor = module.factors[role]
        if role == "magnitude" and factor.ndim > 1 and factor.shape[0] == 1 != sum(sizes):
            raise refuse(module, "its magnitude is one per column, which all parts share")
        if factor.shape[0] != sum(sizes):
            raise refuse(module, f"{role} has {factor.shape[0]} rows, {sum(sizes)} are needed")
        pieces[role] = _cut(factor, sizes)
    parts = [
        replace(
            module,
            path=path,
            factors={
                role: (pieces[role][i] if role in pieces else factor).copy() for role, factor in module.factors.items()
            },
        )
        for i, path in enumerate(paths)
    ]
    if module.family == "lora" and not module.is_dora and "B_bias" not in module.factors:
        slim = [_drop_idle_ranks(part) for part in parts]
        return tuple(part for part in slim if part is not None) or tuple(parts)
    return tuple(parts)


def _drop_idle_ranks(part: Module) -> Module | None:
    """Leave out ranks whose column of B is zero; None when all are."""
    a, b = part.factors["A"], part.factors["B"]
    is_used = (b.reshape(b.shape[0], b.shape[1], -1) != 0).any(axis=(0, 2))
    if bool(is_used.all()):
        return part
    if not bool(is_used.any()):
        return None
    if "mid" in part.factors:
        return part
    factors = {**part.factors, "A": a[is_used], "B": np.asarray(b[:, is_used], order="C")}
    return with_scale(part, factors, scale_of(part))


def _split_lokr(module: Module, sizes: Sequence[int], paths: Sequence[str]) -> tuple[Module, ...]:
    """Rows of kron(w1, w2) come in blocks as high as w2: parts of whole blocks take their rows of w1."""
    height = module.factors["w2" if "w2" in module.factors else "w2_a"].shape[0]
    role = "w1" if "w1" in module.factors else "w1_a"
    if "t2" in module.factors or module.is_dora:
        raise refuse(module, "a LoKr with a Tucker core or a magnitude cannot be cut into parts")
    if any(size % height for size in sizes) or module.factors[role].shape[0] * height != sum(sizes):
        raise refuse(module, f"its blocks are {height} rows high, the parts {', '.join(map(str, sizes))}")
    pieces = _cut(module.factors[role], [size // height for size in sizes])
    return tuple(
        replace(
            module,
            path=path,
            factors={name: (pieces[i] if name == role else factor).copy() for name, factor in module.factors.items()},
        )
        for i, path in enumerate(paths)
    )


def join(parts: Mapping[int, Module], sizes: Sequence[int], path: str) -> Module:
    """Put the modules of some parts together into one module over all of them; parts that lack stay unchanged.

    Loras keep their rank when all of them share one A; otherwise A is stacked and B is block-diagonal. Parts of one
    scale keep it in alpha; others have it multiplied into B.

    Args:
        parts: By their position.
        sizes: Rows of every part, also of those that lack.
        path: Path of the whole.

    Raises:
        InexpressibleError: Families that do not add up, or a DoRA of some of the parts.
    """
    some = next(iter(parts.values()))
    families = {part.family for part in parts.values()}
    if families == {"full"}:
        return _join_full(parts, sizes, path)
    if families != {"lora"}:
        raise refuse(some, f"its parts are {' and '.join(sorted(families))}, which have no common form")
    if any("mid" in part.factors or part.factors["A"].ndim != 2 for part in parts.values()):
        raise refuse(some, "convolutions have no parts to put together")
    if any(part.factors["A"].shape[1] != some.factors["A"].shape[1] for part in parts.values()):
        raise refuse(some, "its parts have different inputs")
    for index, part in parts.items():
        if part.factors["B"].shape[0] != sizes[index]:
            raise refuse(part, f"B has {part.factors['B'].shape[0]} rows, {sizes[index]} are needed")
    factors: dict[str, Array] = {}
    if any(part.is_dora for part in parts.values()):
        if len(parts) != len(sizes) or not all(part.is_dora for part in parts.values()):
            raise refuse(some, "a fused weight has one magnitude per row, and not all of its parts have one")
        factors["magnitude"] = _stack([parts[i].factors["magnitude"].reshape(-1) for i in range(len(sizes))])
    if any("B_bias" in part.factors for part in parts.values()):
        dtype = some.factors["B"].dtype
        biases = [
            parts[i].factors["B_bias"] if i in parts and "B_bias" in parts[i].factors else np.zeros(size, dtype)
            for i, size in enumerate(sizes)
        ]
        scales = {scale_of(part) for part in parts.values()}
        if len(scales) > 1:
            raise refuse(some, "its parts have biases and different scales")
        factors["B_bias"] = _stack(biases)
    return _join_lora(parts, sizes, path, factors)


def _join_lora(parts: Mapping[int, Module], sizes: Sequence[int], path: str, others: Mapping[str, Array]) -> Module:
    order = sorted(parts)
    scales = {i: scale_of(parts[i]) for i in order}
    common = scales[order[0]] if len(set(scales.values())) == 1 else None
    up = {i: parts[i].factors["B"] if common is not None else _times(parts[i], scales[i]) for i in order}
    down = {i: parts[i].factors["A"] for i in order}
    dtype = _common_dtype([*up.values(), *down.values()])
    down = {i: factor.astype(dtype) for i, factor in down.items()}
    is_shared = all(np.array_equal(down[i], down[order[0]]) for i in order)
    starts = list(accumulate(sizes, initial=0))
    rank = down[order[0]].shape[0] if is_shared else sum(down[i].shape[0] for i in order)
    b = np.zeros((sum(sizes), rank), dtype)
    column = 0
    for i in order:
        width = up[i].shape[1]
        at = 0 if is_shared else column
        b[starts[i] : starts[i + 1], at : at + width] = up[i].astype(dtype)
        column += width
    a = down[order[0]] if is_shared else _stack([down[i] for i in order])
    module = replace(parts[order[0]], path=path)
    return with_scale(module, {"A": a, "B": b, **others}, 1.0 if common is None else common)


def _times(module: Module, scale: float) -> Array:
    with np.errstate(over="ignore"):
        scaled = (module.factors["B"].astype(np.float64) * scale).astype(np.float32)
    if not is_finite(scaled):
        raise refuse(module, "B times alpha/r is too large for 32 bits")
    return scaled


def _join_full(parts: Mapping[int, Module], sizes: Sequence[int], path: str) -> Module:
    some = next(iter(parts.values()))
    factors: dict[str, Array] = {}
    for role in ("diff", "diff_b"):
        like = next((part.factors[role] for part in parts.values() if role in part.factors), None)
        if like is not None:
            factors[role] = _stack(
                [
                    parts[i].factors[role]
                    if i in parts and role in parts[i].factors
                    else np.zeros((size, *like.shape[1:]), like.dtype)
                    for i, size in enumerate(sizes)
                ]
            )
    return replace(some, path=path, factors=factors)


def swap_halves(module: Module) -> Module:
    """Exchange the upper and the lower half of the rows.

    Raises:
        InexpressibleError: The family's factors do not have halves.
    """
    if module.family == "lokr":
        role = "w1" if "w1" in module.factors else "w1_a"
        if module.factors[role].shape[0] % 2 or module.is_dora:
            raise refuse(module, "its halves cannot be swapped: w1 has an odd number of rows")
        return replace(module, factors={**module.factors, role: _swapped(module.factors[role])})
    factors = dict(module.factors)
    for role in _row_roles(module):
        if role == "magnitude" and factors[role].ndim > 1 and factors[role].shape[0] == 1:
            continue
        if factors[role].shape[0] % 2:
            raise refuse(module, f"its halves cannot be swapped: {role} has an odd number of rows")
        factors[role] = _swapped(factors[role])
    return replace(module, factors=factors)


def _swapped(factor: Array) -> Array:
    half = factor.shape[0] // 2
    return np.concatenate([factor[half:], factor[:half]])


def _cut(factor: Array, sizes: Sequence[int]) -> list[Array]:
    return np.split(factor, list(accumulate(sizes))[:-1])


def _stack(parts: Sequence[Array]) -> Array:
    dtype = _common_dtype(parts)
    return np.concatenate([part.astype(dtype) for part in parts])


def _common_dtype(arrays: Sequence[Array]) -> np.dtype[Any]:
    """Return a type that holds the elements of all: numpy's choice, or float32 where it has none."""
    dtype = arrays[0].dtype
    for array in arrays[1:]:
        try:
            dtype = np.promote_types(dtype, array.dtype)
        except TypeError:  # bfloat16 and float16, or 8 bits of two kinds
            dtype = np.dtype(np.float32)
    return dtype


def _row_roles(module: Module) -> tuple[str, ...]:
    if module.family not in _BY_OUT or module.factors.keys() & {"A_embedding", "B_embedding"}:
        raise refuse(module, "its factors have no rows of the weight")
    return tuple(role for role in _BY_OUT[module.family] if role in module.factors)
