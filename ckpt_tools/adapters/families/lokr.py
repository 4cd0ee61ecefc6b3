"""LoKr: W + s·(w1 ⊗ w2).

Roles: w1 (l, m), or w1_a (l, r) and w1_b (r, m); w2 (out/l, in/m[, k, k]), or w2_a (out/l, r) and w2_b (r, in/m · k·k);
with a Tucker core t2 (r, r, k, k) w2_a (r, out/l) and w2_b (r, in/m); magnitude (see `dora`). Letters: r rank, out and
in the dims of the weight, k a kernel's, l and m the dims of the first factor.

Source: peft 0.21 `tuners/lokr/{config,layer}.py`; lycoris-lora 4.1 `modules/lokr.py`, its forward (merge_to applies
alpha/r twice where a half is factored).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from ckpt_tools.adapters.adapter import Adapter, AdapterModule, F, Fields, Shape, Shapes, Sourced
from ckpt_tools.adapters.families.family import (
    MERGE_HINT,
    PEFT_LYCORIS,
    Factors,
    InexpressibleError,
    Module,
    ScaledFamily,
    Ways,
    geometry,
    missing_halves,
    refuse,
)
from ckpt_tools.adapters.families.loha import effective_conv2d, half, peft_core
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    from ckpt_tools.adapters.families.changes import WeightChange
    from ckpt_tools.adapters.families.family import Setting
    from ckpt_tools.transfer.arrays import Array

_NAMES = {role: f"lokr_{role}" for role in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")}
_DECOMPOSE_FACTOR, _DECOMPOSE_BOTH = "decompose_factor", "decompose_both"
_MAX_FACTOR = 1 << 16


class Halves(NamedTuple):
    """The shapes of the two matrices of which the Kronecker product is the change, kernels apart."""

    first: tuple[int, int]  # (l, m)
    second: tuple[int, int]  # (out/l, in/m)


class Lokr(ScaledFamily):
    """A Kronecker product."""

    name = "lokr"
    title = "LoKr"
    lycoris_algorithm = "lokr"
    marker = "lokr_"
    peft_names: ClassVar = _NAMES
    lycoris_names: ClassVar = {**_NAMES, "magnitude": "dora_scale"}
    peft_type = "LOKR"
    peft_fields = frozenset(f"{PEFT_LYCORIS} decompose_both decompose_factor rank_dropout_scale".split())
    core = "t2"

    def shape(self, shapes: Shapes) -> Shape | None:
        """Return (out, in[, k, k]); the kernel shows in a whole second half, and in a core."""
        first, second = _first(shapes), _second(shapes)
        if first is None or second is None:
            return None
        kernel = shapes["t2"][2:] if "t2" in shapes else shapes.get("w2", ())[2:]
        return (first[0] * second[0], first[1] * second[1], *kernel)

    def hides_kernel(self, roles: Collection[str]) -> bool:
        """With a factored second half, and no core."""
        return "w2_b" in roles and "t2" not in roles

    def is_unranked(self, roles: Collection[str]) -> bool:
        """With both halves whole."""
        return "w1" in roles and "w2" in roles

    def missing(self, roles: Collection[str]) -> list[str]:
        """Half a pair, or nothing of a factor."""
        lone = missing_halves((("w1_a", "w1_b"), ("w2_a", "w2_b")), roles)
        return [*lone, *(half for half in ("w1", "w2") if not {half, f"{half}_a", f"{half}_b"} & set(roles))]

    def rank_dims(self, roles: Collection[str]) -> Mapping[str, int]:
        """Whole factors have none."""
        side = 0 if "t2" in roles else 1  # with a core, both factors of the second half are (r, …)
        return {"w1_b": 0, "w2_b": 0, "w1_a": 1, "w2_a": side, "t2": 0}

    def ranked_together(self, roles: Collection[str]) -> tuple[tuple[str, ...], ...]:
        """Each half has its own."""
        return tuple(tuple(role for role in roles if role[:2] in half) for half in (("w1",), ("w2", "t2")))

    # PEFT

    def peft_config(self, adapter: Adapter[F], modules: Sequence[AdapterModule[F]], base: Shapes) -> Fields:
        """Return use_effective_conv2d, and how the dims are divided."""
        return effective_conv2d(adapter, modules) | _division(adapter, modules, base)

    def peft_shapes(self, config: Mapping[str, object], rank: int, weight: Shape) -> Ways:
        """Source: peft 0.21 `tuners/lokr/layer.py`, `update_layer` and `create_adapter_parameters`."""
        out, inputs, *kernel = weight
        factor = config.get(_DECOMPOSE_FACTOR, -1)
        factor = factor if isinstance(factor, int) else -1
        (in1, in2), (out1, out2) = factorization(inputs, factor), factorization(out, factor)
        both = bool(config.get(_DECOMPOSE_BOTH))
        is_whole1, is_whole2 = _are_whole(Halves((out1, in1), (out2, in2)), rank, both=both)
        shapes: dict[str, Shape | None] = {"w1": (out1, in1)}
        if not is_whole1:
            shapes = {"w1_a": (out1, rank), "w1_b": (rank, in1)}
        if is_whole2:
            shapes["w2"] = (out2, in2, *kernel)
        elif (core := peft_core(config, rank, kernel)) is not None:
            shapes |= {"t2": core, "w2_a": (rank, out2), "w2_b": (rank, in2)}
        else:
            shapes |= {"w2_a": (out2, rank), "w2_b": (rank, in2 * math.prod(kernel))}
        return (shapes,)

    # Arithmetic

    def change(self, module: Module, factors: Factors, shape: Shape, setting: Setting, role: str) -> WeightChange:
        """Return the product; LyCORIS does not scale that of two whole factors, and PEFT does."""
        if setting.convention == "peft" and self.rank(module) is None:
            what = f"the rank of {module.path} is not known: PEFT scales full factors by alpha/r as well"
            raise UsageError(what, hint="put PEFT's adapter_config.json beside the adapter")
        return super().change(module, factors, shape, setting, role)

    def product(self, factors: Factors, shape: Shape, scale: float, setting: Setting) -> WeightChange:
        """Return the Kronecker product."""
        import numpy as np

        from ckpt_tools.adapters.families.changes import Kronecker, WeightDifference

        w1 = factors["w1"] if "w1" in factors else np.matmul(*half(factors, 1))
        if setting.convention == "peft" and len(shape) == 3 and "w2" in factors and factors["w2"].ndim == 3:
            # PEFT leaves w1 as a matrix here, so that the Kronecker product takes its dims for the last two of the
            # convolution's. Its forward does the same: what was trained means this.
            return WeightDifference(np.kron(w1, factors["w2"]).reshape(geometry(shape)), scale)
        w2 = factors["w2"] if "w2" in factors else np.matmul(*half(factors, 2))
        return Kronecker(w1, w2.reshape(w2.shape[0], -1), scale)

    def low_rank(self, factors: Factors, shape: Shape) -> tuple[Array, Array] | None:
        """Return the halves' products: (a·b) ⊗ (c·d) = (a ⊗ c)·(b ⊗ d)."""
        import numpy as np

        (left1, right1), (left2, right2) = _pair(factors, 1), _pair(factors, 2)
        rank, columns = left1.shape[1] * left2.shape[1], math.prod(shape[1:])
        if self.is_unranked(factors) and rank * (shape[0] + columns) >= shape[0] * columns:
            return None
        return np.kron(left1, left2), np.kron(right1, right2)

    def split(self, module: Module, sizes: Sequence[int], paths: Sequence[str]) -> tuple[Module, ...]:
        """Rows of a Kronecker product come in blocks as high as w2: parts of whole blocks take their rows of w1."""
        from ckpt_tools.adapters.families.factor_rows import cut, with_pieces

        height = module.factors["w2" if "w2" in module.factors else "w2_a"].shape[0]
        role = first_role(module.factors)
        if "t2" in module.factors or module.is_dora:
            raise refuse(module, "a LoKr with a Tucker core or a magnitude cannot be split into parts")
        if any(size % height for size in sizes) or module.factors[role].shape[0] * height != sum(sizes):
            raise refuse(module, f"its blocks are {height} rows high, the parts {', '.join(map(str, sizes))}")
        pieces = {role: cut(module.factors[role], [size // height for size in sizes])}
        return with_pieces(module, pieces, paths)

    def swap_halves(self, module: Module) -> Module:
        """Swap those of w1."""
        from ckpt_tools.adapters.families.factor_rows import swapped

        role = first_role(module.factors)
        if module.factors[role].shape[0] % 2 or module.is_dora:
            raise refuse(module, "its halves cannot be swapped: w1 has an odd number of rows")
        return replace(module, factors={**module.factors, role: swapped(module.factors[role])})


def first_role(roles: Collection[str]) -> str:
    """Return the factor that has the rows of w1."""
    return "w1" if "w1" in roles else "w1_a"


def factorization(dimension: int, factor: int) -> tuple[int, int]:
    """Return the two factors (m ≤ n, unless `factor` divides) that PEFT and LyCORIS give a dimension.

    Source: peft 0.21 `tuners/lokr/layer.py`, `factorization`.
    """
    if factor > 0 and dimension % factor == 0:
        return factor, dimension // factor
    limit = dimension if factor == -1 else factor
    best = (1, dimension)
    for small in range(2, math.isqrt(dimension) + 1):
        if small > limit:
            break
        if dimension % small == 0:  # the sum of the two falls while they come closer
            best = (small, dimension // small)
    return best


def is_rebuilt(halves: Sequence[Halves], factor: int) -> bool:
    """Does one decompose_factor give all these dims?"""
    return all(
        factorization(first[i] * second[i], factor) == (first[i], second[i]) for first, second in halves for i in (0, 1)
    )


def _are_whole(halves: Halves, rank: int, *, both: bool) -> tuple[bool, bool]:
    """Return which of the two PEFT leaves whole. Source: peft 0.21 `tuners/lokr/layer.py`, `update_layer`."""
    return not (both and rank < max(halves.first) / 2), not rank < max(halves.second) / 2


def half_built_otherwise(roles: Collection[str], halves: Halves, rank: int, *, both: bool) -> str | None:
    """Return a half that PEFT would build otherwise at this rank (whole, or out of two factors); None where none."""
    wanted = zip(("w1", "w2"), _are_whole(halves, rank, both=both), strict=True)
    return next((role for role, is_whole in wanted if is_whole != (role in roles)), None)


def _first(shapes: Shapes) -> tuple[int, int] | None:
    if "w1" in shapes:
        return shapes["w1"][:2] if len(shapes["w1"]) == 2 else None
    left, right = shapes.get("w1_a", ()), shapes.get("w1_b", ())
    return (left[0], right[1]) if len(left) == len(right) == 2 else None


def _second(shapes: Shapes) -> tuple[int, int] | None:
    """Return (out/l, in/m); a factored half of a convolution has its kernel in the second one."""
    whole = shapes.get("w2", ())
    if len(whole) > 1:
        return whole[0], whole[1]
    left, right = shapes.get("w2_a", ()), shapes.get("w2_b", ())
    if len(left) != 2 or len(right) != 2:
        return None
    return (left[1] if "t2" in shapes else left[0]), right[1]


def halves_of(module: AdapterModule[F], weight: Shape | None = None) -> Halves:
    """Return the dims of a module's halves; `weight` tells the kernel of a convolution that flat factors hide."""
    shapes = module.shapes
    first, second = _first(shapes), _second(shapes)
    if first is None or second is None:
        raise UsageError(f"{module.path!r} has no whole {'w1' if first is None else 'w2'}")
    if Lokr().hides_kernel(shapes) and "w2" not in shapes and weight is not None and len(weight) > 2 and first[1]:
        second = second[0], weight[1] // first[1]
    return Halves(first, second)


def _division(adapter: Adapter[F], modules: Sequence[AdapterModule[F]], base: Shapes) -> Fields:
    """Return the decompose_factor and decompose_both that give every module its shapes."""
    halves = [halves_of(module, base.get(f"{module.path}.weight")) for module in modules]
    known = adapter.settings.get(_DECOMPOSE_FACTOR)
    hides_kernel = any(Lokr().hides_kernel(module.factors) for module in modules)
    if known is not None and "peft_type" in adapter.settings and not base and hides_kernel:
        # PEFT's own file: it has the shapes that PEFT gave it, which those of a convolution do not show.
        settled = adapter.settings.get(_DECOMPOSE_BOTH, Sourced(False, known.source))
        return {_DECOMPOSE_FACTOR: known, _DECOMPOSE_BOTH: settled}
    asked = [known.value] if known is not None and isinstance(known.value, int) else []
    candidates = dict.fromkeys([*asked, -1, *(size for each in halves for size in each.first)])
    factor = next((n for n in candidates if 0 < abs(n) <= _MAX_FACTOR and is_rebuilt(halves, n)), None)
    if factor is None:
        what = "no value of PEFT's decompose_factor produces these shapes"
        hint = ("" if base else "for convolutions give --base DIR; else ") + MERGE_HINT
        raise InexpressibleError(what, where=modules[0].path, hint=hint)
    both = any("w1_a" in module.factors for module in modules)
    for module, each in zip(modules, halves, strict=True):
        if module.rank is None:
            continue
        if (role := half_built_otherwise(module.factors, each, module.rank.value, both=both)) is not None:
            built = "out of two factors" if role in module.factors else "whole"
            raise InexpressibleError(
                f"PEFT would build {role} of {module.path!r} {built} at rank {module.rank.value}, but in this "
                "adapter it is not",
                hint="give the rank of the training run (--config r=VALUE), or merge: ckpt merge-lora",
            )
    source = known.source if known is not None and known.value == factor else "shapes of w1 and w2"
    return {
        _DECOMPOSE_FACTOR: Sourced(factor, source),
        _DECOMPOSE_BOTH: Sourced(both, "w1 has two factors" if both else "no w1 has two factors"),
    }


def _pair(factors: Factors, number: int) -> tuple[Array, Array]:
    """Return two matrices of which the product is one half, the inner dim as small as can be."""
    import numpy as np

    whole = factors.get(f"w{number}")
    if whole is None:
        return half(factors, number)
    matrix = whole.reshape(whole.shape[0], -1)
    rows, columns = matrix.shape
    if rows <= columns:
        return np.eye(rows, dtype=matrix.dtype), matrix
    return matrix, np.eye(columns, dtype=matrix.dtype)
