"""Meshes, placements and boxes: which part of a tensor every rank holds, in closed form.

Shape legend: L is the length of a tensor dim, N the number of ranks along a mesh axis.

Sources: `torch.chunk` semantics as used by `torch.distributed.tensor.placement_types.Shard` (chunks of
ceil(L/N), trailing ranks short or empty), and `fully_shard` on top of tensor parallelism, which cuts inside
the tensor-parallel chunk (`_StridedShard`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, product
from operator import add, sub
from typing import Any, Generic, TypeVar

from ckpt_tools.errors import UsageError

AXES = ("dp_replicate", "dp_shard", "tp", "ep", "cp", "pp")  # Mesh axis names, as PyTorch trainers spell them
AXIS_ALIASES = {"fsdp": "dp_shard", "dp": "dp_shard", "ddp": "dp_replicate"}  # Other spellings that are understood
FSDP_AXIS = "dp_shard"  # The axis along which `fully_shard` cuts: inside whatever other axes cut on the same dim

Interval = tuple[int, int]  # (offset, size) along one dim, in elements


@dataclass(frozen=True, slots=True)
class Shard:
    """Cut along tensor dim `dim`."""

    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """A whole copy on every rank of the axis."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Fsdp:
    """An axis whose ranks FSDP cuts over, together with `dp_shard`: torchtitan's `ep`, for all but the experts."""

    def __str__(self) -> str:
        return "F"


Placement = Shard | Replicate | Fsdp


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: elements [offset, offset + size) along every dim."""

    offsets: tuple[int, ...]
    """First element along each dim."""
    sizes: tuple[int, ...]
    """Number of elements along each dim."""

    @property
    def num_elems(self) -> int:
        """Number of elements; 1 for the box of a 0-d tensor."""
        return math.prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """Return the common part, or None when no element is shared."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, map(add, self.offsets, self.sizes), map(add, other.offsets, other.sizes))
        sizes = tuple(map(sub, ends, offsets))
        return None if sizes and min(sizes) <= 0 else Box(offsets, sizes)


@dataclass(frozen=True)
class Mesh:
    """Named axes of ranks; order is rank order, the last axis varies fastest."""

    axes: tuple[tuple[str, int], ...]
    """(name, number of ranks) per axis."""

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        for name, size in self.axes:
            if name not in AXES:
                raise UsageError(f"unknown mesh axis {name!r}", hint=f"the axes are {', '.join(AXES)}")
            if size < 1:
                raise UsageError(f"mesh axis {name}={size} must be at least 1")
        if len(set(names)) != len(names):
            raise UsageError(f"a mesh axis is named twice: {', '.join(names)}")

    @cached_property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """Ranks along `axis`; 1 for an axis that the mesh does not have."""
        return dict(self.axes).get(axis, 1)

    def rank(self, coordinate: tuple[int, ...]) -> int:
        """Return the rank at `coordinate` (one index per axis)."""
        rank = 0
        for (_, size), index in zip(self.axes, coordinate, strict=True):
            rank = rank * size + index
        return rank

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the index along each axis of `rank`."""
        indices = []
        for _, size in reversed(self.axes):
            rank, index = divmod(rank, size)
            indices.append(index)
        return tuple(reversed(indices))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A mesh, and where it puts every tensor: FQN → axis → placement. Axes that are not named replicate."""

    mesh: Mesh
    placements: Mapping[str, Mapping[str, Placement]]
    packed: tuple[str, ...] = ()  # Several matrices side by side, of each of which a rank has a part; one run here
    kept_whole: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """FQN → axes that a rule names and that do not cut it, since they would cut unevenly."""


MeshLike = str | int | Mapping[str, int] | Mesh | Any
"""Any: torch's `DeviceMesh`."""


def mesh_text(mesh: MeshLike) -> str:
    """Return "dp_shard=8" for 8, {"dp_shard": 8}, a `Mesh`, torch's `DeviceMesh`, or the text itself."""
    if isinstance(mesh, str | Mesh):
        return str(mesh)
    if hasattr(mesh, "__index__"):
        return f"{FSDP_AXIS}={mesh}"
    if isinstance(mesh, Mapping):
        return ",".join(f"{name}={size}" for name, size in mesh.items())
    if not hasattr(mesh, "mesh_dim_names"):
        hint = 'write 8, "dp_shard=8,tp=2" or {"dp_shard": 8, "tp": 2}, or give a DeviceMesh'
        raise UsageError(f"mesh must be a number, text, a mapping or a mesh, got {mesh!r}", hint=hint)
    names = mesh.mesh_dim_names or ((FSDP_AXIS,) if len(mesh.shape) == 1 else ())
    if not names:
        raise UsageError("the axes of this DeviceMesh have no names", hint="give init_device_mesh mesh_dim_names")
    return ",".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))


def parse_mesh(mesh: MeshLike, *, world_size: int | None = None) -> Mesh:
    """Parse "dp_replicate=2,dp_shard=-1,tp=2", or what `mesh_text` takes; one -1 is inferred from `world_size`.

    Raises:
        UsageError: Unknown axis, bad number, or a product that is not `world_size`.
    """
    text = mesh_text(mesh)
    if text.strip().isdecimal():
        text = f"{FSDP_AXIS}={text}"
    axes: list[tuple[str, int]] = []
    for part in text.split(","):
        name, equals, number = part.partition("=")
        name = name.strip()
        try:
            size = int(number)
        except ValueError:
            equals = ""
            size = 0
        if not equals:
            what = f"{part.strip()!r} is not an axis of a mesh"
            raise UsageError(what, hint="write for example --mesh dp_shard=8,tp=2")
        axes.append((AXIS_ALIASES.get(name, name), size))
    unknown = [name for name, size in axes if size == -1]
    if len(unknown) > 1:
        raise UsageError(f"only one axis of the mesh can be -1, found {', '.join(unknown)}")
    if unknown:
        known = math.prod(size for _, size in axes if size != -1)
        if world_size is None:
            raise UsageError(f"{unknown[0]}=-1 needs --world-size", hint=f"add --world-size to --mesh {text}")
        if known < 1 or world_size % known:
            raise UsageError(f"a world of {world_size} ranks is not a multiple of {known}")
        axes = [(name, world_size // known if size == -1 else size) for name, size in axes]
    found = Mesh(tuple(axes))
    if world_size is not None and found.world_size != world_size:
        what = f"the mesh {found} has {found.world_size} ranks, --world-size says {world_size}"
        raise UsageError(what, hint="drop --world-size or write -1 for one axis")
    return found


def parse_placement(text: str) -> Placement:
    """Parse "S(0)", "Shard(0)", "R", "Replicate()" or "F"."""
    name, _, rest = text.strip().partition("(")
    if name in ("S", "Shard") and rest.endswith(")") and rest[:-1].isdecimal():
        return Shard(int(rest[:-1]))
    if name in ("R", "Replicate") and rest in ("", ")"):
        return Replicate()
    if (name, rest) == ("F", ""):
        return Fsdp()
    raise UsageError(f"{text!r} is not a placement", hint="write S(0) to cut dim 0, R to replicate, F to cut as FSDP")


def fsdp_axes(mesh: Mesh, placements: Mapping[str, Placement]) -> tuple[str, ...]:
    """Return the axes over whose ranks together FSDP cuts a tensor, in the order of the mesh; none if it does not."""
    if not isinstance(placements.get(FSDP_AXIS), Shard):
        return ()
    return tuple(name for name, _ in mesh.axes if name == FSDP_AXIS or placements.get(name) == Fsdp())


def cut(length: int, num_parts: int) -> list[Interval]:
    """Cut `length` elements as `torch.chunk` does: parts of ceil(L/N), the last ones short or empty."""
    step = -(-length // num_parts)
    starts = (min(i * step, length) for i in range(num_parts))
    return [(start, min(step, length - start)) for start in starts]


@dataclass(frozen=True)
class Grid:
    """How a mesh cuts one tensor: every dim into intervals, every rank one cell of their product."""

    shape: tuple[int, ...]
    mesh: Mesh
    cutters: tuple[tuple[int, ...], ...]  # Per dim, the positions of the mesh axes that cut it, outermost cut first
    intervals: tuple[tuple[Interval, ...], ...]  # Per dim, the parts in the order of the cutters' combined index

    def local_box(self, rank: int) -> Box:
        """Return the box that `rank` holds; empty parts have size 0 and the offset where they would start."""
        coordinate = self.mesh.coordinate(rank)
        parts = []
        for positions, intervals in zip(self.cutters, self.intervals, strict=True):
            index = 0
            for position in positions:
                index = index * self.mesh.axes[position][1] + coordinate[position]
            parts.append(intervals[index])
        return Box(tuple(offset for offset, _ in parts), tuple(size for _, size in parts))

    @cached_property
    def cells(self) -> tuple[tuple[int, Box], ...]:
        """(rank, box) of every distinct box by the lowest rank that holds it, in rank order."""
        # Boxes at the same offsets are one, as in DCP's planner (`dedup_save_to_lowest_rank`).
        strides = [math.prod(size for _, size in self.mesh.axes[i + 1 :]) for i in range(len(self.mesh.axes))]
        per_dim = []
        for positions, intervals in zip(self.cutters, self.intervals, strict=True):
            ranges = [range(self.mesh.axes[position][1]) for position in positions]
            ranks = (
                sum(i * strides[p] for i, p in zip(indices, positions, strict=True)) for indices in product(*ranges)
            )
            per_dim.append(tuple(zip(ranks, intervals, strict=True)))
        cells = []
        for parts in product(*per_dim):
            box = Box(tuple(p[1][0] for p in parts), tuple(p[1][1] for p in parts))
            cells.append((sum(p[0] for p in parts), box))
        cells.sort(key=lambda cell: cell[0])
        first: dict[tuple[int, ...], tuple[int, Box]] = {}
        for cell in cells:
            first.setdefault(cell[1].offsets, cell)
        return tuple(first.values())


@lru_cache(maxsize=4096)
def _grid(shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...], pack: int) -> Grid:
    cutters: list[tuple[int, ...]] = []
    all_intervals: list[tuple[Interval, ...]] = []
    names = [name for name, _ in mesh.axes]
    fsdp = fsdp_axes(mesh, dict(zip(names, placements, strict=True)))
    for dim, num_elems in enumerate(shape):
        # torch counts packed elements along the last dim, and cuts between them only.
        scale = pack if dim == len(shape) - 1 else 1
        length = num_elems // scale
        # FSDP cuts inside what every other axis has cut, once over all of its ranks; the others cut in mesh order.
        inner = [names.index(name) for name in fsdp if placements[names.index(FSDP_AXIS)] == Shard(dim)]
        outer = [i for i, placement in enumerate(placements) if placement == Shard(dim) and i not in inner]
        positions = [*outer, *inner]
        intervals: list[Interval] = [(0, length)]
        for group in (*((i,) for i in outer), inner):
            num_parts = math.prod(mesh.axes[i][1] for i in group)
            intervals = [
                # An empty part starts at the end of the tensor, as DTensor reports it.
                (start + offset if size else length, size)
                for start, size_before in intervals
                for offset, size in cut(size_before, num_parts)
            ]
        if length == 0:
            intervals = [(0, 0)] * len(intervals)
        cutters.append(tuple(positions))
        all_intervals.append(tuple((start * scale, size * scale) for start, size in intervals))
    return Grid(shape, mesh, tuple(cutters), tuple(all_intervals))


def cut_tensor(shape: tuple[int, ...], mesh: Mesh, placements: Mapping[str, Placement], *, pack: int = 1) -> Grid:
    """Return how `mesh` cuts a tensor of `shape` under `placements` (axis name → placement)."""
    # Axes that `placements` does not name replicate. Grids are cached: tensors of one shape share one. The shape counts
    # logical elements, of which torch keeps `pack` in one of its own along the last dim (`DType.pack`): that dim is a
    # multiple of it, and is cut at multiples of it.
    for axis, placement in placements.items():
        if isinstance(placement, Shard) and not 0 <= placement.dim < len(shape):
            raise UsageError(f"{axis}={placement} cuts a dim that a tensor of shape {shape} does not have")
    if pack > 1 and (not shape or shape[-1] % pack):
        raise UsageError(f"the last dim of shape {shape} is not a multiple of {pack} packed elements")
    return _grid(shape, mesh, tuple(placements.get(name, Replicate()) for name, _ in mesh.axes), pack)


T = TypeVar("T")


class BoxIndex(Generic[T]):
    """Finds which of many boxes share elements with a given one, without looking at all; empty ones are never found."""

    def __init__(self, items: Iterable[tuple[T, Box]]) -> None:
        self._items = [(item, box) for item, box in items if 0 not in box.sizes]
        self._items.sort(key=lambda pair: pair[1].offsets)
        self._starts: list[int] = []
        self._reach: list[int] = []  # how far the boxes up to here extend along dim 0
        if self._items and self._items[0][1].sizes:
            self._starts = [box.offsets[0] for _, box in self._items]
            ends = (box.offsets[0] + box.sizes[0] for _, box in self._items)
            self._reach = list(accumulate(ends, max))

    def overlaps(self, box: Box) -> Iterator[tuple[T, Box]]:
        """Yield (item, common part) in the order of the items' offsets."""
        first, last = 0, len(self._items)
        if self._starts:
            first = bisect_right(self._reach, box.offsets[0])
            last = bisect_left(self._starts, box.offsets[0] + box.sizes[0])
        for item, own in self._items[first:last]:
            part = own.intersect(box)
            if part is not None:
                yield item, part


@dataclass(frozen=True, slots=True)
class Blocks:
    """The canonical partition of a tensor into contiguous row-major blocks of at most `block_bytes`."""

    # A block fixes the leading dims, takes a range along one dim and everything after it, so its part of any row-major
    # chunk is one contiguous run. Blocks are the unit of work and of digests: they depend on shape and element width
    # alone, so every format yields the same ones.

    shape: tuple[int, ...]
    dim: int  # The dim along which blocks take a range; -1 when one block holds everything
    step: int  # Elements of `dim` per block; the last range of each run may be shorter

    def __len__(self) -> int:
        if 0 in self.shape:
            return 0
        if self.dim < 0:
            return 1
        return math.prod(self.shape[: self.dim]) * -(-self.shape[self.dim] // self.step)

    def __getitem__(self, index: int) -> Box:
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self.dim < 0:
            return Box((0,) * len(self.shape), self.shape)
        index, part = divmod(index, -(-self.shape[self.dim] // self.step))
        offsets = [0] * len(self.shape)
        offsets[self.dim] = part * self.step
        for dim in reversed(range(self.dim)):
            index, offsets[dim] = divmod(index, self.shape[dim])
        size = min(self.step, self.shape[self.dim] - part * self.step)
        return Box(tuple(offsets), (1,) * self.dim + (size,) + self.shape[self.dim + 1 :])

    def __iter__(self) -> Iterator[Box]:
        return (self[i] for i in range(len(self)))

    def rows(self) -> Iterator[range]:
        """Yield the indices of blocks that lie side by side along `dim`: any that follow each other are one box."""
        count = 1 if self.dim < 0 else max(1, -(-self.shape[self.dim] // self.step))
        return (range(start, start + count) for start in range(0, len(self), count))

    def span(self, indices: range) -> Box:
        """Return the box of blocks that follow each other in one of `rows`."""
        first, last = self[indices[0]], self[indices[-1]]
        return Box(first.offsets, tuple(map(sub, map(add, last.offsets, last.sizes), first.offsets)))


def split_blocks(shape: tuple[int, ...], element_bits: int, *, block_bytes: int, granule: int = 1) -> Blocks:
    """Return the canonical blocks of a tensor: of at most `block_bytes`, which one granule of elements may exceed."""
    # A granule is the elements along the last dim that fill whole bytes (sub-byte types).
    inner_bits = element_bits
    for dim in reversed(range(len(shape))):
        if inner_bits * shape[dim] > block_bytes * 8:
            step = max(1, block_bytes * 8 // inner_bits)
            if dim == len(shape) - 1:
                step = max(granule, step - step % granule)
            return Blocks(shape, dim, step)
        inner_bits *= shape[dim]
    return Blocks(shape, -1, 0)


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that elements [start, stop) of a row-major tensor are, in order."""
    # Every box is contiguous too: it follows the one before it in the run. A tensor of n dims has at most 2n - 1 of
    # them; none for an empty run.
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, begin = divmod(start, row)
    last, end = divmod(stop, row)
    if begin and first == last:  # within one row
        yield from _within(first, shape[1:], begin, end)
        return
    if begin:
        yield from _within(first, shape[1:], begin, row)
        first += 1
    if first < last:
        yield Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:]))
    if end:
        yield from _within(last, shape[1:], 0, end)


def _within(index: int, shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of a run inside of one row."""
    return (Box((index, *box.offsets), (1, *box.sizes)) for box in flat_boxes(shape, start, stop))
