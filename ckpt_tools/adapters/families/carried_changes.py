"""What PEFT's carried types do to a weight (float32), as its own `merge` computes it.

Letters: r rank, o outputs and i inputs of the weight, n blocks, b a block's size.

Source: peft 0.21 `tuners/*/layer.py`, `get_delta_weight` and `merge`; torch 2.13 `randperm` (Fisher-Yates on mt19937).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ckpt_tools.adapters.adapter import Shape
from ckpt_tools.adapters.families.changes import Change, Difference, LowRank
from ckpt_tools.adapters.families.family import Factors, Module, Setting, geometry
from ckpt_tools.errors import UsageError
from ckpt_tools.moving.arrays import Array

Sum = Array | tuple[Array, Array]
"""What is added to the weight (o, i), or two factors of it."""
_OF_CONVOLUTIONS = ("adalora", "hra", "ia3")
_LEAST_NORM = 1e-4
_RANK_STEP = np.float32(1e-5)
"""PEFT adds it to AdaLoRA's rank."""


@dataclass(frozen=True, slots=True)
class _Given:
    """A module, and the weight that it changes as a matrix."""

    factors: Factors
    rows: int
    columns: int
    shape: Shape
    """As the base has it."""
    setting: Setting

    def __getitem__(self, role: str) -> Array:
        return self.factors[role]

    def field(self, name: str) -> object:
        """Return a field of the configuration.

        Raises:
            UsageError: It is not known.
        """
        if name not in self.setting.settings:
            raise UsageError(
                f"{name} is not known, and the result depends on it",
                hint="put PEFT's adapter_config.json beside the adapter",
            )
        return self.setting.settings[name].value

    def number(self, name: str) -> float:
        """Return a field that is a number."""
        self.field(name)
        return self.setting.number_of(name, 0)


class Multiplied(Change):
    """weight ⊙ factor, where the factor has one row or column, or as many as the weight."""

    is_additive = False

    def __init__(self, rows: int, columns: int, factor: Array) -> None:
        super().__init__(rows, columns)
        if factor.shape[0] not in (1, rows) or factor.shape[1] not in (1, columns):
            raise ValueError("the factor has another size than the weight")
        self.factor = factor

    def apply(self, weight: Array, start: int) -> Array:
        """Return the new rows."""
        weight *= self.factor if len(self.factor) == 1 else self.factor[start : start + len(weight)]
        return weight


class ColumnsMixed(Change):
    """weight · matrix."""

    is_additive = False

    def __init__(self, rows: int, matrix: Array) -> None:
        super().__init__(rows, matrix.shape[0])
        self.matrix = matrix

    def apply(self, weight: Array, start: int) -> Array:
        """Return the new rows."""
        product: Array = weight @ self.matrix
        return product


class BlocksMixed(Change):
    """MiSS' "bat": every b × b block W of the n-th b rows becomes W + W·B[n] + B[n]."""

    is_additive = False

    def __init__(self, columns: int, blocks: Array) -> None:
        super().__init__(blocks.shape[0] * blocks.shape[1], columns)
        self.blocks = blocks

    def apply(self, weight: Array, start: int) -> Array:
        """Return the new rows."""
        size = self.blocks.shape[1]
        number, within = np.divmod(np.arange(start, start + len(weight)), size)
        old = weight.reshape(len(weight), -1, size)
        new: Array = old + old @ self.blocks[number] + self.blocks[number, within][:, None, :]
        return new.reshape(weight.shape)


class HalvesRotated(Change):
    """RoAd: in every group of rows the two halves are rotated against each other, each row by its own angle."""

    is_additive = False
    is_rowwise = False

    def __init__(self, columns: int, group: int, cosine: Array, sine: Array) -> None:
        super().__init__(len(cosine), columns)
        self.group, self.cosine, self.sine = group, cosine, sine

    def apply(self, weight: Array, start: int) -> Array:
        """Return the new weight."""
        halves = weight.reshape(-1, 2, self.group // 2, self.columns)
        turned = np.stack((-halves[:, 1], halves[:, 0]), axis=1).reshape(weight.shape)
        new: Array = weight * self.cosine[:, None] + turned * self.sine[:, None]
        return new


def _adalora(x: _Given) -> Sum:
    rank = np.float32(x.number("init_r"))
    alpha = x.number("lora_alpha")
    scale = np.float32(alpha if alpha > 0 else len(x["lora_A"])) / (rank + _RANK_STEP)
    return x["lora_B"], x["lora_A"] * x["lora_E"] * scale


def _c3a(x: _Given) -> Sum:
    kernel = x["c3a_kernel"]
    size = kernel.shape[2]
    places = (np.arange(size)[None, :] - np.arange(size)[:, None]) % size
    blocks = kernel[:, :, places] / np.float32(x.columns)  # (m, n, b rows, b columns)
    delta: Array = blocks.transpose(0, 2, 1, 3).reshape(x.rows, x.columns)
    return delta


def _delora(x: _Given) -> Sum:
    right, left = x["delora_A"], x["delora_B"]
    norms = [np.maximum(np.linalg.norm(each, axis=axis), _LEAST_NORM) for each, axis in ((right, 1), (left, 0))]
    return left * (x["delora_lambda"] / len(right) / (norms[0] * norms[1])), right * x["delora_w_norm"]


def _fourierft(x: _Given) -> Sum:
    spectrum = np.zeros(x.rows * x.columns)
    values = x["fourierft_spectrum"]
    spectrum[first_of_permutation(spectrum.size, len(values), int(x.number("random_loc_seed")))] = values
    waves: Array = np.fft.ifft2(spectrum.reshape(x.rows, x.columns)).real * x.number("scaling")
    return waves.astype(np.float32)


def first_of_permutation(size: int, count: int, seed: int) -> Array:
    """Return the first elements of torch.randperm(size, generator=torch.Generator().manual_seed(seed))."""
    draws = np.random.RandomState(seed % 2**32).randint(0, 2**32, count, np.uint32)  # its words, as mt19937 gives them
    moved: dict[int, int] = {}
    chosen = np.empty(count, np.int64)
    for place, draw in enumerate(draws.tolist()):
        other = place + draw % (size - place)
        chosen[place] = moved.get(other, other)
        moved[other] = moved.get(place, place)
    return chosen


def _gralora(x: _Given) -> Sum:
    down, up = x["gralora_A"], x["gralora_B"]
    n, inputs, rank = down.shape
    outputs, part = up.shape[2], rank // n
    delta = np.empty((x.rows, x.columns), np.float32)
    for one in range(n):  # of the inputs
        for other in range(n):  # of the outputs
            left = up[other, one * part : (one + 1) * part].T
            right = down[one, :, other * part : (other + 1) * part].T
            rows = slice(other * outputs, (other + 1) * outputs)
            delta[rows, one * inputs : (one + 1) * inputs] = left @ right
    if "gralora_A_general.weight" in x.factors:
        delta += x["gralora_B_general.weight"] @ x["gralora_A_general.weight"]
    return delta * np.float32(x.number("alpha") / (rank + x.number("hybrid_r")))


def _hra(x: _Given) -> Change:
    vectors = x["hra_u"].astype(np.float64)
    if x.field("apply_GS"):
        vectors = np.linalg.qr(vectors)[0]
        matrix = np.eye(len(vectors)) - 2 * vectors @ vectors.T
    else:
        vectors = vectors / np.linalg.norm(vectors, axis=0)
        matrix = np.eye(len(vectors))
        for vector in vectors.T:
            matrix -= 2 * np.outer(matrix @ vector, vector)
    return ColumnsMixed(x.rows, matrix.astype(np.float32))


def _ia3(x: _Given) -> Change:
    factor = x["ia3_l"]
    if factor.ndim == 2:
        return Multiplied(x.rows, x.columns, factor)
    if x.shape[0] == x.shape[1]:  # (1, n, 1, …) of a convolution may be of either
        raise UsageError("ckpt merges no IA³ of a convolution with as many inputs as outputs")
    if factor.size == x.rows:
        return Multiplied(x.rows, x.columns, factor.reshape(-1, 1))
    return Multiplied(x.rows, x.columns, np.repeat(factor.reshape(1, -1), x.columns // factor.size, axis=1))


def _miss(x: _Given) -> Sum | Change:
    block = x["miss_block"]
    if block.ndim == 3:
        return BlocksMixed(x.columns, block)
    if x.field("init_weights") == "mini":
        block = np.tile(block, (1, x.rows // block.shape[1]))
    rank = block.shape[0]
    return np.tile(block.T, (1, -(-x.columns // rank)))[:, : x.columns]


def _randlora(x: _Given) -> Sum:
    weights, gamma = x["randlora_lambda"], x["randlora_gamma"]
    rank, bases = weights.shape
    small = x["randlora_A"][:, :bases, : gamma.shape[1]] * weights[:, :, None] * gamma[None]
    large = x["randlora_B"][: max(x.rows, x.columns), :bases] * np.float32(x.number("randlora_alpha") / rank)
    # The one's rows and the other's columns are in different orders, in PEFT as well.
    left, right = large.reshape(len(large), -1), small.reshape(rank * bases, -1)
    return (left, right) if x.columns <= x.rows else (right.T, left.T)


def _road(x: _Given) -> Change:
    group = int(x.number("group_size"))
    theta, alpha = x["road_theta"], x["road_alpha"]
    cosine, sine = (np.cos(theta) * alpha, np.sin(theta) * alpha)
    variant = x.field("variant")
    if variant == "road_1":  # an angle for two rows
        cosine, sine = (np.repeat(part.reshape(-1, group // 2), 2, axis=0).reshape(-1) for part in (cosine, sine))
    elif variant == "road_4":  # two for one
        cosine, sine = cosine.reshape(-1, 2, group)[:, 0].reshape(-1), sine.reshape(-1, 2, group)[:, 1].reshape(-1)
    return HalvesRotated(x.columns, group, cosine, sine)


def _shira(x: _Given) -> Sum:
    delta = np.zeros((x.rows, x.columns), np.float32)
    row, column = x["shira_indices"].astype(np.int64)
    np.add.at(delta, (row, column), x["shira_weight"])
    return delta


def _vera(x: _Given) -> Sum:
    if "vera_A" not in x.factors:
        raise UsageError(
            "the adapter has no vera_A and vera_B, which PEFT makes from random numbers (save_projection is false)",
            hint="load it with PEFT, and save it with save_projection=True",
        )
    left = x["vera_lambda_b"][:, None] * x["vera_B"][: x.rows]
    return left, x["vera_lambda_d"][:, None] * x["vera_A"][:, : x.columns]


_CHANGES: Mapping[str, Callable[[_Given], Sum | Change]] = {
    "adalora": _adalora,
    "c3a": _c3a,
    "delora": _delora,
    "fourierft": _fourierft,
    "gralora": _gralora,
    "hra": _hra,
    "ia3": _ia3,
    "miss": _miss,
    "randlora": _randlora,
    "road": _road,
    "shira": _shira,
    "vera": _vera,
}


def change(name: str, module: Module, factors: Factors, shape: Shape, setting: Setting) -> Change:
    """Return what a module of the carried type `name` makes of a tensor; the arguments as for `change_of`.

    Raises:
        UsageError: ckpt does not know, or the configuration lacks what the result depends on.
    """
    if name not in _CHANGES or (len(shape) > 2 and name not in _OF_CONVOLUTIONS):
        what = name if name not in _CHANGES else f"{name} of a convolution"
        raise UsageError(f"ckpt does not merge {what}", where=module.path, hint="PEFT's merge_and_unload may")
    rows, columns = geometry(shape)[:: -1 if setting.transposed else 1]
    found = _CHANGES[name](_Given(factors, rows, columns, shape, setting))
    if isinstance(found, Multiplied) and setting.transposed:
        return Multiplied(columns, rows, found.factor.T)
    if isinstance(found, Change):
        if setting.transposed:
            raise UsageError(f"ckpt does not merge {name} into a transposed weight", where=module.path)
        return found
    if isinstance(found, tuple):
        left, right = (found[1].T, found[0].T) if setting.transposed else found
        return LowRank(left, right, setting.scale)
    return Difference(found.T if setting.transposed else found, setting.scale)
