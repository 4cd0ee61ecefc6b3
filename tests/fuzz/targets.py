"""Every parser of files that nobody vouches for: valid seeds, words of its format, and what must hold of any input.

A `check` takes any bytes. It returns whether they were accepted; refusing means a `CkptError`. It fails (with
AssertionError, or whatever else escapes) when what was accepted is not sound in itself, or is not what another reader
(the safetensors library, torch, `json`) makes of the same bytes.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pickle
import pickletools
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import safetensors
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from fuzz import saved
from samples import memory_directory, safetensors_bytes, tensor, without_ranks

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import BlobEntry, ByteSpan, Chunk, TensorEntry
from ckpt_tools.checkpoint.formats import dcp_safetensors as hf_sharded, hf
from ckpt_tools.checkpoint.formats._torch_tensor import ItemHead
from ckpt_tools.checkpoint.formats.dcp_metadata import ALLOWED_GLOBALS, build_metadata, parse_metadata
from ckpt_tools.checkpoint.formats.manifest import (
    FileRecord,
    Manifest,
    Origin,
    TensorRecord,
    build_manifest,
    parse_manifest,
)
from ckpt_tools.checkpoint.formats.safetensors import LENGTH_BYTES, HeaderFile, parse_header, parse_length
from ckpt_tools.checkpoint.formats.torch_zip import check_archive, item_frame, parse_item
from ckpt_tools.checkpoint.globs import NameIndex
from ckpt_tools.checkpoint.layout import Box, Mesh, Shard
from ckpt_tools.checkpoint.tiling import check_tiling
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.storage.journal import JOURNAL_NAME, BlockRecord, JournalWriter, read_journal
from ckpt_tools.transfer.placement.place import parse_rules


@dataclass(frozen=True, slots=True)
class Target:
    """One parser."""

    name: str
    make_seeds: Callable[[], tuple[bytes, ...]]
    """Valid files, by recipe."""
    tokens: tuple[bytes, ...]
    """Words of the format."""
    check: Callable[[bytes], bool]
    """See above."""

    @property
    def seeds(self) -> tuple[bytes, ...]:
        """The valid files, made once."""
        return _made(self.make_seeds)


@cache
def _made(make: Callable[[], tuple[bytes, ...]]) -> tuple[bytes, ...]:
    return make()


_JSON_TOKENS = (
    *(b"{", b"}", b"[", b"]", b'"', b":", b",", b"null", b"true", b"false", b"0", b"-1", b"-0", b"1e3", b"1.0", b"NaN"),
    *(b"\\u0000", b"\\ud800", b"\\", b"\xff", b"\xef\xbb\xbf", b"\x00", b"[]", b"{}", b'""', b"9" * 400, b"[" * 400),
)


# safetensors


def _safetensors_seeds() -> tuple[bytes, ...]:
    plain = {"a.w": tensor("F32", 4, 2, seed=1), "b": tensor("BF16", 3, seed=2)}
    plain |= {"c": tensor("F8_E4M3"), "e": tensor("I8", 0, 4)}
    half = {"w": tensor("F32", 2, 3, seed=3), "s": tensor("F4", 4, seed=4)}
    info = {"w": {"saved_offsets": [2, 0]}, "s": {"saved_offsets": [0]}}
    return (
        safetensors_bytes(plain, metadata={"format": "pt"}),
        safetensors_bytes(half, metadata={hf_sharded.SHARDING_KEY: json.dumps(info), "DCP_VERSION": "1.0"}),
        safetensors_bytes({}),
    )


def _check_safetensors(data: bytes) -> bool:
    try:
        length = parse_length(data[:LENGTH_BYTES], where="f")
        if LENGTH_BYTES + length > len(data):
            return False  # `opening.read_file` says so
        text = data[LENGTH_BYTES : LENGTH_BYTES + length]
        header = parse_header(text, file="f", file_nbytes=len(data))
    except CkptError:
        return False
    theirs = dict(safetensors.deserialize(data))
    ours = {entry.fqn: entry for entry in header.tensors}
    assert ours.keys() == theirs.keys()
    for fqn, entry in ours.items():
        span = entry.chunks[0].span
        assert LENGTH_BYTES + length <= span.offset <= span.offset + span.nbytes <= len(data)
        assert entry.shape == tuple(theirs[fqn]["shape"])
        assert entry.nbytes == span.nbytes
        assert data[span.offset : span.offset + span.nbytes] == bytes(theirs[fqn]["data"])
    if hf_sharded.SHARDING_KEY in header.metadata:
        with contextlib.suppress(CkptError):
            described = hf_sharded.describe_sharded("r", [HeaderFile(name="f", header_text=text, header=header)])
            for entry in described.tensors:
                check_tiling(entry.shape, (chunk.box for chunk in entry.chunks))
    return True


# index.json


def _index_seeds() -> tuple[bytes, ...]:
    names = {f"layers.{i}.w": f"model-{i % 2 + 1:05d}-of-00002.safetensors" for i in range(5)}
    entries = {name: [] for name in sorted(set(names.values()))}
    one = json.dumps({"metadata": {"total_size": 10}, "weight_map": names}, indent=2).encode()
    return one, hf.build_index(entries), b'{"weight_map": {"a": "sub/dir/x.safetensors"}}'


def _check_index(data: bytes) -> bool:
    try:
        weight_map = hf.parse_index(data, where="i")
    except CkptError:
        return False
    assert weight_map == json.loads(data)["weight_map"]
    for fqn, name in weight_map.items():
        assert isinstance(fqn, str)
        assert not os.path.isabs(name)
        assert not os.path.normpath(os.path.join("root", name)).startswith("..")
        assert ".." not in name.split("/")
        assert "\0" not in name
    return True


# .metadata


def _metadata_seeds() -> tuple[bytes, ...]:
    def span(rank: int, offset: int) -> ByteSpan:
        return ByteSpan(file=f"__{rank}_0.distcp", offset=offset, nbytes=1 << 12)

    def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...], rank: int, at: int) -> Chunk:
        return Chunk(box=Box(offsets, sizes), span=span(rank, at), encoding="torch_zip")

    rows = tuple(chunk((3 * rank, 0), (3, 4), rank, 0) for rank in range(2))
    tensors = [
        TensorEntry(fqn="model.w", dtype=BY_NAME["F32"], shape=(6, 4), chunks=rows, path=("model", "w")),
        TensorEntry(fqn="s", dtype=BY_NAME["F4"], shape=(4,), chunks=(chunk((0,), (4,), 0, 1 << 33),)),
    ]
    ours = build_metadata(tensors, [BlobEntry(fqn="step", span=span(1, 1 << 13), path=("step",))])
    with memory_directory() as root:
        with without_ranks():
            dcp.save(
                {"m": {"w": torch.ones(3, 2)}, "step": 5, "l": [torch.tensor(1.0)]}, checkpoint_id=root, no_dist=True
            )
        with open(os.path.join(root, ".metadata"), "rb") as file:
            theirs = file.read()
    return ours, theirs


_METADATA_TOKENS = (
    *(op.code.encode("latin-1") for op in pickletools.opcodes),
    *(name.rpartition(".")[2].encode() for name in sorted(ALLOWED_GLOBALS)),
    *(b"builtins", b"os", b"system", b"K\x00", b"\x8a\x08" + b"\xff" * 8, b"h\x00", b"j\x00\x00\x00\x00", b"q\x00"),
    *b"../x /etc/passwd".split(),
    *b"\x8c\x02.. \x00 \x80\x04 \x80\x05 )\x81} \x85\x86\x87 (K\x01t".split(),
)


def _check_metadata(data: bytes) -> bool:
    try:
        parsed = parse_metadata(data)
    except CkptError:
        return False
    for entry in parsed.tensors:
        check_tiling(entry.shape, (chunk.box for chunk in entry.chunks))
        for chunk in entry.chunks:
            assert len(chunk.box.offsets) == len(chunk.box.sizes) == len(entry.shape)
            _check_span(chunk.span)
    for blob in parsed.blobs:
        _check_span(blob.span)
    again = parse_metadata(build_metadata(parsed.tensors, parsed.blobs))
    assert replace(again, single_names=0) == replace(
        parsed,
        tensors=tuple(replace(e, path=e.path or (e.fqn,)) for e in parsed.tensors),
        blobs=tuple(replace(b, path=b.path or (b.fqn,)) for b in parsed.blobs),
        single_names=0,  # how often a name stands in the file is not what the file says
    )
    _compare_with_torch(data, {e.fqn: e for e in parsed.tensors}, {b.fqn: b for b in parsed.blobs})
    return True


def _check_span(span: ByteSpan) -> None:
    assert span.offset >= 0
    assert span.nbytes >= 0
    assert not os.path.isabs(span.file)
    assert not {"", ".", ".."} & set(span.file.split("/"))
    assert "\0" not in span.file


def _compare_with_torch(data: bytes, tensors: dict[str, TensorEntry], blobs: dict[str, BlobEntry]) -> None:
    """Hold what the inert reader understood against what torch's classes become. It has accepted every name in it."""
    try:
        theirs = pickle.loads(data)
        sizes = {
            fqn: tuple(entry.size) for fqn, entry in theirs.state_dict_metadata.items() if hasattr(entry, "chunks")
        }
        files = {(index.fqn, index.offset): info for index, info in theirs.storage_data.items()}
        boxes = {fqn: [tuple(c.offsets) for c in theirs.state_dict_metadata[fqn].chunks] for fqn in sizes}
    except Exception:
        return  # it names the right classes, and they do not want it: nothing is loaded of it anywhere
    assert sizes.keys() == tensors.keys()
    for fqn, entry in tensors.items():
        pack = entry.dtype.pack
        assert (*sizes[fqn][:-1], *(n * pack for n in sizes[fqn][-1:])) == entry.shape
        assert len(boxes[fqn]) == len(entry.chunks)
        for offsets, chunk in zip(boxes[fqn], entry.chunks, strict=True):
            info = files[fqn, torch.Size(offsets)]
            assert (info.relative_path, info.offset, info.length) == (
                *(chunk.span.file, chunk.span.offset, chunk.span.nbytes),
            )
    for fqn, blob in blobs.items():
        info = files[fqn, None]
        assert (info.relative_path, info.offset, info.length) == (blob.span.file, blob.span.offset, blob.span.nbytes)


# One item


def _item_seeds() -> tuple[bytes, ...]:
    def saved(value: object) -> bytes:
        stream = io.BytesIO()
        torch.save(value, stream)
        return stream.getvalue()

    payload = bytes(range(24))
    frame = item_frame(BY_NAME["F32"], (2, 3))
    before, after = frame.before, frame.after(zlib.crc32(payload))
    return (
        before + payload + after,
        saved(torch.arange(6.0).reshape(2, 3)),
        saved(torch.arange(6.0).reshape(2, 3).t()),
        saved(torch.arange(6, dtype=torch.uint8).view(torch.float8_e4m3fn)),
        saved(torch.nn.Parameter(torch.ones(2))),
        saved({"step": 3}),
    )


_ITEM_TOKENS = (
    *(b"PK\3\4", b"PK\1\2", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\7\x08", b"\xff\xff\xff\xff", b"\x00\x00\x00\x00"),
    *(b"archive/data/0", b"archive/data/1", b"archive/data.pkl", b"archive/version", b"archive/byteorder", b"big"),
    *b"_rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter FloatStorage UntypedStorage torch".split(),
    *(b"storage", b"cpu", b"cuda:0", b"OrderedDict", b"\x88", b"\x89", b"K\x00", b"K\xff", b"J\xff\xff\xff\x7f", b"Q"),
    *b"( ) t \x85 \x86 \x87 R b } . \x08\x00 \x00\x08 FB \x01\x00\x10\x00".split(),
)


def _check_item(data: bytes) -> bool:
    def read(offset: int, nbytes: int) -> bytes:
        assert 0 <= offset <= offset + nbytes <= len(data), "read outside of the item"
        return data[offset : offset + nbytes]

    with contextlib.suppress(CkptError):
        check_archive(len(data), read)
    try:
        head = parse_item(len(data), read, thorough=True)
    except CkptError:
        return False
    assert 0 <= head.payload_offset <= head.payload_offset + head.payload_nbytes <= len(data)
    if head.strides is None:
        assert head.dtype.num_bytes(math.prod(head.shape)) == head.payload_nbytes
    payload = data[head.payload_offset : head.payload_offset + head.payload_nbytes]
    if head.crc32 is None or zlib.crc32(payload) == head.crc32:
        _compare_item_with_torch(data, head, payload)
    return True


def _compare_item_with_torch(data: bytes, head: ItemHead, payload: bytes) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception:
        return  # torch does not load it: nothing wrong comes of it
    if isinstance(loaded, torch.nn.Parameter):
        loaded = loaded.detach()
    assert str(loaded.dtype) == f"torch.{head.dtype.torch_name}"
    shape = (*head.shape[:-1], *(n // head.dtype.pack for n in head.shape[-1:]))
    assert tuple(loaded.shape) == shape
    if not loaded.numel():
        return
    itemsize = loaded.element_size()
    stored = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    if head.strides is not None:
        steps = (*(step // head.dtype.pack for step in head.strides[:-1]), head.strides[-1])
        stored = torch.as_strided(stored, (*shape, itemsize), (*(s * itemsize for s in steps), 1))
    assert torch.equal(stored.reshape(-1), loaded.contiguous().reshape(-1).view(torch.uint8))


# Manifest


def _manifest_seeds() -> tuple[bytes, ...]:
    digest = "0123456789abcdef" * 2
    one = Manifest(
        writer="ckpt 0.1.0",
        format="dcp",
        mesh=Mesh((("dp_shard", 2), ("tp", 2))),
        tensors={
            "w": TensorRecord(dtype=BY_NAME["F32"], shape=(6, 4), digest=digest, placements={"dp_shard": Shard(0)}),
            "s": TensorRecord(dtype=BY_NAME["BF16"], shape=(), digest=digest),
        },
        blobs={"step": FileRecord(nbytes=9, digest=digest)},
        assets={"config.json": FileRecord(nbytes=2, digest=digest)},
        documents={".metadata": FileRecord(nbytes=1000, digest=digest)},
        files={"__0_0.distcp": 100},
        frames={"__0_0.distcp": digest},
        source={"name": "m", "format": "hf", "files": {"model.safetensors": {"nbytes": 1, "mtime_ns": 2, "inode": 3}}},
        origin=Origin(
            headers={"model.safetensors": "{}"}, index_name="model.safetensors.index.json", index_text="{}", prefix="p."
        ),
    )
    return build_manifest(one), build_manifest(Manifest(writer="w", format="hf", mesh=None, tensors={}))


_CHECKSUM = b',\n"checksum": '


def _resealed(data: bytes) -> bytes:
    body, found, _ = data.rpartition(_CHECKSUM)
    body = body if found else data
    return body + _CHECKSUM + f'"{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode()


def _check_manifest(data: bytes) -> bool:
    """Also with a checksum that belongs to it: then the content itself must be refused or sound."""
    accepted = False
    for text in (data, _resealed(data)):
        try:
            manifest = parse_manifest(text)
        except CkptError:
            continue
        accepted = accepted or text is data
        again = parse_manifest(build_manifest(manifest))
        assert again == manifest
        for name in (*manifest.files, *manifest.assets, *manifest.documents, *manifest.frames):
            assert name
            assert not os.path.isabs(name)
            assert ".." not in name.split("/")
    return accepted


# Journal


_FINGERPRINT = "f" * 32
_RECORDS = {
    (tensor_number, block): BlockRecord(
        f"{tensor_number:016x}{block:016x}", ((0, 64 * block, 64, 12345),) * tensor_number
    )
    for tensor_number in range(2)
    for block in range(3)
}


def _journal_seeds() -> tuple[bytes, ...]:
    with memory_directory() as root:
        writer = JournalWriter(root, _FINGERPRINT, continues=False)
        for (tensor_number, block), record in _RECORDS.items():
            writer.append(tensor_number, block, record)
        writer.close()
        with open(os.path.join(root, JOURNAL_NAME), "rb") as file:
            return (file.read(),)


@contextlib.contextmanager
def _journal(data: bytes) -> Iterator[str]:
    with memory_directory() as root:
        with open(os.path.join(root, JOURNAL_NAME), "wb") as file:
            file.write(data)
        yield root


def _check_journal(data: bytes) -> bool:
    """What comes back are records that were written; with checksums that belong to the lines, anything well-formed."""
    with _journal(data) as root:
        records = read_journal(root, _FINGERPRINT)
    assert records is None or records.items() <= _RECORDS.items()
    lines = data.split(b"\n")
    sealed = [b"%08x %s" % (zlib.crc32(text), text) for text in (line.partition(b" ")[2] for line in lines[1:])]
    with _journal(b"\n".join((_FINGERPRINT.encode(), *sealed))) as root:
        for (tensor_number, block), record in (read_journal(root, _FINGERPRINT) or {}).items():
            assert type(tensor_number) is type(block) is int
            assert isinstance(record.digest, str)
            assert all(type(n) is int for read in record.reads for n in read)
    return records is not None


# Rules


def _rules_seeds() -> tuple[bytes, ...]:
    return (
        (
            b"version: 1\nmesh: {dp_replicate: 2, dp_shard: 4, tp: 2}\n"
            b"rules:\n"
            b'  - match: "model.layers.*.self_attn.{q,k,v}_proj.weight"\n    place: {tp: S(0)}\n'
            b'  - match: "model.layers.*.self_attn.o_proj.weight"\n    style: rowwise\n'
            b'  - match: "**norm**"\n    place: {}\n'
        ),
        b"version: 1\nmesh: {dp_shard: -1}\nrules: []\n",
        b"version: 1\nrules:\n- &a {match: x, place: &p {tp: S(1), ep: R}}\n- {match: y, place: *p}\n",
    )


_RULES_TOKENS = (
    *b"version mesh rules match place style colwise dp_shard tp S(0) R ** &a *a << [*a,*a,*a] | > --- ...".split(),
    *(b"<<: *p", b"- ", b"? ", b": ", b"%YAML 1.1\n---\n"),
    *b"!!timestamp !!int !!float !!bool !!binary !!set !!omap !!pairs !!null !!str".split(),
    *(b"!!python/object/apply:os.system", b"!", b"0x" + b"f" * 900, b"1:59:59", b"2001-02-30", b"1e999", b".nan", b"~"),
    *(b"{", b"}", b"[", b"]", b"{a,b}", b"{" * 40, b"{a,b}" * 40, b"*" * 40, b"\t", b"\x00", b"\x85", b"\xef\xbb\xbf"),
)


def _check_rules(data: bytes) -> bool:
    try:
        rules = parse_rules(data.decode("utf-8"), where="rules.yaml", world_size=16)
        names = {"model.layers.0.self_attn.q_proj.weight": ("layers.0.self_attn.q_proj.weight",)}
        assert not any(replace(rule, optional=True).find(NameIndex(names)) - names.keys() for rule in rules.rules)
    except (UnicodeDecodeError, UsageError):
        return False
    assert rules.mesh is None or rules.mesh.world_size == 16
    return True


_SAFETENSORS_TOKENS = (
    *b"dtype shape data_offsets __metadata__ format saved_offsets DCP_SHARDING_INFO \\ud834".split(),
    *(f'"{name}"'.encode() for name in BY_NAME),
)

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("safetensors", _safetensors_seeds, (*_SAFETENSORS_TOKENS, *_JSON_TOKENS), _check_safetensors),
        Target("index", _index_seeds, (b"weight_map", b"metadata", b"../", b"/etc/x", *_JSON_TOKENS), _check_index),
        Target("metadata", _metadata_seeds, _METADATA_TOKENS, _check_metadata),
        Target("item", _item_seeds, _ITEM_TOKENS, _check_item),
        Target("saved", saved.make_seeds, saved.TOKENS, saved.check),
        Target(
            "manifest",
            _manifest_seeds,
            (b"S(0)", b"R", b"tp", b"F32", b"../", b"/x", b"tensors", b"frames", b"origin", b"mesh", *_JSON_TOKENS),
            _check_manifest,
        ),
        Target("journal", _journal_seeds, (b"\n", b" ", b"[[0,0,0,0]]", *_JSON_TOKENS), _check_journal),
        Target("rules", _rules_seeds, _RULES_TOKENS, _check_rules),
    )
}
"""Every target by name."""
