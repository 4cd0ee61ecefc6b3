"""Do boxes tile a shape exactly? Arithmetic on their bounds, never a bitmap."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ckpt_tools.checkpoint.layout import Box

_Range = tuple[int, int]  # half-open
_Ranges = tuple[_Range, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TilingProblem:
    """The first place where boxes fail to tile a shape."""

    kind: Literal["missing", "overlap", "outside", "num-dims"]  # No box, two boxes, outside, another number of dims
    box: Box

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
    """Return what keeps `boxes` from tiling `shape`, or None when every element is in exactly one."""
    # Equal boxes count once: they are replicas. Empty boxes hold nothing but must lie inside. Takes time linear in the
    # number of boxes, and to find the place of a problem a logarithm more, however the boxes lie.
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
    whole = tuple((0, length) for length in shape)
    if 0 in shape or _is_grid(shape, filled) or _tiles(whole, filled):
        return None
    return _locate(whole, filled)


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


_MODULUS = (1 << 127) - 1


class _Weights(dict[int, int]):
    """A secret random number for every coordinate."""

    def __missing__(self, coordinate: int) -> int:
        weight = self[coordinate] = int.from_bytes(os.urandom(16)) % _MODULUS
        return weight


def _tiles(whole: _Ranges, filled: Iterable[_Ranges]) -> bool:
    """Do the boxes tile the whole exactly? Boxes must be distinct, lie inside and hold something."""
    # How often each element is held is a sum of boxes, and determined by the signed corners of these boxes: it is 1
    # everywhere exactly when all corners but those of the whole cancel. With a variable for every coordinate, the
    # corners of a box are the product over the dims of (x_end - x_start), so that they cancel exactly when a polynomial
    # is zero. It is evaluated at random: a polynomial of degree d that is not zero comes out as zero with a chance
    # below d / 2^127 (Schwartz and Zippel), and a file cannot know the numbers.
    # A sweep would compare intervals instead, but takes n^d steps for n boxes that are cut along d different dims.
    weights = [_Weights() for _ in whole]

    def corners(ranges: _Ranges) -> int:
        product = 1
        for weight, (start, end) in zip(weights, ranges, strict=True):
            product = product * (weight[end] - weight[start]) % _MODULUS
        return product

    return (sum(map(corners, filled)) - corners(whole)) % _MODULUS == 0


def _locate(whole: _Ranges, filled: Sequence[_Ranges]) -> TilingProblem:
    """Return the first part, in row-major order, that is not held once; `filled` must not tile the whole."""
    for dim in range(len(whole)):
        if not filled:
            break
        cuts = sorted({*whole[dim], *(cut for ranges in filled for cut in ranges[dim])})
        low, high = 0, len(cuts) - 1  # before cuts[low] all is well, up to cuts[high] it is not
        while high - low > 1:
            middle = (low + high) // 2
            half = _clip(whole, filled, dim, (cuts[low], cuts[middle]))
            if _tiles(*half):
                whole, filled = _clip(whole, filled, dim, (cuts[middle], cuts[high]))
                low = middle
            else:
                whole, filled = half
                high = middle
    return TilingProblem(kind="overlap" if filled else "missing", box=_box(whole))


def _clip(whole: _Ranges, filled: Iterable[_Ranges], dim: int, part: _Range) -> tuple[_Ranges, list[_Ranges]]:
    """Return the whole and what lies in `part` of it along `dim`."""
    start, end = part
    clipped = [
        (*ranges[:dim], (max(ranges[dim][0], start), min(ranges[dim][1], end)), *ranges[dim + 1 :])
        for ranges in filled
        if ranges[dim][0] < end and ranges[dim][1] > start
    ]
    return (*whole[:dim], part, *whole[dim + 1 :]), clipped


def _box(ranges: _Ranges) -> Box:
    return Box(tuple(start for start, _ in ranges), tuple(end - start for start, end in ranges))
