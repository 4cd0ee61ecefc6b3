"""What PEFT's carried types do to a weight (float32), as its own `merge` computes it.

Arguments: f factors by role, o outputs and i inputs of the weight, s what else is known. Letters: r rank, n blocks.

Source: peft 0.21 `tuners/*/layer.py`, `get_delta_weight` and `merge`; torch 2.13 `randperm` (Fisher-Yates on mt19937).
"""
# ruff: noqa: ARG001 - all have the same arguments

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ckpt_tools.adapters.adapter import Shape
from ckpt_tools.adapters.families.changes import Change, Difference, LowRank, Turned
from ckpt_tools.adapters.families.family import Factors, Setting, geometry
from ckpt_tools.errors import UsageError
from ckpt_tools.moving.arrays import Array

Sum = Array | tuple[Array, Array]
"""What is added to the weight (o, i), or two factors of it."""
_OF_CONVOLUTIONS = ("adalora", "hra")
_LEAST_NORM = 1e-4
_RANK_STEP = np.float32(1e-5)
"""PEFT adds it to AdaLoRA's rank."""


def _adalora(f: Factors, o: int, i: int, s: Setting) -> Sum:
    alpha = s.number_of("lora_alpha")
    scale = np.float32(alpha if alpha > 0 else len(f["lora_A"])) / (np.float32(s.number_of("init_r")) + _RANK_STEP)
    return f["lora_B"], f["lora_A"] * f["lora_E"] * scale


def _c3a(f: Factors, o: int, i: int, s: Setting) -> Sum:
    kernel = f["c3a_kernel"]
    index = np.arange(kernel.shape[2])
    blocks = kernel[:, :, (index[None, :] - index[:, None]) % len(index)] / np.float32(i)
    delta: Array = blocks.transpose(0, 2, 1, 3).reshape(o, i)
    return delta


def _delora(f: Factors, o: int, i: int, s: Setting) -> Sum:
    right, left = f["delora_A"], f["delora_B"]
    norms = [np.maximum(np.linalg.norm(each, axis=axis), _LEAST_NORM) for each, axis in ((right, 1), (left, 0))]
    return left * (f["delora_lambda"] / len(right) / (norms[0] * norms[1])), right * f["delora_w_norm"]


def _fourierft(f: Factors, o: int, i: int, s: Setting) -> Sum:
    """A wave's real part is cos(x + y) = cos x · cos y - sin x · sin y: two ranks, and no spectrum in memory."""
    values = f["fourierft_spectrum"] * (s.number_of("scaling") / (o * i))
    places = first_of_permutation(o * i, len(values), int(s.number_of("random_loc_seed")))
    down, across = (
        2 * np.pi / size * (np.outer(np.arange(size), each) % size)
        for size, each in zip((o, i), np.divmod(places, i), strict=True)
    )
    left = np.hstack((np.cos(down) * values, np.sin(down) * -values)).astype(np.float32)
    return left, np.hstack((np.cos(across), np.sin(across))).T.astype(np.float32)


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


def _gralora(f: Factors, o: int, i: int, s: Setting) -> Sum:
    n, inputs, rank = f["gralora_A"].shape
    outputs, part = o // n, rank // n
    delta = np.empty((o, i), np.float32)
    for x in range(n):  # of the inputs
        for y in range(n):  # of the outputs
            left = f["gralora_B"][y, x * part : (x + 1) * part].T
            right = f["gralora_A"][x, :, y * part : (y + 1) * part].T
            delta[y * outputs : (y + 1) * outputs, x * inputs : (x + 1) * inputs] = left @ right
    if "gralora_A_general.weight" in f:
        delta += f["gralora_B_general.weight"] @ f["gralora_A_general.weight"]
    return delta * np.float32(s.number_of("alpha") / (rank + s.number_of("hybrid_r")))


def _hra(f: Factors, o: int, i: int, s: Setting) -> Change:
    vectors = f["hra_u"].astype(np.float64)
    if s.bool_of("apply_GS"):
        vectors = np.linalg.qr(vectors)[0]
        matrix = np.eye(len(vectors)) - 2 * vectors @ vectors.T
    else:
        matrix = np.eye(len(vectors))
        for vector in (vectors / np.linalg.norm(vectors, axis=0)).T:
            matrix -= 2 * np.outer(matrix @ vector, vector)
    mixed = matrix.astype(np.float32)
    return Turned(o, len(mixed), lambda weight, _: weight @ mixed)


def _ia3(f: Factors, o: int, i: int, s: Setting) -> Change:
    factor = f["ia3_l"].T if s.transposed else f["ia3_l"]
    rows, columns = (i, o) if s.transposed else (o, i)
    if factor.shape not in ((rows, 1), (1, columns)):
        raise ValueError("the factor has another size than the weight")
    whole = np.broadcast_to(factor, (rows, factor.shape[1]))
    return Turned(rows, columns, lambda weight, start: weight * whole[start : start + len(weight)])


def _miss(f: Factors, o: int, i: int, s: Setting) -> Sum | Change:
    block = f["miss_block"]
    if block.ndim < 3:
        if s.settings.get("init_weights") is not None and s.settings["init_weights"].value == "mini":
            block = np.tile(block, (1, o // block.shape[1]))
        return np.tile(block.T, (1, -(-i // len(block))))[:, :i]

    def turn(weight: Array, start: int) -> Array:
        """Every block W of the n-th rows becomes W + W·B[n] + B[n]."""
        number, within = np.divmod(np.arange(start, start + len(weight)), block.shape[1])
        old = weight.reshape(len(weight), -1, block.shape[1])
        new: Array = old + old @ block[number] + block[number, within][:, None, :]
        return new.reshape(weight.shape)

    return Turned(block.shape[0] * block.shape[1], i, turn)


def _randlora(f: Factors, o: int, i: int, s: Setting) -> Sum:
    weights, gamma = f["randlora_lambda"], f["randlora_gamma"]
    rank, bases = weights.shape
    small = f["randlora_A"][:, :bases, : gamma.shape[1]] * weights[:, :, None] * gamma[None]
    large = f["randlora_B"][: max(o, i), :bases] * np.float32(s.number_of("randlora_alpha") / rank)
    # The one's columns and the other's rows are in different orders, in PEFT as well.
    left, right = large.reshape(len(large), -1), small.reshape(rank * bases, -1)
    return (left, right) if i <= o else (right.T, left.T)


def _road(f: Factors, o: int, i: int, s: Setting) -> Change:
    group, variant = int(s.number_of("group_size")), s.settings["variant"].value if "variant" in s.settings else None
    cosine, sine = (turn(f["road_theta"]) * f["road_alpha"] for turn in (np.cos, np.sin))
    if variant == "road_1":  # an angle for two rows
        cosine, sine = (np.repeat(each.reshape(-1, group // 2), 2, axis=0).reshape(-1) for each in (cosine, sine))
    elif variant == "road_4":  # two for one
        cosine, sine = cosine.reshape(-1, 2, group)[:, 0].reshape(-1), sine.reshape(-1, 2, group)[:, 1].reshape(-1)
    elif variant != "road_2":
        raise UsageError(f"the variant of RoAd is {variant}, on which the result depends")

    def turn_halves(weight: Array, _: int) -> Array:
        """In every group of rows the halves are rotated against each other."""
        halves = weight.reshape(-1, 2, group // 2, weight.shape[1])
        turned = np.stack((-halves[:, 1], halves[:, 0]), axis=1).reshape(weight.shape)
        new: Array = weight * cosine[:, None] + turned * sine[:, None]
        return new

    return Turned(len(cosine), i, turn_halves, is_rowwise=False)


def _shira(f: Factors, o: int, i: int, s: Setting) -> Sum:
    delta = np.zeros((o, i), np.float32)
    np.add.at(delta, tuple(f["shira_indices"].astype(np.int64)), f["shira_weight"])
    return delta


def _vera(f: Factors, o: int, i: int, s: Setting) -> Sum:
    if "vera_A" not in f:
        raise UsageError(
            "the adapter has no vera_A and vera_B, which PEFT makes from random numbers (save_projection is false)",
            hint="load it with PEFT, and save it with save_projection=True",
        )
    return f["vera_lambda_b"][:, None] * f["vera_B"][:o], f["vera_lambda_d"][:, None] * f["vera_A"][:, :i]


_CHANGES: Mapping[str, Callable[[Factors, int, int, Setting], Sum | Change]] = {
    each.__name__[1:]: each
    for each in (_adalora, _c3a, _delora, _fourierft, _gralora, _hra, _ia3, _miss, _randlora, _road, _shira, _vera)
}


def change(name: str, path: str, factors: Factors, shape: Shape, setting: Setting) -> Change:
    """Return what a module of the carried type `name` makes of a tensor; the arguments are those of `change_of`."""
    if name not in _CHANGES or (len(shape) > 2 and name not in _OF_CONVOLUTIONS):
        what = name if name not in _CHANGES else f"{name} of a convolution"
        raise UsageError(f"ckpt does not merge {what}", where=path, hint="PEFT's merge_and_unload may")
    o, i = geometry(shape)[:: -1 if setting.transposed else 1]
    found = _CHANGES[name](factors, o, i, setting)
    if isinstance(found, Change):
        return found
    if isinstance(found, tuple):
        left, right = (found[1].T, found[0].T) if setting.transposed else found
        return LowRank(left, right, setting.scale)
    return Difference(found.T if setting.transposed else found, setting.scale)
