"""Do boxes tile a shape exactly? Interval arithmetic, never a bitmap."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ckpt_tools.layout import Box

_Range = tuple[int, int]  # half-open
_Ranges = tuple[_Range, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TilingProblem:
    """The first place where boxes fail to tile a shape."""

    kind: Literal["missing", "overlap", "outside", "num-dims"]
    """A part without a box, with two boxes, outside of the shape, or a box of another number of dims."""
    box: Box
    """The part concerned."""

    def describe(self, shape: Sequence[int]) -> str:
        """Say it in words, naming the first dim that is not whole."""
        if self.kind == "num-dims":
            return f"a chunk has {len(self.box.sizes)} dims, the tensor has {len(shape)}"
        what = {
            "missing": "have no chunk",
            "overlap": "are in two different chunks",
            "outside": "lie outside of the tensor",
        }[self.kind]
        parts = []
        for dim, (offset, size, length) in enumerate(zip(self.box.offsets, self.box.sizes, shape, strict=True)):
            if (offset, size) != (0, length):
                label = "rows" if dim == 0 else "columns" if dim == 1 and len(shape) == 2 else f"dim {dim}:"
                parts.append(f"{label} {offset}..{offset + size} of {length}")
        return f"{' × '.join(parts) or 'all elements'} {what}"


def check_tiling(shape: tuple[int, ...], boxes: Iterable[Box]) -> TilingProblem | None:
    """Return what keeps `boxes` from tiling `shape`, or None when every element is in exactly one.

    Equal boxes count once: they are replicas. Empty boxes hold nothing but must lie inside.
    """
    filled = []
    for box in dict.fromkeys(boxes):
        if len(box.sizes) != len(shape) or len(box.offsets) != len(shape):
            return TilingProblem(kind="num-dims", box=box)
        if any(
            offset < 0 or size < 0 or offset + size > length
            for offset, size, length in zip(box.offsets, box.sizes, shape, strict=True)
        ):
            return TilingProblem(kind="outside", box=box)
        if 0 not in box.sizes:
            filled.append(tuple((o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True)))
    if 0 in shape or _is_grid(shape, filled):
        return None
    return _sweep(tuple((0, length) for length in shape), filled, 0)


def _is_grid(shape: tuple[int, ...], filled: Sequence[_Ranges]) -> bool:
    """Are the boxes the full product of per-dim intervals? True for everything that DTensor makes."""
    intervals = [sorted({ranges[dim] for ranges in filled}) for dim in range(len(shape))]
    if math.prod(map(len, intervals)) != len(filled):
        return False
    for length, parts in zip(shape, intervals, strict=True):
        position = 0
        for start, end in parts:
            if start != position:
                return False
            position = end
        if position != length:
            return False
    return True


def _sweep(whole: _Ranges, filled: Sequence[_Ranges], dim: int) -> TilingProblem | None:
    """Hold `filled` against `whole` from `dim` on; earlier dims are settled."""
    if dim == len(whole):
        if len(filled) == 1:
            return None
        kind: Literal["missing", "overlap"] = "overlap" if filled else "missing"
        return TilingProblem(kind=kind, box=_box(whole))
    if not filled:
        return TilingProblem(kind="missing", box=_box(whole))
    cuts = sorted({whole[dim][0], whole[dim][1], *(end for ranges in filled for end in ranges[dim])})
    pending = sorted(filled, key=lambda ranges: ranges[dim][0], reverse=True)
    active: list[_Ranges] = []
    for start, end in pairwise(cuts):
        active = [ranges for ranges in active if ranges[dim][1] > start]
        while pending and pending[-1][dim][0] <= start:
            active.append(pending.pop())
        slab = (*whole[:dim], (start, end), *whole[dim + 1 :])
        problem = _sweep(slab, active, dim + 1)
        if problem is not None:
            return problem
    return None


def _box(ranges: _Ranges) -> Box:
    return Box(tuple(start for start, _ in ranges), tuple(end - start for start, end in ranges))
