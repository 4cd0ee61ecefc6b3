"""Which mesh a checkpoint was sharded for, worked out from its chunks.

DCP stores neither mesh nor placements; it does store every chunk's box, and a rank in every file name. A
mesh *explains* a checkpoint when, under some placement of every tensor, `cut_tensor` gives exactly the stored
boxes, and every chunk lies in the file of a rank that holds its box. The smallest mesh with the fewest axes
that explains every tensor is the answer; when none does, there is no answer.

Sources: `torch.distributed.checkpoint.filesystem` (2.13) for `__{rank}_{n}.distcp`, `hf_storage` and
`_hf_utils._gen_file_name` for `shard-{rank + 1}-model-…`, `_dedup_save_plans` for which replica is kept: any.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ckpt_tools.checkpoint.entries import Checkpoint
from ckpt_tools.checkpoint.layout import Box, Fsdp, Interval, Layout, Mesh, Placement, Replicate, Shard, cut_tensor

_MAX_CANDIDATES = 1000  # Meshes tried before giving up: more than any real one needs, a bound for hostile files
_MAX_RANKS = 1 << 16  # Highest world size considered: a grid takes memory for every rank
_RANKED_FILE = re.compile(
    r"(?:.*/)?(?:(?:__(\d{1,9})_\d+\.distcp|model_world_size_\d+_rank_(\d{1,9})\.pt|"
    r"pytorch_model_fsdp(?:_\d+)?_rank(\d{1,9})\.bin)|shard-(\d{1,9})-model-\d+-of-\d+\.safetensors)",
    re.ASCII | re.DOTALL,
)
_EXPERTS = {"expert", "experts", "inner_experts"}  # Names of modules whose parameters are those of experts
_BLOCK = re.compile(r"(?:.*?\.)??(\d+)(?=\.|\Z)", re.ASCII | re.DOTALL)

Sizes = tuple[int, ...]


def rank_of_file(file: str) -> int | None:
    """Return the rank that wrote `file`, from its name; None when the name has none."""
    match = _RANKED_FILE.fullmatch(file)
    if match is None:
        return None
    *ranks, number = match.groups()
    if number is None:
        return next(int(rank) for rank in ranks if rank is not None)
    return int(number) - 1 if int(number) else None


def block_of(fqn: str) -> tuple[str, int] | None:
    """Return the repeated block that a tensor belongs to: ("model.layers", 3) for "model.layers.3.mlp.w"."""
    match = _BLOCK.match(fqn)
    if match is None or len(match[1]) > 9:
        return None
    return fqn[: match.start(1)].removesuffix("."), int(match[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredAlike:
    """One way in which tensors are stored; most tensors of a model share a few."""

    shape: Sizes
    pack: int
    boxes: tuple[tuple[Sizes, Sizes], ...]  # (offsets, sizes) per chunk
    ranks: tuple[int, ...]
    intervals: tuple[frozenset[Interval], ...]  # The distinct parts along every dim
    fqns: tuple[str, ...]

    @property
    def num_cells(self) -> int:
        return math.prod(map(len, self.intervals))

    @property
    def num_experts(self) -> int:
        return sum(not _EXPERTS.isdisjoint(fqn.split(".")) for fqn in self.fqns)


def _find_patterns(checkpoint: Checkpoint) -> tuple[_StoredAlike, ...] | None:
    """Group tensors by how they are stored; None when that is no grid, or some file has no rank."""
    rank_of = {chunk.span.file: -1 for tensor in checkpoint.tensors for chunk in tensor.chunks}
    for file in rank_of:
        rank = rank_of_file(file)
        if rank is None:
            return None
        rank_of[file] = rank
    groups: dict[tuple[Sizes, int, tuple[Sizes, ...], tuple[Sizes, ...], tuple[int, ...]], list[str]] = {}
    for tensor in checkpoint.tensors:
        boxes = [chunk.box for chunk in tensor.chunks]
        offsets = tuple([box.offsets for box in boxes])
        sizes = tuple([box.sizes for box in boxes])
        ranks = tuple([rank_of[chunk.span.file] for chunk in tensor.chunks])
        groups.setdefault((tensor.shape, tensor.dtype.pack, offsets, sizes, ranks), []).append(tensor.fqn)
    patterns = []
    for (shape, pack, all_offsets, all_sizes, ranks), fqns in groups.items():
        if any(len(part) != len(shape) for part in (*all_offsets, *all_sizes)):
            return None
        if pack > 1 and (not shape or shape[-1] % pack):
            return None
        pattern = _StoredAlike(
            shape=shape,
            pack=pack,
            boxes=tuple(zip(all_offsets, all_sizes, strict=True)),
            ranks=ranks,
            intervals=tuple(
                frozenset((offsets[dim], sizes[dim]) for offsets, sizes in zip(all_offsets, all_sizes, strict=True))
                for dim in range(len(shape))
            ),
            fqns=tuple(fqns),
        )
        if not ranks or len(set(pattern.boxes)) != pattern.num_cells:
            return None
        patterns.append(pattern)
    # The most finely cut pattern refutes a wrong mesh soonest.
    patterns.sort(key=lambda pattern: -pattern.num_cells)
    return tuple(patterns)


def _divide_up(count: int, divisor: int) -> int:
    return -(-count // divisor)


def _axis_sizes(patterns: tuple[_StoredAlike, ...], num_ranks: int) -> list[int]:
    """Return the sizes that an axis can have, given how many parts dims are cut into."""
    counts = {len(parts) for pattern in patterns for parts in pattern.intervals}
    sizes = set()
    for count in counts:
        # Two axes may share a dim, and the parts of both that are empty are stored as one.
        for total in (count, count - 1):
            sizes |= {size for size in range(2, min(total, num_ranks) + 1) if total % size == 0}
            sizes |= {total // size + 1 for size in sizes if total % size == 0}
    return sorted(size for size in sizes | counts if 1 < size <= num_ranks)


def _candidates(patterns: tuple[_StoredAlike, ...], num_ranks: int) -> Iterator[Mesh]:
    """Yield meshes worth trying, those with fewer axes first."""
    # The outermost cutting axis is only as long as the highest rank demands: the further parts of a longer one would
    # be empty, so that it would explain the same chunks.
    num_cells = patterns[0].num_cells
    if num_cells == 1:
        yield Mesh((("dp_shard", 1),) if num_ranks == 1 else (("dp_replicate", num_ranks),))
        return
    sizes = _axis_sizes(patterns, num_ranks)
    if num_ranks >= num_cells:
        yield Mesh((("dp_shard", num_ranks),))
    for shard in reversed(sizes):
        replicate = _divide_up(num_ranks, shard)
        if replicate > 1 and shard >= num_cells:
            yield Mesh((("dp_replicate", replicate), ("dp_shard", shard)))
    for inner in sizes:
        shard = _divide_up(num_ranks, inner)
        if shard > 1 and shard * inner >= num_cells:
            yield Mesh((("dp_shard", shard), ("tp", inner)))
            yield Mesh((("dp_shard", shard), ("ep", inner)))
    for shard, inner in product(reversed(sizes), sizes):
        replicate = _divide_up(num_ranks, shard * inner)
        if replicate > 1 and shard * inner >= num_cells:
            yield Mesh((("dp_replicate", replicate), ("dp_shard", shard), ("tp", inner)))
            yield Mesh((("dp_replicate", replicate), ("dp_shard", shard), ("ep", inner)))
    for outer, inner in product(sizes, sizes):
        shard = _divide_up(num_ranks, outer * inner)
        if shard > 1 and shard * outer * inner >= num_cells:
            yield Mesh((("dp_shard", shard), ("tp", outer), ("ep", inner)))


def _options(pattern: _StoredAlike, axis: str, size: int, has_tp: bool) -> tuple[Placement, ...]:
    """Return the placements that `axis` can have, the likeliest first."""
    if axis == "dp_replicate":
        return (Replicate(),)
    cuts = tuple(Shard(dim) for dim, parts in enumerate(pattern.intervals) if len(parts) > 1)
    if axis == "ep" and not has_tp:  # whose ranks are FSDP's for all but the experts, as torchtitan has it
        return (*cuts, Replicate()) if pattern.num_experts else (Fsdp(),)
    if axis != "dp_shard":
        return (Replicate(), *cuts)
    # Where a cut leaves no trace, assume what `fully_shard` does by default.
    traceless = bool(pattern.shape) and (size == 1 or pattern.shape[0] == 0)
    return (Shard(0), *cuts, Replicate()) if traceless else (*cuts, Replicate())


def _may_fit(pattern: _StoredAlike, mesh: Mesh, placements: tuple[Placement, ...]) -> bool:
    """Tell, without building the grid, whether the number of parts along every dim can be right."""
    fsdp = [cut for (axis, _), cut in zip(mesh.axes, placements, strict=True) if axis == "dp_shard"]
    for dim, parts in enumerate(pattern.intervals):
        cuts = (Shard(dim), Fsdp()) if fsdp == [Shard(dim)] else (Shard(dim),)
        sizes = [size for (_, size), placement in zip(mesh.axes, placements, strict=True) if placement in cuts]
        most = math.prod(sizes)
        if len(sizes) == 1 and pattern.pack == 1 and pattern.shape[dim]:
            step = _divide_up(pattern.shape[dim], most)
            num_full = _divide_up(pattern.shape[dim], step)
            if len(parts) != num_full + (num_full < most):
                return False
        elif len(parts) > most:
            return False
    return True


def _explain(pattern: _StoredAlike, mesh: Mesh) -> tuple[Placement, ...] | None:
    """Return the placements per axis under which `mesh` gives exactly the pattern's boxes and ranks."""
    for placements in product(*(_options(pattern, axis, size, mesh.size("tp") > 1) for axis, size in mesh.axes)):
        if not _may_fit(pattern, mesh, placements):
            continue
        by_axis = {axis: placement for (axis, _), placement in zip(mesh.axes, placements, strict=True)}
        grid = cut_tensor(pattern.shape, mesh, by_axis, pack=pattern.pack)
        if any(set(ours) != theirs for ours, theirs in zip(grid.intervals, pattern.intervals, strict=True)):
            continue
        held: dict[int, Box] = {rank: grid.local_box(rank) for rank in set(pattern.ranks)}
        if all(held[rank].offsets == box[0] for rank, box in zip(pattern.ranks, pattern.boxes, strict=True)):
            return placements
    return None


def _explain_all(patterns: tuple[_StoredAlike, ...], mesh: Mesh) -> list[tuple[Placement, ...]] | None:
    explained = []
    for pattern in patterns:
        placements = _explain(pattern, mesh)
        if placements is None:
            return None
        explained.append(placements)
    # An axis that cuts nothing explains nothing; replicas are what dp_replicate is for.
    for position, (axis, size) in enumerate(mesh.axes):
        if axis != "dp_replicate" and size > 1 and not any(isinstance(p[position], Shard) for p in explained):
            return None
    return explained


def _looks_like_stages(patterns: tuple[_StoredAlike, ...], mesh: Mesh) -> bool:
    """Tell whether the replicas hold different layers: pipeline stages, not copies."""
    num_inner = mesh.world_size // mesh.size("dp_replicate")
    groups: dict[tuple[str, int], set[int]] = {}
    for pattern in patterns:
        replicas = {rank // num_inner for rank in pattern.ranks}
        for fqn in pattern.fqns:
            block = block_of(fqn)
            if block is not None:
                groups.setdefault(block, set()).update(replicas)
    if any(len(replicas) > 1 for replicas in groups.values()):
        return False
    stages: dict[str, list[int]] = {}
    for (prefix, _), replicas in sorted(groups.items()):
        stages.setdefault(prefix, []).extend(replicas)
    return len({s for order in stages.values() for s in order}) > 1 and all(
        order == sorted(order) for order in stages.values()
    )


def _name_axes(
    patterns: tuple[_StoredAlike, ...], mesh: Mesh, explained: list[tuple[Placement, ...]]
) -> tuple[str, ...]:
    """Name the axes by what each cuts; grids alone do not tell tp, ep and dp_shard apart."""
    names = [axis for axis, _ in mesh.axes]
    cutting = [position for position, axis in enumerate(names) if axis != "dp_replicate"]
    for position in cutting:
        cut_experts = cut_others = cut_inner_dim = leaves_whole = False
        for pattern, placements in zip(patterns, explained, strict=True):
            placement = placements[position]
            if isinstance(placement, Shard):
                cut_experts |= pattern.num_experts > 0
                cut_others |= pattern.num_experts < len(pattern.fqns)
                cut_inner_dim |= 0 < placement.dim == len(pattern.shape) - 1
            elif pattern.shape and 0 not in pattern.shape:
                leaves_whole = True
        only_experts = cut_experts and not cut_others and leaves_whole
        if len(cutting) == 1:
            # `fully_shard` cuts every parameter; tensor parallelism cuts some along the last dim, and no norms.
            names[position] = "ep" if only_experts else "tp" if cut_inner_dim and leaves_whole else "dp_shard"
        elif position != cutting[0]:
            names[position] = "ep" if only_experts else "tp"
    if len(set(names)) != len(names):
        return tuple(axis for axis, _ in mesh.axes)
    return tuple(names)


def infer_mesh(checkpoint: Checkpoint) -> Layout | None:
    """Return the smallest mesh that explains every chunk of `checkpoint`, every axis placed, or None."""
    # Works on chunk boxes and the ranks in file names alone, so what leaves no trace is not seen: replicas that wrote
    # nothing, and ranks whose every part is empty. Axis names follow from what an axis cuts; a mesh whose axes are
    # ordered unlike (dp_replicate, dp_shard, tp, ep) is explained only where it cannot be told apart. A checkpoint of
    # one rank is a mesh of one rank.
    patterns = _find_patterns(checkpoint)
    if not patterns:
        return None
    num_ranks = 1 + max(max(pattern.ranks) for pattern in patterns)
    if num_ranks > _MAX_RANKS:
        return None
    for tried, mesh in enumerate(_candidates(patterns, num_ranks)):
        if tried == _MAX_CANDIDATES:
            return None
        explained = _explain_all(patterns, mesh)
        if explained is None:
            continue
        if mesh.size("dp_replicate") > 1 and _looks_like_stages(patterns, mesh):
            return None
        names = _name_axes(patterns, mesh, explained)
        by_fqn = {
            fqn: dict(zip(names, placements, strict=True))
            for pattern, placements in zip(patterns, explained, strict=True)
            for fqn in pattern.fqns
        }
        renamed = Mesh(tuple((name, size) for name, (_, size) in zip(names, mesh.axes, strict=True)))
        return Layout(mesh=renamed, placements={tensor.fqn: by_fqn[tensor.fqn] for tensor in checkpoint.tensors})
    return None
