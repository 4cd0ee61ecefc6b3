"""Files of ranks for another mesh, after the pattern of those that a trainer left.

What a rank pickled is read inertly, changed where it says how large the mesh is and which part is whose, and pickled
again: everything else (options of an optimizer, versions of modules, attributes of one release of PyTorch) stays as it
was written.

Source: as `_torch_pieces`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.checkpoint.entries import ByteSpan, Chunk, KeyPath, TensorEntry
from ckpt_tools.checkpoint.formats._pickle_values import PERSISTENT_ID, GlobalName, Record, build_pickle
from ckpt_tools.checkpoint.formats._torch_file import TorchFile, read_torch_file
from ckpt_tools.checkpoint.formats._torch_pieces import MAX_DEPTH, MAX_VALUES, REBUILD, box_in, read_piece
from ckpt_tools.checkpoint.formats._torch_tensor import DENSE, FROM_TYPE, PLAIN_CALLS
from ckpt_tools.checkpoint.formats.torch_zip import ArchiveFrame, archive_frame
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.errors import LimitError, UnreadableError
from ckpt_tools.storage.source import Source
from ckpt_tools.text import first_few

_ORDERED = "collections.OrderedDict"
_MESH = "torch.distributed.device_mesh.DeviceMesh"
_MESH_FIELDS = frozenset({
    *("_device_type", "_layout", "_rank_map", "_mesh_dim_names", "_root_mesh", "_flatten_rank_map", "_thread_id"),
    *("_flatten_mapping", "_dim_group_names", "_rank", "_coordinate_on_dim", "_hash"),
    *("device_type", "mesh", "mesh_dim_names", "_flatten_mesh_list"),
})  # fmt: skip
"""Attributes of a mesh (PyTorch 2.10 to 2.15, and before 2.9); with others, what should change is not known."""
_INTEGERS = {"torch.IntStorage": 4, "torch.LongStorage": 8}  # Storages of ranks, and the bytes of an element

Place = tuple[str, int, int, Box]  # Where the part of a tensor lies: file, offset, bytes; and which part it is


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFile:
    """One file to write."""

    name: str
    frame: ArchiveFrame
    chunks: tuple[tuple[str, Chunk], ...]  # (FQN, where its part lies) of every tensor


def places_of(tensors: Iterable[TensorEntry]) -> dict[Place, list[str]]:
    """Return which tensors lie where, of those of an open checkpoint; tied ones lie in one place."""
    found: dict[Place, list[str]] = {}
    for entry in tensors:
        for chunk in entry.chunks:
            span = chunk.span
            found.setdefault((span.file, span.offset, span.nbytes, chunk.box), []).append(entry.fqn)
    return found


def plan_rank_file(
    source: Source, pattern: str, name: str, *, rank: int, sizes: tuple[int, ...], places: Mapping[Place, Sequence[str]]
) -> RankFile:
    """Return what the file `name` of a rank of another mesh holds; what is not said otherwise stays as in `pattern`."""
    # `sizes` are the lengths of the mesh's dims, `places` those of what is there (`places_of`). What depends on the
    # mesh in a way that is not known is an `UnreadableError`.
    file = read_torch_file(source, pattern, exactly=True)
    try:
        return _plan(file, name, rank, sizes, places)
    except UnreadableError as error:
        where = os.path.join(source.root, pattern)
        raise UnreadableError(f"it cannot be written for another mesh: {error.what}", where=where) from error


def _plan(
    file: TorchFile, name: str, rank: int, sizes: tuple[int, ...], places: Mapping[Place, Sequence[str]]
) -> RankFile:
    boxes: dict[tuple[int, ...], Box] = {}
    pieces = [(call, read_piece(file, path, call, boxes)) for path, call in _tensors(file.value)]
    if pieces and all(piece.layout is None for _, piece in pieces):
        raise UnreadableError("its tensors are whole, without a mesh: use gather for a model that training starts from")
    records = _records(file.value)
    known: list[bytes] = []
    changed: set[int] = set()
    for mesh in records:
        if mesh.name == _MESH:
            changed |= {id(_fields(mesh).get(name)) for name in ("_rank_map", "mesh")}
            known.append(_enlarge(mesh, str(len(known)), rank, sizes))
    parts: list[tuple[list[str], Box, int]] = []
    at: dict[int, int] = {}
    for call, piece in pieces:
        chunk = piece.chunks[0]
        named = places.get((chunk.span.file, chunk.span.offset, chunk.span.nbytes, chunk.box))
        if named is None:
            raise UnreadableError(f"tensor {piece.fqn!r} is read as a part of another")
        fqn = piece.fqn if piece.fqn in named else named[0]
        own, box = call, Box((0,) * len(piece.shape), piece.shape)
        if piece.layout is not None:
            own, box = _local_of(call), box_in(piece, sizes, _coordinate(rank, sizes))
        if piece.dtype.pack > 1:
            raise UnreadableError(f"tensor {piece.fqn!r} is {piece.dtype.name}")
        if id(call) not in at:
            at[id(call)] = len(parts)
            parts.append(([], box, piece.dtype.num_bytes(box.num_elems)))
            key = str(len(known) + at[id(call)])
            changed |= {id(call), *_renew(own, key, box.sizes, piece.dtype.bits // 8)}
        parts[at[id(call)]][0].append(fqn)
    if left := sum(each.name.startswith(REBUILD) and id(each) not in changed for each in records):
        raise UnreadableError(f"{left} tensors are inside objects")
    frame = archive_frame(build_pickle(file.value), [nbytes for _, _, nbytes in parts], known)
    chunks = (
        (fqn, Chunk(box=box, span=ByteSpan(file=name, offset=start, nbytes=nbytes)))
        for (fqns, box, nbytes), start in zip(parts, frame.starts, strict=True)
        for fqn in fqns
    )
    return RankFile(name=name, frame=frame, chunks=(*chunks,))


def _coordinate(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return a rank's place in a mesh whose last dim runs fastest."""
    return tuple(rank // math.prod(sizes[dim + 1 :]) % size for dim, size in enumerate(sizes))


def _tensors(value: object) -> Iterator[tuple[KeyPath, Record]]:
    """Yield the calls that make the tensors which keys and indices lead to."""
    pending: list[tuple[KeyPath, object]] = [((), value)]
    num_values = 0
    while pending:
        path, each = pending.pop()
        num_values += 1
        if num_values > MAX_VALUES or len(path) > MAX_DEPTH:  # as `describe_state`, which has read the file before
            raise LimitError(f"more than {MAX_VALUES} values, or more than {MAX_DEPTH} containers in each other")
        pairs: Iterable[tuple[object, object]] = ()
        if isinstance(each, dict):
            pairs = each.items()
        elif isinstance(each, list | tuple):
            pairs = enumerate(each)
        elif isinstance(each, Record) and each.name.startswith(REBUILD):
            yield path, each
        elif isinstance(each, Record) and each.name == _ORDERED and each.content:
            pairs = zip(each.content[::2], each.content[1::2], strict=True)
        inner: list[tuple[KeyPath, object]] = [
            ((*path, key), child) for key, child in pairs if isinstance(key, str | int)
        ]
        pending += reversed(inner)


def _records(value: object) -> list[Record]:
    """Return every object, however deep it lies."""
    found: list[Record] = []
    seen: set[int] = set()
    pending = [value]
    while pending:
        each = pending.pop()
        if type(each) not in (dict, list, tuple, Record) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Record):
            found.append(each)
            pending += (each.args, each.state, each.content)
        elif isinstance(each, dict):
            pending += (*each, *each.values())
        elif isinstance(each, list | tuple):
            pending += each
    return found


def _fields(record: Record) -> dict[object, object]:
    if type(record.state) is not dict:
        raise UnreadableError(f"a {record.name.rpartition('.')[2]} has no attributes")
    return record.state


def _enlarge(mesh: Record, key: str, rank: int, sizes: tuple[int, ...]) -> bytes:
    """Change a mesh to one of these sizes, and return the content of the storage that has its ranks."""
    fields, world_size = _fields(mesh), math.prod(sizes)
    if unknown := sorted(map(str, fields.keys() - _MESH_FIELDS)):
        raise UnreadableError(f"its mesh has attributes of another release of PyTorch: {first_few(unknown)}")
    if fields.get("_root_mesh") is not None or fields.get("_flatten_mapping"):
        raise UnreadableError("its mesh is a part of another one")
    for name in ("_flatten_rank_map", "_flatten_mesh_list"):
        if name in fields:
            ranks = fields[name]
            if not isinstance(ranks, tuple) or ranks != tuple(range(len(ranks))):
                raise UnreadableError("its mesh does not list the ranks in order")
            fields[name] = tuple(range(world_size))
    place = _coordinate(rank, sizes)
    fields["_coordinate_on_dim"] = list(place) if isinstance(fields.get("_coordinate_on_dim"), list) else place
    fields.update({name: value for name, value in (("_rank", rank), ("_hash", None)) if name in fields})
    layout = fields.get("_layout")
    if layout is not None:
        _enlarge_layout(layout, sizes)
    own, shape = (fields.get("mesh"), sizes) if layout is None else (fields.get("_rank_map"), (world_size,))
    match own:
        case Record(args=(Record(args=(("storage", GlobalName(name=storage), *_),)), _, tuple(before), *_)) if (
            storage in _INTEGERS and len(before) == len(shape)
        ):
            _renew(own, key, shape, _INTEGERS[storage])
            return b"".join(each.to_bytes(_INTEGERS[storage], "little") for each in range(world_size))
    raise UnreadableError(f"its mesh does not have {len(sizes)} dims, or stores its ranks differently")


def _enlarge_layout(layout: object, sizes: tuple[int, ...]) -> None:
    """Change what PyTorch since 2.10 keeps of a mesh's lengths; until 2.12 without an object for each dim."""
    stated = _fields(layout) if type(layout) is Record else {}
    axes = stated.get("axes", stated.get("shape"))
    if not isinstance(axes, tuple) or len(axes) != len(sizes):
        raise UnreadableError(f"its mesh does not have {len(sizes)} dims")
    steps = tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
    if "axes" not in stated:
        stated.update(shape=sizes, stride=steps)
        return
    for axis, size, step in zip(axes, sizes, steps, strict=True):
        if type(axis) is not Record:
            raise UnreadableError("its mesh stores its lengths in another form")
        # A dim of one rank is none.
        _fields(axis).update(shape=(size,) if size > 1 else (), stride=(step,) if size > 1 else ())


def _local_of(call: Record) -> Record:
    """Return the call that makes a rank's own part of a DTensor, whose remembered hash is forgotten."""
    state = call.args[3]
    fields = state[1] if isinstance(state, tuple) and len(state) == 2 else None
    own, spec = (fields.get("_local_tensor"), fields.get("_spec")) if isinstance(fields, dict) else (None, None)
    if type(own) is not Record or type(spec) is not Record or own.name not in PLAIN_CALLS:
        raise UnreadableError("a part of a tensor is not a plain tensor")
    if "_hash" in _fields(spec):
        _fields(spec)["_hash"] = None
    return own


def _renew(call: Record, key: str, sizes: tuple[int, ...], width: int) -> list[int]:
    """Let a call make a row-major tensor, alone in the storage `key`; return which records are concerned."""
    rest: list[object]
    match call.args:
        case (GlobalName(name=function), kind, tuple(args), state) if call.name == FROM_TYPE:
            inner = Record(function, args, None, 0)  # of a subclass that only has another name
            _renew(inner, key, sizes, width)
            call.args = (call.args[0], kind, inner.args, state)
            return [id(call)]
        case (Record() as inner, *_) if call.name not in PLAIN_CALLS:  # a parameter
            return [id(call), *_renew(inner, key, sizes, width)]
        case (Record(args=((kind, name, _, location, *_),)), _, _, _, *rest):
            pass
        case _:
            raise UnreadableError(f"a {call.name} is in it, which ckpt does not write")
    num_elems = math.prod(sizes) * (1 if call.name == DENSE else width)
    strides = tuple(math.prod(max(size, 1) for size in sizes[dim + 1 :]) for dim in range(len(sizes)))
    own = Record(PERSISTENT_ID, ((kind, name, key, location, num_elems),), None, 0)
    call.args = (own, 0, sizes, strides, *rest)
    return [id(call)]
