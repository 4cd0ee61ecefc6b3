"""Which files, and how many bytes, every rank of a mesh reads of a checkpoint. Pure; no torch.

What a rank holds is a box of every tensor (`layout.cut_tensor`). PyTorch's DCP reader loads every stored item that
shares elements with it, whole; its safetensors reader takes slices.

Source: `FileSystemReader.read_data` and `HuggingFaceStorageReader._process_read_request` of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.description.checkpoint import Chunk, TensorEntry
from ckpt_tools.description.layout import BoxIndex, Mesh, Placement
from ckpt_tools.description.summarise import chunk_bytes
from ckpt_tools.placement.place import cut_entry

MAX_RANKS = 64
"""Ranks that are counted; of larger worlds as many, spread evenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReads:
    """What one rank reads."""

    rank: int
    num_files: int
    needed_bytes: int
    """Bytes of its own boxes."""
    read_bytes: int
    """Bytes that are read for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """What the ranks of a mesh read, or why that is not known."""

    ranks: tuple[RankReads, ...] = ()
    refused: tuple[str, str | None] | None = None
    """Why the checkpoint cannot be cut for the mesh, and a hint."""
    unknown: str | None = None
    """Why nothing says how it would be cut."""


def count_reads(
    tensors: Sequence[TensorEntry],
    mesh: Mesh,
    placements: Mapping[str, Mapping[str, Placement]],
    *,
    whole_items: bool,
    max_ranks: int = MAX_RANKS,
) -> tuple[RankReads, ...]:
    """Return what every rank of `mesh` reads of `tensors`, for at most `max_ranks` ranks, spread evenly.

    `placements` is FQN → axis → placement; a tensor that is not named is replicated. With `whole_items` a chunk is read
    whole, whatever part of it is needed (DCP).
    """
    size = mesh.world_size
    ranks = range(size) if size <= max_ranks else [i * size // max_ranks for i in range(max_ranks)]
    files: dict[int, set[str]] = {rank: set() for rank in ranks}
    needed = dict.fromkeys(ranks, 0)
    read = dict.fromkeys(ranks, 0)
    for tensor in tensors:
        grid = cut_entry(tensor, mesh, placements.get(tensor.fqn, {}))
        index: BoxIndex[Chunk] = BoxIndex((chunk, chunk.box) for chunk in tensor.chunks)
        cells: dict[tuple[int, ...], tuple[set[str], int, int]] = {}
        for rank in ranks:
            box = grid.local_box(rank)
            if 0 in box.sizes:
                continue
            if box.offsets not in cells:  # replicas read alike
                found = list(index.overlaps(box))
                own = chunk_bytes(tensor.dtype, box.sizes)
                items = sum(chunk_bytes(tensor.dtype, chunk.box.sizes) for chunk, _ in found) if whole_items else own
                cells[box.offsets] = ({chunk.span.file for chunk, _ in found}, own, items)
            names, own, items = cells[box.offsets]
            files[rank] |= names
            needed[rank] += own
            read[rank] += items
    return tuple(
        RankReads(rank=rank, num_files=len(files[rank]), needed_bytes=needed[rank], read_bytes=read[rank])
        for rank in ranks
    )
