"""Read and write `.metadata` of a DCP checkpoint, without torch and without running anything in it.

The pickle becomes inert records first (`inert_pickle`), then descriptions; every field is checked on the way. What
torch 2.0 to 2.14 and megatron-core 0.4 to 0.16 wrote is understood; anything else is refused by name.

Source: torch `distributed/checkpoint/{metadata,filesystem,planner}.py` (2.13),
`distributed/_shard/sharded_tensor/metadata.py` (2.0 to 2.2); megatron-core
`dist_checkpointing/strategies/{torch,state_dict_saver}.py` (0.15.3, 0.16.1).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ckpt_tools.checkpoint.dtypes import BY_TORCH_NAME, DType
from ckpt_tools.checkpoint.entries import (
    MAX_DIMS,
    MAX_ELEMS,
    BlobEntry,
    ByteSpan,
    Chunk,
    KeyPath,
    TensorEntry,
    fqn_problem,
    is_possible_shape,
)
from ckpt_tools.checkpoint.formats._pickle_values import (
    ANY,
    DEFAULT_LIMITS,
    GlobalName,
    PickleLimits,
    Record,
    collector_paused,
    push_int,
)
from ckpt_tools.checkpoint.formats.inert_pickle import Calls, parse_pickle
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.errors import UnreadableError, UnsupportedError, UsageError
from ckpt_tools.text import first_few, is_plain_path

# `planner_data` of a DCP `.metadata`: the keys that lead to every entry, and with them a second record of its name
# torch flattens nested dicts and lists, and names an entry by its keys, joined by dots. So each name must be what its
# keys say: one that is not was changed after it was saved, and nothing tells which of the two is right.
# Source: torch `distributed/checkpoint/{_nested_dict,_traverse,default_planner}.py` (2.0 to 2.13).

MAX_KEYS = DEFAULT_LIMITS.max_depth  # Of a path: a state dict cannot nest deeper than the pickle that holds it
_HASHABLE = frozenset({"torch.distributed.checkpoint.metadata.MetadataIndex", "torch.Size"})
"""Classes that a `.metadata` may name and whose objects can be keys of a dict."""


def parse_paths(planner_data: object, names: Collection[object]) -> Mapping[str, KeyPath]:
    """Return FQN → keys for all `names`, or nothing when this is not what torch's planner keeps."""
    # A planner of somebody else may keep anything here. It is torch's when it has the keys of any of these names. torch
    # before 2.6 also kept the keys of objects that it did not save, so there may be more of them than names.
    if type(planner_data) is not dict:
        return {}
    if any(type(key) is Record and key.name not in _HASHABLE for key in planner_data):
        raise UnreadableError("planner_data has a key that torch cannot use as a dict key")
    paths = {fqn: path for fqn, path in planner_data.items() if type(fqn) is str and _is_path(path)}
    if paths.keys().isdisjoint(names):
        return {}
    for fqn, path in paths.items():
        if (joined := ".".join(map(str, path))) != fqn:
            raise _changed_name(fqn, f"the keys of '{joined}'")
    for name in names:
        if name not in paths:
            raise _changed_name(name, "no keys")
    return paths


def _is_path(path: object) -> bool:
    return type(path) is tuple and 0 < len(path) <= MAX_KEYS and all(type(key) in (str, int) for key in path)


def _changed_name(fqn: object, found: str) -> UnreadableError:
    name = fqn if isinstance(fqn, str) else type(fqn).__name__
    what = f"'{name}' has {found} in planner_data: a name has changed since it was saved"
    return UnreadableError(what, hint="the file is damaged: restore it, or save the checkpoint again")


_DCP = "torch.distributed.checkpoint.metadata."
_OLD = "torch.distributed._shard.sharded_tensor.metadata."
_CHUNK = f"{_DCP}ChunkStorageMetadata"
_INDEX = f"{_DCP}MetadataIndex"
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_PLANNER = "torch.distributed.checkpoint.planner."
_PLANNER_CLASSES = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
_MCORE = "megatron.core.dist_checkpointing.strategies.torch."
_MCORE_METADATA = f"{_MCORE}MCoreMetadata"
_LAYOUT = "torch.serialization._get_layout"
_PROPERTIES = frozenset({f"{_DCP}TensorProperties", f"{_OLD}TensorProperties"})
_MEMORY_FORMATS = frozenset({f"{_DCP}_MEM_FORMAT_ENCODING", f"{_OLD}MEM_FORMAT_ENCODING"})
_FOREIGN_DTYPES = (
    *("qint8", "quint8", "qint32", "quint4x2", "quint2x4", "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
)
_DCP_CLASSES = (
    *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex"),
    *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
)

ALLOWED_GLOBALS = frozenset(
    {
        *(_DCP + name for name in _DCP_CLASSES),
        *(_OLD + name for name in ("TensorProperties", "MEM_FORMAT_ENCODING")),
        *(_STORAGE_INFO, _LAYOUT, "torch.Size"),
        # Megatron keeps the plans of all ranks beside what torch does, for its next save; nobody else reads them.
        *(_PLANNER + name for name in _PLANNER_CLASSES),
        *("torch.distributed.checkpoint.filesystem._StoragePrefix", _MCORE_METADATA, f"{_MCORE}MCoreSavePlan"),
        # Types that cannot be converted may be named too, so that the message can name their tensor.
        *(f"torch.{name}" for name in (*BY_TORCH_NAME, *_FOREIGN_DTYPES)),
        # The saver's path in StorageMeta, as different Pythons spell its class.
        *(
            f"{module}.{kind}Path"
            for module in ("pathlib", "pathlib._local")
            for kind in ("Posix", "PurePosix", "Windows", "PureWindows")
        ),
    }
)
"""Every name that a `.metadata` may mention."""
_CALLED = frozenset({*_MEMORY_FORMATS, f"{_PLANNER}WriteItemType", _LAYOUT, "torch.Size"})
_CALLS: Calls = {
    name: ("REDUCE", 1) if name in _CALLED else ("REDUCE", ANY) if name.startswith("pathlib") else ("NEWOBJ", 0)
    for name in ALLOWED_GLOBALS
    if name in _CALLED or name.count(".") > 1 or name.startswith("pathlib")
}
"""How picklers make each of them, but for dtypes: of what is made in another way, unpickling mostly fails."""

_Dims = tuple[int, ...]
_Spans = dict[_Dims, ByteSpan]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedMetadata:
    """What `.metadata` says."""

    tensors: tuple[TensorEntry, ...]  # In the order of the file; every chunk's span is a whole item ("torch_zip")
    blobs: tuple[BlobEntry, ...]  # In the order of the file
    single_names: int = 0  # Names that stand in the file only once: nothing shows whether one has changed
    flattened: frozenset[str] = frozenset()
    """Tensors that Megatron stored as [blocks of every dim…, elements of a block], and not in the shape that they have:
    state of its distributed optimizer until 0.15."""


def parse_metadata(
    data: bytes, *, limits: PickleLimits = DEFAULT_LIMITS, is_other: Callable[[ByteSpan], bool] = lambda _: False
) -> ParsedMetadata:
    """Read the bytes of `.metadata`."""
    # Shapes and boxes come in logical elements: torch's F4 counts pairs, so its last dim doubles. Whether the boxes
    # tile their tensor is not looked at here: that is a check of its own. `is_other` knows short items of other kinds.
    with collector_paused():
        value = parse_pickle(data, allowed_globals=ALLOWED_GLOBALS, limits=limits, calls=_CALLS)
        return _describe(value, is_other)


def _describe(metadata: object, is_other: Callable[[ByteSpan], bool]) -> ParsedMetadata:
    is_mcore = type(metadata) is Record and metadata.name == _MCORE_METADATA
    fields = _fields(metadata, _MCORE_METADATA if is_mcore else f"{_DCP}Metadata", "the metadata")
    entries = fields.get("state_dict_metadata")
    if type(entries) is not dict:
        raise UnreadableError("the metadata has no state_dict_metadata")
    if "planner_data" not in fields:
        raise UnreadableError("the metadata has no planner_data, not even an empty one")
    meta = fields.get("storage_meta")
    place = meta.state.get("checkpoint_id") if type(meta) is Record and type(meta.state) is dict else None
    if type(place) is Record and not all(type(part) is str for part in place.args):
        raise UnreadableError("the saver's path in storage_meta must be text, without which torch reads nothing")
    tensor_spans, blob_spans = _parse_storage(fields.get("storage_data"))
    paths = parse_paths(fields["planner_data"], entries)
    # One object in several places is one string in the file, fetched again from the memo.
    copies: dict[object, object] = {fqn: fqn for fqn in (*tensor_spans, *blob_spans)}
    copies |= {fqn: path[0] for fqn, path in paths.items() if copies.get(fqn) is fqn}
    single_names = sum(copies.get(fqn) is fqn for fqn in entries)
    boxes: dict[str, dict[tuple[_Dims, _Dims], tuple[Box, int]]] = {name: {} for name in BY_TORCH_NAME}
    tensors: list[TensorEntry] = []
    blobs: list[BlobEntry] = []
    for fqn, entry in entries.items():
        if type(fqn) is not str:
            raise UnreadableError(f"a name in the state dict is a {type(fqn).__name__}")
        if (problem := fqn_problem(fqn)) is not None:
            raise UnreadableError(f"'{fqn}' {problem}")
        path = paths.get(fqn, ())
        kind = entry.name if type(entry) is Record else type(entry).__name__
        if kind == f"{_DCP}TensorStorageMetadata":
            reader = _EntryReader(fqn, _fields(entry, kind, f"tensor '{fqn}'"))
            tensors.append(reader.read(tensor_spans.pop(fqn, {}), path, boxes, is_other))
        elif kind == f"{_DCP}BytesStorageMetadata":
            span = blob_spans.pop(fqn, None)
            if span is None:
                raise UnreadableError(f"object '{fqn}' has no item in storage_data")
            blobs.append(BlobEntry(fqn=fqn, span=span, path=path))
        else:
            raise UnreadableError(f"'{fqn}' is neither a tensor nor an object but a {kind}")
    for fqn in (*tensor_spans, *blob_spans):
        raise UnreadableError(f"'{fqn}' has an item in storage_data that the state dict does not name")
    return ParsedMetadata(
        tensors=tuple(tensors),
        blobs=tuple(blobs),
        single_names=single_names,
        flattened=_flattened(fields.get("mcore_data")),
    )


def _flattened(mcore_data: object) -> frozenset[str]:
    """Return the FQNs of what Megatron stored in another shape than it has."""
    rows = mcore_data.items() if type(mcore_data) is dict else ()
    found = (fqn for fqn, said in rows if type(said) is dict and "nd_reformulated_orig_global_shape" in said)
    return frozenset(fqn for fqn in found if type(fqn) is str)


def _fields(value: object, name: str, what: str) -> dict[str, object]:
    """Return the state of a record of class `name`; a dataclass without fields has none."""
    if type(value) is not Record or value.name != name:
        found = value.name if isinstance(value, Record | GlobalName) else type(value).__name__
        raise UnreadableError(f"{what} is not a {name} but a {found}")
    if value.state is None:
        return {}
    if type(value.state) is not dict or not all(type(key) is str for key in value.state):
        raise UnreadableError(f"{what}: the state of {name} is not a dict of fields")
    return value.state


def _dims(value: object, what: str) -> _Dims:
    """Return the content of a `torch.Size`."""
    if type(value) is Record and value.name == "torch.Size" and value.state is None and len(value.args) == 1:
        dims = value.args[0]
        if type(dims) is tuple:
            if len(dims) > MAX_DIMS:
                raise UnreadableError(f"{what} are {len(dims)} numbers; PyTorch has at most {MAX_DIMS} dims")
            for dim in dims:
                if type(dim) is not int or not 0 <= dim <= MAX_ELEMS:
                    raise UnreadableError(f"{what} are not numbers between 0 and 2^62")
            return dims
    raise UnreadableError(f"{what} are not a torch.Size")


def _parse_storage(storage: object) -> tuple[dict[str, _Spans], dict[str, ByteSpan]]:
    """Return the spans of tensor items by FQN and offsets, and of other items by FQN."""
    if type(storage) is not dict:
        raise UnreadableError("the metadata has no storage_data", hint="only FileSystemWriter checkpoints can be read")
    tensors: dict[str, _Spans] = {}
    blobs: dict[str, ByteSpan] = {}
    files: dict[str, str] = {}
    for key, value in storage.items():
        # Inlined `_fields`: this loop runs once per chunk of the checkpoint.
        index = key.state if type(key) is Record and key.name == _INDEX else None
        info = value.state if type(value) is Record and value.name == _STORAGE_INFO else None
        if type(index) is not dict or type(info) is not dict:
            raise UnreadableError("storage_data is not a dict of MetadataIndex to _StorageInfo")
        fqn = index.get("fqn")
        if type(fqn) is not str:
            raise UnreadableError("an entry of storage_data has no FQN")
        if "index" not in index and not all(type(name) is str for name in index):
            raise UnreadableError(f"'{fqn}': a field of its key in storage_data has no name")
        span = _span(fqn, info, files)
        offset = index.get("offset")
        if offset is None:
            if fqn in blobs:
                raise UnreadableError(f"object '{fqn}' is stored twice")
            blobs[fqn] = span
            continue
        dims = _dims(offset, "chunk offsets in storage_data")
        spans = tensors.get(fqn)
        if spans is None:
            spans = tensors[fqn] = {}
        if dims in spans:
            raise UnreadableError(f"tensor '{fqn}': the chunk at {list(dims)} is stored twice")
        spans[dims] = span
    return tensors, blobs


def _span(fqn: str, info: dict[object, object], files: dict[str, str]) -> ByteSpan:
    file = info.get("relative_path")
    offset = info.get("offset")
    nbytes = info.get("length")
    if type(file) is not str or type(offset) is not int or type(nbytes) is not int:
        raise UnreadableError(f"'{fqn}': its entry in storage_data has no relative_path, offset or length")
    if not (0 <= offset <= MAX_ELEMS and 0 <= nbytes <= MAX_ELEMS):
        raise UnreadableError(f"'{fqn}': bytes {offset}+{nbytes} cannot be a part of a file")
    if file not in files:
        if not is_plain_path(file):
            what = f"'{fqn}' is recorded in '{file}', which is not a plain path inside the checkpoint"
            raise UnreadableError(what)
        files[file] = file
    if len(info) > 3:
        if not all(type(key) is str for key in info):
            raise UnreadableError(f"'{fqn}': a field of its entry in storage_data has no name")
        transforms = info.get("transform_descriptors")
        if transforms:
            names = transforms if isinstance(transforms, list | tuple) else ()
            shown = first_few([name for name in names if isinstance(name, str)], 4)
            what = f"'{fqn}' is stored through the transform {shown or '(unnamed)'}, which ckpt cannot undo"
            hint = "dcp.load it (for ZStandard, stream.zstd, install zstandard), and save it without _extensions"
            raise UnsupportedError(what, hint=hint)
    return ByteSpan(file=files[file], offset=offset, nbytes=nbytes)


def _is_memory_format(value: object) -> bool:
    """Is this one of the three codes? What it means for a tensor nobody reads, but torch loads nothing with another."""
    return type(value) is Record and value.name in _MEMORY_FORMATS and value.args in ((0,), (1,), (2,))


def _are_strides(rest: tuple[object, ...]) -> bool:
    """Is this nothing, or the strides of a tensor in memory, which torch 2.15 and newer note and do not load by?"""
    strides = rest[0] if rest else None
    return strides is None or (type(strides) is tuple and all(type(stride) is int for stride in strides))


class _EntryReader:
    """One `TensorStorageMetadata`."""

    __slots__ = ("_fields", "_fqn", "_where")

    def __init__(self, fqn: str, fields: dict[str, object]) -> None:
        self._fqn = fqn
        self._fields = fields
        self._where = f"tensor '{fqn}'"

    def read(
        self,
        spans: _Spans,
        path: KeyPath,
        boxes: dict[str, dict[tuple[_Dims, _Dims], tuple[Box, int]]],
        is_other: Callable[[ByteSpan], bool],
    ) -> TensorEntry:
        """Return the tensor; `spans` holds its items by offsets, `boxes` the boxes made so far by dtype."""
        dtype = self._dtype(self._fields.get("properties"))
        size = _dims(self._fields.get("size"), f"{self._where}: the lengths of its dims")
        shape = self._logical(size, dtype)
        if not is_possible_shape(shape) or math.prod(shape) * dtype.bits > 8 * MAX_ELEMS:
            raise UnreadableError(f"{self._where} of shape {list(shape)} is too large to exist")
        known = boxes[dtype.torch_name or ""]
        stored = self._fields.get("chunks")
        if type(stored) is not list and type(stored) is not tuple:
            raise UnreadableError(f"{self._where} has no list of chunks")
        chunks: list[Chunk] = []
        num_dims = len(size)
        for record in stored:
            fields = record.state if type(record) is Record and record.name == _CHUNK else None
            if type(fields) is not dict:
                raise UnreadableError(f"{self._where}: a chunk is not a ChunkStorageMetadata")
            offsets = _dims(fields.get("offsets"), f"{self._where}: chunk offsets")
            sizes = _dims(fields.get("sizes"), f"{self._where}: chunk sizes")
            if len(offsets) != num_dims or len(sizes) != num_dims:
                what = f"{self._where} has {num_dims} dims, a chunk of it {len(offsets)} offsets and {len(sizes)} sizes"
                raise UnreadableError(what)
            span = spans.pop(offsets, None)
            if span is None:
                raise self._no_item(offsets, stored[: len(chunks)])
            found = known.get((offsets, sizes))
            if found is None:
                box = Box(self._logical(offsets, dtype), self._logical(sizes, dtype))
                found = known[offsets, sizes] = (box, math.prod(box.sizes) * dtype.bits // 8)
            if span.nbytes <= found[1] and not is_other(span):
                raise self._short_item(span, found[1])
            chunks.append(Chunk(box=found[0], span=span, encoding="torch_zip"))
        for offsets in spans:
            raise UnreadableError(f"{self._where} has an item for a chunk at {list(offsets)}, but no such chunk")
        return TensorEntry(fqn=self._fqn, dtype=dtype, shape=shape, chunks=tuple(chunks), path=path)

    def _dtype(self, properties: object) -> DType:
        if type(properties) is not Record or properties.name not in _PROPERTIES:
            raise UnreadableError(f"{self._where} has no TensorProperties")
        state = properties.state
        if type(state) is dict:
            dtype, layout = state.get("dtype"), state.get("layout")
        elif type(state) is tuple and len(state) in (5, 6) and _is_memory_format(state[3]) and _are_strides(state[5:]):
            dtype, layout = state[:2]
        else:
            raise UnreadableError(f"{self._where}: its TensorProperties do not have the fields that torch reads")
        if type(layout) is not Record or layout.name != _LAYOUT or layout.args != ("torch.strided",):
            name = layout.args[0] if type(layout) is Record and len(layout.args) == 1 else None
            shown = name if type(name) is str else "(unnamed)"
            kind = UnsupportedError if shown.startswith("torch.sparse_") else UnreadableError
            raise kind(f"{self._where} has layout {shown}; only torch.strided can be read: save tensor.to_dense()")
        name = dtype.name.removeprefix("torch.") if type(dtype) is GlobalName else ""
        if name not in BY_TORCH_NAME:
            kind = UnsupportedError if name in _FOREIGN_DTYPES else UnreadableError
            raise kind(f"{self._where} has dtype {name or '(none)'}, which ckpt does not know; save it in another one")
        return BY_TORCH_NAME[name]

    def _logical(self, dims: _Dims, dtype: DType) -> _Dims:
        """Turn torch's dims or offsets into logical elements."""
        if dtype.pack == 1:
            return dims
        if not dims:
            raise UnreadableError(f"{self._where} is a 0-d {dtype.name}, whose elements come in pairs")
        return (*dims[:-1], dims[-1] * dtype.pack)

    def _no_item(self, offsets: _Dims, earlier: Sequence[Record]) -> UnreadableError:
        # Items are taken out as chunks name them, so a second chunk at the same place finds none either.
        twice = any(_dims(_fields(chunk, _CHUNK, "").get("offsets"), "") == offsets for chunk in earlier)
        what = "is listed twice" if twice else "has no item in storage_data"
        return UnreadableError(f"{self._where}: the chunk at {list(offsets)} {what}")

    def _short_item(self, span: ByteSpan, nbytes: int) -> UnreadableError:
        if span.nbytes == nbytes:
            return UnreadableError(
                f"{self._where}: its items are as long as the bare elements, as SerializationFormat.SAFETENSORS "
                "writes them; such a checkpoint does not say where its elements lie, and DCP cannot load it either",
                hint="save it again in the default format, or with HuggingFaceStorageWriter. If it holds tensors "
                "alone, its files are safetensors files, which --from hf-sharded reads",
            )
        what = f"{self._where}: an item of {span.nbytes} bytes cannot hold the {nbytes} bytes of its chunk"
        return UnreadableError(what, where=f"{span.file}, bytes {span.offset}..{span.offset + span.nbytes}")


_MODULE = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_VERSION = "1.0.0"  # `CURRENT_DCP_VERSION` of torch 2.13; readers do not look at it

_BYTES_PER_CHUNK = 112
_BYTES_PER_ENTRY = 200
_T = TypeVar("_T")
_NEW = b")\x81\x94"  # EMPTY_TUPLE NEWOBJ MEMOIZE
_DICT = b"}\x94("  # EMPTY_DICT MEMOIZE MARK
_FILLED = b"ub"  # SETITEMS BUILD
_FALSE = b"\x89"
_TUPLES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}


def build_metadata(tensors: Sequence[TensorEntry], blobs: Sequence[BlobEntry]) -> bytes:
    """Return the bytes of `.metadata` for tensors and blobs that lie in `.distcp` files, every span a whole item."""
    # Stock torch (2.6 and later) unpickles them to the equivalent `Metadata`. There is no `StorageMeta`: it would carry
    # the path of the checkpoint, and torch makes an empty one on reading. Shapes and boxes are in logical elements.
    names = [*(entry.fqn for entry in tensors), *(entry.fqn for entry in blobs)]
    if len(set(names)) != len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise UsageError(f"two entries are named '{twice}'")
    return _MetadataWriter().write(tensors, blobs)


def estimate_metadata_bytes(tensors: Sequence[TensorEntry], blobs: Sequence[BlobEntry]) -> int:
    """Return about how long `.metadata` will be, a few percent too long rather than too short."""
    num_chunks = sum(len(entry.chunks) for entry in tensors)
    names = sum(len(entry.fqn) for entry in tensors) + sum(len(blob.fqn) for blob in blobs)
    return _BYTES_PER_CHUNK * num_chunks + _BYTES_PER_ENTRY * (len(tensors) + len(blobs)) + 2 * names


class _MetadataWriter:
    """Collects the bytes of one pickle, and numbers the memo as its reader will."""

    __slots__ = ("_body", "_next", "_seen")

    def __init__(self) -> None:
        self._body = bytearray()
        self._seen: dict[object, bytes] = {}
        self._next = 0

    def write(self, tensors: Sequence[TensorEntry], blobs: Sequence[BlobEntry]) -> bytes:
        put = self._put
        put(self._class(_MODULE, "Metadata"), self._new(), self._open_dict())
        put(self._string("state_dict_metadata"), self._open_dict())
        self._entries(tensors, blobs)
        put(b"u", self._string("planner_data"), self._open_dict())
        self._paths((*tensors, *blobs))
        put(b"u", self._string("storage_data"), self._open_dict())
        self._items(tensors, blobs)
        put(b"u", self._string("storage_meta"), b"N", self._string("version"), self._string(_VERSION))
        put(_FILLED, b".")
        return b"\x80\x04\x95" + len(self._body).to_bytes(8, "little") + self._body

    def _put(self, *opcodes: bytes) -> None:
        self._body += b"".join(opcodes)

    def _once(self, what: object, opcodes: bytes) -> bytes:
        """Return `opcodes` the first time and a BINGET of their value from then on."""
        index = self._next
        self._seen[what] = b"h%c" % index if index < 256 else b"j" + index.to_bytes(4, "little")
        self._next += 1
        return opcodes + b"\x94"

    def _string(self, text: str) -> bytes:
        known = self._seen.get(text)
        return known or self._once(text, _text(text))

    def _class(self, module: str, name: str) -> bytes:
        key = (module, name)
        known = self._seen.get(key)
        return known or self._once(key, self._string(module) + self._string(name) + b"\x93")

    def _new(self) -> bytes:
        self._next += 1
        return _NEW

    def _size(self, dims: tuple[int, ...]) -> bytes:
        known = self._seen.get(dims)
        if known is not None:
            return known
        opcodes = self._class("torch", "Size")
        if dims:
            numbers = b"".join(map(push_int, dims))
            opcodes += numbers + _TUPLES[len(dims)] if len(dims) <= 3 else b"(" + numbers + b"t"
            opcodes += b"\x94"
            self._next += 1
        else:
            opcodes += b")"
        self._next += 1
        return self._once(dims, opcodes + b"\x85\x94R")

    def _begin(self, module: str, name: str, field: str) -> bytes:
        """Return the opcodes of a new instance up to the name of its first field."""
        key = (module, name, field)
        known = self._seen.get(key)
        if known is not None:
            self._next += 2
            return known
        opcodes = self._class(module, name) + self._new() + self._open_dict() + self._string(field)
        # From now on class and name are fetched from the memo.
        self._seen[key] = self._class(module, name) + _NEW + _DICT + self._string(field)
        return opcodes

    def _open_dict(self) -> bytes:
        self._next += 1
        return _DICT

    def _entries(self, tensors: Sequence[TensorEntry], blobs: Sequence[BlobEntry]) -> None:
        """Write `state_dict_metadata`."""
        put = self._put
        for entry in tensors:
            put(self._string(entry.fqn), self._class(_MODULE, "TensorStorageMetadata"), self._new())
            put(self._open_dict(), self._string("properties"), self._properties(entry))
            put(self._string("size"), self._size(_torch_dims(entry, entry.shape)))
            put(self._string("chunks"), b"]\x94(")
            self._next += 1
            for chunk in entry.chunks:
                begin = self._begin(_MODULE, "ChunkStorageMetadata", "offsets")
                offsets = self._size(_torch_dims(entry, chunk.box.offsets))
                put(begin, offsets, self._string("sizes"), self._size(_torch_dims(entry, chunk.box.sizes)), _FILLED)
            put(b"e", _FILLED)
        for blob in blobs:
            put(self._string(blob.fqn), self._class(_MODULE, "BytesStorageMetadata"), self._new())

    def _properties(self, entry: TensorEntry) -> bytes:
        """Return a `TensorProperties` of `entry`'s dtype; the other fields are deprecated and have their defaults."""
        name = entry.dtype.torch_name
        if name is None:
            raise UsageError(f"tensor '{entry.fqn}': {entry.dtype.name} cannot be stored in DCP")
        opcodes = self._class(_MODULE, "TensorProperties") + self._new() + b"(" + self._class("torch", name)
        opcodes += self._call("torch.serialization", "_get_layout", self._string, "torch.strided") + _FALSE
        opcodes += self._call(_MODULE, "_MEM_FORMAT_ENCODING", push_int, 0) + _FALSE
        return opcodes + b"tb"

    def _call(self, module: str, name: str, arg: Callable[[_T], bytes], value: _T) -> bytes:
        key = (module, name, "call")
        known = self._seen.get(key)
        return known or self._once(key, self._class(module, name) + arg(value) + b"\x85R")

    def _paths(self, entries: Iterable[TensorEntry | BlobEntry]) -> None:
        """Write `planner_data`; where the only key is the name, as a second copy of it that damage would contradict."""
        for entry in entries:
            name, keys = self._string(entry.fqn), [_text(entry.fqn)]
            if len(entry.path) > 1:
                keys = [push_int(key) if isinstance(key, int) else self._string(key) for key in entry.path]
            self._put(name, b"(", *keys, b"t")

    def _items(self, tensors: Sequence[TensorEntry], blobs: Sequence[BlobEntry]) -> None:
        """Write `storage_data`, blobs first as in the files."""
        put = self._put
        for blob in blobs:
            name = self._begin(_MODULE, "MetadataIndex", "fqn") + self._string(blob.fqn)
            put(name, self._string("index"), b"N", _FILLED)
            self._info(blob.span)
        for entry in tensors:
            for index, chunk in enumerate(entry.chunks):
                name = self._begin(_MODULE, "MetadataIndex", "fqn") + self._string(entry.fqn)
                number = self._string("index") + push_int(index)
                offset = self._string("offset") + self._size(_torch_dims(entry, chunk.box.offsets))
                put(name, number, offset, _FILLED)
                self._info(chunk.span)

    def _info(self, span: ByteSpan) -> None:
        file = self._begin(_FILESYSTEM, "_StorageInfo", "relative_path") + self._string(span.file)
        offset = self._string("offset") + push_int(span.offset)
        self._put(file, offset, self._string("length") + push_int(span.nbytes), _FILLED)


def _torch_dims(entry: TensorEntry, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Turn logical elements into torch's, which hold `dtype.pack` of them along the last dim."""
    pack = entry.dtype.pack
    if pack == 1:
        return dims
    if not dims or dims[-1] % pack:
        raise UsageError(f"tensor '{entry.fqn}': {list(dims)} elements of {entry.dtype.name} end inside a byte")
    return (*dims[:-1], dims[-1] // pack)


def _text(text: str) -> bytes:
    """Return the opcode that pushes `text`."""
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"the name '{text}' is not valid Unicode") from None
    return (b"\x8c%c" % len(raw) if len(raw) < 256 else b"X" + len(raw).to_bytes(4, "little")) + raw
