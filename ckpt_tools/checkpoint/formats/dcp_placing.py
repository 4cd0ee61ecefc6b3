"""Where everything goes in a DCP directory that ckpt writes: the items of every rank's file."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tools.checkpoint.entries import BlobEntry, ByteSpan, Checkpoint, Chunk, Encoding, TensorEntry
from ckpt_tools.checkpoint.formats.dcp import Dcp
from ckpt_tools.checkpoint.formats.torch_zip import item_frame
from ckpt_tools.checkpoint.infer_mesh import rank_of_file
from ckpt_tools.checkpoint.layout import Box

ITEM_ALIGNMENT = 64  # Items begin at multiples of this, so that payloads are aligned in the file too


def data_file(rank: int) -> str:
    """Return the name of `rank`'s file."""
    return f"__{rank}_0.distcp"


Place = tuple[str, Box, int, Encoding]  # (file, box, offset, what surrounds the payload) of a chunk
Cells = tuple[tuple[int, Box], ...]  # (rank, box) of every distinct box of a tensor


def kept_cells(entry: TensorEntry) -> Cells:
    """Return the distinct chunks of a stored tensor and the ranks of their files; rank 0 where a name says none."""
    ranks: dict[Box, int] = {}
    for chunk in entry.chunks:
        rank = rank_of_file(chunk.span.file) or 0
        ranks[chunk.box] = min(rank, ranks.get(chunk.box, rank))
    return tuple((rank, box) for box, rank in ranks.items())


def place(tensors: Sequence[TensorEntry], cells: Mapping[str, Cells], blobs: Sequence[BlobEntry] = ()) -> Checkpoint:
    """Describe the files that hold `tensors` cut into `cells`: one per rank, items in the tensors' order."""
    # Replicas are stored once, by the lowest rank. Blobs come first, in rank 0's file, carried along as they are. The
    # tensors' own chunks are not looked at; every chunk's span in the result is its item. Cells are in logical
    # elements.
    names = _FileNames()
    position = 0
    placed_blobs = []
    for blob in blobs:
        start = _aligned(position)
        position = start + blob.span.nbytes
        placed_blobs.append(replace(blob, span=ByteSpan(file=names[0], offset=start, nbytes=blob.span.nbytes)))
    items = _Items(position)
    lengths: dict[tuple[int, str], tuple[int, ...]] = {}  # cells are shared by equal tensors
    placed = []
    for number, entry in enumerate(tensors):
        own = cells[entry.fqn]
        key = (id(own), entry.dtype.name)
        if key not in lengths:
            lengths[key] = tuple(item_frame(entry.dtype, box.sizes).nbytes for _, box in own)
        items.add(own, lengths[key])
        placed.append(replace(entry, chunks=PlacedItems(own, lengths[key], names, items, number)))
    return Checkpoint(
        root="",
        format=Dcp.name,
        tensors=tuple(placed),
        blobs=tuple(placed_blobs),
        files={names[rank]: end for rank, end in sorted(items.ends().items())},
    )


def _aligned(position: int) -> int:
    return -(-position // ITEM_ALIGNMENT) * ITEM_ALIGNMENT


class _Items:
    """Where the items of all tensors lie in their ranks' files, in the order of the tensors; rank 0's begin at `start`.

    A plan for thousands of ranks has millions of items, of which most commands need only the sizes of the files. So
    those come from counting equal tensors, and the items' offsets are found when the first one is asked for.
    """

    def __init__(self, start: int) -> None:
        self._start = start
        self._parts: list[tuple[Cells, tuple[int, ...]]] = []
        self._starts: list[array[int]] = []
        self._ranks: frozenset[int] = frozenset()
        self._of_ranks: list[tuple[list[tuple[int, int]], array[int]]] = []

    def add(self, cells: Cells, lengths: tuple[int, ...]) -> None:
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

    def within(self, number: int, ranks: frozenset[int]) -> tuple[list[tuple[int, int]], array[int]]:
        """Return (position, rank) of the items of a tensor in the files of some ranks, and the offset of each."""
        if ranks != self._ranks:
            ends = dict.fromkeys(ranks, 0)
            ends[0] = self._start
            chosen: dict[int, list[tuple[int, int]]] = {}  # cells are shared by equal tensors
            found = []
            for cells, lengths in self._parts:
                own = chosen.get(id(cells))
                if own is None:
                    own = chosen[id(cells)] = [(i, rank) for i, (rank, _) in enumerate(cells) if rank in ranks]
                starts = array("Q")
                for position, rank in own:
                    start = -(-ends[rank] // ITEM_ALIGNMENT) * ITEM_ALIGNMENT
                    starts.append(start)
                    ends[rank] = start + lengths[position]
                found.append((own, starts))
            self._ranks, self._of_ranks = ranks, found
        return self._of_ranks[number]


class PlacedItems(Sequence[Chunk]):
    """The items of one tensor in a destination; each `Chunk` is made when it is asked for."""

    __slots__ = ("_cells", "_items", "_lengths", "_names", "_number")

    def __init__(self, cells: Cells, lengths: tuple[int, ...], names: _FileNames, items: _Items, number: int) -> None:
        self._cells = cells
        self._lengths = lengths
        self._names = names
        self._items = items
        self._number = number

    def __len__(self) -> int:
        return len(self._cells)

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - a chunk for a number, several for a slice
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        return self.chunk(range(len(self))[index], self._items.starts(self._number)[index])

    def __iter__(self) -> Iterator[Chunk]:
        return (self.chunk(position, start) for position, start in enumerate(self._items.starts(self._number)))

    def within(self, files: Collection[str]) -> Sequence[Chunk]:
        """Return the items in some files, without a look at the others."""
        return _ItemsWithin(self, *self._items.within(self._number, self._names.ranks_of(files)))

    def places(self) -> Iterator[Place]:
        """Yield where every item lies."""
        for (rank, box), start in zip(self._cells, self._items.starts(self._number), strict=True):
            yield self._names[rank], box, start, "torch_zip"

    def places_at(self, own: Iterable[tuple[int, int]], starts: Iterable[int]) -> Iterator[Place]:
        """Yield where some items lie: (position, rank) and offset of each."""
        cells, names = self._cells, self._names
        for (position, rank), start in zip(own, starts, strict=True):
            yield names[rank], cells[position][1], start, "torch_zip"

    def chunk(self, position: int, start: int) -> Chunk:
        """Return an item that lies at an offset."""
        rank, box = self._cells[position]
        span = ByteSpan(file=self._names[rank], offset=start, nbytes=self._lengths[position])
        return Chunk(box=box, span=span, encoding="torch_zip")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


class _ItemsWithin(Sequence[Chunk]):
    """Some of the items of a tensor."""

    __slots__ = ("_all", "_own", "_starts")

    def __init__(self, every: PlacedItems, own: Sequence[tuple[int, int]], starts: Sequence[int]) -> None:
        self._all = every
        self._own = own
        self._starts = starts

    def __len__(self) -> int:
        return len(self._own)

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - as that of all items
        if isinstance(index, slice):
            return _ItemsWithin(self._all, self._own[index], self._starts[index])
        return self._all.chunk(self._own[index][0], self._starts[index])

    def places(self) -> Iterator[Place]:
        """Yield where every one of them lies."""
        return self._all.places_at(self._own, self._starts)


def places_of(chunks: Sequence[Chunk]) -> Iterator[Place]:
    """Yield where every chunk lies, without making those that are made when they are asked for."""
    if isinstance(chunks, PlacedItems | _ItemsWithin):
        return chunks.places()
    return ((chunk.span.file, chunk.box, chunk.span.offset, chunk.encoding) for chunk in chunks)


class _FileNames(dict[int, str]):
    """Rank → file name, each string made once."""

    def __init__(self) -> None:
        super().__init__()
        self._chosen: tuple[Collection[str], frozenset[int]] = ((), frozenset())

    def __missing__(self, rank: int) -> str:
        name = self[rank] = data_file(rank)
        return name

    def ranks_of(self, files: Collection[str]) -> frozenset[int]:
        """Return the ranks whose files these are."""
        if self._chosen[0] is not files:
            self._chosen = files, frozenset(rank for rank, name in self.items() if name in files)
        return self._chosen[1]
