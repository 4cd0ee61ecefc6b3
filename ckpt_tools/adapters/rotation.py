"""Rotations that OFT and BOFT put around a weight (torch).

Letters: n blocks, b size of a block, m butterfly factors, dim the length of the rotated side.

PEFT rotates the input side: W' = W·Rᵀ. LyCORIS (and kohya) rotate the output side: W' = Rᵀ·W for diag-oft, R·W for
boft. Source: PEFT 0.21 `tuners/oft/layer.py`, `tuners/boft/layer.py`; LyCORIS 4.1.3 `functional/diag_oft.py`,
`functional/boft.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ckpt_tools.errors import UnreadableError


def block_size(num_elems: int) -> int:
    """Return b of a skew-symmetric matrix of which b(b-1)/2 elements are stored.

    Raises:
        UnreadableError: No b has that many.
    """
    size = (1 + math.isqrt(1 + 8 * num_elems)) // 2
    if size * (size - 1) // 2 != num_elems:
        raise UnreadableError(f"oft_R has {num_elems} elements in a row, which is no b(b-1)/2")
    return size


def peft_rotation(vectors: Tensor, *, use_cayley_neumann: bool, num_terms: int, coft_eps: float | None) -> Tensor:
    """Return PEFT's OFT rotations (n, b, b) from what is stored of them (n, b(b-1)/2).

    Args:
        vectors: Upper triangles, row by row.
        use_cayley_neumann: The Neumann series instead of the exact Cayley transform.
        num_terms: Terms of that series.
        coft_eps: The constraint of COFT; None without.
    """
    size = block_size(vectors.shape[1])
    rows, columns = torch.triu_indices(size, size, 1)
    skew = vectors.new_zeros(vectors.shape[0], size, size)
    skew[:, rows, columns] = vectors
    skew = skew - skew.transpose(1, 2)
    if coft_eps is not None:
        limit = coft_eps / math.sqrt(skew.shape[0])
        norm = torch.linalg.vector_norm(skew, dim=(1, 2), keepdim=True)
        skew = torch.where(norm <= limit, skew, limit * (skew / norm))
    if not use_cayley_neumann:
        return cayley(skew)
    # I + 2Q + 2Q² + … + Qⁿ: the last term counts once, as in PEFT.
    rotation = torch.eye(size, dtype=skew.dtype).repeat(skew.shape[0], 1, 1)
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


def cayley(skew: Tensor) -> Tensor:
    """Return (I - Q)(I + Q)⁻¹ of skew-symmetric matrices Q (…, b, b)."""
    identity = torch.eye(skew.shape[-1], dtype=skew.dtype).expand_as(skew)
    rotation: Tensor = torch.linalg.solve(identity + skew, identity - skew, left=False)
    return rotation


def lycoris_rotation(blocks: Tensor, constraint: float) -> Tensor:
    """Return LyCORIS' rotations from its blocks (…, b, b), of which Q = blocks - blocksᵀ.

    Args:
        blocks: As stored.
        constraint: Bound of the norm of all Q together; 0 for none.
    """
    skew = blocks - blocks.transpose(-1, -2)
    if constraint > 0:
        norm = torch.linalg.vector_norm(skew) + 1e-8
        if norm > constraint:
            skew = skew * constraint / norm
    identity = torch.eye(skew.shape[-1], dtype=skew.dtype)
    inverse: Tensor = torch.linalg.inv(identity - skew)
    return (identity + skew) @ inverse


def butterfly_order(dim: int, num_blocks: int, half: int) -> Tensor:
    """Return the order into which PEFT's BOFT puts `dim` elements before one of its factors is applied.

    Args:
        dim: Number of elements.
        num_blocks: Groups of this factor; each is sorted by itself.
        half: Elements that stay together, b/2.

    Raises:
        UnreadableError: The numbers do not go together.
    """
    if num_blocks < 1 or half < 1 or dim % num_blocks or (dim // num_blocks) % (2 * half):
        raise UnreadableError(f"boft_R with {num_blocks} groups of pairs of {half} does not fit {dim} elements")
    group = torch.arange(dim).view(num_blocks, -1, half)
    return torch.cat([group[:, 0::2], group[:, 1::2]], dim=1).reshape(-1)


def rotate_inputs_by_butterfly(weight: Tensor, stored: Tensor) -> Tensor:
    """Return weight·Rᵀ, where R is the product of PEFT's BOFT factors.

    Args:
        weight: (rows, dim).
        stored: (m, n, b, b); only the skew-symmetric part counts.
    """
    num_factors, num_blocks, size, _ = stored.shape
    rotations = cayley(0.5 * (stored - stored.transpose(-1, -2)))
    dim = weight.shape[1]
    for i in range(num_factors):
        order = torch.arange(dim) if num_factors == 1 else butterfly_order(dim, num_blocks >> i, size // 2)
        # Row j of the permutation matrix P has its 1 in column order[j]: (W·P)[:, order[j]] is W[:, j].
        sorted_weight = torch.empty_like(weight)
        sorted_weight[:, order] = weight
        weight = rotate_columns(sorted_weight, rotations[i].transpose(-1, -2))[:, order]
    return weight


def rotate_columns(weight: Tensor, blocks: Tensor) -> Tensor:
    """Return weight times the block-diagonal matrix of `blocks` (n, b, b); one block is shared by all columns."""
    rows, size = weight.shape[0], blocks.shape[-1]
    parts = weight.reshape(rows, -1, size)
    if blocks.shape[0] == 1:
        return (parts.reshape(-1, size) @ blocks[0]).reshape(weight.shape)
    return torch.bmm(parts.transpose(0, 1), blocks).transpose(0, 1).reshape(weight.shape)


def rotate_outputs(weight: Tensor, rotations: Tensor) -> Tensor:
    """Return Rᵀ·weight, R block-diagonal with `rotations` (n, b, b), as LyCORIS' diag-oft does."""
    num_blocks, size, _ = rotations.shape
    parts = weight.view(num_blocks, size, -1)
    return torch.bmm(rotations.transpose(1, 2), parts).view(weight.shape)


def rotate_outputs_by_butterfly(weight: Tensor, rotations: Tensor) -> Tensor:
    """Return the rotated weight (out, columns) of LyCORIS' boft.

    Args:
        weight: (out, columns).
        rotations: (m, n, b, b); factor i mixes rows that lie up to 2ⁱ·b apart.
    """
    num_factors, num_blocks, size, _ = rotations.shape
    columns = weight.shape[1]
    for i in range(num_factors):
        apart = 2**i * (size // 2)
        mixed = weight.view(-1, 2, apart, columns).transpose(1, 2).reshape(num_blocks, size, columns)
        mixed = torch.bmm(rotations[i], mixed)
        weight = mixed.view(-1, apart, 2, columns).transpose(1, 2).reshape(-1, columns)
    return weight
