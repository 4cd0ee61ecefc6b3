"""torch_checkpointing's directories: a file for every rank and item, and `metadata.pkl`, which places their parts.

Source: torch_checkpointing 0.1.1 `distributed_metadata.py`, `dtensor_metadata.py`, `checkpoint_layout.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice, product

from ckpt_tools.description.checkpoint import (
    Asset,
    BlobEntry,
    ByteSpan,
    Checkpoint,
    KeyPath,
    TensorEntry,
    is_possible_shape,
)
from ckpt_tools.description.layout import Box
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats._json import MAX_JSON_BYTES, parse_json
from ckpt_tools.formats._pickle_objects import MAX_PICKLE_BYTES
from ckpt_tools.formats._rank_parts import Ranks, assemble, keep_one, misfit, missing_ranks
from ckpt_tools.formats._torch_file import read_torch_file
from ckpt_tools.formats._torch_pieces import Cut, Piece, cell, show_path
from ckpt_tools.formats._torch_state import State, describe_state
from ckpt_tools.formats.file_names import is_hf_asset
from ckpt_tools.formats.format import Format, Opened, Reader, read_document
from ckpt_tools.formats.inert_pickle import parse_pickle
from ckpt_tools.formats.manifest import Manifest
from ckpt_tools.formats.rank_optimizer import build_items, leaves_of, plain_values
from ckpt_tools.formats.safetensors import read_file
from ckpt_tools.formats.torch_save import list_tied
from ckpt_tools.storage.source import Source
from ckpt_tools.storage.virtual import VirtualFile, VirtualSource
from ckpt_tools.text import first_few

_METADATA = "metadata.pkl"
_VERSION = "2.0"
_MAX_RANKS = 1 << 16
_TORCH = "TorchSerialization"
_SAFETENSORS = "SafetensorsSerialization"
_OF_RANK_0 = re.compile(r"(?:.*[^0-9])?0\.(pt|safetensors)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """Where the parts of one tensor are, on some ranks."""

    shape: tuple[int, ...]
    dtype: str
    sizes: tuple[int, ...]
    """Of the mesh."""
    members: tuple[int, ...]
    """Ranks of the mesh, in row-major order."""
    cuts: tuple[Cut, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """One item of a checkpoint, such as a model."""

    key: str
    files: Mapping[int, tuple[str, str]]
    """Rank → file, and how it is written."""
    placed: Mapping[str, Mapping[int, _Placed]] = field(default_factory=dict)
    """FQN in it → rank → where its part is; {} for an item without a resharder."""
    keys: Mapping[str, KeyPath] = field(default_factory=dict)


_Part = tuple[State, dict[KeyPath, object], tuple[tuple[ByteSpan, int], ...]]
"""What a rank has of an item: tensors, what is no tensor, and recorded CRC-32s."""


class TorchCheckpointing(Format):
    """What `CheckpointManager` writes when an item has a resharder."""

    name = "torch-checkpointing"
    found_by = "`metadata.pkl` and `ITEM_0.pt` in a directory"
    about = (
        "torch_checkpointing 0.1: DTensors in its `.pt` and `.safetensors` files, plain values as items; "
        "items in JSON or without a resharder are named and not read. `verify` sees no checksum of "
        "safetensors files"
    )
    whole_by = "`metadata.pkl`, which lists the files of all ranks"
    suffix = ".pt"
    is_sharded = True
    is_training = True
    has_views = True
    unchecked = ("whether the files of all ranks are of one step, which they do not record",)

    def detects(self, files: Mapping[str, int]) -> bool:
        """By `metadata.pkl` and a rank's file."""
        return _METADATA in files and "config.json" not in files and any(map(_OF_RANK_0.fullmatch, files))

    def open(self, source: Source, files: Mapping[str, int], *, path: str, manifest: Manifest | None) -> Opened:  # noqa: ARG002
        """Read `metadata.pkl` and the pickles of all files, none of which is run."""
        try:
            pickled = read_document(source, _METADATA, MAX_PICKLE_BYTES)
            items, world_size = _parse(parse_pickle(pickled, allowed_globals=frozenset()))
        except UnreadableError as error:
            raise type(error)(f"{_METADATA}: {error.what}", where=path, hint=error.hint) from error
        for name in files:  # what has no resharder is not in there
            if (found := re.fullmatch(r"(.+)_0\.pt", name)) is not None and found[1] not in items:
                own = {rank: (f"{found[1]}_{rank}.pt", _TORCH) for rank in range(world_size)}
                items[found[1]] = _Item(key=found[1], files=own)
        tensors: list[TensorEntry] = []
        blobs: list[BlobEntry] = []
        unread: list[str] = []
        sums: list[tuple[ByteSpan, int]] = []
        used = {_METADATA: files[_METADATA]}
        virtual: dict[str, VirtualFile] = {}
        for item in items.values():
            used |= {name: files[name] for name, _ in item.files.values() if name in files}
            kinds = {kind for _, kind in item.files.values()}
            if not kinds <= {_TORCH, _SAFETENSORS}:
                unread.append(f"item {item.key!r}, of {first_few(sorted(kinds))}")
                continue
            read = {rank: _read(source, item, rank) for rank, (name, _) in item.files.items() if name in files}
            parts = {rank: part for rank, part in read.items() if part is not None}
            if len(parts) < len(read):
                unread.append(f"item {item.key!r}, for which {_METADATA} has no places")
                continue
            stored, missing = _fit(item, {rank: part[0] for rank, part in parts.items()}, path)
            unread += missing
            tensors += [replace(each, fqn=f"{item.key}.{each.fqn}", path=(item.key, *each.path)) for each in stored]
            sums += [each for part in parts.values() for each in part[2]]
            values = [part[1] for part in parts.values()]
            if len(set(map(repr, values))) > 1:
                unread.append(f"values of item {item.key!r}, of which every rank has its own")
            elif values[0]:
                held, file = build_items(f"{item.key}#values", values[0])
                blobs += held
                virtual |= file
        rest = [name for name in files if name not in used]
        assets = [name for name in rest if "/" not in name and is_hf_asset(name)]
        others = dict.fromkeys(re.sub(r"\d+", "*", name) for name in rest if name not in assets)
        unread += [f"other files: {first_few(others, 6)}"] if others else []
        return Opened(
            format=self,
            checkpoint=Checkpoint(
                root=source.root,
                format=self.name,
                tensors=tuple(tensors),
                blobs=tuple(blobs),
                assets=tuple(Asset(file=name, nbytes=files[name]) for name in assets),
                files=used | {name: file.nbytes for name, file in virtual.items()},
            ),
            source=VirtualSource(source, virtual) if virtual else source,
            unread=tuple(unread),
            notes=list_tied(tensors),
            sums=tuple(sums),
        )

    def resolve(self, entry: TensorEntry, reader: Reader) -> TensorEntry:
        """Keep one of the equal parts that several ranks have."""
        return keep_one(entry, reader)


FORMAT = TorchCheckpointing()


def _read(source: Source, item: _Item, rank: int) -> _Part | None:
    """Read what a rank has of an item; None for tensors that nothing says the places of."""
    name, kind = item.files[rank]
    if kind == _SAFETENSORS:
        tensors = read_file(source, name).header.tensors
        return State(pieces=[_piece(item, rank, entry, name) for entry in tensors]), {}, ()
    file = read_torch_file(source, name)
    try:
        state = describe_state(file)
        values = plain_values(dict(leaves_of(file.value, (), (item.key,), {})), state)
    except UnreadableError:
        if item.placed:
            raise
        return None
    if not item.placed and any(piece.layout is None for piece in state.pieces):
        return None
    for piece in state.pieces if item.placed else ():
        placed = _placed(item, rank, piece.fqn, name)
        layout = (placed.sizes, placed.cuts)
        is_there = piece.layout == layout or (piece.layout is None and {cut[0] for cut in placed.cuts} == {"Replicate"})
        if not is_there or (placed.shape, placed.dtype) != (piece.shape, piece.dtype.torch_name):
            raise UnreadableError(f"tensor {piece.fqn!r} is not where {_METADATA} says", where=name)
    return state, values, file.sums


def _placed(item: _Item, rank: int, fqn: str, name: str) -> _Placed:
    found = item.placed.get(fqn, {}).get(rank)
    if found is None:
        raise UnreadableError(f"{_METADATA} has no place for tensor {fqn!r}", where=name)
    return found


def _piece(item: _Item, rank: int, entry: TensorEntry, name: str) -> Piece:
    """Return the part of a tensor that lies in a safetensors file, whose place `metadata.pkl` alone says."""
    placed = _placed(item, rank, entry.fqn, name)
    coordinate = next(islice(product(*map(range, placed.sizes)), placed.members.index(rank), None))
    offsets, sizes = cell(placed.shape, placed.sizes, placed.cuts, coordinate)
    if entry.shape != sizes or entry.dtype.torch_name != placed.dtype:
        found = f"{entry.dtype.name} {list(entry.shape)}"
        what = f"tensor {entry.fqn!r} is {found}, where its placement leaves {placed.dtype} {list(sizes)}"
        raise UnreadableError(what, where=name)
    return Piece(
        path=item.keys[entry.fqn],
        dtype=entry.dtype,
        shape=placed.shape,
        chunks=(replace(entry.chunks[0], box=Box(offsets, sizes)),),
        layout=(placed.sizes, placed.cuts),
        highest=max(placed.members),
    )


def _fit(item: _Item, states: Mapping[int, State], path: str) -> tuple[tuple[TensorEntry, ...], tuple[str, ...]]:
    """Return an item's tensors, and what is to be said of files that are not here."""
    if not states:
        raise UnreadableError(f"no file of item {item.key!r} is here: {item.files[0][0]}", where=path)
    stored = assemble(states, path, item.placed or None)
    missing = missing_ranks(states, Ranks(directory="", files={}, world_size=len(item.files)), stored, path)
    if lost := item.placed.keys() - {entry.fqn for entry in stored}:
        raise misfit(path, f"no file has {first_few(sorted(lost))} of item {item.key!r}")
    return stored, missing


# metadata.pkl


def _parse(value: object) -> tuple[dict[str, _Item], int]:
    match value:
        case {"version": str(version)} if version != _VERSION:
            raise UnreadableError(f"its version is {version!r}; ckpt reads {_VERSION!r}")
        case {"metadata": dict(items), "world_size": int(world_size)} if 0 < world_size <= _MAX_RANKS:
            return {str(key): _parse_item(str(key), each, world_size) for key, each in items.items()}, world_size
    raise UnreadableError("not what torch_checkpointing writes", hint="--from names the format of the other files")


def _parse_item(key: str, value: object, world_size: int) -> _Item:
    match value:
        case {"nested_path_to_metadata": dict(paths), "rank_to_layout_info": dict(files)}:
            if len(files) != world_size or not all(rank in files for rank in range(world_size)):
                raise UnreadableError(f"item {key!r} has files of other ranks than 0 to {world_size - 1}")
            keys: dict[str, KeyPath] = {}
            placed = {}
            for text, groups in paths.items():
                found = parse_json(str(text).encode(), what="the path of a tensor", where=key, max_bytes=MAX_JSON_BYTES)
                own = tuple(found) if isinstance(found, list) else ()
                keys[show_path(own)] = own
                placed[show_path(own)] = dict(_parse_places(show_path(own), groups))
            own_files = {rank: _file(key, rank, files[rank]) for rank in range(world_size)}
            return _Item(key=key, files=own_files, placed=placed, keys=keys)
    raise UnreadableError(f"item {key!r} has no places and files")


def _file(key: str, rank: int, value: object) -> tuple[str, str]:
    match value:
        case None:
            return f"{key}_{rank}.pt", _TORCH
        case {"file_path": str(name), "serialization_format": {"type": str(kind)}}:
            return name, kind
    raise UnreadableError(f"item {key!r} has no file of rank {rank}")


def _parse_places(fqn: str, groups: object) -> Iterator[tuple[int, _Placed]]:
    for group in groups if isinstance(groups, list) else ():
        match group:
            case {"sharding_metadata": {"type": "DTensorShardingMetadata", "data": data}, "ranks": tuple(ranks)}:
                placed = _parse_placed(data)
                if placed is not None and all(type(rank) is int for rank in ranks) and {*ranks} <= {*placed.members}:
                    yield from ((rank, placed) for rank in ranks)
                    continue
            case {"sharding_metadata": {"type": str(kind)}} if kind != "DTensorShardingMetadata":
                raise UnreadableError(f"tensor {fqn!r} is placed by {kind}, which is not read")
        raise UnreadableError(f"tensor {fqn!r} has no sound place")


def _parse_placed(data: object) -> _Placed | None:
    match data:
        case {
            "global_shape": list(shape),
            "dtype": str(dtype),
            "mesh_spec": {"mesh_shape": tuple(sizes), "mesh_data": tuple(members)},
            "placements": list(placements),
        }:
            cuts = tuple(cut for cut in map(_parse_cut, placements) if cut is not None)
            if not all(type(number) is int and number >= 0 for number in (*shape, *sizes, *members)):
                return None
            is_mesh = math.prod(sizes) == len(members) == len(set(members))
            if is_mesh and len(cuts) == len(placements) == len(sizes) and is_possible_shape(shape):
                kind = dtype.removeprefix("torch.")
                return _Placed(shape=tuple(shape), dtype=kind, sizes=sizes, members=members, cuts=cuts)
    return None


def _parse_cut(value: object) -> Cut | None:
    match value:
        case {"type": "Replicate"}:
            return "Replicate", 0, 1
        case {"type": "Shard", "dim": int(dim)}:
            return "Shard", dim, 1
        case {"type": "StridedShard", "dim": int(dim), "split_factor": int(factor)}:
            return "_StridedShard", dim, factor
    return None
