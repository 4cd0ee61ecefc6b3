"""The page of `inspect`: what a checkpoint holds, who holds it, and a planned layout beside the stored one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

from ckpt_tools.description.checkpoint import Chunk, TensorEntry
from ckpt_tools.description.folding import fold_blocks, format_placement
from ckpt_tools.description.infer import rank_of_file
from ckpt_tools.description.summarise import Summary
from ckpt_tools.report.page import Drawing, Facts, Mood, Notes, Page, Part, Section, Table
from ckpt_tools.report.parts import identity_sections
from ckpt_tools.units import format_size

# A layout as little data: how tensors are cut, who wrote what, in runs of numbers that a browser expands
# Thousands of tensors on thousands of ranks share a few patterns, and the ranks of a pattern are an arithmetic sequence
# or nearly so: what a page holds grows with the number of patterns, not of chunks.

NOBODY = -1
"""In place of a rank: no chunk holds this part of the tensor."""
UNKNOWN = -2
"""In place of a rank: the name of the file has none."""
MAX_ROWS = 300
"""Rows of the map of modules and ranks."""
_MAX_BOXES = 500
"""Chunks that are listed of a tensor that no grid explains."""
_MAX_CELLS = 1 << 17
"""Cells of a grid that is drawn."""


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


_MAX_DEPTH = 12
"""Levels of the tree of modules; names with more dots keep the rest in one."""
_MAX_FILES = 500
_SOURCES = {
    "manifest": "from the manifest",
    "inferred": "inferred from the chunks",
    "overlay": "planned, nothing is written",
}


def build_page(summary: Summary, stored: Summary | None = None) -> Page:
    """Return the page of a summary; of a planned layout with the `stored` one beside it, where that is known."""
    summaries = [summary] if stored is None else [stored, summary]
    first = summaries[0]
    renamed = stored is not None and {t.fqn for t in stored.tensors} != {t.fqn for t in summary.tensors}
    names = ["stored", "planned"] if stored is not None else ["planned" if summary.is_virtual else "stored"]
    layouts = [LayoutData(each, name) for each, name in zip(summaries, names, strict=True)]
    tree = _build_tree(summaries, layouts)
    drawn = [layout.to_json() for layout in layouts]
    sections = [
        *identity_sections([first.identity] if first.identity is not None else []),
        Section(title="What it holds", parts=_facts(first, summary)),
        Section(title="Modules", parts=(Drawing(draws="modules", caption=_HOW_MODULES + _RENAMED * renamed),)),
    ]
    for number, (each, name) in enumerate(zip(summaries, names, strict=True)):
        sections += _layout_sections(each, number, f" ({name})" if stored is not None else "", drawn[number])
    sections += _more_sections(first)
    data = {
        "layouts": drawn,
        "tree": tree,
        "dtypes": _dtype_names(summaries),
        "files": [file.file for file in first.files],
    }
    verdict, missing = _verdict(first)
    mood: Mood | None = "unknown" if missing else None
    return Page(command="inspect", subject=first.path, sections=sections, data=data, verdict=verdict, mood=mood)


_HOW_MODULES = "Areas are bytes. Open a module for its parts, and a tensor for its chunks; Escape goes back."
_RENAMED = " Names are those of the plan; where what is stored has another name, its chunks are not shown."


def _verdict(summary: Summary) -> tuple[str, int]:
    missing = sum(file.file_bytes is None for file in summary.files) if not summary.is_virtual else 0
    lost = f"; {missing} of {len(summary.files)} files missing" if missing else ""
    held = f"{summary.num_tensors:,} tensors, {format_size(summary.total_bytes)}"
    return f"{held}, from headers alone: no data was read or checked{lost}", missing


def _facts(first: Summary, summary: Summary) -> list[Part]:
    rows = [
        ("format", first.format),
        ("tensors", f"{first.num_tensors:,}"),
        ("elements", f"{first.num_elems:,}"),
        ("bytes", f"{first.total_bytes:,} ({format_size(first.total_bytes)})"),
        ("chunks", f"{first.num_chunks:,} in {sum(bool(f.num_chunks or f.file_bytes) for f in first.files):,} files"),
        ("dtypes", ", ".join(f"{name} {format_size(size)}" for name, size in first.dtypes.items()) or "none"),
    ]
    if not first.is_virtual:
        rows.append(("on disk", format_size(sum(file.file_bytes or 0 for file in first.files))))
    if first.names or summary.names:
        rows.append(("names", first.names or summary.names))
    for each in (first, summary) if first is not summary else (first,):
        name = "plan" if first is not summary and each is summary else "mesh"
        if each.mesh is not None and each.mesh_source is not None:
            rows.append((name, f"{each.mesh}, {each.mesh.world_size:,} ranks ({_SOURCES[each.mesh_source]})"))
        elif each.ranks:
            rows.append((name, "unknown: no mesh explains every chunk"))
        if each.imbalance is not None:
            rows.append(("imbalance", f"{each.imbalance:.2f} (fullest / mean of {len(each.ranks):,} ranks)"))
    if first.objects:
        rows.append(("blobs" if first.blobs else "objects", first.objects))
    if first.assets:
        rows.append(("assets", f"{len(first.assets):,} files, {format_size(sum(a.nbytes for a in first.assets))}"))
    missing = [file.file for file in first.files if file.file_bytes is None and not first.is_virtual]
    parts: list[Part] = [Facts(rows=rows)]
    return [*parts, Notes(items=[f"missing: {file}" for file in missing[:_MAX_FILES]])] if missing else parts


def _layout_sections(summary: Summary, number: int, suffix: str, drawn: dict[str, object]) -> list[Section]:
    sections = []
    if summary.mesh is not None and drawn["mesh"]:
        how = f"{summary.mesh}: what lies in the files of each rank. Of replicas, one rank writes."
        mesh = Drawing(draws="mesh", layout=number, caption=how)
        sections.append(Section(title=f"Mesh{suffix}", parts=(mesh,)))
    if summary.ranks and summary.blocks:
        parts: list[Part] = [Drawing(draws="heat", layout=number, caption="What each rank wrote of each module.")]
        if drawn["rows_left_out"]:
            parts.append(Notes(items=[f"{drawn['rows_left_out']} modules with the fewest bytes are not drawn"]))
        sections.append(Section(title=f"Bytes by module and rank{suffix}", parts=parts))
    return sections


def _more_sections(summary: Summary) -> list[Section]:
    sections = []
    if not summary.ranks and summary.files:
        rows = [
            (
                file.file,
                "missing" if file.file_bytes is None else format_size(file.file_bytes),
                format_size(file.num_bytes),
                f"{file.num_chunks:,}",
            )
            for file in summary.files[:_MAX_FILES]
        ]
        left_out = len(summary.files) - len(rows)
        headers = ("file", "on disk", "tensor bytes", "chunks")
        table = Table(caption="Files", headers=headers, rows=rows, align="lrrr", left_out=left_out)
        sections.append(Section(title="Files", parts=(table,)))
    if summary.blobs:
        blobs = [(blob.fqn, f"{blob.span.nbytes:,}", blob.span.file) for blob in summary.blobs[:_MAX_FILES]]
        left_out = len(summary.blobs) - len(blobs)
        table = Table(
            caption="Items that are not tensors; they are never unpickled",
            headers=("name", "bytes", "file"),
            rows=blobs,
            align="lrl",
            left_out=left_out,
        )
        sections.append(Section(title="Blobs", parts=(table,)))
    if summary.contents:
        contents = [(c.name, format_size(c.num_bytes), c.what or "not known") for c in summary.contents]
        table = Table(
            caption="Parts of the training step", headers=("part", "bytes", "what it is"), rows=contents, align="lrl"
        )
        sections.append(Section(title="The step", parts=(table,)))
    return sections


def _dtype_names(summaries: Sequence[Summary]) -> list[str]:
    return list(dict.fromkeys(name for summary in summaries for name in summary.dtypes))


_Leaf = list[object]
_Branch = dict[tuple[str, bool], object]
"""(name, is it a module) → a `_Branch` or a `_Leaf`: a tensor may have the name of a module."""


def _build_tree(summaries: Sequence[Summary], layouts: Sequence[LayoutData]) -> list[Any]:
    """Return the tree of modules: [name, bytes, parts, tensors], and of a tensor [name, bytes, dtype, shape, …]."""
    dtypes = {name: number for number, name in enumerate(_dtype_names(summaries))}
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
