"""What one tensor of a file is: all of it, or the part that one rank holds of a DTensor or a ShardedTensor.

Nothing here is imported or called: names of classes decide what a record means, and fields are taken as they were
written. Source: torch `distributed/tensor` (`DTensor`, `DTensorSpec`), `distributed/device_mesh.py`,
`distributed/_shard` (`ShardedTensor`), 2.4 to 2.13.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

from ckpt_tools.checkpoint.dtypes import BY_TORCH_NAME, DType
from ckpt_tools.checkpoint.entries import ByteSpan, Census, Chunk, KeyPath, TensorEntry, fqn_problem, is_possible_shape
from ckpt_tools.checkpoint.formats._pickle_values import KEY, GlobalName, Record
from ckpt_tools.checkpoint.formats._torch_file import TorchFile
from ckpt_tools.checkpoint.formats._torch_tensor import (
    FROM_TYPE,
    WRAPPER,
    PickledTensor,
    is_expanded,
    is_row_major,
    rebuild_tensor,
)
from ckpt_tools.checkpoint.formats.format import Reader
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.checkpoint.tiling import check_tiling
from ckpt_tools.errors import LimitError, UnreadableError
from ckpt_tools.text import counted, first_few

MAX_COPIES = 1 << 12  # Parts of an expanded tensor, each a chunk on the same bytes
_DTENSOR = frozenset({"torch.distributed.tensor.DTensor", "torch.distributed._tensor.api.DTensor"})
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
_PLACEMENTS = ("torch.distributed.tensor.placement_types.", "torch.distributed._tensor.placement_types.")

Cut = tuple[str, int, int]  # (Shard, _StridedShard or Replicate; dim; split factor) of one mesh dim


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPiece:
    """What one file holds of one tensor."""

    path: KeyPath
    dtype: DType
    shape: tuple[int, ...]  # Of the whole tensor, in logical elements
    chunks: tuple[Chunk, ...]
    layout: object = None  # How ranks share it, equal on all of them; None for a plain tensor
    highest: int = 0  # Highest rank that has a part of it
    rank: int | None = None  # Whose part this is, where that is said

    @property
    def fqn(self) -> str:
        """Its keys, joined by dots."""
        return ".".join(map(str, self.path))


def show_path(path: KeyPath) -> str:
    """Return keys joined by dots."""
    return ".".join(map(str, path)) or "(root)"


def read_piece(file: TorchFile, path: KeyPath, value: Record, boxes: dict[tuple[int, ...], Box]) -> TensorPiece:
    """Return what a call that rebuilds a tensor stands for; `boxes` has those of the shapes seen so far."""
    try:
        if (shared := _shared(file, path, value)) is not None:
            return shared
        tensor = rebuild_tensor(value)
        shape = tensor.head.shape
        box = boxes.setdefault(shape, Box((0,) * len(shape), shape))
        return TensorPiece(path=path, dtype=tensor.head.dtype, shape=shape, chunks=_chunks(file, tensor, box))
    except UnreadableError as error:
        raise type(error)(f"tensor {show_path(path)!r}: {error.what}", hint=error.hint) from error


def _chunk(file: TorchFile, tensor: PickledTensor, box: Box) -> Chunk:
    """Return where a tensor's bytes lie in the file."""
    head = tensor.head
    storage = file.storages.get(tensor.key)
    if storage is None:
        raise UnreadableError(f"its storage, data/{tensor.key}, is not in the file")
    if storage.nbytes != tensor.storage_nbytes:
        what = f"its storage has {storage.nbytes} bytes in the file instead of {tensor.storage_nbytes}"
        raise UnreadableError(what)
    if not is_possible_shape(head.shape):
        raise UnreadableError(f"a tensor of shape {list(head.shape)} is too large to exist")
    is_all = head.payload_nbytes == storage.nbytes
    return Chunk(
        box=box,
        span=ByteSpan(file=file.name, offset=storage.start + head.payload_offset, nbytes=head.payload_nbytes),
        strides=head.strides,
        crc32=storage.crc32 if is_all else None,
    )


def _chunks(file: TorchFile, tensor: PickledTensor, box: Box) -> tuple[Chunk, ...]:
    """Return a tensor's bytes; one that is expanded has the same ones at every index along some dims."""
    chunk, strides = _chunk(file, tensor, box), tensor.head.strides
    if strides is None or not is_expanded(tensor.head):
        return (chunk,)
    counts = tuple(size if not step else 1 for step, size in zip(strides, box.sizes, strict=True))
    if math.prod(counts) > MAX_COPIES:
        raise LimitError(f"an expanded tensor of {math.prod(counts)} parts that share their bytes")
    sizes = tuple(1 if not step else size for step, size in zip(strides, box.sizes, strict=True))
    kept = None if is_row_major(sizes, strides) else strides
    return tuple(replace(chunk, box=Box(at, sizes), strides=kept) for at in product(*map(range, counts)))


def _shared(file: TorchFile, path: KeyPath, value: Record) -> TensorPiece | None:
    """Return what a tensor that ranks share holds here; None for any other."""
    match value.args if value.name == FROM_TYPE else ():
        case (GlobalName(name=function), GlobalName(name=name), (_, GlobalName() as kind, size, *_), state):
            dtype, shape = BY_TORCH_NAME.get(kind.name.removeprefix("torch.")), _sizes(size)
            if function == WRAPPER and dtype is not None and shape is not None:
                if name in _DTENSOR:
                    return _dtensor(file, path, dtype, shape, _fields(state))
                if name == _SHARDED_TENSOR and type(state) is tuple and len(state) > 2:
                    return _sharded_tensor(file, path, dtype, shape, state)
    return None


def _fields(state: object) -> Mapping[object, object]:
    """Return an object's attributes: a dict, or what slots make of it."""
    if type(state) is tuple and len(state) == 2 and state[0] is None:
        state = state[1]
    if type(state) is not dict:
        raise UnreadableError("an object has no attributes")
    return state


def _attributes(value: object, name: str) -> Mapping[object, object]:
    """Return the attributes of an object whose class ends in `name`."""
    if type(value) is not Record or value.name.rpartition(".")[2] != name:
        raise UnreadableError(f"a {name} was expected")
    return {} if value.state is None else _fields(value.state)


def _sizes(value: object) -> tuple[int, ...] | None:
    """Return a tuple of lengths, however it is written; None when it is none."""
    if type(value) is Record and value.name == "torch.Size" and len(value.args) == 1:
        value = value.args[0]
    if type(value) is list:
        value = tuple(value)
    if type(value) is tuple and all(type(n) is int and n >= 0 for n in value) and is_possible_shape(value):
        return value
    return None


def _packed(sizes: tuple[int, ...], dtype: DType) -> tuple[int, ...]:
    """Count the last dim in logical elements."""
    return (*sizes[:-1], sizes[-1] * dtype.pack) if sizes else sizes


def _box(offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: DType) -> Box:
    return Box(_packed(offsets, dtype), _packed(sizes, dtype))


def _local(file: TorchFile, value: object, box: Box, dtype: DType) -> Chunk:
    """Return the chunk of a rank's own tensor, which must fill its box."""
    tensor = rebuild_tensor(value)
    if tensor.head.dtype != dtype:
        raise UnreadableError(f"a part is {tensor.head.dtype.name}, the whole {dtype.name}")
    if tensor.head.shape != box.sizes:
        what = f"a part of shape {list(tensor.head.shape)}, where its placement leaves {list(box.sizes)}"
        raise UnreadableError(what)
    if is_expanded(tensor.head):
        raise UnreadableError("a part is an expanded tensor")
    return _chunk(file, tensor, box)


# DTensor


def _dtensor(
    file: TorchFile, path: KeyPath, dtype: DType, shape: tuple[int, ...], state: Mapping[object, object]
) -> TensorPiece:
    spec = _attributes(state.get("_spec"), "DTensorSpec")
    meta = spec.get("tensor_meta")
    said = _sizes(meta.args[0]) if type(meta) is Record and meta.args else None
    if said != shape:
        raise UnreadableError("its two global shapes differ")
    mesh = _attributes(spec.get("mesh"), "DeviceMesh")
    placements = spec.get("placements")
    cuts = tuple(map(_cut_of, placements)) if type(placements) is tuple else ()
    coordinate = _sizes(mesh.get("_coordinate_on_dim"))
    sizes, ranks = _mesh_sizes(mesh)
    if coordinate is None or not len(cuts) == len(coordinate) == len(sizes) or any(map(int.__ge__, coordinate, sizes)):
        raise UnreadableError("its mesh, its placements and its rank's place in the mesh do not fit together")
    offsets, lengths = cell(shape, sizes, cuts, coordinate)
    chunk = _local(file, state.get("_local_tensor"), _box(offsets, lengths, dtype), dtype)
    rank = mesh.get("_rank")
    return TensorPiece(
        path=path,
        dtype=dtype,
        shape=_packed(shape, dtype),
        chunks=(chunk,),
        layout=(sizes, cuts),
        highest=max(ranks, default=math.prod(sizes) - 1),
        rank=rank if type(rank) is int else None,  # torch before 2.8 does not say
    )


def _mesh_sizes(mesh: Mapping[object, object]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the lengths of a mesh's dims, and the ranks that it counts."""
    if "_layout" in mesh:  # torch 2.10 and later
        layout = _attributes(mesh["_layout"], "_MeshLayout")
        axes = layout.get("axes", layout.get("shape"))  # until 2.12: lengths, without an object for each
        found = [_axis_sizes(axis) for axis in axes] if type(axes) is tuple else []
        if found and None not in found:
            ranks = _sizes(mesh.get("_flatten_rank_map")) or ()
            return tuple(math.prod(each or ()) for each in found), ranks
    elif (saved := mesh.get("mesh")) is not None:
        return rebuild_tensor(saved).head.shape, ()
    raise UnreadableError("its mesh is stored in an unknown form")


def _axis_sizes(axis: object) -> tuple[int, ...] | None:
    if type(axis) is int:
        return _sizes((axis,))
    return _sizes(axis if type(axis) is tuple else _attributes(axis, "_FlatLayout").get("shape"))


def box_in(piece: TensorPiece, sizes: tuple[int, ...], coordinate: tuple[int, ...]) -> Box:
    """Return what a place in another mesh of as many dims holds of a DTensor that is cut in the same way."""
    match piece.layout:
        case (tuple(own), tuple(cuts)) if len(own) == len(sizes) == len(cuts):
            return Box(*cell(piece.shape, sizes, cuts, coordinate))
    raise UnreadableError(f"tensor {piece.fqn!r} is not sharded over a mesh of {len(sizes)} dims")


def _cut_of(placement: object) -> Cut:
    name = placement.name if type(placement) is Record else ""
    kind = name.rpartition(".")[2]
    if type(placement) is Record and name.startswith(_PLACEMENTS):
        fields = {} if placement.state is None else _fields(placement.state)
        dim, factor = fields.get("dim", 0), fields.get("split_factor", 1)
        if kind in ("Shard", "_StridedShard", "Replicate") and type(dim) is int and type(factor) is int:
            return kind, dim, factor
    raise UnreadableError(f"it is placed as {kind or 'something unknown'}, which ckpt does not read")


def cell(
    shape: tuple[int, ...], sizes: tuple[int, ...], cuts: tuple[Cut, ...], coordinate: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and lengths of what a place in a mesh holds, in elements of torch."""
    # Mesh dims cut a tensor dim in their order, except for a strided one, which cuts inside what the next dims of
    # `split_factor` ranks together have cut: FSDP cuts inside the tensor-parallel parts.
    offsets, lengths = [0] * len(shape), list(shape)
    for dim in range(len(shape)):
        order: list[int] = []
        for axis in reversed(range(len(cuts))):
            kind, own, factor = cuts[axis]
            if kind == "Replicate" or own != dim:
                continue
            inside = 0
            while kind == "_StridedShard" and factor > math.prod(sizes[a] for a in order[:inside]):
                inside += 1
                if inside > len(order):
                    raise UnreadableError(f"its cut is strided by {factor}, which fits none of the mesh's other dims")
            if kind == "_StridedShard" and factor != math.prod(sizes[a] for a in order[:inside]):
                raise UnreadableError(f"its cut is strided by {factor}, which fits none of the mesh's other dims")
            order.insert(inside, axis)
        for axis in order:
            start, length = _part(lengths[dim], sizes[axis], coordinate[axis])
            offsets[dim], lengths[dim] = offsets[dim] + start, length
    if any(kind != "Replicate" and not 0 <= dim < len(shape) for kind, dim, _ in cuts):
        raise UnreadableError("it is cut along a dim that it does not have")
    return tuple(offsets), tuple(lengths)


def _part(length: int, num_parts: int, index: int) -> tuple[int, int]:
    """Return one of the parts of `layout.cut`."""
    step = -(-length // num_parts)
    start = min(index * step, length)
    return start, min(step, length - start)


# ShardedTensor


def _sharded_tensor(
    file: TorchFile, path: KeyPath, dtype: DType, shape: tuple[int, ...], state: tuple[object, ...]
) -> TensorPiece:
    local, metadata, group = state[:3]
    if _sizes(_attributes(metadata, "ShardedTensorMetadata").get("size")) != shape:
        raise UnreadableError("its two global shapes differ")
    whole = _attributes(metadata, "ShardedTensorMetadata").get("shards_metadata")
    everything = tuple(_shard_box(each) for each in whole) if type(whole) is list else ()
    process = _attributes(group, "ProcessGroupState")
    rank, world_size = process.get("global_rank"), process.get("global_world_size")
    if type(local) is not list or type(rank) is not int or type(world_size) is not int:
        raise UnreadableError("its parts or its ranks are not recorded")
    chunks = []
    for shard in local:
        fields = _attributes(shard, "Shard")
        offsets, sizes = _shard_box(fields.get("metadata"))
        if (offsets, sizes) not in everything:
            raise UnreadableError("a part is not among those that its metadata lists")
        chunks.append(_local(file, fields.get("tensor"), _box(offsets, sizes, dtype), dtype))
    return TensorPiece(
        path=path,
        dtype=dtype,
        shape=_packed(shape, dtype),
        chunks=tuple(chunks),
        layout=everything,
        highest=world_size - 1,
        rank=rank,
    )


def _shard_box(value: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    fields = _attributes(value, "ShardMetadata")
    offsets, sizes = _sizes(fields.get("shard_offsets")), _sizes(fields.get("shard_sizes"))
    if offsets is None or sizes is None or len(offsets) != len(sizes):
        raise UnreadableError("a part has an invalid position")
    return offsets, sizes


MAX_TENSORS = 1 << 20
MAX_VALUES = 1 << 22  # Keys and items that are looked at: a container may be in the file many times, in many others
MAX_DEPTH = 64
MAX_SHARED = 256  # Bytes of all tensors for each byte of a storage, at most: a view costs nothing
REBUILD = ("torch._utils._rebuild", "torch._tensor._rebuild")  # How the names of functions begin that make tensors
_ARRAY = re.compile(r"numpy\.(_?core\.(multiarray\._reconstruct|numeric\._frombuffer)|ma\.core\._mareconstruct)")
"""Functions that make arrays, of old and new numpy."""


@dataclass(slots=True, kw_only=True)
class Content:
    """What one file holds."""

    pieces: list[TensorPiece] = field(default_factory=list)
    values: Counter[str] = field(default_factory=Counter)  # First key → how many plain values are below it
    objects: dict[str, str] = field(default_factory=dict)  # Keys → class of everything else
    sealed: dict[str, str] = field(default_factory=dict)  # Keys → what it is, of objects that are or hold tensors
    counts: dict[int, int] = field(default_factory=dict)  # Id of an object, under whatever keys → how many it holds
    seen: set[int] = field(default_factory=set)  # What has been looked through for them
    census: Census = field(default_factory=Counter)  # What was found in them


def settings_of(value: object) -> dict[str, object]:
    """Return the plain values of the command line that Megatron, fairseq and others keep under `args`; {} without."""
    args = value.get("args") if type(value) is dict else None
    state = args.state if type(args) is Record else args
    values = state.items() if type(state) is dict else ()
    return {key: each for key, each in values if type(key) is str and type(each) in (bool, int, float, str)}


def describe_state(file: TorchFile, root: KeyPath = ()) -> Content:
    """Find every tensor of a file that keys and indices lead to; `root` leads to the file."""
    state = Content()
    boxes: dict[tuple[int, ...], Box] = {}
    names: set[str] = set()
    pending: list[tuple[KeyPath, object]] = [(root, file.value)]
    most_bytes = MAX_SHARED * sum(record.nbytes for record in file.storages.values())
    num_values = num_chunks = num_bytes = 0
    while pending:
        path, value = pending.pop()
        num_values += 1
        if num_values > MAX_VALUES or len(path) > MAX_DEPTH:
            raise LimitError(f"more than {MAX_VALUES} values, or more than {MAX_DEPTH} nested containers")
        if isinstance(value, dict) or (isinstance(value, list | tuple) and _holds_tensors(value)):
            children = value.items() if isinstance(value, dict) else enumerate(value)
            inner: list[tuple[KeyPath, object]] = []
            for key, child in children:
                if isinstance(key, str | int | None):  # True and None as DCP spells them when it flattens a state dict
                    inner.append(((*path, key if type(key) is int else str(key)), child))
                else:
                    of = key.args[0] if isinstance(key, Record) and key.name == KEY else key
                    name = getattr(of, "name", type(of).__name__).replace("_codecs.encode", "bytes")
                    _add_object(state, (*path, f"({name} as key)"), child)
            pending += reversed(inner)
        elif type(value) is Record and value.name.startswith(REBUILD):
            if not path:
                what = "a tensor by itself, without a name"
                raise UnreadableError(what, hint="save a dict: torch.save({NAME: tensor}, …)")
            piece = read_piece(file, path, value, boxes)
            if (problem := fqn_problem(piece.fqn)) is not None:
                raise UnreadableError(f"tensor {piece.fqn!r} {problem}")
            if piece.fqn in names:
                raise UnreadableError(f"two tensors have the name {piece.fqn!r}")
            names.add(piece.fqn)
            state.pieces.append(piece)
            num_chunks += len(piece.chunks)
            num_bytes += sum(piece.dtype.num_bytes(chunk.box.num_elems) for chunk in piece.chunks)
            if num_chunks > MAX_TENSORS or num_bytes > most_bytes:
                raise LimitError(f"more than {MAX_TENSORS} tensors, or {MAX_SHARED} times as many bytes as are stored")
        elif type(value) in (Record, GlobalName):
            _add_object(state, path, value)
        else:
            state.values[show_path(path[:1])] += 1
    return state


def _holds_tensors(values: Iterable[object]) -> bool:
    """Is something in a list that may be or hold a tensor? A list of numbers is one value."""
    return any(type(value) in (dict, list, tuple, Record) for value in values)


def _add_object(state: Content, path: KeyPath, value: object) -> None:
    name = value.name if isinstance(value, Record | GlobalName) else type(value).__name__
    state.objects[show_path(path)] = name
    state.census[name] += type(value) is GlobalName
    if id(value) not in state.counts:
        state.counts[id(value)] = _count_tensors(value, state)
    if count := state.counts[id(value)]:
        what = "a tensor" if name.startswith(REBUILD) else f"{name} with {counted(count, 'tensor')}"
        state.sealed[show_path(path)] = "a numpy array" if _ARRAY.fullmatch(name) else what


def _count_tensors(value: object, state: Content) -> int:
    """Count the tensors anywhere in a value, which may contain itself, but for what was seen before."""
    pending = [value]
    count = 0
    while pending:
        each = pending.pop()
        if type(each) not in (dict, list, tuple, Record) or id(each) in state.seen:
            continue
        state.seen.add(id(each))
        if isinstance(each, Record):
            name = "tensors" if each.name.startswith(REBUILD) else _ARRAY.sub("numpy.ndarray", each.name)
            state.census[name] += name not in (KEY, "_codecs.encode")
            if name in ("tensors", "numpy.ndarray"):
                count += 1
                continue
            pending += (*each.args, each.state, *(each.content or ()))
        elif isinstance(each, dict):
            pending += (*each, *each.values())
        elif isinstance(each, list | tuple):
            pending += each
    return count


_COMPARED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedFiles:
    """The files of one model."""

    directory: str  # In the checkpoint's, with its slash; "" for itself
    files: Mapping[int, str]  # Rank → file
    world_size: int  # As the names say; 0 where they do not


def assemble(
    states: Mapping[int, Content], path: str, owners: Mapping[str, Collection[int]] | None = None
) -> tuple[TensorEntry, ...]:
    """Fit the parts of all ranks together."""
    # `owners` has for every FQN the ranks that have a part of it; by default all.
    leader = min(states)
    pieces: dict[str, dict[int, TensorPiece]] = {}
    for rank, state in states.items():
        for piece in state.pieces:
            if piece.rank not in (None, rank):
                raise misfit(path, f"the file of rank {rank} records rank {piece.rank} instead")
            held = pieces.setdefault(piece.fqn, {})
            held[rank] = piece
            known, first = next(iter(held.items()))
            for what, one, other in (
                ("dtype", first.dtype.name, piece.dtype.name),
                ("shape", first.shape, piece.shape),
                ("placement", first.layout, piece.layout),
            ):
                if one != other:
                    raise misfit(path, f"ranks {known} and {rank} differ in the {what} of tensor {piece.fqn!r}")
    for fqn, held in pieces.items():
        wanted = states.keys() if owners is None else owners.get(fqn, ())
        if more := sorted(held.keys() - wanted):
            raise misfit(path, f"rank {more[0]} has tensor {fqn!r}, but should not")
        if held.keys() != {*wanted} & states.keys():
            if leader not in held and leader in wanted:
                raise misfit(path, f"rank {min(held)} has tensor {fqn!r}, and rank {leader} does not")
            raise misfit(path, f"tensor {fqn!r} is not in the files of all ranks")
    return tuple(
        TensorEntry(
            fqn=fqn,
            dtype=first.dtype,
            shape=first.shape,
            chunks=tuple(chunk for piece in held.values() for chunk in piece.chunks),
            path=first.path,
        )
        for fqn, held in pieces.items()
        for first in (next(iter(held.values())),)
    )


def misfit(path: str, what: str) -> UnreadableError:
    """Return the error for files that are not of one save."""
    hint = "files of different models or saves are mixed here: restore those of one"
    return UnreadableError(what, where=path, hint=hint)


def missing_ranks(
    states: Mapping[int, Content], ranks: RankedFiles, tensors: Iterable[TensorEntry], path: str
) -> tuple[str, ...]:
    """Say which ranks' files are not here, where the others have replicas of all that they hold."""
    highest = max((piece.highest for state in states.values() for piece in state.pieces), default=0)
    if ranks.world_size and max(highest, *states) >= ranks.world_size:
        raise misfit(path, f"rank {max(highest, *states)} appears in files for only {ranks.world_size} ranks")
    world_size = ranks.world_size or 1 + max(highest, *states)
    missing = [rank for rank in range(world_size) if rank not in states]
    if not missing:
        return ()
    shown = first_few([str(rank) for rank in missing], 6)
    what = f"{len(missing)} of {world_size} ranks have no file here: {shown}"
    for entry in tensors:
        if check_tiling(entry.shape, (chunk.box for chunk in entry.chunks)) is not None:
            hint = "copy the files of all ranks, from every node, into one directory"
            raise UnreadableError(what, where=path, hint=hint)
    return (f"{what}; the others hold everything",)


def keep_one(entry: TensorEntry, reader: Reader) -> TensorEntry:
    """Compare what several ranks have of a tensor, and return it with one of each."""
    firsts: dict[object, Chunk] = {}
    for chunk in entry.chunks:
        first = firsts.setdefault(chunk.box, chunk)
        if first is not chunk and not _is_same(first, chunk, reader):
            what = f"tensor {entry.fqn!r}: ranks that should have the same part have different ones"
            hint = "are the files of one step? If every rank has its own tensor, leave it out with --exclude"
            raise UnreadableError(what, where=f"{first.span.file}, {chunk.span.file}", hint=hint)
    return entry if len(firsts) == len(entry.chunks) else replace(entry, chunks=tuple(firsts.values()))


def _is_same(one: Chunk, other: Chunk, reader: Reader) -> bool:
    """Are two chunks of one box the same, by their CRC-32s where they are recorded?"""
    if one.span.nbytes != other.span.nbytes or one.strides != other.strides:
        return False
    if one.crc32 is not None and other.crc32 is not None:
        return one.crc32 == other.crc32
    for start in range(0, one.span.nbytes, _COMPARED_BYTES):
        count = min(_COMPARED_BYTES, one.span.nbytes - start)
        left, right = (reader.read(c.span.file, c.span.offset + start, count) for c in (one, other))
        if left != right:
            return False
    return True
