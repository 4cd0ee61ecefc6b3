"""Write `.metadata` of a DCP checkpoint: a protocol-4 pickle, put together from bytes.

The opcodes are those of CPython's pickler, instance for instance, so that stock torch loads it and `_pickle_runs`
reads it fast. Sizes that come again are fetched from the memo.

Source: `dcp_metadata`; CPython `Lib/pickle.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from ckpt_tools.checkpoint.entries import BlobEntry, ByteSpan, TensorEntry
from ckpt_tools.checkpoint.formats._pickle_writer import push_int
from ckpt_tools.errors import UsageError

_DCP = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_VERSION = "1.0.0"
"""`CURRENT_DCP_VERSION` of torch 2.13; readers do not look at it."""

_BYTES_PER_CHUNK = 112
_BYTES_PER_ENTRY = 200
_T = TypeVar("_T")
_NEW = b")\x81\x94"  # EMPTY_TUPLE NEWOBJ MEMOIZE
_DICT = b"}\x94("  # EMPTY_DICT MEMOIZE MARK
_FILLED = b"ub"  # SETITEMS BUILD
_FALSE = b"\x89"
_TUPLES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}


def build_metadata(tensors: Sequence[TensorEntry], blobs: Sequence[BlobEntry]) -> bytes:
    """Return the bytes of `.metadata` for tensors and blobs that lie in `.distcp` files, every span a whole item.

    Stock torch (2.6 and later) unpickles them to the equivalent `Metadata`. There is no `StorageMeta`: it would carry
    the path of the checkpoint, and torch makes an empty one on reading. Shapes and boxes are in logical elements.
    """
    names = [*(entry.fqn for entry in tensors), *(entry.fqn for entry in blobs)]
    if len(set(names)) != len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise UsageError(f"two entries are named '{twice}'")
    return _Writer().write(tensors, blobs)


def estimate_metadata_bytes(tensors: Sequence[TensorEntry], blobs: Sequence[BlobEntry]) -> int:
    """Return about how long `.metadata` will be, a few percent too long rather than too short."""
    num_chunks = sum(len(entry.chunks) for entry in tensors)
    names = sum(len(entry.fqn) for entry in tensors) + sum(len(blob.fqn) for blob in blobs)
    return _BYTES_PER_CHUNK * num_chunks + _BYTES_PER_ENTRY * (len(tensors) + len(blobs)) + 2 * names


class _Writer:
    """Collects the bytes of one pickle, and numbers the memo as its reader will."""

    __slots__ = ("_body", "_next", "_seen")

    def __init__(self) -> None:
        self._body = bytearray()
        self._seen: dict[object, bytes] = {}
        self._next = 0

    def write(self, tensors: Sequence[TensorEntry], blobs: Sequence[BlobEntry]) -> bytes:
        put = self._put
        put(self._class(_DCP, "Metadata"), self._new(), self._open_dict())
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
        self._seen[what] = self._get(self._next)
        self._next += 1
        return opcodes + b"\x94"

    @staticmethod
    def _get(index: int) -> bytes:
        return b"h%c" % index if index < 256 else b"j" + index.to_bytes(4, "little")

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
            put(self._string(entry.fqn), self._class(_DCP, "TensorStorageMetadata"), self._new())
            put(self._open_dict(), self._string("properties"), self._properties(entry))
            put(self._string("size"), self._size(_torch_dims(entry, entry.shape)))
            put(self._string("chunks"), b"]\x94(")
            self._next += 1
            for chunk in entry.chunks:
                put(
                    self._begin(_DCP, "ChunkStorageMetadata", "offsets"),
                    self._size(_torch_dims(entry, chunk.box.offsets)),
                    self._string("sizes"),
                    self._size(_torch_dims(entry, chunk.box.sizes)),
                    _FILLED,
                )
            put(b"e", _FILLED)
        for blob in blobs:
            put(self._string(blob.fqn), self._class(_DCP, "BytesStorageMetadata"), self._new())

    def _properties(self, entry: TensorEntry) -> bytes:
        """Return a `TensorProperties` of `entry`'s dtype; the other fields are deprecated and have their defaults."""
        name = entry.dtype.torch_name
        if name is None:
            raise UsageError(f"tensor '{entry.fqn}': {entry.dtype.name} cannot be stored in DCP")
        opcodes = self._class(_DCP, "TensorProperties") + self._new() + b"(" + self._class("torch", name)
        opcodes += self._call("torch.serialization", "_get_layout", self._string, "torch.strided") + _FALSE
        opcodes += self._call(_DCP, "_MEM_FORMAT_ENCODING", push_int, 0) + _FALSE
        return opcodes + b"tb"

    def _call(self, module: str, name: str, arg: Callable[[_T], bytes], value: _T) -> bytes:
        key = (module, name, "call")
        known = self._seen.get(key)
        return known or self._once(key, self._class(module, name) + arg(value) + b"\x85R")

    def _key(self, key: str | int) -> bytes:
        return push_int(key) if isinstance(key, int) else self._string(key)

    def _paths(self, entries: Iterable[TensorEntry | BlobEntry]) -> None:
        """Write `planner_data`; where the only key is the name, as a second copy of it that damage would contradict."""
        for entry in entries:
            keys = map(self._key, entry.path) if len(entry.path) > 1 else (_text(entry.fqn),)
            self._put(self._string(entry.fqn), b"(", *keys, b"t")

    def _items(self, tensors: Sequence[TensorEntry], blobs: Sequence[BlobEntry]) -> None:
        """Write `storage_data`, blobs first as in the files."""
        put = self._put
        for blob in blobs:
            put(self._begin(_DCP, "MetadataIndex", "fqn"), self._string(blob.fqn), self._string("index"), b"N", _FILLED)
            self._info(blob.span)
        for entry in tensors:
            for index, chunk in enumerate(entry.chunks):
                put(
                    self._begin(_DCP, "MetadataIndex", "fqn"),
                    self._string(entry.fqn),
                    self._string("index"),
                    push_int(index),
                    self._string("offset"),
                    self._size(_torch_dims(entry, chunk.box.offsets)),
                    _FILLED,
                )
                self._info(chunk.span)

    def _info(self, span: ByteSpan) -> None:
        self._put(
            self._begin(_FILESYSTEM, "_StorageInfo", "relative_path"),
            self._string(span.file),
            self._string("offset"),
            push_int(span.offset),
            self._string("length"),
            push_int(span.nbytes),
            _FILLED,
        )


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
