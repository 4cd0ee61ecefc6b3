"""`.metadata`: read as torch's own pickler writes it, written so that stock torch loads it."""

from __future__ import annotations

import copyreg
import io
import pathlib
import pickle
import struct
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_tools import api
from ckpt_tools.checkpoint.dtypes import BY_NAME, BY_TORCH_NAME
from ckpt_tools.checkpoint.entries import BlobEntry, ByteSpan, Chunk, TensorEntry
from ckpt_tools.checkpoint.formats import inert_pickle
from ckpt_tools.checkpoint.formats._pickle_values import PickleLimits
from ckpt_tools.checkpoint.formats.dcp_metadata import build_metadata, parse_metadata
from ckpt_tools.checkpoint.formats.torch_zip import parse_item
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.errors import LimitError, UnreadableError, UsageError

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


def size(*dims: int) -> torch.Size:
    return torch.Size(dims)


def metadata_of(
    *,
    fqn: str = "w",
    shape: tuple[int, ...] = (6, 4),
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (((0, 0), (3, 4)), ((3, 0), (3, 4))),
    dtype: torch.dtype = torch.float32,
    **properties: object,
) -> Metadata:
    """What torch would write for one tensor."""
    chunks = [ChunkStorageMetadata(offsets=size(*o), sizes=size(*s)) for o, s in boxes]
    storage = {
        MetadataIndex(fqn, chunk.offsets, i): _StorageInfo(f"__{i}_0.distcp", 1000 * i, 900)
        for i, chunk in enumerate(chunks)
    }
    entry = TensorStorageMetadata(TensorProperties(dtype=dtype, **properties), size(*shape), chunks)
    return Metadata({fqn: entry}, {fqn: (fqn,)}, storage, StorageMeta(), "1.0.0")


def parse(metadata: object, protocol: int = 4):
    return parse_metadata(pickle.dumps(metadata, protocol))


STATE = {
    "model": {"w": torch.arange(12.0).view(3, 4), "t": torch.zeros(4, 3).t(), "empty": torch.zeros(0, 3)},
    "scalar": torch.tensor(1.5),
    "step": 5,
    "optim": {"state": [torch.zeros(2), {"lr": 0.1}], "groups": {0: torch.ones(2, 1, 1, 1, 1)}},
}


@pytest.mark.parametrize("make_id", [str, pathlib.Path], ids=["str", "path"])
def test_parse_metadata_of_real_save_names_every_item(tmp_path, make_id) -> None:
    dcp.save(STATE, checkpoint_id=make_id(tmp_path), no_dist=True)
    parsed = parse_metadata((tmp_path / ".metadata").read_bytes())
    tensors = {entry.fqn: entry for entry in parsed.tensors}
    assert [entry.fqn for entry in parsed.tensors] == [
        *("model.w", "model.t", "model.empty", "scalar", "optim.state.0", "optim.groups.0")
    ]
    assert [(blob.fqn, blob.path) for blob in parsed.blobs] == [
        ("step", ("step",)),
        ("optim.state.1.lr", ("optim", "state", 1, "lr")),
    ]
    assert tensors["model.w"].path == ("model", "w")
    assert tensors["optim.groups.0"].path == ("optim", "groups", "0")
    assert tensors["optim.groups.0"].shape == (2, 1, 1, 1, 1)
    assert tensors["scalar"].chunks[0].box == Box((), ())
    assert tensors["model.empty"].chunks[0].box == Box((0, 0), (0, 3))
    data = (tmp_path / "__0_0.distcp").read_bytes()
    for entry in (*parsed.tensors, *parsed.blobs):
        span = entry.chunks[0].span if isinstance(entry, TensorEntry) else entry.span
        zipfile.ZipFile(io.BytesIO(data[span.offset : span.offset + span.nbytes])).testzip()
    span = tensors["model.w"].chunks[0].span
    head = parse_item(span.nbytes, lambda offset, nbytes: data[span.offset + offset :][:nbytes])
    start = span.offset + head.payload_offset
    assert struct.unpack("<12f", data[start : start + 48]) == tuple(range(12))


@pytest.mark.parametrize("dtype", BY_TORCH_NAME.values(), ids=BY_TORCH_NAME)
def test_parse_metadata_knows_every_torch_dtype(tmp_path, dtype) -> None:
    tensor = torch.zeros(4, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2) if dtype.name == "F4" else None
    if tensor is None:
        tensor = torch.zeros(4, 2, dtype=getattr(torch, dtype.torch_name))
    dcp.save({"w": tensor}, checkpoint_id=tmp_path, no_dist=True)
    (entry,) = parse_metadata((tmp_path / ".metadata").read_bytes()).tensors
    assert entry.dtype == dtype
    assert entry.shape == entry.chunks[0].box.sizes == ((4, 4) if dtype.name == "F4" else (4, 2))


def test_parse_metadata_of_f4_counts_logical_elements() -> None:
    metadata = metadata_of(dtype=torch.float4_e2m1fn_x2, boxes=(((0, 0), (6, 2)), ((0, 2), (6, 2))))
    (entry,) = parse(metadata).tensors
    assert entry.shape == (6, 8)
    assert [chunk.box for chunk in entry.chunks] == [Box((0, 0), (6, 4)), Box((0, 4), (6, 4))]
    with pytest.raises(UnreadableError, match="tensor 'w' is a 0-d F4"):
        parse(metadata_of(dtype=torch.float4_e2m1fn_x2, shape=(), boxes=(((), ()),)))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_parse_metadata_of_any_protocol_gives_the_same(protocol: int) -> None:
    assert parse(metadata_of(), protocol) == parse(metadata_of())


def many(num_tensors: int, num_ranks: int, *, separate: bool) -> Metadata:
    """Metadata of many chunks; `separate` as when every rank's names were sent to rank 0 on their own."""
    parts = [
        metadata_of(
            fqn=f"layers.{i}.weight",
            shape=(num_ranks * 100, 3, 2),
            boxes=tuple(((rank * 100, 0, 0), (100, 3, 2)) for rank in range(num_ranks)),
        )
        for i in range(num_tensors)
    ]
    whole = Metadata({}, {}, {})
    for part in parts:
        whole.state_dict_metadata |= part.state_dict_metadata
        whole.planner_data |= part.planner_data
        for index, info in part.storage_data.items():
            copies = pickle.loads(pickle.dumps((index, info))) if separate else (index, info)
            whole.storage_data[copies[0]] = replace(copies[1], offset=copies[1].offset + (1 << 33), length=5000)
    return whole


@pytest.mark.full
@pytest.mark.parametrize("separate", [False, True])
def test_parse_metadata_of_many_chunks_equals_torch(separate: bool, monkeypatch) -> None:
    metadata = many(40, 60, separate=separate)
    data = pickle.dumps(metadata, 4)
    assert len(data) > 65536 * 2  # several frames
    parsed = parse_metadata(data)
    monkeypatch.setattr(inert_pickle.ObjectRuns, "match", lambda *_: 0)
    assert parse_metadata(data) == parsed
    assert {entry.fqn for entry in parsed.tensors} == set(metadata.state_dict_metadata)
    for entry in parsed.tensors:
        for chunk, theirs in zip(entry.chunks, metadata.state_dict_metadata[entry.fqn].chunks, strict=True):
            assert (chunk.box.offsets, chunk.box.sizes) == (tuple(theirs.offsets), tuple(theirs.sizes))
            info = metadata.storage_data[MetadataIndex(entry.fqn, theirs.offsets)]
            assert chunk.span == ByteSpan(file=info.relative_path, offset=info.offset, nbytes=info.length)
            assert chunk.encoding == "torch_zip"


@pytest.mark.full
def test_parse_metadata_uses_the_fast_path_for_real_files(monkeypatch) -> None:
    steps = []
    match = inert_pickle.ObjectRuns.match

    def counting(self, *args):
        end = match(self, *args)
        steps.append(end - args[0] if end else 0)
        return end

    monkeypatch.setattr(inert_pickle.ObjectRuns, "match", counting)
    for separate in (False, True):
        data = pickle.dumps(many(40, 60, separate=separate), 4)
        steps.clear()
        parsed = parse_metadata(data)
        assert sum(steps) > 0.9 * len(data)
        ours = build_metadata(parsed.tensors, parsed.blobs)
        steps.clear()
        parse_metadata(ours)
        assert sum(steps) > 0.9 * len(ours)


# What other versions of torch wrote


@pytest.mark.parametrize(
    ("name", "stand_in"), [("storage_meta", "storage_xxxx"), ("version", "xxxxxxx"), ("index", "xxxxx")]
)
def test_parse_metadata_without_newer_fields_is_read(name: str, stand_in: str) -> None:
    data = pickle.dumps(metadata_of(), 4)
    assert name.encode() in data
    assert parse_metadata(data.replace(name.encode(), stand_in.encode())) == parse_metadata(data)


def test_parse_metadata_of_torch_2_0_is_read() -> None:
    data = pickle.dumps(metadata_of(), 2)  # names stand as text in protocol 2
    old = b"torch.distributed._shard.sharded_tensor.metadata\n"
    data = data.replace(b"torch.distributed.checkpoint.metadata\nTensorProperties", old + b"TensorProperties")
    data = data.replace(b"torch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING", old + b"MEM_FORMAT_ENCODING")
    assert data.count(old) == 2
    assert parse_metadata(data) == parse(metadata_of())


def test_parse_metadata_of_torch_2_15_is_read() -> None:
    """It notes the strides of tensors; the file is what that release wrote: {"model": {"w", "t", "s"}, "step"}."""
    data = (Path(__file__).parents[1] / "compat" / "torch-2.15.metadata").read_bytes()
    parsed = parse_metadata(data)
    assert [(tensor.fqn, tensor.dtype.name, tensor.shape) for tensor in parsed.tensors] == [
        ("model.w", "F32", (2, 3)),
        ("model.t", "F32", (2, 3)),
        ("model.s", "F32", ()),
    ]
    assert [blob.fqn for blob in parsed.blobs] == ["step"]


def pickled(metadata: Metadata, state_of) -> bytes:
    """As another release of torch would: `TensorProperties` with the state that `state_of` makes of them."""

    class Other(pickle.Pickler):
        def reducer_override(self, value):
            if isinstance(value, TensorProperties):
                return copyreg.__newobj__, (TensorProperties,), state_of(value)
            return NotImplemented

    stream = io.BytesIO()
    Other(stream, 4).dump(metadata)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("rest", "is_read"),
    [(((3, 1),), True), (((),), True), ((None,), True), ((3,), False), (((1.5,),), False), (((1,), None), False)],
)
def test_parse_metadata_with_strides_is_read_and_with_anything_else_refused(rest, is_read: bool) -> None:
    data = pickled(metadata_of(), lambda value: (*pickle.loads(pickle.dumps(value)).__getstate__()[:5], *rest))
    if is_read:
        assert parse_metadata(data) == parse(metadata_of())
    else:
        with pytest.raises(UnreadableError, match="do not have the fields that torch reads"):
            parse_metadata(data)


def test_parse_metadata_with_dict_properties_is_read() -> None:
    """The state that pickle makes of a class without `__getstate__`."""

    def state_of(value):
        return {"dtype": value.dtype, "layout": value.layout}

    assert parse_metadata(pickled(metadata_of(), state_of)) == parse(metadata_of())
    with pytest.raises(UnreadableError, match=r"layout torch\.sparse_csr"):
        parse_metadata(pickled(metadata_of(layout=torch.sparse_csr), state_of))


@pytest.mark.parametrize("code", [b"K\x03\x85", b"K\x80\x85", b"NN\x86"])
def test_parse_metadata_of_an_unknown_memory_format_is_refused(code: bytes) -> None:
    """torch raises on it while it loads."""
    name = b"_MEM_FORMAT_ENCODING\x94\x93\x94"
    data = pickle.dumps(metadata_of(), 4)
    assert data.count(name + b"K\x00\x85") == 1
    with pytest.raises(UnreadableError, match=r"do not have the fields that torch reads|made by REDUCE of 2 arguments"):
        parse_metadata(data.replace(name + b"K\x00\x85", name + code))


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.preserve_format])
def test_parse_metadata_of_any_memory_format_is_read(memory_format: torch.memory_format) -> None:
    assert parse(metadata_of(memory_format=memory_format)).tensors[0].dtype is BY_NAME["F32"]


def test_parse_metadata_keeps_tied_items_apart_by_name() -> None:
    metadata = metadata_of()
    tied = metadata_of(fqn="tied")
    metadata.state_dict_metadata |= tied.state_dict_metadata
    metadata.storage_data |= tied.storage_data
    metadata.planner_data |= tied.planner_data
    first, second = parse(metadata).tensors
    assert first.chunks == second.chunks


# Names and the keys that lead to them


def test_names_are_held_against_their_keys(tmp_path) -> None:
    dcp.save({"model": {"1.weight": torch.ones(3), "1.bias": torch.ones(2)}}, checkpoint_id=tmp_path, no_dist=True)
    raw = (tmp_path / ".metadata").read_bytes()
    assert parse_metadata(raw).single_names == 0
    with pytest.raises(UnreadableError, match=r"'model\.1\.wmight' has the keys of 'model\.1\.weight'"):
        parse_metadata(raw.replace(b"model.1.weight", b"model.1.wmight"))
    with pytest.raises(UnreadableError, match=r"'model\.1\.weight' has the keys of 'model\.1\.wmight'"):
        parse_metadata(raw.replace(b"\x081.weight", b"\x081.wmight"))


def test_name_without_keys_among_names_with_keys_is_refused() -> None:
    metadata = metadata_of()
    other = metadata_of(fqn="other")
    metadata.state_dict_metadata |= other.state_dict_metadata
    metadata.storage_data |= other.storage_data
    with pytest.raises(UnreadableError, match="'other' has no keys in planner_data"):
        parse(metadata)


def test_metadata_without_the_field_planner_data_is_refused() -> None:
    metadata = metadata_of()
    metadata.qlanner_data = metadata.__dict__.pop("planner_data")
    with pytest.raises(UnreadableError, match="no planner_data"):
        parse(metadata)


@pytest.mark.parametrize(
    "planner_data",
    [
        *(None, {}, "text", [1, 2], {"step": 3}, {"foo_w": ("w",)}, {"w": "w"}, {"w": (1.5,)}, {3: ("w",)}),
        {"w": ("w",), "gone.0": ("gone", 0)},
    ],
    ids=str,
)
def test_planner_data_of_another_planner_is_no_damage(planner_data: object) -> None:
    metadata = metadata_of()
    metadata.planner_data = planner_data
    (entry,) = parse(metadata).tensors
    has_path = isinstance(planner_data, dict) and "gone.0" in planner_data
    assert (entry.fqn, entry.path) == ("w", ("w",) if has_path else ())


def test_single_names_are_those_that_one_string_of_the_file_makes(tmp_path) -> None:
    dcp.save({"a.weight": torch.ones(3), "b.weight": torch.ones(2), "n": 1}, checkpoint_id=tmp_path, no_dist=True)
    parsed = parse_metadata((tmp_path / ".metadata").read_bytes())
    assert parsed.single_names == 3
    again = parse_metadata(build_metadata(parsed.tensors, parsed.blobs))
    assert [entry.fqn for entry in again.tensors] == ["a.weight", "b.weight"]
    assert again.single_names == 1  # a name of one character is one object wherever it stands


# Refused


def edit_chunks(**change: object) -> Metadata:
    metadata = metadata_of()
    metadata.state_dict_metadata["w"].chunks[1] = replace(metadata.state_dict_metadata["w"].chunks[1], **change)
    return metadata


def edit_info(**change: object) -> Metadata:
    metadata = metadata_of()
    key = MetadataIndex("w", size(3, 0))
    metadata.storage_data[key] = replace(metadata.storage_data[key], **change)
    return metadata


def with_storage(key: MetadataIndex | None, *, drop: bool = False) -> Metadata:
    metadata = metadata_of()
    if drop:
        del metadata.storage_data[key]
    else:
        metadata.storage_data[key] = _StorageInfo("x", 0, 900)
    return metadata


def with_field(**change: object) -> Metadata:
    return replace(metadata_of(), **change)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"w": 1}, "the metadata is not a .*Metadata but a dict"),
        (size(3), "the metadata is not a .*Metadata but a torch.Size"),
        (with_field(state_dict_metadata=None), "no state_dict_metadata"),
        (with_field(state_dict_metadata={3: BytesStorageMetadata()}), "a name in the state dict is a int"),
        (with_field(state_dict_metadata={"w": 3}), "'w' is neither a tensor nor an object but a int"),
        (with_field(state_dict_metadata={"w": StorageMeta()}), "'w' is neither .* StorageMeta|StorageMeta"),
        (with_field(storage_data=None), "no storage_data"),
        (with_field(storage_data={"w": _StorageInfo("x", 0, 9)}), "not a dict of MetadataIndex"),
        (with_field(storage_data={MetadataIndex("w"): "x"}), "not a dict of MetadataIndex"),
        (with_field(storage_data={}), "tensor 'w': the chunk at \\[0, 0\\] has no item"),
        (with_storage(MetadataIndex("w", size(3, 0)), drop=True), "the chunk at \\[3, 0\\] has no item"),
        (with_storage(MetadataIndex("w", size(9, 0))), "an item for a chunk at \\[9, 0\\], but no such chunk"),
        (with_storage(MetadataIndex("x", size(0, 0))), "'x' has an item in storage_data that the state dict"),
        (with_storage(MetadataIndex("x")), "'x' has an item in storage_data that the state dict"),
        (with_storage(MetadataIndex("w")), "'w' has an item in storage_data that the state dict"),
        (with_storage(MetadataIndex(3)), "an entry of storage_data has no FQN"),
        (with_storage(MetadataIndex("w", size(0, 3))), "an item for a chunk at \\[0, 3\\], but no such chunk"),
        (edit_chunks(offsets=size(0, 0)), "the chunk at \\[0, 0\\] is listed twice"),
        (edit_chunks(offsets=size(3)), "2 dims, a chunk of it 1 offsets and 2 sizes"),
        (edit_chunks(sizes=size(3, 4, 1)), "2 dims, a chunk of it 2 offsets and 3 sizes"),
        (edit_chunks(sizes=size(-3, 4)), "chunk sizes are not numbers between"),
        (edit_chunks(sizes=(3, 4)), "chunk sizes are not a torch.Size"),
        (edit_chunks(sizes=size(10**8, 4)), "an item of 900 bytes cannot hold the 1600000000 bytes"),
        (edit_chunks(sizes=size(15, 15)), "as SerializationFormat.SAFETENSORS"),
        (edit_info(relative_path="../x"), "not a plain path"),
        (edit_info(relative_path="/etc/passwd"), "not a plain path"),
        (edit_info(relative_path="a/../../x"), "not a plain path"),
        (edit_info(relative_path="a\0b"), "'a\\\\x00b', which is not a plain path"),
        (edit_info(relative_path=""), "not a plain path"),
        (edit_info(relative_path="."), "not a plain path"),
        (edit_info(relative_path=7), "has no relative_path, offset or length"),
        (edit_info(offset=-1), "cannot be a part of a file"),
        (edit_info(length=-1), "cannot be a part of a file"),
        (edit_info(offset=2**62 + 1), "cannot be a part of a file"),
        (edit_info(offset=True), "has no relative_path, offset or length"),
        (edit_info(offset=1.5), "has no relative_path, offset or length"),
        (edit_info(transform_descriptors=["stream.zstd/1"]), "the transform stream.zstd/1, which ckpt cannot undo"),
        (edit_info(length=48), "as SerializationFormat.SAFETENSORS"),
        (edit_info(length=47), "an item of 47 bytes cannot hold the 48 bytes"),
        (metadata_of(layout=torch.sparse_coo), "tensor 'w' has layout torch.sparse_coo"),
        (metadata_of(dtype=torch.qint8), "tensor 'w' has dtype qint8"),
        (metadata_of(dtype=torch.uint4), "tensor 'w' has dtype uint4"),
        (metadata_of(shape=(2**31, 2**31, 2**31), boxes=()), "too large to exist"),
        (metadata_of(fqn="\x1b[31m\u202e", layout=torch.sparse_coo), r"tensor '\\x1b\[31m\\u202e' has layout"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_parse_metadata_that_cannot_be_right_is_refused_by_name(metadata: object, message: str) -> None:
    with pytest.raises(UnreadableError, match=message):
        parse(metadata)


def test_parse_metadata_with_one_chunk_stored_twice_is_refused() -> None:
    # Equal keys cannot be pickled from one dict; two dicts of one key each can be joined in the bytes.
    data = pickle.dumps(metadata_of(), 4)
    second = data.index(b"K\x03K\x00\x86", data.index(b"storage_data"))
    doubled = data[:second] + b"K\x00K\x00\x86" + data[second + 5 :]
    with pytest.raises(UnreadableError, match="the chunk at \\[0, 0\\] is stored twice"):
        parse_metadata(doubled)


def test_parse_metadata_of_safetensors_items_is_refused_by_name(tmp_path) -> None:
    writer = dcp.FileSystemWriter(tmp_path / "dcp", serialization_format=SerializationFormat.SAFETENSORS)
    weight = torch.arange(3.0)
    dcp.save({"w": weight}, storage_writer=writer, no_dist=True)
    with pytest.raises(UnreadableError, match=r"SAFETENSORS.*DCP cannot load it either") as caught:
        parse_metadata((tmp_path / "dcp" / ".metadata").read_bytes())
    # The hint is followed and works; torch agrees about what it says.
    assert "--from hf-sharded" in (caught.value.hint or "")
    api.gather(tmp_path / "dcp", tmp_path / "model", format="hf-sharded", allow_foreign_names=True)
    assert torch.equal(load_file(tmp_path / "model" / "model.safetensors")["w"], weight)
    with pytest.raises(CheckpointException):
        dcp.load({"w": weight}, checkpoint_id=tmp_path / "dcp", no_dist=True)


def test_parse_metadata_beyond_limits_is_refused() -> None:
    with pytest.raises(LimitError, match="bytes long"):
        parse_metadata(pickle.dumps(metadata_of(), 4), limits=PickleLimits(max_bytes=100))


# Written


def entry_of(fqn: str, name: str, shape: tuple[int, ...], boxes: list[Box], **extra: object) -> TensorEntry:
    chunks = tuple(
        Chunk(
            box=box,
            span=ByteSpan(file=f"__{rank}_0.distcp", offset=(5 << 30) * rank, nbytes=1 << 20),
            encoding="torch_zip",
        )
        for rank, box in enumerate(boxes)
    )
    return TensorEntry(fqn=fqn, dtype=BY_NAME[name], shape=shape, chunks=chunks, **extra)


ENTRIES = (
    entry_of("a.weight", "BF16", (6, 4), [Box((0, 0), (3, 4)), Box((3, 0), (3, 4)), Box((6, 0), (0, 4))]),
    entry_of("a.bias", "F32", (300, 70_000), [Box((0, 0), (300, 70_000))], path=("a", "bias")),
    entry_of("scalar", "I64", (), [Box((), ())]),
    entry_of("deep", "F8_E4M3", (1, 2, 3, 4, 5), [Box((0,) * 5, (1, 2, 3, 4, 5))]),
    entry_of("packed", "F4", (2, 8), [Box((0, 0), (2, 4)), Box((0, 4), (2, 4))]),
    entry_of("é" * 200, "U16", (2**33,), [Box((0,), (2**33,))]),
    entry_of("none", "BOOL", (3,), []),
)
BLOBS = (BlobEntry(fqn="step", span=ByteSpan(file="__0_0.distcp", offset=0, nbytes=7), path=("step",)),)


def test_build_metadata_reads_back_equal() -> None:
    boxes = replace(ENTRIES[5], chunks=(replace(ENTRIES[5].chunks[0], span=replace(BLOBS[0].span, nbytes=2**35)),))
    entries = (ENTRIES[0], ENTRIES[2], ENTRIES[3], ENTRIES[4], boxes, ENTRIES[6])
    parsed = parse_metadata(build_metadata(entries, BLOBS))
    assert parsed.blobs == BLOBS
    assert parsed.tensors == tuple(replace(entry, path=entry.path or (entry.fqn,)) for entry in entries)
    assert parse_metadata(build_metadata((), ())).tensors == ()


def test_build_metadata_loads_in_torch_as_equivalent_metadata(tmp_path) -> None:
    (tmp_path / ".metadata").write_bytes(build_metadata(ENTRIES, BLOBS))
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    assert list(metadata.state_dict_metadata) == [*(entry.fqn for entry in ENTRIES), "step"]
    assert metadata.state_dict_metadata["step"] == BytesStorageMetadata()
    assert metadata.planner_data["a.weight"] == ("a.weight",)
    assert metadata.planner_data["a.bias"] == ("a", "bias")
    assert metadata.version == "1.0.0"
    for entry in ENTRIES:
        stored = metadata.state_dict_metadata[entry.fqn]
        pack = entry.dtype.pack

        def torch_dims(dims: tuple[int, ...], pack: int = pack) -> torch.Size:
            return size(*dims[:-1], dims[-1] // pack) if dims else size()

        dtype = getattr(torch, entry.dtype.torch_name)
        assert stored == TensorStorageMetadata(
            TensorProperties(dtype=dtype),
            torch_dims(entry.shape),
            [ChunkStorageMetadata(torch_dims(c.box.offsets), torch_dims(c.box.sizes)) for c in entry.chunks],
        )
        assert type(stored.size) is torch.Size
        keys = [key for key in metadata.storage_data if key.fqn == entry.fqn]
        assert [key.index for key in keys] == list(range(len(entry.chunks)))
        for key, chunk in zip(keys, entry.chunks, strict=True):
            assert key == MetadataIndex(entry.fqn, torch_dims(chunk.box.offsets))
            span = chunk.span
            assert metadata.storage_data[key] == _StorageInfo(span.file, span.offset, span.nbytes)
    assert metadata.storage_data[MetadataIndex("step")] == _StorageInfo("__0_0.distcp", 0, 7)
    assert MetadataIndex("step").index is None


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ((entry_of("w", "F6_E2M3", (4,), []),), "F6_E2M3 cannot be stored in DCP"),
        ((entry_of("w", "F4", (3,), []),), "end inside a byte"),
        ((entry_of("w", "F4", (4,), [Box((1,), (3,))]),), "end inside a byte"),
        ((entry_of("w", "F32", (4,), []),) * 2, "two entries are named 'w'"),
        ((entry_of("\ud800", "F32", (4,), []),), "not valid Unicode"),
    ],
)
def test_build_metadata_of_what_torch_lacks_is_a_usage_error(entries: tuple[TensorEntry, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_metadata(entries, ())


def test_module_does_not_import_torch() -> None:
    code = (
        "import sys, pickle, ckpt_tools.checkpoint.formats.dcp_metadata as m, ckpt_tools.checkpoint.formats.torch_zip;"
        "m.parse_metadata(m.build_metadata((), ()));"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
