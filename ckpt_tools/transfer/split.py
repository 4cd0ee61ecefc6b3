"""Cut a plan into shares: contiguous runs of its files, one for each of several processes. Pure; no byte is read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ckpt_tools.checkpoint.entries import Checkpoint, Chunk, TensorEntry
from ckpt_tools.checkpoint.formats.dcp_placing import PlacedItems
from ckpt_tools.checkpoint.layout import Blocks, Box, BoxIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Which of the processes that share a conversion this is."""

    index: int  # From 0
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def split(sizes: Sequence[int], count: int, *, align: int = 1) -> tuple[range, ...]:
    """Cut files into `count` contiguous runs of about as many bytes, some of them empty; return the positions in each.

    Runs begin at multiples of `align`: ranks that hold parts of the same rows stay together. The i-th begins at the
    first file before which i/count of all bytes lie, so that it differs from an equal share by the largest group of
    `align` files at most.
    """
    total = sum(sizes)
    before = [0, *accumulate(sizes)]
    cuts = range(0, len(sizes), align)
    starts: list[int] = []
    position = 0
    for index in range(count):
        while position < len(cuts) and before[cuts[position]] * count < index * total:
            position += 1
        starts.append(cuts[position] if position < len(cuts) else len(sizes))
    return tuple(range(start, end) for start, end in zip(starts, [*starts[1:], len(sizes)], strict=True))


def own_tensors(entries: Sequence[TensorEntry], part: Part | None) -> Sequence[TensorEntry]:
    """Return the tensors that a part reads of those that several processes check; all without a part."""
    if part is None:
        return entries
    own = split([entry.nbytes for entry in entries], part.count)[part.index]
    return entries[own.start : own.stop]


def restrict(target: Checkpoint, files: Collection[str]) -> Checkpoint:
    """Return what `target` has in some of its files; tensors that have nothing there are left out."""
    tensors = ((entry, _chunks_in(entry.chunks, files)) for entry in target.tensors)
    return replace(
        target,
        tensors=tuple(replace(entry, chunks=chunks) for entry, chunks in tensors if chunks),
        blobs=tuple(blob for blob in target.blobs if blob.span.file in files),
        files={file: nbytes for file, nbytes in target.files.items() if file in files},
    )


def _chunks_in(chunks: Sequence[Chunk], files: Collection[str]) -> Sequence[Chunk]:
    if isinstance(chunks, PlacedItems):
        return chunks.within(files)
    return tuple(chunk for chunk in chunks if chunk.span.file in files)


def boxes_before(target: TensorEntry, files: Collection[str]) -> tuple[Box, ...] | None:
    """Return the boxes of a tensor in those `files`; None where it has no element twice, and nobody needs to know."""
    if isinstance(target.chunks, PlacedItems):
        return None
    if sum(chunk.box.num_elems for chunk in target.chunks) <= target.num_elems:
        return None
    return tuple(chunk.box for chunk in target.chunks if chunk.span.file in files)


def owned_blocks(blocks: Blocks, mine: Iterable[Box], before: Iterable[Box]) -> frozenset[int]:
    """Return which blocks of a tensor a share owns: it reads them whole, and records their digests.

    A block belongs to the share that holds its first element; where several do, to the first of them. `before` are the
    tensor's boxes in files of earlier shares, as far as these hold the same elements.
    """
    own, earlier = (BoxIndex((None, box) for box in boxes) for boxes in (mine, before))

    def holds(index: BoxIndex[None], block: Box) -> bool:
        first = Box(block.offsets, (1,) * len(block.offsets))
        return next(index.overlaps(first), None) is not None

    return frozenset(i for i, block in enumerate(blocks) if holds(own, block) and not holds(earlier, block))


def has_whole_rows(part: Box, block: Box) -> bool:
    """Is a part of a block cut along its first long dim alone? It is then one run of the block's bytes."""
    dim = _first_long_dim(block)
    return part.sizes[dim + 1 :] == block.sizes[dim + 1 :]


def hull(block: Box, parts: Sequence[Box]) -> Box:
    """Return what has to be read of a block for some parts of it: a run of whole rows if they are such, else all."""
    if not block.sizes or not all(has_whole_rows(part, block) for part in parts):
        return block
    dim = _first_long_dim(block)
    start = min(part.offsets[dim] for part in parts)
    end = max(part.offsets[dim] + part.sizes[dim] for part in parts)
    offsets = (*block.offsets[:dim], start, *block.offsets[dim + 1 :])
    return Box(offsets, (*block.sizes[:dim], end - start, *block.sizes[dim + 1 :]))


def _first_long_dim(block: Box) -> int:
    return next((dim for dim, size in enumerate(block.sizes) if size > 1), 0)
