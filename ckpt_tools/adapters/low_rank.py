"""The nearest product of two thin factors, of which rank, and what it loses.

Ranks by a threshold: kohya-ss/sd-scripts, networks/resize_lora.py (sv_cumulative, sv_fro, sv_ratio).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ckpt_tools.adapters.adapter import Sourced
from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.convert.job import DTYPES, Conversion
from ckpt_tools.errors import UsageError
from ckpt_tools.options.adapters import RankOptions
from ckpt_tools.results import CheckedResult, as_json

if TYPE_CHECKING:
    from torch import Tensor

    from ckpt_tools.transfer.arrays import Array

_SPARE = 8  # Columns of a random projection beside those that are wanted
_SMALL = 256  # Rows up to which all singular vectors are computed
_ROUNDS = 16  # Of a projection, until all are computed after all
_CONVERGED, _NOISE = 1e-5, 1e-9  # Parts of the squared error and norm that another round must win
_SLICE = 1 << 22  # Elements that are float64 at a time


class RankRule(NamedTuple):
    """How many ranks a module gets."""

    most: int
    by: str | None = None
    threshold: float = 0.0

    @classmethod
    def of(cls, options: RankOptions, usual: int) -> RankRule:
        """Return what options ask for; `usual` is the most where they do not say it."""
        most, by, threshold = options.rank or usual, options.rank_by, options.threshold
        if options.dtype not in DTYPES:
            raise UsageError(f"{options.dtype!r} is not a dtype", hint=f"--dtype takes {', '.join(DTYPES)}")
        if by is None or threshold is None:
            if by or threshold is not None:
                raise UsageError("--rank-by and --threshold need each other", hint="--rank-by fro --threshold 0.9")
            return cls(most)
        if not (1 <= threshold < math.inf if by == "ratio" else 0 < threshold <= 1):
            limits = "at least 1" if by == "ratio" else "above 0 and at most 1"
            raise UsageError(f"--threshold must be {limits} for {by}, got {threshold:g}", where="--threshold")
        return cls(most, by, threshold)

    def choose(self, sizes: Tensor | Array, norm: float) -> int:
        """Return the rank by the largest singular values, of a matrix of this norm; by energy all are needed."""
        found, limit = len(sizes), self.threshold * (1 - 1e-9)
        if self.by == "energy":
            found = int((sizes.cumsum(0) < limit * sizes.sum()).sum()) + 1
        elif self.by == "fro":
            found = int(((sizes * sizes).cumsum(0) < (limit * norm) ** 2).sum()) + 1
        elif self.by == "ratio":
            found = int((sizes * self.threshold >= sizes[0]).sum())
        return max(1, min(found, self.most, len(sizes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleLoss:
    """What a module's factors, rounded as they are written, lack of the change that they stand for."""

    path: str
    """The module's path in the base model."""
    rank: int
    rank_before: int | None = None
    """That of the source's factors, where it has any."""
    norm: float
    """2-norm of the change."""
    error: float
    """2-norm of what lacks: computed from the factors, not estimated."""
    method: str
    """How the factors were found: svd, randomised svd, or kept; DoRA's magnitudes stay."""

    @property
    def loss(self) -> float:
        """The error as a part of the norm."""
        return self.error / self.norm if self.norm else 0.0

    def to_json(self) -> dict[str, object]:
        """Return it as JSON holds it."""
        return as_json(self, "path rank rank_before norm error loss method")


class LeftOut(NamedTuple):
    """A change that is not in the adapter."""

    fqn: str
    norm: float | None  # 2-norm; None where there are no two numbers to compare
    why: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LoraResult(CheckedResult):
    """A LoRA that stands for another change, and what it loses of that."""

    conversion: Conversion
    modules: tuple[ModuleLoss, ...]
    left_out: tuple[LeftOut, ...] = ()
    """What differs and is not in the adapter."""
    config: Mapping[str, Sourced[object]] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    @property
    def loss(self) -> float:
        """What lacks as a part of the whole change (2-norms), what is left out included."""
        lost = [each.norm for each in self.left_out if each.norm is not None]
        whole = math.hypot(*(each.norm for each in self.modules), *lost)
        return math.hypot(*(each.error for each in self.modules), *lost) / whole if whole else 0.0

    def to_json(self) -> dict[str, object]:
        """Return it as JSON holds it."""
        left_out = [each._asdict() for each in self.left_out]
        return self.conversion.to_json() | as_json(self, "ok loss modules config findings") | {"left_out": left_out}


def norm_of(tensor: Tensor) -> float:
    """Return the 2-norm, summed in float64."""
    import torch

    parts = torch.split(tensor.reshape(-1), _SLICE)
    return math.sqrt(math.fsum(part.double().square().sum().item() for part in parts))


def svd_of_product(left: Array, right: Array) -> tuple[Array, Array, Array]:
    """Return the singular value decomposition of left·right (float64) by those of their triangles."""
    import numpy as np

    (outer, upper), (inner, lower) = np.linalg.qr(left), np.linalg.qr(right.T)
    vectors, sizes, others = np.linalg.svd(upper @ lower.T, full_matrices=False)
    return outer @ vectors, sizes, others @ inner.T


def nearest(matrix: Tensor, rule: RankRule, norm: float) -> tuple[Tensor, Tensor, str]:
    """Return B (rows, r) and A (r, columns) of the nearest product to a float32 matrix, and how they were found."""
    flat = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    few = min(rule.most, len(flat))
    found = None
    if rule.by != "energy" and len(flat) > max(_SMALL, 4 * (few + _SPARE)):
        found = _projected(flat, few, norm)
    basis, rest = _turned(flat, few if rule.by != "energy" else len(flat)) if found is None else found
    sizes = rest.double().square().sum(1).sqrt()
    rank = rule.choose(sizes, norm)
    roots = sizes[:rank].clamp(min=1e-37).sqrt().to(basis)
    up, down = basis[:, :rank] * roots, rest[:rank] / roots[:, None]
    return *((up, down) if flat is matrix else (down.T, up.T)), "svd" if found is None else "randomised svd"


def _turned(rows: Tensor, few: int) -> tuple[Tensor, Tensor]:
    """Return the leading left singular vectors, and rows times these: as long as the singular values."""
    vectors = _gram_vectors(rows)[1][:, :few].to(rows)
    return vectors, vectors.T @ rows


def _gram_vectors(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared singular values, the largest first, and the left vectors, by way of float64."""
    import torch

    gram = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for part in torch.split(rows, max(1, _SLICE // len(rows)), 1):
        gram.addmm_(part.double(), part.double().T)
    values, vectors = torch.linalg.eigh(gram)
    return values.flip(0), vectors.flip(1)


def _projected(flat: Tensor, few: int, norm: float) -> tuple[Tensor, Tensor] | None:
    """Return the same from a block Krylov space that grows until the error stays; None where it goes on shrinking."""
    import torch

    width, before = few + _SPARE, -math.inf
    start = torch.randn(flat.shape[1], width, generator=torch.Generator().manual_seed(0)).to(flat)
    basis = torch.linalg.qr(flat @ start)[0]
    newest = taken = basis.T @ flat
    for _ in range(_ROUNDS):
        values, vectors = _gram_vectors(taken)
        now = float(values[:few].sum())
        if now - before <= max(_CONVERGED * (norm**2 - now), _NOISE * norm**2):
            turn = vectors[:, :few].to(flat)
            return basis @ turn, turn.T @ taken
        if basis.shape[1] + width > len(flat) // 2:
            return None
        before, block = now, flat @ newest.T
        for _ in range(2):  # once leaves what rounding has put back
            block = torch.linalg.qr(block - basis @ (basis.T @ block))[0]
        newest = block.T @ flat
        basis, taken = torch.cat((basis, block), 1), torch.cat((taken, newest))
    return None
