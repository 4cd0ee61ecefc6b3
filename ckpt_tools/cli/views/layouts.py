"""Layouts as little data that a browser draws: how tensors are cut, who wrote what, in runs of numbers.

Thousands of tensors on thousands of ranks share a few patterns, and the ranks of a pattern are an arithmetic sequence
or nearly so: what a page holds grows with the number of patterns, not of chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

from ckpt_tools.checkpoint.entries import Chunk, TensorEntry
from ckpt_tools.checkpoint.infer_mesh import block_of, rank_of_file
from ckpt_tools.checkpoint.layout import Replicate
from ckpt_tools.checkpoint.summarise import BlockSummary, Summary

# What a summary comes to in few words: ranges of numbers, equal blocks in one row, the cuts of a tensor

_MAX_RANGES = 6


def format_ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers as ranges ("0-3,8"), the first few of them."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return ",".join(texts[:_MAX_RANGES]) + (",..." if len(texts) > _MAX_RANGES else "")


def fold_blocks(blocks: Sequence[BlockSummary]) -> list[tuple[str, int, tuple[int, ...]]]:
    """Fold equal neighbours into rows of (name, blocks, bytes of each by rank): "model.layers.0-31"."""
    runs: dict[str, list[tuple[int, BlockSummary]]] = {}
    order: list[str | BlockSummary] = []
    for block in blocks:
        numbered = block_of(block.name)
        if numbered is None:
            order.append(block)
            continue
        if numbered[0] not in runs:
            order.append(numbered[0])
        runs.setdefault(numbered[0], []).append((numbered[1], block))
    rows: list[tuple[str, int, tuple[int, ...]]] = []
    for item in order:
        if isinstance(item, BlockSummary):
            rows.append((item.name, 1, item.bytes_by_rank))
            continue
        numbered_blocks = sorted(runs[item], key=lambda pair: pair[0])
        first = 0
        for i in range(1, len(numbered_blocks) + 1):
            here = numbered_blocks[first][1].bytes_by_rank
            if i < len(numbered_blocks) and numbered_blocks[i][1].bytes_by_rank == here:
                continue
            numbers = format_ranges(number for number, _ in numbered_blocks[first:i])
            rows.append((f"{item}.{numbers}" if item else numbers, i - first, here))
            first = i
    return rows


def format_placement(summary: Summary, fqn: str) -> str:
    """Return the cuts of a tensor ("dp_shard:S(0) tp:S(1)"), "R" for none, "-" when they are not known."""
    placements = summary.placements_of(fqn)
    if placements is None:
        return "-"
    cuts = [f"{axis}:{placement}" for axis, placement in placements.items() if placement != Replicate()]
    return " ".join(cuts) or "R"


NOBODY = -1  # In place of a rank: no chunk holds this part of the tensor
UNKNOWN = -2  # In place of a rank: the name of the file has none
MAX_ROWS = 300  # Rows of the map of modules and ranks
_MAX_BOXES = 500  # Chunks that are listed of a tensor that no grid explains
_MAX_CELLS = 1 << 17  # Cells of a grid that is drawn


def encode_runs(numbers: Iterable[int]) -> list[int]:
    """Return numbers as runs, one after the other: first, step, count."""
    runs: list[int] = []
    for number in numbers:
        if runs and runs[-1] == 1:
            runs[-2:] = [number - runs[-3], 2]
        elif runs and number == runs[-3] + runs[-2] * runs[-1]:
            runs[-1] += 1
        else:
            runs += [number, 0, 1]
    return runs


class LayoutData:
    """What a page holds of one layout."""

    def __init__(self, summary: Summary, name: str) -> None:
        self._summary = summary
        self._name = name
        self._patterns: list[dict[str, object]] = []
        self._places: dict[object, int] = {}
        self._rank_of: dict[str, int] = {}

    def add(self, tensor: TensorEntry) -> int:
        """Return the number of the pattern that a tensor is stored in."""
        placed = format_placement(self._summary, tensor.fqn)
        # Tensors of an overlay that are cut alike share the chunks themselves.
        shortcut = (id(tensor.chunks), tensor.shape, placed)
        place = self._places.get(shortcut)
        if place is None:
            cells = tuple((*chunk.box.offsets, *chunk.box.sizes, self._rank(chunk)) for chunk in tensor.chunks)
            key = (tensor.shape, placed, cells)
            place = self._places.get(key)
            if place is None:
                place = self._places[key] = len(self._patterns)
                self._patterns.append(self._pattern(tensor) | {"placed": self._describe(placed)})
            self._places[shortcut] = place
        return place

    def _describe(self, placed: str) -> str:
        if placed == "-":
            return "placement not known"
        return "replicated" if placed == "R" else f"placement {placed}"

    def _rank(self, chunk: Chunk) -> int:
        file = chunk.span.file
        rank = self._rank_of.get(file)
        if rank is None:
            found = rank_of_file(file)
            rank = self._rank_of[file] = UNKNOWN if found is None else found
        return rank

    def _pattern(self, tensor: TensorEntry) -> dict[str, object]:
        full = [chunk for chunk in tensor.chunks if chunk.box.num_elems]
        pattern: dict[str, object] = {"empty": len(tensor.chunks) - len(full)}
        starts = [_starts(full, dim, length) for dim, length in enumerate(tensor.shape)]
        num_cells = math.prod(map(len, starts))
        if num_cells > _MAX_CELLS or not _is_grid(full, starts, tensor.shape):
            boxes = [(self._rank(c), list(c.box.offsets), list(c.box.sizes)) for c in full[:_MAX_BOXES]]
            return pattern | {"boxes": boxes, "num": len(full)}
        numbers = [{start: number for number, start in enumerate(each)} for each in starts]
        ranks = [NOBODY] * (num_cells if math.prod(tensor.shape) else 0)
        copies: dict[int, list[int]] = {}
        for chunk in full:
            cell = 0
            for dim, offset in enumerate(chunk.box.offsets):
                cell = cell * len(starts[dim]) + numbers[dim][offset]
            rank = self._rank(chunk)
            if ranks[cell] == NOBODY:
                ranks[cell] = rank
            else:
                copies.setdefault(cell, []).append(rank)
        pattern |= {"starts": [encode_runs(each) for each in starts], "ranks": encode_runs(ranks)}
        return pattern | ({"copies": copies} if copies else {})

    def to_json(self) -> dict[str, object]:
        """Return the layout with every pattern that was added."""
        summary = self._summary
        rows = fold_blocks(summary.blocks)
        kept = set(sorted(range(len(rows)), key=lambda i: -rows[i][1] * sum(rows[i][2]))[:MAX_ROWS])
        return {
            "name": self._name,
            "mesh": None if summary.mesh is None else [list(axis) for axis in summary.mesh.axes if axis[1] > 1],
            "ranks": encode_runs(rank.rank for rank in summary.ranks),
            "bytes": encode_runs(rank.num_bytes for rank in summary.ranks),
            "rows": [[row[0], row[1], encode_runs(row[2])] for i, row in enumerate(rows) if i in kept],
            "rows_left_out": len(rows) - len(kept),
            "patterns": self._patterns,
        }


def _starts(chunks: Sequence[Chunk], dim: int, length: int) -> list[int]:
    """Return where cells begin along a dim: at the first elements of chunks, and behind their last."""
    offsets = {chunk.box.offsets[dim] for chunk in chunks}
    ends = {chunk.box.offsets[dim] + chunk.box.sizes[dim] for chunk in chunks}
    return sorted({0} | {start for start in offsets | ends if 0 <= start < length})


def _is_grid(chunks: Sequence[Chunk], starts: Sequence[Sequence[int]], shape: Sequence[int]) -> bool:
    """Do chunks fill whole cells of the grid that they draw?"""
    ends = [dict(zip(each, [*each[1:], length], strict=True)) for each, length in zip(starts, shape, strict=True)]
    return all(
        ends[dim].get(offset) == offset + size
        for chunk in chunks
        for dim, (offset, size) in enumerate(zip(chunk.box.offsets, chunk.box.sizes, strict=True))
    )


_MAX_DEPTH = 12  # Levels of the tree of modules; names with more dots keep the rest in one


def dtype_names(summaries: Sequence[Summary]) -> list[str]:
    """Return the names of all dtypes, in the order of the data's numbers."""
    return list(dict.fromkeys(name for summary in summaries for name in summary.dtypes))


_Leaf = list[object]
_Branch = dict[tuple[str, bool], object]
"""(name, is it a module) → a `_Branch` or a `_Leaf`: a tensor may have the name of a module."""


def build_tree(summaries: Sequence[Summary], layouts: Sequence[LayoutData]) -> list[Any]:
    """Return the tree of modules: [name, bytes, parts, tensors], and of a tensor [name, bytes, dtype, shape, …]."""
    dtypes = {name: number for number, name in enumerate(dtype_names(summaries))}
    files = {file.file: number for number, file in enumerate(summaries[0].files)}
    by_name: list[dict[str, TensorEntry]] = [{t.fqn: t for t in summary.tensors} for summary in summaries]
    root: _Branch = {}
    for fqn in by_name[-1]:  # a plan may have other names than what is stored; no tensor counts twice
        found = [each.get(fqn) for each in by_name]
        tensor = by_name[-1][fqn]
        places = [None if t is None else layout.add(t) for t, layout in zip(found, layouts, strict=True)]
        leaf: _Leaf = [tensor.nbytes, dtypes[tensor.dtype.name], list(tensor.shape), places]
        if found[0] is not None and len(found[0].chunks) == 1 and not summaries[0].ranks:
            leaf.append(files[found[0].chunks[0].span.file])
        branch = root
        *modules, name = fqn.split(".", _MAX_DEPTH - 1)
        for module in modules:
            branch = cast("_Branch", branch.setdefault((module, True), {}))
        branch[name, False] = leaf
    return _close("", root)


def _close(name: str, branch: _Branch) -> list[Any]:
    parts: list[Any] = [
        _close(part, cast("_Branch", below)) if is_module else [part, *cast("_Leaf", below)]
        for (part, is_module), below in branch.items()
    ]
    while name and len(parts) == 1 and isinstance(parts[0][2], list):  # a chain of modules with one part each
        name, parts = f"{name}.{parts[0][0]}", parts[0][2]
    num_tensors = sum([part[3] if isinstance(part[2], list) else 1 for part in parts])
    return [name, sum(part[1] for part in parts), parts, num_tensors]
