"""Rows of factors: cut, stacked, swapped. Exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from ckpt_tools.adapters.families.family import Module, refuse
from ckpt_tools.transfer.arrays import Array


def split(module: Module, roles: Sequence[str], sizes: Sequence[int], paths: Sequence[str]) -> tuple[Module, ...]:
    """Cut the factors that have the weight's rows; the others are shared. See `Family.split`."""
    pieces: dict[str, list[Array]] = {}
    for role in roles:
        factor = module.factors[role]
        if role == "magnitude" and factor.ndim > 1 and factor.shape[0] == 1 != sum(sizes):
            raise refuse(module, "its magnitude is one per column, which all parts share")
        if factor.shape[0] != sum(sizes):
            raise refuse(module, f"{role} has {factor.shape[0]} rows, {sum(sizes)} are needed")
        pieces[role] = cut(factor, sizes)
    return with_pieces(module, pieces, paths)


def with_pieces(module: Module, pieces: Mapping[str, Sequence[Array]], paths: Sequence[str]) -> tuple[Module, ...]:
    """Return one module for each path, with its pieces of some factors and copies of the others."""
    return tuple(
        replace(
            module,
            path=path,
            factors={
                role: (pieces[role][i] if role in pieces else factor).copy() for role, factor in module.factors.items()
            },
        )
        for i, path in enumerate(paths)
    )


def swap_halves(module: Module, roles: Sequence[str]) -> Module:
    """Exchange the upper and the lower half of some factors; raise InexpressibleError for an odd number of rows."""
    factors = dict(module.factors)
    for role in roles:
        if role == "magnitude" and factors[role].ndim > 1 and factors[role].shape[0] == 1:
            continue
        if factors[role].shape[0] % 2:
            raise refuse(module, f"its halves cannot be swapped: {role} has an odd number of rows")
        factors[role] = swapped(factors[role])
    return replace(module, factors=factors)


def swapped(factor: Array) -> Array:
    """Return the lower half of a factor's rows above the upper one."""
    half = factor.shape[0] // 2
    return np.concatenate([factor[half:], factor[:half]])


def cut(factor: Array, sizes: Sequence[int]) -> list[Array]:
    """Cut a factor's rows."""
    return np.split(factor, list(accumulate(sizes))[:-1])


def stack(parts: Sequence[Array]) -> Array:
    """Put rows below each other."""
    dtype = common_dtype(parts)
    return np.concatenate([part.astype(dtype) for part in parts])


def common_dtype(arrays: Sequence[Array]) -> np.dtype[Any]:
    """Return a type that holds the elements of all: numpy's choice, or float32 where it has none."""
    dtype = arrays[0].dtype
    for array in arrays[1:]:
        try:
            dtype = np.promote_types(dtype, array.dtype)
        except TypeError:  # bfloat16 and float16, or 8 bits of two kinds
            dtype = np.dtype(np.float32)
    return dtype
