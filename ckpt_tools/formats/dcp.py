"""DCP directories: `.metadata` plus `.distcp` files of `torch.save` items.

Source: torch `distributed/checkpoint/{metadata,filesystem}.py` (2.13).
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, overload

from ckpt_tools.description.checkpoint import BlobEntry, ByteSpan, Checkpoint, Chunk, TensorEntry
from ckpt_tools.description.dtypes import DType
from ckpt_tools.description.layout import Box
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats.torch_zip import ItemHead, check_archive, item_frame, parse_item

METADATA_NAME = ".metadata"
"""The file that makes a directory a DCP checkpoint; written last."""
ITEM_ALIGNMENT = 64
"""Items begin at multiples of this, so that payloads are aligned in the file too."""

_DATA_FILE = re.compile(r"__(\d+)_\d+\.distcp")


class Reader(Protocol):
    """What this module needs of storage."""

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """Return exactly these bytes."""


def data_file(rank: int) -> str:
    """Return the name of `rank`'s file."""
    return f"__{rank}_0.distcp"


def parse_rank(file: str) -> int | None:
    """Return the rank that wrote `file`, or None when the name does not say."""
    match = _DATA_FILE.fullmatch(file.rpartition("/")[2])
    return int(match[1]) if match and len(match[1]) < 10 else None


def read_item(span: ByteSpan, reader: Reader, *, thorough: bool = False) -> ItemHead:
    """Read what the item at `span` says of itself; `thorough` as in `parse_item`."""
    with _located(span):
        return parse_item(span.nbytes, _reads(span, reader), thorough=thorough)


def check_blob(span: ByteSpan, reader: Reader, *, content: bool = True) -> bool:
    """Check a non-tensor item as `check_archive` does."""
    with _located(span):
        return check_archive(span.nbytes, _reads(span, reader), content=content)


def _reads(span: ByteSpan, reader: Reader) -> Callable[[int, int], bytes]:
    def read(offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes < 0 or offset + nbytes > span.nbytes:
            raise UnreadableError("the item points outside of itself")
        return reader.read(span.file, span.offset + offset, nbytes)

    return read


@contextmanager
def _located(span: ByteSpan) -> Iterator[None]:
    """Say of an error where its item lies."""
    try:
        yield
    except UnreadableError as error:
        if error.where is not None:
            raise
        where = f"{span.file}, bytes {span.offset}..{span.offset + span.nbytes}"
        raise UnreadableError(error.what, where=where, hint=error.hint) from error


def item_mismatch(dtype: DType, sizes: tuple[int, ...], head: ItemHead) -> str | None:
    """Return how an item disagrees with the metadata's dtype and chunk sizes, or None."""
    if head.dtype != dtype:
        return f"the metadata says dtype {dtype.name}, the item holds {head.dtype.name}"
    if head.shape != sizes:
        return f"the metadata says sizes {list(sizes)}, the item holds {list(head.shape)}"
    return None


def resolve(entry: TensorEntry, reader: Reader) -> TensorEntry:
    """Return `entry` with every chunk's span on its raw payload, read from the items' headers.

    Raises:
        UnreadableError: An item is malformed or is not what the metadata says.
    """
    return replace(entry, chunks=tuple(_resolve_chunk(entry, chunk, reader) for chunk in entry.chunks))


def _resolve_chunk(entry: TensorEntry, chunk: Chunk, reader: Reader) -> Chunk:
    if chunk.encoding == "raw":
        return chunk
    head = read_item(chunk.span, reader)
    if (problem := item_mismatch(entry.dtype, chunk.box.sizes, head)) is not None:
        raise UnreadableError(
            f"tensor {entry.fqn!r}: {problem}",
            where=f"{chunk.span.file}, bytes {chunk.span.offset}..",
            hint="the checkpoint is damaged, or was saved by FSDP on top of an uneven tensor-parallel cut of "
            "the same dim, which PyTorch cannot load either",
        )
    span = ByteSpan(file=chunk.span.file, offset=chunk.span.offset + head.payload_offset, nbytes=head.payload_nbytes)
    return Chunk(box=chunk.box, span=span, strides=head.strides, crc32=head.crc32)


class Cut(Protocol):
    """How a tensor is cut: `layout.Grid`, or the cells that another checkpoint has."""

    @property
    def cells(self) -> tuple[tuple[int, Box], ...]:
        """(rank, box) of every distinct box."""


@dataclass(frozen=True, slots=True)
class KeptCells:
    """The boxes of a checkpoint, on the ranks that hold them there."""

    cells: tuple[tuple[int, Box], ...]
    """(rank, box) of every distinct box."""


def kept_cells(entry: TensorEntry) -> KeptCells:
    """Return the distinct chunks of a stored tensor and the ranks of their files; rank 0 where a name says none."""
    ranks: dict[Box, int] = {}
    for chunk in entry.chunks:
        rank = parse_rank(chunk.span.file) or 0
        ranks[chunk.box] = min(rank, ranks.get(chunk.box, rank))
    return KeptCells(tuple((rank, box) for box, rank in ranks.items()))


def place(tensors: Sequence[TensorEntry], grids: Mapping[str, Cut], blobs: Sequence[BlobEntry] = ()) -> Checkpoint:
    """Describe the files that hold `tensors` cut by `grids`: one per rank, items in the tensors' order.

    Replicas are stored once, by the lowest rank. Blobs come first, in rank 0's file.

    Args:
        tensors: What to hold; their chunks are not looked at.
        grids: FQN → how the mesh cuts it, in logical elements.
        blobs: Items that are carried along as they are.

    Returns:
        The destination; every chunk's span is its item.

    Raises:
        UsageError: A dtype that DCP cannot hold.
    """
    names = _FileNames()
    position = 0
    placed_blobs = []
    for blob in blobs:
        start = _aligned(position)
        position = start + blob.span.nbytes
        placed_blobs.append(replace(blob, span=ByteSpan(file=names[0], offset=start, nbytes=blob.span.nbytes)))
    items = _Items(position)
    lengths: dict[tuple[int, str], tuple[int, ...]] = {}  # grids and their cells are shared by equal tensors
    placed = []
    for number, entry in enumerate(tensors):
        cells = grids[entry.fqn].cells
        key = (id(cells), entry.dtype.name)
        if key not in lengths:
            lengths[key] = tuple(item_frame(entry.dtype, box.sizes).nbytes for _, box in cells)
        items.add(cells, lengths[key])
        placed.append(replace(entry, chunks=PlacedItems(cells, lengths[key], names, items, number)))
    return Checkpoint(
        root="",
        format="dcp",
        tensors=tuple(placed),
        blobs=tuple(placed_blobs),
        files={names[rank]: end for rank, end in sorted(items.ends().items())},
    )


def _aligned(position: int) -> int:
    return -(-position // ITEM_ALIGNMENT) * ITEM_ALIGNMENT


_Cells = tuple[tuple[int, Box], ...]


class _Items:
    """Where the items of all tensors lie in their ranks' files, one after the other in the order of the tensors.

    A plan for thousands of ranks has millions of items, of which most commands need only the sizes of the files. So
    those come from counting equal tensors, and the items' offsets are found when the first one is asked for.

    Args:
        start: End of what comes first in the file of rank 0.
    """

    def __init__(self, start: int) -> None:
        self._start = start
        self._parts: list[tuple[_Cells, tuple[int, ...]]] = []
        self._starts: list[array[int]] = []

    def add(self, cells: _Cells, lengths: tuple[int, ...]) -> None:
        """Add a tensor: (rank, box) and length of each of its items."""
        self._parts.append((cells, lengths))

    def ends(self) -> dict[int, int]:
        """Return the size of every rank's file."""
        groups: dict[int, list[int]] = {}  # lengths are shared by equal tensors: [first with them, last, how many]
        for number, (_, lengths) in enumerate(self._parts):
            group = groups.setdefault(id(lengths), [number, number, 0])
            group[1] = number
            group[2] += 1
        ends: dict[int, int] = {0: self._start} if self._start else {}
        padding: dict[int, int] = {}  # after the last item so far; the last one of all has none
        for _, last, count in sorted(groups.values(), key=lambda group: group[1]):
            for (rank, _), nbytes in zip(*self._parts[last], strict=True):
                ends[rank] = _aligned(ends.get(rank, 0)) + count * _aligned(nbytes)
                padding[rank] = _aligned(nbytes) - nbytes
        return {rank: end - padding.get(rank, 0) for rank, end in ends.items()}

    def starts(self, number: int) -> array[int]:
        """Return the offset of each item of a tensor."""
        if not self._starts:
            ends: dict[int, int] = {0: self._start}
            found = []
            for cells, lengths in self._parts:
                starts = array("Q")
                for (rank, _), nbytes in zip(cells, lengths, strict=True):
                    start = _aligned(ends.get(rank, 0))
                    starts.append(start)
                    ends[rank] = start + nbytes
                found.append(starts)
            self._starts = found
        return self._starts[number]


class PlacedItems(Sequence[Chunk]):
    """The items of one tensor in a destination; each `Chunk` is made when it is asked for."""

    __slots__ = ("_cells", "_items", "_lengths", "_names", "_number")

    def __init__(
        self, cells: _Cells, lengths: tuple[int, ...], names: Mapping[int, str], items: _Items, number: int
    ) -> None:
        self._cells = cells
        self._lengths = lengths
        self._names = names
        self._items = items
        self._number = number

    def __len__(self) -> int:
        return len(self._cells)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Chunk]: ...

    def __getitem__(self, index: int | slice) -> Chunk | Sequence[Chunk]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        rank, box = self._cells[index]
        start = self._items.starts(self._number)[index]
        span = ByteSpan(file=self._names[rank], offset=start, nbytes=self._lengths[index])
        return Chunk(box=box, span=span, encoding="torch_zip")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


class _FileNames(dict[int, str]):
    """Rank → file name, each string made once."""

    def __missing__(self, rank: int) -> str:
        name = self[rank] = data_file(rank)
        return name
