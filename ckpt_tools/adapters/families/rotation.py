"""Rotations that OFT and BOFT put around a weight (float32).

Letters: n blocks, b size of a block, m butterfly factors, dim the length of the rotated side.

PEFT rotates the input side: W' = W·Rᵀ. LyCORIS (and kohya) rotate the output side: W' = Rᵀ·W for diag-oft, R·W for
boft. Source: PEFT 0.21 `tuners/oft/layer.py`, `tuners/boft/layer.py`; LyCORIS 4.1.3 `functional/diag_oft.py`,
`functional/boft.py`.
"""

from __future__ import annotations

import math

import numpy as np

from ckpt_tools.errors import UnreadableError
from ckpt_tools.transfer.arrays import Array


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
