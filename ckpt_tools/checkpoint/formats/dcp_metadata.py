"""Read and write `.metadata` of a DCP checkpoint, without torch and without running anything in it.

The pickle becomes inert records first (`inert_pickle`), then descriptions; every field is checked on the way. What
torch 2.0 to 2.14 and megatron-core 0.4 to 0.16 wrote is understood; anything else is refused by name.

Source: torch `distributed/checkpoint/{metadata,filesystem,planner}.py` (2.13),
`distributed/_shard/sharded_tensor/metadata.py` (2.0 to 2.2); megatron-core
`dist_checkpointing/strategies/{torch,state_dict_saver}.py` (0.15.3, 0.16.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

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
from ckpt_tools.checkpoint.formats._dcp_metadata_writer import build_metadata, estimate_metadata_bytes
from ckpt_tools.checkpoint.formats._pickle_values import ANY
from ckpt_tools.checkpoint.formats.inert_pickle import (
    DEFAULT_LIMITS,
    Calls,
    GlobalName,
    PickleLimits,
    Record,
    collector_paused,
    parse_pickle,
)
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.errors import UnreadableError, UnsupportedError
from ckpt_tools.text import first_few, is_plain_path

# `planner_data` of a DCP `.metadata`: the keys that lead to every entry, and with them a second record of its name
# torch flattens nested dicts and lists, and names an entry by its keys, joined by dots. So each name must be what its
# keys say: one that is not was changed after it was saved, and nothing tells which of the two is right.
# Source: torch `distributed/checkpoint/{_nested_dict,_traverse,default_planner}.py` (2.0 to 2.13).

MAX_KEYS = DEFAULT_LIMITS.max_depth
"""Keys of a path: a state dict cannot nest deeper than the pickle that would hold it."""
_HASHABLE = frozenset({"torch.distributed.checkpoint.metadata.MetadataIndex", "torch.Size"})
"""Classes that a `.metadata` may name and whose objects can be keys of a dict."""


def parse_paths(planner_data: object, names: Collection[object]) -> Mapping[str, KeyPath]:
    """Return FQN → keys for all `names`, or nothing when this is not what torch's planner keeps.

    A planner of somebody else may keep anything here. It is torch's when it has the keys of any of these names.
    torch before 2.6 also kept the keys of objects that it did not save, so there may be more of them than names.
    """
    if type(planner_data) is not dict:
        return {}
    if any(type(key) is Record and key.name not in _HASHABLE for key in planner_data):
        raise UnreadableError("planner_data has a key that torch cannot make one of")
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
    return UnreadableError(
        f"'{name}' has {found} in planner_data: a name has changed since it was saved",
        hint="the file is damaged: restore it, or save the checkpoint again",
    )


__all__ = ["ALLOWED_GLOBALS", "ParsedMetadata", "build_metadata", "estimate_metadata_bytes", "parse_metadata"]

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

    tensors: tuple[TensorEntry, ...]
    """In the order of the file; every chunk's span is a whole item, its encoding "torch_zip"."""
    blobs: tuple[BlobEntry, ...]
    """In the order of the file."""
    single_names: int = 0
    """Names that stand in the file only once, so that nothing shows whether a damage has changed them."""
    flattened: frozenset[str] = frozenset()
    """Tensors that Megatron stored as [blocks of every dim…, elements of a block], and not in the shape that they have:
    state of its distributed optimizer until 0.15."""


def parse_metadata(
    data: bytes, *, limits: PickleLimits = DEFAULT_LIMITS, is_other: Callable[[ByteSpan], bool] = lambda _: False
) -> ParsedMetadata:
    """Read the bytes of `.metadata`.

    Shapes and boxes come in logical elements: torch's F4 counts pairs, so its last dim doubles. Whether the boxes
    tile their tensor is not looked at here: that is a check of its own. `is_other` knows short items of other kinds.
    """
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
            raise UnreadableError(f"{_shown(fqn)} {problem}")
        path = paths.get(fqn, ())
        kind = entry.name if type(entry) is Record else type(entry).__name__
        if kind == f"{_DCP}TensorStorageMetadata":
            reader = _TensorReader(fqn, _fields(entry, kind, f"tensor {_shown(fqn)}"))
            tensors.append(reader.read(tensor_spans.pop(fqn, {}), path, boxes, is_other))
        elif kind == f"{_DCP}BytesStorageMetadata":
            span = blob_spans.pop(fqn, None)
            if span is None:
                raise UnreadableError(f"object {_shown(fqn)} has no item in storage_data")
            blobs.append(BlobEntry(fqn=fqn, span=span, path=path))
        else:
            raise UnreadableError(f"{_shown(fqn)} is neither a tensor nor an object but a {kind}")
    for fqn in (*tensor_spans, *blob_spans):
        raise UnreadableError(f"{_shown(fqn)} has an item in storage_data that the state dict does not name")
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


def _shown(fqn: str) -> str:
    return f"'{fqn}'"


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
            raise UnreadableError(f"{_shown(fqn)}: a field of its key in storage_data has no name")
        span = _span(fqn, info, files)
        offset = index.get("offset")
        if offset is None:
            if fqn in blobs:
                raise UnreadableError(f"object {_shown(fqn)} is stored twice")
            blobs[fqn] = span
            continue
        dims = _dims(offset, "chunk offsets in storage_data")
        spans = tensors.get(fqn)
        if spans is None:
            spans = tensors[fqn] = {}
        if dims in spans:
            raise UnreadableError(f"tensor {_shown(fqn)}: the chunk at {list(dims)} is stored twice")
        spans[dims] = span
    return tensors, blobs


def _span(fqn: str, info: dict[object, object], files: dict[str, str]) -> ByteSpan:
    file = info.get("relative_path")
    offset = info.get("offset")
    nbytes = info.get("length")
    if type(file) is not str or type(offset) is not int or type(nbytes) is not int:
        raise UnreadableError(f"{_shown(fqn)}: its entry in storage_data lacks relative_path, offset or length")
    if not (0 <= offset <= MAX_ELEMS and 0 <= nbytes <= MAX_ELEMS):
        raise UnreadableError(f"{_shown(fqn)}: bytes {offset}+{nbytes} cannot be a part of a file")
    if file not in files:
        files[file] = _check_path(fqn, file)
    if len(info) > 3:
        if not all(type(key) is str for key in info):
            raise UnreadableError(f"{_shown(fqn)}: a field of its entry in storage_data has no name")
        transforms = info.get("transform_descriptors")
        if transforms:
            names = transforms if isinstance(transforms, list | tuple) else ()
            shown = first_few([name for name in names if isinstance(name, str)], 4)
            raise UnsupportedError(
                f"{_shown(fqn)} is stored through the transform {shown or '(unnamed)'}, which ckpt cannot undo",
                hint="dcp.load it (for ZStandard, stream.zstd, install zstandard), and save it without _extensions",
            )
    return ByteSpan(file=files[file], offset=offset, nbytes=nbytes)


def _check_path(fqn: str, file: str) -> str:
    """Return `file` when it stays inside the checkpoint's directory."""
    if not is_plain_path(file):
        raise UnreadableError(
            f"{_shown(fqn)} is said to lie in '{file}', which is not a plain path inside the checkpoint"
        )
    return file


def _is_memory_format(value: object) -> bool:
    """Is this one of the three codes? What it means for a tensor nobody reads, but torch loads nothing with another."""
    return type(value) is Record and value.name in _MEMORY_FORMATS and value.args in ((0,), (1,), (2,))


def _are_strides(rest: tuple[object, ...]) -> bool:
    """Is this nothing, or the strides of a tensor in memory, which torch 2.15 and newer note and do not load by?"""
    strides = rest[0] if rest else None
    return strides is None or (type(strides) is tuple and all(type(stride) is int for stride in strides))


class _TensorReader:
    """One `TensorStorageMetadata`."""

    __slots__ = ("_fields", "_fqn", "_where")

    def __init__(self, fqn: str, fields: dict[str, object]) -> None:
        self._fqn = fqn
        self._fields = fields
        self._where = f"tensor {_shown(fqn)}"

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
                raise UnreadableError(
                    f"{self._where} has {num_dims} dims, a chunk of it {len(offsets)} offsets and {len(sizes)} sizes"
                )
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
        return UnreadableError(
            f"{self._where}: an item of {span.nbytes} bytes cannot hold the {nbytes} bytes of its chunk",
            where=f"{span.file}, bytes {span.offset}..{span.offset + span.nbytes}",
        )
