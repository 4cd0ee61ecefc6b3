"""What is in a checkpoint and where: a description in, a summary out, no bytes read.

Bytes of tensors, chunks, ranks and prefixes are logical ones (elements times width); the size of a file is
what it takes on disk, with headers and item records. Shapes, offsets and sizes count elements.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.entries import Asset, BlobEntry, ByteSpan, Checkpoint, Chunk, TensorEntry, say_census
from ckpt_tools.checkpoint.identity import Identity
from ckpt_tools.checkpoint.infer_mesh import block_of, infer_mesh, rank_of_file
from ckpt_tools.checkpoint.layout import Layout, Mesh, Placement, Replicate, cut_tensor
from ckpt_tools.results import Result, as_json
from ckpt_tools.text import natural_key, natural_order

MAX_PREFIXES = 12  # Rows that the FQN tree is folded to
MAX_BLOCKS = 2000  # Rows of the rank × layer map; what is beyond goes into one row, `OTHER`
OTHER = "(other)"  # Name of the row that takes what has no row of its own
_MAX_DEPTH = 8  # Components of an FQN that the folded tree looks at


MeshSource = Literal["manifest", "inferred", "overlay"]  # Who says it; "overlay" is the user who asks "what if"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSummary:
    """One file that holds chunks or blobs, and the logical bytes of its chunks."""

    file: str
    file_bytes: int | None  # Size on disk; None when the file is missing or not yet written
    num_chunks: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """What one rank wrote, in logical bytes."""

    rank: int
    files: tuple[str, ...]
    num_chunks: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSummary:
    """A branch of the FQN tree; `*` stands for the numbers of repeated blocks."""

    prefix: str
    num_tensors: int
    num_elems: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSummary:
    """A row of the rank × layer map: one repeated block, or one top-level branch outside of blocks."""

    name: str  # For example "model.layers.3" or "model.norm"
    bytes_by_rank: tuple[int, ...]  # Logical bytes, in the order of `Summary.ranks`


@dataclass(frozen=True, slots=True)
class ContentSummary:
    """A directory or file of a training step, or several files that differ by a number."""

    name: str
    num_bytes: int
    what: str  # What a trainer keeps there; "" where that is not known


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Summary(Result):
    """Everything that `ckpt inspect` shows about a checkpoint."""

    path: str
    """The path as the user wrote it."""
    format: str
    """How it is stored."""
    num_tensors: int
    """Tensors."""
    num_elems: int
    """Elements of all tensors, replicas counted once."""
    total_bytes: int
    """Logical bytes of all tensors, replicas counted once."""
    num_chunks: int
    """Stored chunks, empty ones included."""
    dtypes: Mapping[str, int]
    """Dtype name → logical bytes, most bytes first."""
    files: tuple[FileSummary, ...]
    """Files that hold chunks or blobs, by name (numbers in order)."""
    ranks: tuple[RankSummary, ...]
    """Ranks that wrote something, in order; () when file names carry no rank."""
    blobs: tuple[BlobEntry, ...]
    """Items that are not tensors."""
    assets: tuple[Asset, ...]
    """Files that are copied with the weights."""
    prefixes: tuple[PrefixSummary, ...]
    """The FQN tree, folded to at most `MAX_PREFIXES` rows; branches in source order, one may be `OTHER`."""
    blocks: tuple[BlockSummary, ...]
    """Bytes per block and rank, in source order; () when there are no ranks."""
    mesh: Mesh | None
    """The mesh, when known."""
    mesh_source: MeshSource | None
    """Where the mesh comes from."""
    identity: Identity | None = None
    """What it is, and whether it is whole."""
    placements: Mapping[str, Mapping[str, Placement]] | None
    """FQN → axis → placement, when known."""
    tensors: tuple[TensorEntry, ...] = ()
    """The tensors themselves."""
    names: str = ""
    """What `--names` changed, for people; empty where the names are those that are stored."""
    contents: tuple[ContentSummary, ...] = ()
    """Of a training step whose model this is: everything that it consists of, the model first."""
    inside: Mapping[str, Counter[str]] = field(default_factory=dict)
    """Blob → what it holds."""
    census: Counter[str] = field(default_factory=Counter)
    """What blobs, and files of objects, hold: how many "tensors", their "bytes", and class → how many objects."""

    @property
    def objects(self) -> str:
        """What is not a tensor, in a line; "" where nothing is."""
        count = f"{len(self.blobs):,} (not tensors, never unpickled): " if self.blobs else "never unpickled: "
        return count + say_census(self.census) if self.blobs or self.census else ""

    @property
    def imbalance(self) -> float | None:
        """Bytes of the fullest rank over the mean of all ranks; None without ranks or bytes."""
        total = sum(rank.num_bytes for rank in self.ranks)
        return max(rank.num_bytes for rank in self.ranks) * len(self.ranks) / total if total else None

    @property
    def is_virtual(self) -> bool:
        """True when the files do not exist: an overlay describes them."""
        return self.mesh_source == "overlay"

    def placements_of(self, fqn: str) -> dict[str, Placement] | None:
        """Return axis → placement for every axis of the mesh; None when nothing is known."""
        if self.mesh is None or self.placements is None or fqn not in self.placements:
            return None
        named = self.placements[fqn]
        return {axis: named.get(axis, Replicate()) for axis, _ in self.mesh.axes}

    def to_json(self, *, tensors: Iterable[TensorEntry] | None = None) -> dict[str, object]:
        """Return the `inspect` document of the command contract, with chunks of `tensors`; names stay as they are."""

        def rows(items: Iterable[object], names: str) -> list[dict[str, object]]:
            return [as_json(each, names) for each in items]

        document: dict[str, object] = {
            **as_json(self, "path format identity"),
            "names": self.names or None,
            **as_json(self, "num_tensors num_elements=num_elems total_bytes num_chunks"),
            "num_files": len(self.files),
            "dtypes": dict(self.dtypes),
            "ranks": rows(self.ranks, "rank files num_chunks bytes=num_bytes"),
            "imbalance": self.imbalance,
            "files": rows(self.files, "file nbytes=file_bytes num_chunks bytes=num_bytes"),
            "blobs": [
                {"fqn": b.fqn, **as_json(b.span, "file offset nbytes")}
                | {"census": (held := self.inside.get(b.fqn)), "holds": None if held is None else say_census(held)}
                for b in self.blobs
            ],
            "objects": self.census,
            "assets": rows(self.assets, "file nbytes"),
            "prefixes": rows(self.prefixes, "prefix num_tensors num_elements=num_elems bytes=num_bytes"),
            "mesh": None if self.mesh is None else dict(self.mesh.axes),
            **as_json(self, "mesh_source virtual=is_virtual"),
            "contents": rows(self.contents, "name nbytes=num_bytes what"),
        }
        if tensors is not None:
            document["tensors"] = [_tensor_json(self, tensor) for tensor in tensors]
        return document


def chunk_bytes(dtype: DType, sizes: Sequence[int]) -> int:
    """Return the logical bytes of a box of `sizes` elements; a last half byte counts as one."""
    return -(-math.prod(sizes) * dtype.bits // 8)


def _row_name(fqn: str) -> str:
    block = block_of(fqn)
    if block is not None:
        return f"{block[0]}.{block[1]}" if block[0] else str(block[1])
    # The last component is the parameter itself; two levels are enough outside of blocks.
    return ".".join(fqn.split(".")[:-1][:2]) or fqn


def _fold_prefixes(tensors: Sequence[TensorEntry]) -> tuple[PrefixSummary, ...]:
    """Open the heaviest branches of the FQN tree for as long as the rows stay few."""
    paths = []
    for tensor in tensors:
        parts = tensor.fqn.split(".", _MAX_DEPTH)[:_MAX_DEPTH]
        paths.append(tuple("*" if part.isdecimal() else part for part in parts))
    sizes = [chunk_bytes(tensor.dtype, tensor.shape) for tensor in tensors]
    rows: dict[tuple[str, ...], list[int]] = {}
    for i, path in enumerate(paths):
        rows.setdefault(path[:1], []).append(i)
    closed: set[tuple[str, ...]] = set()

    def weigh(row: tuple[str, ...]) -> int:
        return sum(sizes[i] for i in rows[row])

    if len(rows) > MAX_PREFIXES:
        kept = set(sorted(rows, key=weigh, reverse=True)[: MAX_PREFIXES - 1])
        others = [i for row, indices in rows.items() if row not in kept for i in indices]
        rows = {row: indices for row, indices in rows.items() if row in kept} | {(OTHER,): sorted(others)}
        closed.add((OTHER,))
    while len(closed) < len(rows):
        heaviest = max((row for row in rows if row not in closed), key=weigh)
        children: dict[tuple[str, ...], list[int]] = {}
        for i in rows[heaviest]:
            children.setdefault(paths[i][: len(heaviest) + 1], []).append(i)
        if heaviest in children or len(rows) - 1 + len(children) > MAX_PREFIXES:
            closed.add(heaviest)
            continue
        del rows[heaviest]
        rows |= children

    def place(row: tuple[str, ...]) -> tuple[int, ...]:
        # Where each ancestor first comes up, so that branches stay together whatever order tensors are in.
        heads = (row[: depth + 1] for depth in range(len(row)))
        return tuple(min(rows[r][0] for r in rows if r[: len(head)] == head) for head in heads)

    return tuple(
        PrefixSummary(
            prefix=".".join(row),
            num_tensors=len(indices),
            num_elems=sum(tensors[i].num_elems for i in indices),
            num_bytes=weigh(row),
        )
        for row, indices in sorted(rows.items(), key=lambda item: place(item[0]))
    )


def _summarise_dtypes(tensors: Sequence[TensorEntry]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for tensor in tensors:
        totals[tensor.dtype.name] = totals.get(tensor.dtype.name, 0) + chunk_bytes(tensor.dtype, tensor.shape)
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


def _count(tensors: Sequence[TensorEntry]) -> tuple[dict[str, int], dict[str, int], dict[str, dict[str, int]]]:
    """Return chunks by file, bytes by file, and bytes by row of the map and file."""
    # Tensors of an overlay that are cut alike share the chunks themselves, and layers of such tensors share a row:
    # thousands of ranks are counted once per kind of layer.
    alike: dict[tuple[int, DType], Sequence[Chunk]] = {}
    held: dict[str, Counter[tuple[int, DType]]] = {}
    for tensor in tensors:
        key = (id(tensor.chunks), tensor.dtype)
        alike[key] = tensor.chunks
        name = _row_name(tensor.fqn)
        held.setdefault(name if name in held or len(held) < MAX_BLOCKS else OTHER, Counter())[key] += 1
    same = Counter(frozenset(counter.items()) for counter in held.values())
    num_chunks: dict[str, int] = {}
    num_bytes: dict[str, int] = {}
    rows: dict[frozenset[tuple[tuple[int, DType], int]], dict[str, int]] = {}
    # Most chunks share their sizes with many others, and the loop in the middle runs once per chunk.
    cache: dict[tuple[tuple[int, ...], DType], int] = {}
    for kind, num_rows in same.items():
        row = rows[kind] = {}
        for key, num_tensors in kind:
            for chunk in alike[key]:
                file = chunk.span.file
                nbytes = cache.get((chunk.box.sizes, key[1]))
                if nbytes is None:
                    nbytes = cache[chunk.box.sizes, key[1]] = chunk_bytes(key[1], chunk.box.sizes)
                num_chunks[file] = num_chunks.get(file, 0) + num_tensors * num_rows
                num_bytes[file] = num_bytes.get(file, 0) + nbytes * num_tensors * num_rows
                row[file] = row.get(file, 0) + nbytes * num_tensors
    return num_chunks, num_bytes, {name: rows[frozenset(counter.items())] for name, counter in held.items()}


def summarise(checkpoint: Checkpoint, *, path: str | None = None, mesh_source: MeshSource | None = None) -> Summary:
    """Return what `ckpt inspect` tells about `checkpoint`, calling it by its root unless `path` is given."""
    # The mesh is the recorded one ("manifest", unless `mesh_source` says otherwise; "overlay" marks the files as not
    # written); where none is, the one that explains the chunks (`infer_mesh`).
    tensors = tuple(natural_order(checkpoint.tensors, lambda entry: entry.fqn))
    num_chunks, num_bytes, rows = _count(tensors)
    names = num_chunks.keys() | {blob.span.file for blob in checkpoint.blobs} | checkpoint.files.keys()
    files = tuple(
        FileSummary(
            file=file,
            file_bytes=checkpoint.files.get(file),
            num_chunks=num_chunks.get(file, 0),
            num_bytes=num_bytes.get(file, 0),
        )
        for file in sorted(names, key=natural_key)
    )
    ranks = _summarise_ranks(files)
    distinct = {id(by_file): by_file for by_file in (rows.values() if ranks else ())}
    by_rank = {
        key: tuple(sum(by_file.get(file, 0) for file in rank.files) for rank in ranks)
        for key, by_file in distinct.items()
    }
    blocks = tuple(
        BlockSummary(name=name, bytes_by_rank=by_rank[id(by_file)]) for name, by_file in (rows.items() if ranks else ())
    )
    mesh, placements = checkpoint.mesh, checkpoint.placements
    if mesh is not None:
        mesh_source = mesh_source or "manifest"
    elif inferred := infer_mesh(checkpoint):
        mesh, placements, mesh_source = inferred.mesh, inferred.placements, "inferred"
    else:
        mesh_source = None
    return Summary(
        path=checkpoint.root if path is None else path,
        format=checkpoint.format,
        num_tensors=len(tensors),
        num_elems=sum(tensor.num_elems for tensor in tensors),
        total_bytes=sum(chunk_bytes(tensor.dtype, tensor.shape) for tensor in tensors),
        num_chunks=sum(num_chunks.values()),
        dtypes=_summarise_dtypes(tensors),
        files=files,
        ranks=ranks,
        blobs=tuple(natural_order(checkpoint.blobs, lambda blob: blob.fqn)),
        assets=checkpoint.assets,
        prefixes=_fold_prefixes(tensors),
        blocks=blocks,
        mesh=mesh,
        mesh_source=mesh_source,
        placements=placements,
        tensors=tensors,
    )


def _summarise_ranks(files: Sequence[FileSummary]) -> tuple[RankSummary, ...]:
    by_rank: dict[int, list[FileSummary]] = {}
    for file in files:
        rank = rank_of_file(file.file)
        if rank is None:
            if file.num_chunks:
                return ()
            continue
        by_rank.setdefault(rank, []).append(file)
    return tuple(
        RankSummary(
            rank=rank,
            files=tuple(file.file for file in written),
            num_chunks=sum(file.num_chunks for file in written),
            num_bytes=sum(file.num_bytes for file in written),
        )
        for rank, written in sorted(by_rank.items())
    )


def overlay(checkpoint: Checkpoint, layout: Layout) -> Checkpoint:
    """Return what `checkpoint` would look like sharded for a mesh: virtual files, one per rank that writes."""
    # Tensors that the layout does not name are replicated. Spans tell the file and the length alone (their offset is
    # 0), and tensors that are cut alike share their chunks: 1000 tensors × 4096 ranks stay small.
    files: dict[str, int] = {}
    shared: dict[tuple[object, ...], tuple[Chunk, ...]] = {}
    uses: Counter[tuple[object, ...]] = Counter()
    tensors = []
    for tensor in checkpoint.tensors:
        by_axis = layout.placements.get(tensor.fqn, {})
        grid = cut_tensor(tensor.shape, layout.mesh, by_axis, pack=tensor.dtype.pack)
        key = (tensor.shape, tensor.dtype.name, grid.cutters)
        chunks = shared.get(key)
        if chunks is None:
            chunks = shared[key] = tuple(
                Chunk(
                    box=box,
                    span=ByteSpan(file=f"__{rank}_0.distcp", offset=0, nbytes=chunk_bytes(tensor.dtype, box.sizes)),
                )
                for rank, box in grid.cells
            )
        uses[key] += 1
        tensors.append(replace(tensor, chunks=chunks))
    for cut, num_tensors in uses.items():
        for chunk in shared[cut]:
            files[chunk.span.file] = files.get(chunk.span.file, 0) + chunk.span.nbytes * num_tensors
    return Checkpoint(
        root=checkpoint.root,
        format="dcp",
        tensors=tuple(tensors),
        assets=checkpoint.assets,
        mesh=layout.mesh,
        placements=layout.placements,
        files=files,
    )


def _tensor_json(summary: Summary, tensor: TensorEntry) -> dict[str, object]:
    placements = summary.placements_of(tensor.fqn)
    chunks = [
        {"rank": rank_of_file(chunk.span.file), **as_json(chunk.box, "offsets sizes")}
        | as_json(chunk.span, "file offset nbytes")
        | ({"offset": None} if summary.is_virtual else {})
        for chunk in tensor.chunks
    ]
    said = None if placements is None else {axis: str(p) for axis, p in placements.items()}
    names = {"fqn": tensor.fqn, "dtype": tensor.dtype.name, "shape": list(tensor.shape)}
    return {**names, "placements": said, "chunks": chunks}
