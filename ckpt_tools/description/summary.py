"""What `ckpt inspect` tells about a checkpoint, as values: `inspect` makes them, the reports show them.

Bytes of tensors, chunks, ranks and prefixes are logical ones (elements times width); the size of a file is
what it takes on disk, with headers and item records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ckpt_tools.description.checkpoint import Asset, BlobEntry, TensorEntry
from ckpt_tools.description.layout import Mesh, Placement, Replicate

MeshSource = Literal["manifest", "inferred", "overlay"]
"""Who says what the mesh is: a manifest in the checkpoint, its chunks, or the user who asks "what if"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSummary:
    """One file that holds chunks or blobs, and the logical bytes of its chunks."""

    file: str
    file_bytes: int | None
    """Size on disk; None when the file is missing or not yet written."""
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

    name: str
    """For example "model.layers.3" or "model.norm"."""
    bytes_by_rank: tuple[int, ...]
    """Logical bytes, in the order of `Summary.ranks`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Everything that `ckpt inspect` tells about a checkpoint."""

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
    """Files that come along."""
    prefixes: tuple[PrefixSummary, ...]
    """The FQN tree, folded to at most `MAX_PREFIXES` rows; branches in source order, one may be `OTHER`."""
    blocks: tuple[BlockSummary, ...]
    """Bytes per block and rank, in source order; () when there are no ranks."""
    mesh: Mesh | None
    """The mesh, when known."""
    mesh_source: MeshSource | None
    """Who says so."""
    placements: Mapping[str, Mapping[str, Placement]] | None
    """FQN → axis → placement, when known."""
    tensors: tuple[TensorEntry, ...] = ()
    """The tensors themselves."""

    @property
    def imbalance(self) -> float | None:
        """Bytes of the fullest rank over the mean of all ranks; None without ranks or bytes."""
        total = sum(rank.num_bytes for rank in self.ranks)
        return max(rank.num_bytes for rank in self.ranks) * len(self.ranks) / total if total else None

    @property
    def is_virtual(self) -> bool:
        """True when the files are not written, only imagined by an overlay."""
        return self.mesh_source == "overlay"

    def placements_of(self, fqn: str) -> dict[str, Placement] | None:
        """Return axis → placement for every axis of the mesh; None when nothing is known."""
        if self.mesh is None or self.placements is None or fqn not in self.placements:
            return None
        named = self.placements[fqn]
        return {axis: named.get(axis, Replicate()) for axis, _ in self.mesh.axes}
