"""What an adapter makes of a weight: one class for every way in which a family changes its rows (float32).

A weight is looked at as a matrix: `rows` × `columns`. Rows are the dims that a factor has one row for (out of a linear
layer or a convolution, num_embeddings of an embedding, experts × out of a stack), columns all others. Most families
change a row without looking at any other, so that a weight can be changed piece by piece; `Change.is_rowwise` says so.

Letters: r rank, E experts, l and m the dims of LoKr's first factor, n blocks of size b, m butterfly factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ckpt_tools.adapters.adapter import Shape
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.families.family import PLAIN, Module, Setting, geometry
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.transfer.arrays import Array

_TILE_COLUMNS = 1024
_TILE_PRODUCTS = 1_000_000
"""Products in a tile: up to so many OpenBLAS multiplies small matrices without packing them first, which halves the
time of the thin ones here (0.4 ns an element instead of 0.8 with a rank of 16)."""


class WeightChange:
    """What a module makes of rows of a weight, which has `rows` and `columns` as a matrix."""

    is_rowwise = True  # May `apply` be given some of the rows?
    is_additive = True  # Does it add what does not depend on the weight?

    def __init__(self, rows: int, columns: int) -> None:
        self.rows = rows
        self.columns = columns

    def delta(self, start: int, stop: int) -> Array:
        """Return what is added to rows [start, stop), as (rows, columns)."""
        raise NotImplementedError

    def apply(self, weight: Array, start: int) -> Array:
        """Return the new rows (float32), in the memory of the old ones where that is possible.

        `weight` has the rows from `start` on, (n, columns) in float32; all of them when the change is not row by row.
        """
        weight += self.delta(start, start + weight.shape[0])
        return weight


class LowRank(WeightChange):
    """scale·(left · right), left (rows, r), right (r, columns)."""

    def __init__(self, left: Array, right: Array, scale: float) -> None:
        super().__init__(left.shape[0], right.shape[1])
        if left.shape[1] != right.shape[0]:
            raise ValueError("the factors have different ranks")
        self.scale = scale
        if math.frexp(scale)[0] == 0.5:  # a power of two: the same bits, and a pass less over the weight
            left, self.scale = left * scale, 1.0
        self.left, self.right = np.ascontiguousarray(left), np.ascontiguousarray(right)

    def delta(self, start: int, stop: int) -> Array:
        """Return what is added; rounded as PEFT rounds: the product first, then its multiple."""
        product: Array = np.empty((stop - start, self.columns), np.float32)
        rank = self.left.shape[1]
        height = max(1, _TILE_PRODUCTS // (max(1, rank) * _TILE_COLUMNS))
        for top in range(start, stop, height):
            left = self.left[top : min(top + height, stop)]
            for column in range(0, self.columns, _TILE_COLUMNS):
                right = self.right[:, column : column + _TILE_COLUMNS]
                tile = product[top - start : top - start + len(left), column : column + right.shape[1]]
                np.matmul(left, right, out=tile)
        if self.scale != 1.0:
            product *= self.scale
        return product


class Hadamard(WeightChange):
    """scale·(left1·right1 ⊙ left2·right2), LoHa."""

    def __init__(self, pairs: tuple[tuple[Array, Array], tuple[Array, Array]], scale: float) -> None:
        super().__init__(pairs[0][0].shape[0], pairs[0][1].shape[1])
        for left, right in pairs:
            if (left.shape[0], right.shape[1], left.shape[1]) != (self.rows, self.columns, right.shape[0]):
                raise ValueError("the factors have different ranks or shapes")
        self.pairs = pairs
        self.scale = scale

    def delta(self, start: int, stop: int) -> Array:
        """Return what is added."""
        (left1, right1), (left2, right2) = self.pairs
        product: Array = left1[start:stop] @ right1
        product *= left2[start:stop] @ right2
        product *= self.scale
        return product


class Kronecker(WeightChange):
    """scale·(w1 ⊗ w2), LoKr; w1 (l, m), w2 (out/l, columns/m)."""

    def __init__(self, w1: Array, w2: Array, scale: float) -> None:
        super().__init__(w1.shape[0] * w2.shape[0], w1.shape[1] * w2.shape[1])
        self.w1, self.w2, self.scale = w1, w2, scale

    def delta(self, start: int, stop: int) -> Array:
        """Return what is added."""
        index = np.arange(start, stop)
        outer = self.w1[index // self.w2.shape[0]]
        inner = self.w2[index % self.w2.shape[0]]
        product: Array = (outer[:, :, None] * inner[:, None, :]).reshape(stop - start, -1)
        product *= self.scale
        return product


class WeightDifference(WeightChange):
    """scale·diff."""

    def __init__(self, diff: Array, scale: float) -> None:
        super().__init__(*diff.shape)
        self.diff, self.scale = diff, scale

    def delta(self, start: int, stop: int) -> Array:
        """Return what is added."""
        return self.diff[start:stop] * self.scale


class Experts(WeightChange):
    """Low rank per expert, as PEFT's target_parameters: left (E, rows of one expert, r), right (E, r, columns)."""

    def __init__(self, left: Array, right: Array, scale: float) -> None:
        super().__init__(left.shape[0] * left.shape[1], right.shape[2])
        self.parts = tuple(LowRank(a, b, scale) for a, b in zip(left, right, strict=True))

    def delta(self, start: int, stop: int) -> Array:
        """Return what is added."""
        per_expert = self.parts[0].rows
        pieces = []
        while start < stop:
            expert, row = divmod(start, per_expert)
            end = min(per_expert, row + stop - start)
            pieces.append(self.parts[expert].delta(row, end))
            start += end - row
        return np.concatenate(pieces)


class Decomposed(WeightChange):
    """DoRA: magnitude · (W + Δ)/‖W + Δ‖, the norm of every row, or with `by_column` of every column; `inner` gives Δ.

    `num_spatial` columns side by side share a magnitude: the elements of a kernel.
    """

    is_additive = False

    def __init__(self, inner: WeightChange, magnitude: Array, *, by_column: bool, num_spatial: int = 1) -> None:
        super().__init__(inner.rows, inner.columns)
        self.inner, self.magnitude, self.num_spatial = inner, magnitude.reshape(-1), num_spatial
        self.is_rowwise = not by_column

    def apply(self, weight: Array, start: int) -> Array:
        """Return the new rows. What has no length keeps none."""
        new = self.inner.apply(weight, start)
        if self.is_rowwise:
            norm = np.linalg.norm(new, axis=1)
            new *= _quotient(self.magnitude[start : start + len(norm)], norm)[:, None]
            return new
        groups = new.reshape(new.shape[0], -1, self.num_spatial)
        norm = np.sqrt(np.square(groups).sum(axis=(0, 2), dtype=np.float64)).astype(np.float32)
        groups *= _quotient(self.magnitude, norm)[None, :, None]
        return groups.reshape(new.shape)


class Turned(WeightChange):
    """A weight that a function makes out of the old one: (rows, number of the first row) → new rows."""

    is_additive = False

    def __init__(
        self, rows: int, columns: int, turn: Callable[[Array, int], Array], *, is_rowwise: bool = True
    ) -> None:
        super().__init__(rows, columns)
        self.turn, self.is_rowwise = turn, is_rowwise

    def apply(self, weight: Array, start: int) -> Array:
        """Return the new rows."""
        if not self.is_rowwise and (start or weight.shape[0] != self.rows):
            raise ValueError("an output rotation needs all rows")
        return self.turn(weight, start)


class Replacement(WeightChange):
    """Whole tensors that take the base's place."""

    is_additive = False

    def __init__(self, tensor: Array) -> None:
        super().__init__(*tensor.shape)
        self.tensor = tensor

    def apply(self, weight: Array, start: int) -> Array:
        """Return the new rows."""
        return self.tensor[start : start + weight.shape[0]].copy()


class RowReplacement(Replacement):
    """Rows (n, columns) that take the place of those at `indices` of a weight of `shape`."""

    def __init__(self, rows: Array, indices: Sequence[object], shape: Shape) -> None:
        super().__init__(rows)
        if rows.shape[1:] != shape[1:]:
            raise ValueError(f"{rows.shape} for {shape}")
        self.rows, self.indices = shape[0], np.array(indices, np.int64)

    def apply(self, weight: Array, start: int) -> Array:
        """Return the new rows."""
        at = self.indices - start
        is_here = (at >= 0) & (at < len(weight))
        weight[at[is_here]] = self.tensor[is_here]
        return weight


def _quotient(magnitude: Array, norm: Array) -> Array:
    """Return magnitude / norm, and 0 where the norm is."""
    return np.divide(magnitude, norm, out=np.zeros_like(norm), where=norm != 0)


def change_of(module: Module, shape: Shape, setting: Setting = PLAIN, role: str = "weight") -> WeightChange:
    """Return what `module` makes of a tensor of `shape`; its factors are taken as float32.

    `role` is "weight" for the adapted parameter, "bias" for the bias beside it, for whole tensors (saved) their role.
    """
    whose = module.path
    factors = module.factors
    try:
        with np.errstate(all="ignore"):  # whether numbers are finite is looked at in the result
            factors = {name: factor.astype(np.float32) for name, factor in factors.items()}
            change = family_of(module).change(module, factors, shape, setting, role)
    except KeyError as error:
        raise UnreadableError(f"{whose} has no factor {error.args[0]}", where=whose) from error
    except (ValueError, IndexError, np.linalg.LinAlgError) as error:
        shapes = ", ".join(f"{name} {list(factor.shape)}" for name, factor in factors.items())
        raise UnreadableError(f"the factors of {whose} do not fit together: {shapes}", where=whose) from error
    if (change.rows, change.columns) != geometry(shape, setting.num_experts):
        made = f"{change.rows} × {change.columns}"
        raise UnreadableError(f"{whose} makes {made} elements of a tensor of shape {list(shape)}", where=whose)
    if setting.scale != 1.0 and not change.is_additive and not isinstance(change, Replacement):
        what = "a magnitude (DoRA)" if isinstance(change, Decomposed) else family_of(module).title
        raise UsageError(f"{whose} is {what}, which cannot be scaled", where=whose, hint="leave out --scale")
    return change


# Rotations that OFT and BOFT put around a weight (float32).
#
# Letters: n blocks, b size of a block, m butterfly factors, dim the length of the rotated side.
#
# PEFT rotates the input side: W' = W·Rᵀ. LyCORIS (and kohya) rotate the output side: W' = Rᵀ·W for diag-oft, R·W for
# boft. Source: PEFT 0.21 `tuners/oft/layer.py`, `tuners/boft/layer.py`; LyCORIS 4.1.3 `functional/diag_oft.py`,
# `functional/boft.py`.


def block_size(num_elems: int) -> int:
    """Return b of a skew-symmetric matrix of which b(b-1)/2 elements are stored."""
    size = (1 + math.isqrt(1 + 8 * num_elems)) // 2
    if size * (size - 1) // 2 != num_elems:
        raise UnreadableError(f"oft_R has {num_elems} elements in a row, which is not b(b-1)/2 for any b")
    return size


def peft_rotation(vectors: Array, *, use_cayley_neumann: bool, num_terms: int, coft_eps: float | None) -> Array:
    """Return PEFT's OFT rotations (n, b, b) from their upper triangles, row by row (n, b(b-1)/2).

    `use_cayley_neumann`: a Neumann series of `num_terms`, not the exact Cayley transform. `coft_eps` constrains COFT.
    """
    size = block_size(vectors.shape[1])
    rows, columns = np.triu_indices(size, 1)
    skew = np.zeros((vectors.shape[0], size, size), vectors.dtype)
    skew[:, rows, columns] = vectors
    skew = skew - skew.swapaxes(1, 2)
    if coft_eps is not None:
        limit = coft_eps / math.sqrt(skew.shape[0])
        norm = np.sqrt((skew * skew).sum(axis=(1, 2), keepdims=True))
        with np.errstate(divide="ignore", invalid="ignore"):  # a norm of 0 is below the limit
            skew = np.where(norm <= limit, skew, limit * (skew / norm))
    if not use_cayley_neumann:
        return cayley(skew)
    # I + 2Q + 2Q² + … + Qⁿ: the last term counts once, as in PEFT.
    rotation = np.tile(np.eye(size, dtype=skew.dtype), (skew.shape[0], 1, 1))
    power = skew
    if num_terms > 1:
        rotation += 2 * skew
    if num_terms > 2:
        power = skew @ skew
        rotation += 2 * power
        for _ in range(3, num_terms - 1):
            power = power @ skew
            rotation += 2 * power
        rotation += power @ skew
    return rotation


def cayley(skew: Array) -> Array:
    """Return (I - Q)(I + Q)⁻¹ of skew-symmetric matrices Q (…, b, b)."""
    identity = np.eye(skew.shape[-1], dtype=skew.dtype)
    # (I - Q)(I + Q)⁻¹ is the transpose of what (I + Q)ᵀ = I - Q turns into (I - Q)ᵀ = I + Q.
    transposed: Array = np.linalg.solve(identity - skew, identity + skew)
    return transposed.swapaxes(-1, -2)


def lycoris_rotation(blocks: Array, constraint: float) -> Array:
    """Return LyCORIS' rotations from its blocks (…, b, b), Q = blocks - blocksᵀ; `constraint` bounds all Q, 0: none."""
    skew = blocks - blocks.swapaxes(-1, -2)
    if constraint > 0:
        norm = float(np.linalg.norm(skew.reshape(-1))) + 1e-8
        if norm > constraint:
            skew = skew * constraint / norm
    identity = np.eye(skew.shape[-1], dtype=skew.dtype)
    rotation: Array = (identity + skew) @ np.linalg.inv(identity - skew)
    return rotation


def butterfly_order(dim: int, num_blocks: int, half: int) -> Array:
    """Return the order into which PEFT's BOFT puts `dim` elements before one of its factors is applied.

    Each of `num_blocks` groups is sorted by itself; `half` elements (b/2) stay together.
    """
    if num_blocks < 1 or half < 1 or dim % num_blocks or (dim // num_blocks) % (2 * half):
        raise UnreadableError(f"boft_R with {num_blocks} groups of pairs of {half} does not fit {dim} elements")
    group = np.arange(dim).reshape(num_blocks, -1, half)
    return np.concatenate([group[:, 0::2], group[:, 1::2]], axis=1).reshape(-1)


def rotate_inputs_by_butterfly(weight: Array, stored: Array) -> Array:
    """Return weight·Rᵀ (rows, dim), R the product of BOFT's factors (m, n, b, b), only their skew-symmetric parts."""
    num_factors, num_blocks, size, _ = stored.shape
    rotations = cayley(0.5 * (stored - stored.swapaxes(-1, -2)))
    dim = weight.shape[1]
    for i in range(num_factors):
        order = np.arange(dim) if num_factors == 1 else butterfly_order(dim, num_blocks >> i, size // 2)
        # Row j of the permutation matrix P has its 1 in column order[j]: (W·P)[:, order[j]] is W[:, j].
        sorted_weight = np.empty_like(weight)
        sorted_weight[:, order] = weight
        weight = rotate_columns(sorted_weight, rotations[i].swapaxes(-1, -2))[:, order]
    return weight


def rotate_columns(weight: Array, blocks: Array) -> Array:
    """Return weight times the block-diagonal matrix of `blocks` (n, b, b); one block is shared by all columns."""
    rows, size = weight.shape[0], blocks.shape[-1]
    parts = weight.reshape(rows, -1, size)
    if blocks.shape[0] == 1:
        rotated: Array = parts.reshape(-1, size) @ blocks[0]
    else:
        rotated = (parts.swapaxes(0, 1) @ blocks).swapaxes(0, 1)
    return rotated.reshape(weight.shape)


def rotate_outputs(weight: Array, rotations: Array) -> Array:
    """Return Rᵀ·weight, R block-diagonal with `rotations` (n, b, b), as LyCORIS' diag-oft does."""
    num_blocks, size, _ = rotations.shape
    parts = weight.reshape(num_blocks, size, -1)
    rotated: Array = rotations.swapaxes(1, 2) @ parts
    return rotated.reshape(weight.shape)


def rotate_outputs_by_butterfly(weight: Array, rotations: Array) -> Array:
    """Return LyCORIS' boft of a weight (out, columns); factor i of (m, n, b, b) mixes rows up to 2ⁱ·b apart."""
    num_factors, num_blocks, size, _ = rotations.shape
    columns = weight.shape[1]
    for i in range(num_factors):
        apart = 2**i * (size // 2)
        mixed = weight.reshape(-1, 2, apart, columns).swapaxes(1, 2).reshape(num_blocks, size, columns)
        mixed = rotations[i] @ mixed
        weight = mixed.reshape(-1, apart, 2, columns).swapaxes(1, 2).reshape(-1, columns)
    return weight
