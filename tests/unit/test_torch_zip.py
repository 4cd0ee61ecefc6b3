"""One item of a `.distcp`: written for stock torch, read from what stock torch writes."""

from __future__ import annotations

import io
import math
import os
import struct
import warnings
import zipfile
import zlib

import pytest
import torch

from ckpt_tools.checkpoint.dtypes import BY_NAME, BY_TORCH_NAME, DType
from ckpt_tools.checkpoint.formats.torch_zip import ItemHead, item_frame, parse_item, parse_own_item
from ckpt_tools.errors import UnreadableError, UsageError

SHAPES = [(), (0,), (4,), (0, 4), (3, 0), (4, 6), (1, 2, 3, 4, 5, 2), (300, 700), (1,) * 20]
F32 = BY_NAME["F32"]


def shapes_of(dtype: DType) -> list[tuple[int, ...]]:
    return [sizes for sizes in SHAPES if dtype.pack == 1 or (sizes and sizes[-1] % dtype.pack == 0)]


@pytest.fixture(autouse=True)
def _quiet_complex_half():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
        yield


def payload_of(dtype: DType, sizes: tuple[int, ...]) -> bytes:
    """Bytes with many patterns: NaN payloads, -0.0, subnormals."""
    nbytes = dtype.num_bytes(math.prod(sizes))
    if dtype.name == "BOOL":
        return bytes(i % 2 for i in range(nbytes))
    start = b"\xff\x7f\x00\x80\x01\xfc\xa5\x7f"
    return (start + bytes((i * 37 + 11) % 256 for i in range(nbytes)))[:nbytes]


def build_item(dtype: DType, sizes: tuple[int, ...], payload: bytes) -> bytes:
    frame = item_frame(dtype, sizes)
    before, after = frame.before, frame.after(zlib.crc32(payload))
    return before + payload + after


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Bytes of the elements in row-major order."""
    flat = tensor.reshape(1) if tensor.dim() == 0 else tensor.contiguous()
    return bytes(flat.view(torch.uint8).flatten().tolist())


def save(tensor: object) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()


def parse(item: bytes) -> ItemHead:
    def read(offset: int, nbytes: int) -> bytes:
        assert 0 <= offset <= offset + nbytes <= len(item)
        return item[offset : offset + nbytes]

    return parse_item(len(item), read)


def parse_own(item: bytes, dtype: DType, sizes: tuple[int, ...]) -> ItemHead | None:
    return parse_own_item(len(item), dtype, sizes, lambda offset, nbytes: item[offset : offset + nbytes])


def repack(item: bytes, change) -> bytes:
    """Write the entries of an item anew; `change` takes and returns (name, content) pairs."""
    source = zipfile.ZipFile(io.BytesIO(item))
    entries = change([(info.filename, source.read(info)) for info in source.infolist()])
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about duplicate names
        with zipfile.ZipFile(stream, "w") as target:
            for name, content in entries:
                target.writestr(name, content)
    return stream.getvalue()


def replace_entry(item: bytes, name: str, content: bytes | None) -> bytes:
    def change(entries):
        kept = [(n, content if n == f"archive/{name}" else c) for n, c in entries]
        return [(n, c) for n, c in kept if c is not None]

    return repack(item, change)


# Written items


@pytest.mark.parametrize("dtype", BY_TORCH_NAME.values(), ids=BY_TORCH_NAME)
def test_item_of_every_torch_dtype_loads_bitwise_equal_and_is_read(dtype: DType) -> None:
    for sizes in shapes_of(dtype):
        payload = payload_of(dtype, sizes)
        item = build_item(dtype, sizes, payload)
        tensor = torch.load(io.BytesIO(item), weights_only=True)
        assert tensor.dtype == getattr(torch, dtype.torch_name)
        assert tuple(tensor.shape) == ((*sizes[:-1], sizes[-1] // dtype.pack) if sizes else ())
        assert tensor.is_contiguous()
        assert bytes_of(tensor) == payload
        # The pickle is torch's own, byte for byte, and so are the other records.
        ours, theirs = zipfile.ZipFile(io.BytesIO(item)), zipfile.ZipFile(io.BytesIO(save(tensor)))
        assert ours.testzip() is None
        for name in ours.namelist():
            assert ours.read(name) == theirs.read(name), (name, sizes)
        # Both are read, and ours is known without parsing.
        for each in (item, save(tensor)):
            head = parse(each)
            assert (head.dtype, head.shape, head.strides, head.crc32) == (dtype, sizes, None, zlib.crc32(payload))
            assert each[head.payload_offset :][: head.payload_nbytes] == payload
        assert parse_own(item, dtype, sizes) == parse(item)


@pytest.mark.parametrize("dtype", BY_TORCH_NAME.values(), ids=BY_TORCH_NAME)
def test_frame_describes_the_item_it_seals(dtype: DType) -> None:
    for sizes in [(4,), (3, 8), (0, 2)]:
        frame = item_frame(dtype, sizes)
        for crc32 in (0, 1, 0xFFFFFFFF):
            before, after = frame.before, frame.after(crc32)
            assert len(before) == frame.payload_offset
            assert len(before) + frame.payload_nbytes + len(after) == frame.nbytes
        assert frame.payload_offset % 64 == 0
        assert frame.payload_nbytes == dtype.num_bytes(math.prod(sizes))


def test_item_that_differs_in_one_byte_of_its_frame_is_not_known() -> None:
    sizes = (4, 6)
    item = build_item(F32, sizes, payload_of(F32, sizes))
    head = parse(item)
    payload = range(head.payload_offset, head.payload_offset + head.payload_nbytes)
    for position in set(range(len(item))) - set(payload):
        assert parse_own(item[:position] + bytes([item[position] ^ 1]) + item[position + 1 :], F32, sizes) is None
    for other in [(6, 4), (24,), (4, 5)]:
        assert parse_own(item, F32, other) is None


@pytest.mark.parametrize(("name", "sizes"), [("F6_E2M3", (4,)), ("F6_E3M2", (4,)), ("F4", ()), ("F4", (2, 3))], ids=str)
def test_frame_of_what_torch_lacks_is_a_usage_error_and_no_item_of_it_is_known(
    name: str, sizes: tuple[int, ...]
) -> None:
    with pytest.raises(UsageError, match=r"cannot be stored: torch has no such dtype|end inside a byte"):
        item_frame(BY_NAME[name], sizes)
    assert parse_own(b"PK", BY_NAME[name], sizes) is None


def test_item_loads_in_fake_and_mapped_mode(tmp_path) -> None:
    path = tmp_path / "item.pt"
    path.write_bytes(build_item(F32, (4, 4), payload_of(F32, (4, 4))))
    assert torch.load(path, mmap=True, weights_only=True).shape == (4, 4)
    assert torch.load(path, map_location="meta", weights_only=True).device.type == "meta"


class VirtualItem:
    """An item with a payload of zeros that is never made."""

    def __init__(self, dtype: DType, sizes: tuple[int, ...]) -> None:
        self.frame = item_frame(dtype, sizes)
        self.before, self.after = self.frame.before, self.frame.after(0x12345678)
        self.calls = 0

    def read(self, offset: int, nbytes: int) -> bytes:
        assert 0 <= offset <= offset + nbytes <= self.frame.nbytes
        self.calls += 1
        end = self.frame.payload_offset + self.frame.payload_nbytes
        head = self.before[offset : offset + nbytes]
        tail = self.after[max(0, offset - end) : max(0, offset + nbytes - end)]
        return head + bytes(nbytes - len(head) - len(tail)) + tail


LARGE = [(2**32 - 2,), (2**32 - 1,), (2**32,), (2**20, 2**22), (2**60,)]
"""The first is the last size without zip64, though what follows is beyond 4 GiB."""


@pytest.mark.parametrize("sizes", LARGE, ids=str)
def test_item_beyond_4_gib_is_zip64_and_reads_back(sizes: tuple[int, ...]) -> None:
    item = VirtualItem(BY_NAME["U8"], sizes)
    head = parse_item(item.frame.nbytes, item.read)
    frame = {"payload_offset": item.frame.payload_offset, "payload_nbytes": math.prod(sizes), "crc32": 0x12345678}
    assert head == ItemHead(dtype=BY_NAME["U8"], shape=sizes, strides=None, **frame)
    assert item.calls == 2


@pytest.mark.parametrize("num_elems", [2**32 - 2, 2**32 + 5])
def test_item_beyond_4_gib_loads_with_torch(tmp_path, num_elems: int) -> None:
    dtype = BY_NAME["U8"]
    item = VirtualItem(dtype, (num_elems,))
    path = tmp_path / "large.pt"
    with open(path, "wb") as stream:  # a sparse file
        stream.write(item.before)
        stream.seek(num_elems - 1, os.SEEK_CUR)
        stream.write(b"\x07" + item.after)
    tensor = torch.load(path, mmap=True, weights_only=True)
    assert tensor.shape == (num_elems,)
    assert tensor[-1].item() == 7
    assert zipfile.ZipFile(path).getinfo("archive/data/0").file_size == num_elems
    del tensor


# Read items


@pytest.mark.parametrize("requires_grad", [True, False])
def test_parse_item_of_parameter_reads_its_tensor(requires_grad: bool) -> None:
    item = save(torch.nn.Parameter(torch.arange(6.0).view(2, 3), requires_grad=requires_grad))
    head = parse(item)
    assert head.shape == (2, 3)
    assert struct.unpack("<6f", item[head.payload_offset :][:24]) == (0, 1, 2, 3, 4, 5)
    assert parse(save(torch.zeros(2, requires_grad=True))).shape == (2,)
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.note = "x"  # python attributes change nothing
    assert parse(save(parameter)).shape == (3,)


def elements(item: bytes, head: ItemHead) -> list[int]:
    """Elements of an I32 item in row-major order, through its strides."""
    raw = item[head.payload_offset :][: head.payload_nbytes]
    stored = struct.unpack(f"<{len(raw) // 4}i", raw)
    strides = head.strides
    if strides is None:
        return list(stored)
    positions = [0]
    for size, stride in zip(head.shape, strides, strict=True):
        positions = [p + i * stride for p in positions for i in range(size)]
    return [stored[p] for p in positions]


BASE = torch.arange(48, dtype=torch.int32).view(4, 12)


@pytest.mark.parametrize(
    ("tensor", "is_row_major", "knows_crc"),
    [
        (BASE, True, True),
        (BASE.t(), False, True),
        (BASE.view(2, 2, 3, 4).permute(3, 1, 0, 2), False, True),
        (BASE.view(1, 4, 1, 12).transpose(0, 2), True, True),
        (BASE[2:], True, False),
        (BASE[1:3], True, False),
        (BASE[:, 3:7], False, False),
        (BASE[:, ::2], False, False),
        (BASE[1, 5], True, False),
        (BASE[:, :0], True, False),
        (torch.zeros(2, 3, 4, 4, dtype=torch.int32).to(memory_format=torch.channels_last), False, True),
    ],
)
def test_parse_item_of_view_says_how_it_lies(tensor: torch.Tensor, is_row_major: bool, knows_crc: bool) -> None:
    item = save(tensor)
    head = parse(item)
    assert head.shape == tuple(tensor.shape)
    assert elements(item, head) == tensor.flatten().tolist()
    assert (head.strides is None) == is_row_major
    assert (head.crc32 is not None) == knows_crc
    if head.crc32 is not None:
        assert head.crc32 == zlib.crc32(item[head.payload_offset :][: head.payload_nbytes])


def test_parse_item_of_transposed_f4_doubles_the_outer_strides() -> None:
    packed = torch.arange(24, dtype=torch.uint8).view(2, 3, 4).view(torch.float4_e2m1fn_x2)
    head = parse(save(packed.transpose(0, 1)))
    assert (head.shape, head.strides) == ((3, 2, 8), (8, 24, 1))
    with pytest.raises(UnreadableError, match="transposed across pairs"):
        parse(save(packed.transpose(1, 2)))


def test_parse_item_without_crc_does_not_know_it() -> None:
    frame = item_frame(F32, (2,))
    before, after = frame.before, frame.after(0)
    assert parse(before + bytes(8) + after).crc32 is None


def test_parse_large_item_reads_twice_and_little() -> None:
    item = save(torch.zeros(100_000))
    calls = []

    def read(offset: int, nbytes: int) -> bytes:
        calls.append(nbytes)
        return item[offset : offset + nbytes]

    parse_item(len(item), read)
    assert len(calls) == 2
    assert sum(calls) <= 4096


def test_parse_minimal_item_of_any_order_is_read() -> None:
    item = save(torch.arange(3.0))
    kept = ("archive/data.pkl", "archive/data/0", "archive/version")
    for order in (kept, kept[::-1], (kept[1], kept[0], kept[2])):
        smaller = repack(item, lambda entries, order=order: [(n, dict(entries)[n]) for n in order])
        head = parse(smaller)
        assert struct.unpack("<3f", smaller[head.payload_offset :][:12]) == (0, 1, 2)


def test_parse_item_with_pickle_after_large_payload_is_read() -> None:
    item = repack(save(torch.arange(5000.0)), lambda entries: sorted(entries, key=lambda e: "pkl" in e[0]))
    head = parse(item)
    assert head.payload_nbytes == 20_000


# Refused items


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.zeros(3, dtype=torch.complex64).conj(), "lazy conj"),
        (lambda: torch.zeros(3, dtype=torch.complex64).conj().imag, "lazy neg"),
        (lambda: torch.eye(3).to_sparse(), "a sparse tensor"),
        (lambda: torch.zeros(3, device="meta"), "a meta tensor"),
        (lambda: torch.zeros(1).expand(5), "share memory"),
        (lambda: torch.zeros(4).as_strided((2, 3), (1, 1)), "share memory"),
        (lambda: {"a": torch.zeros(3)}, "holds a dict"),
        (lambda: [torch.zeros(3)], "holds a list"),
        (lambda: 5, "holds a int"),
        (lambda: torch.float32, "holds a torch.float32"),
        (lambda: torch.zeros(3).untyped_storage(), "not that of a plain tensor|holds a"),
    ],
)
def test_parse_item_of_something_else_is_refused_by_name(make, message: str) -> None:
    with pytest.raises(UnreadableError, match=message):
        parse(save(make()))


GOOD = build_item(F32, (2, 3), bytes(range(24)))
LARGE_GOOD = build_item(F32, (3000,), bytes(12_000))


def edit(old: bytes, new: bytes, item: bytes = GOOD, count: int = -1) -> bytes:
    assert old in item
    return item.replace(old, new, count)


PICKLE = zipfile.ZipFile(io.BytesIO(GOOD)).read("archive/data.pkl")
DIRECTORY = GOOD.index(b"PK\1\2")
END = len(GOOD) - 22


def patch(offset: int, new: bytes, item: bytes = GOOD) -> bytes:
    return item[:offset] + new + item[offset + len(new) :]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (b"", "too short"),
        (b"PK\5\6", "too short"),
        (GOOD[:-1], "does not end as a zip"),
        (GOOD + b"\0", "does not end as a zip"),
        (GOOD + GOOD[END:], "directory ends at byte"),
        (GOOD[:END] + b"x" + GOOD[END:], "directory ends at byte"),
        (b"x" + GOOD, "directory ends at byte"),
        (GOOD + GOOD, "directory ends at byte"),
        (GOOD[:DIRECTORY] + GOOD[DIRECTORY:END] * 2 + GOOD[END:], "directory ends at byte"),
        (patch(END + 20, b"\1\0") + b"c", "does not end as a zip"),
        (patch(END + 4, b"\1"), "split over disks"),
        (patch(END + 8, b"\5"), "split over disks"),
        (patch(END + 8, b"\5\0\5\0"), "after its last entry"),
        (patch(END + 8, b"\7\0\7\0"), "malformed"),
        (patch(END + 8, b"\0\0\0\0"), "0 entries"),
        (patch(END + 8, b"\xff\xff\xff\xff"), "65535 entries"),
        (patch(END + 12, b"\xff\xff\xff\xff"), "directory ends at byte"),
        (patch(DIRECTORY, b"XX"), "malformed"),
        (patch(DIRECTORY + 8, b"\x01\x08"), "malformed"),
        (patch(DIRECTORY + 10, b"\x08"), "compressed"),
        (patch(DIRECTORY + 20, b"\x01"), "compressed"),
        (patch(DIRECTORY + 20, b"\xff\xff\xff\xff\xff\xff\xff\xff"), "overlaps"),
        (patch(DIRECTORY + 42, b"\x01"), "contradicts|overlaps"),
        (patch(DIRECTORY + 46, b"\xff"), "malformed"),
        (patch(0, b"XX"), "contradicts"),
        (patch(8, b"\x08"), "contradicts"),
        (patch(14, b"\1\2\3\4"), "contradicts"),
        (patch(18, b"\1\2\3\4"), "contradicts"),
        (patch(28, b"\xff"), "follows it"),
        (patch(30, b"X"), "contradicts"),
        (edit(b"archive/data/0", b"archive/data/1"), "data record"),
        (edit(b"archive/data/0", b"archivf/data/0"), "one folder"),
        (edit(b"archive/", b"archive_"), "one folder"),
        (edit(b"archive/data.pkl", b"archive/data.pkk"), "no archive/data.pkl"),
        (edit(b"archive/version", b"archive/data/0z"), "2 data records"),
        (replace_entry(GOOD, "data/0", None), "0 data records"),
        (replace_entry(GOOD, "data.pkl", None), "no archive/data.pkl"),
        (replace_entry(GOOD, "byteorder", b"big"), "little-endian"),
        (replace_entry(GOOD, "data/0", bytes(23)), "23 bytes"),
        (replace_entry(GOOD, "data/0", bytes(25)), "25 bytes"),
        (replace_entry(GOOD, "data.pkl", bytes(70_000)), "70000 bytes"),
        (repack(GOOD, lambda entries: [*entries, entries[4]]), "two entries"),
        (repack(GOOD, lambda entries: [*entries, ("archive/data/1", b"")]), "2 data records"),
        (repack(GOOD, lambda entries: entries + [(f"archive/{i}", b"") for i in range(60)]), "66 entries"),
        # torch believes the mark, reads nothing, and returns a tensor of memory that nobody has written to.
        (
            patch(GOOD.rindex(b"archive/data/0") - 8, b"\x10"),
            "entry 'archive/data/0' of the archive is marked as a dir",
        ),
        (patch(len(LARGE_GOOD) - 6, b"\0\0\0\0", LARGE_GOOD), "directory ends at byte"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_parse_damaged_item_is_refused_by_name(item: bytes, message: str) -> None:
    with pytest.raises(UnreadableError, match=message):
        parse(item)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"K\x02K\x03\x86", b"K\x02K\x04\x86", "ends at byte 28 of a storage of 24"),
        (b"K\x02K\x03\x86", b"\x8a\x08" + b"\0" * 7 + b"\x40" + b"K\x03\x86", "ends at byte"),
        (b"K\x03K\x01\x86", b"K\x04K\x01\x86", "ends at byte 28"),
        (b"K\x03K\x01\x86", b"K\x00K\x01\x86", "share memory"),
        (b"QK\x00", b"QK\x01", "ends at byte 28"),
        (b"K\x06tq", b"K\x05tq", "ends at byte 24 of a storage of 20"),
        (b"K\x06tq", b"K\x07tq", "24 bytes, but its tensor's storage has 28"),
        (b"K\x06tq", b"J\xff\xff\xff\xfftq", "no storage"),
        (b"K\x02K\x03\x86", b"K\x02J\xff\xff\xff\xff\x86", "not a tuple of numbers"),
        (b"K\x02K\x03\x86", b"K\x02\x88\x86", "not a tuple of numbers"),
        (b"K\x02K\x03\x86", b"K\x06\x85", "1 dims and 2 strides"),
        (b"FloatStorage", b"HalfStorage", "24 bytes, but its tensor's storage has 12"),
        (b"FloatStorage", b"float32", "no dtype that matches its torch.float32"),
        (b"ctorch\nFloatStorage", b"ctorch.storage\nUntypedStorage", "no dtype that matches"),
        (b"FloatStorage", b"QInt8Storage", "torch.QInt8Storage"),
        (b"_rebuild_tensor_v2", b"_rebuild_qtensor", "a quantised tensor"),
        (b"_rebuild_tensor_v2", b"_rebuild_tensor_v3", "6 arguments"),
        (b"ctorch._utils\n_rebuild_tensor_v2", b"cposix\nsystem", "'posix.system'.*not executed"),
        (b"\x01\x00\x00\x000", b"\x02\x00\x00\x00..", "is not a number"),
        (b"\x89c", b"Nc", "hooks or is malformed"),
        (b")Rq", b"K\x01\x85Rq", "hooks or is malformed"),
    ],
)
def test_parse_item_whose_pickle_lies_is_refused(old: bytes, new: bytes, message: str) -> None:
    with pytest.raises(UnreadableError, match=message):
        parse(replace_entry(GOOD, "data.pkl", edit(old, new, PICKLE, 1)))


def test_parse_zip64_item_with_disagreeing_ends_is_refused() -> None:
    virtual = VirtualItem(BY_NAME["U8"], (2**32,))
    good = virtual.after
    for offset, new in [(-6, b"\1\0\0\0"), (-10, b"\1"), (-42 + 8, b"\1"), (-42 + 16, b"\2"), (-98 + 4, b"\1")]:
        virtual.after = good[:offset] + new + good[offset + len(new) :]
        with pytest.raises(UnreadableError, match=r"disagree|locator|zip64"):
            parse_item(virtual.frame.nbytes, virtual.read)
