"""Pickles put together by hand: `.metadata` and items with anything anywhere."""

from __future__ import annotations

import json
import pickle
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.formats.torch_zip import item_frame

DCP = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
PROTO = b"\x80\x04"
NONE = b"N"


def text(value: str | bytes) -> bytes:
    """BINUNICODE."""
    raw = value.encode() if isinstance(value, str) else value
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value: int) -> bytes:
    """The shortest opcode of an integer."""
    if 0 <= value < 256:
        return b"K" + bytes([value])
    raw = pickle.encode_long(value)
    return b"\x8a" + bytes([len(raw)]) + raw if len(raw) < 256 else b"\x8b" + struct.pack("<i", len(raw)) + raw


def name(module: str, attribute: str) -> bytes:
    """STACK_GLOBAL."""
    return text(module) + text(attribute) + b"\x93"


def tuple_of(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t" if items else b")"


def list_of(*items: bytes) -> bytes:
    return b"](" + b"".join(items) + b"e" if items else b"]"


def dict_of(*pairs: tuple[bytes, bytes]) -> bytes:
    return b"}(" + b"".join(key + value for key, value in pairs) + b"u" if pairs else b"}"


def call(function: bytes, *args: bytes) -> bytes:
    """REDUCE."""
    return function + tuple_of(*args) + b"R"


def instance(module: str, attribute: str, **fields: bytes) -> bytes:
    """NEWOBJ and BUILD."""
    return name(module, attribute) + b")\x81" + dict_of(*((text(k), v) for k, v in fields.items())) + b"b"


def size(*dims: int) -> bytes:
    return call(name("torch", "Size"), tuple_of(*map(number, dims)))


def properties(dtype: bytes | None = None, layout: str = "torch.strided") -> bytes:
    kind = call(name("torch.serialization", "_get_layout"), text(layout))
    return instance(DCP, "TensorProperties", dtype=dtype or name("torch", "float32"), layout=kind)


def chunk(offsets: Sequence[int], sizes: Sequence[int]) -> bytes:
    return instance(DCP, "ChunkStorageMetadata", offsets=size(*offsets), sizes=size(*sizes))


def tensor(shape: Sequence[int], chunks: Sequence[bytes] | None = None, **fields: bytes) -> bytes:
    whole = [chunk([0] * len(shape), shape)] if chunks is None else chunks
    defaults = {"properties": properties(), "size": size(*shape), "chunks": list_of(*whole)}
    return instance(DCP, "TensorStorageMetadata", **(defaults | fields))


def index(fqn: bytes, offsets: bytes = NONE) -> bytes:
    return instance(DCP, "MetadataIndex", fqn=fqn, offset=offsets, index=NONE)


def info(path: bytes, offset: int = 0, length: int = 0, **fields: bytes) -> bytes:
    return instance(
        FILESYSTEM, "_StorageInfo", relative_path=path, offset=number(offset), length=number(length), **fields
    )


def metadata(
    entries: Sequence[tuple[bytes, bytes]],
    storage: Sequence[tuple[bytes, bytes]],
    planner: bytes = b"}",
    **fields: bytes,
) -> bytes:
    """A whole `.metadata`."""
    body = instance(
        DCP,
        "Metadata",
        state_dict_metadata=dict_of(*entries),
        planner_data=planner,
        storage_data=dict_of(*storage),
        **fields,
    )
    return PROTO + body + b"."


def item(shape: Sequence[int] = (2, 3), payload: bytes | None = None, dtype: str = "F32") -> bytes:
    """A sound item."""
    kind = BY_NAME[dtype]
    num_elems = 1
    for length in shape:
        num_elems *= length
    raw = bytes(range(24)) * 100 if payload is None else payload
    raw = raw[: kind.num_bytes(num_elems)]
    frame = item_frame(kind, tuple(shape))
    before, after = frame.before, frame.after(zlib.crc32(raw))
    return before + raw + after


W = text("w")


def write_run(
    source: Path,
    *,
    entries: Sequence[tuple[bytes, bytes]] = (),
    storage: Sequence[tuple[bytes, bytes]] = (),
    planner: bytes = b"}",
    shape: Sequence[int] = (2, 3),
    content: bytes | None = None,
    path: bytes = text("__0_0.distcp"),
    offset: int = 0,
    length: int | None = None,
    fqn: bytes = W,
    described: bytes | None = None,
    info_fields: dict[str, bytes] | None = None,
    edit: Callable[[bytes], bytes] = bytes,
    **fields: bytes,
) -> None:
    """A DCP directory with one tensor, sound unless told otherwise."""
    source.mkdir(parents=True, exist_ok=True)
    raw = item(shape) if content is None else content
    (source / "__0_0.distcp").write_bytes(raw)
    own = info(path, offset, len(raw) if length is None else length, **(info_fields or {}))
    document = metadata(
        [(fqn, tensor(shape) if described is None else described), *entries],
        [(index(fqn, size(*[0] * len(shape))), own), *storage],
        planner,
        **fields,
    )
    (source / ".metadata").write_bytes(edit(document))


def hf_shard(rank: int, info_text: str | None = None) -> bytes:
    """One file of DCP's HF writer: half of a tensor."""
    table = {"w": {"saved_offsets": [2 * rank, 0]}}
    document = {
        "__metadata__": {"format": "pt", "DCP_SHARDING_INFO": json.dumps(table) if info_text is None else info_text},
        "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    }
    head = json.dumps(document).encode()
    return len(head).to_bytes(8, "little") + head + bytes(24)
