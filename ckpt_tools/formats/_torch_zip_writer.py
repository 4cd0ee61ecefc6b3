"""The bytes around the payload of one tensor item, as `torch.load` wants them.

Sources: as `torch_zip`; the pickle is what torch's own pickler writes for a contiguous CPU tensor, byte for byte.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache

from ckpt_tools.description.dtypes import DType
from ckpt_tools.errors import UsageError
from ckpt_tools.formats._dcp_metadata_writer import push_int

CENTRAL = struct.Struct("<4s6H3I5H2I")
LOCAL = struct.Struct("<4s5H3I2H")
END = struct.Struct("<4s4H2IH")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR = struct.Struct("<4sIQI")

_ALIGNMENT = 64
"""Payloads begin at multiples of this within their item, as torch aligns storages."""
_FULL32 = 0xFFFFFFFF
_UTF8 = 0x800
_DATE = 0x21  # 1980-01-01, the first day of zip
_PAYLOAD = "archive/data/0"


@dataclass(frozen=True, slots=True)
class ItemFrame:
    """An item without its payload."""

    nbytes: int
    """Length of the whole item, payload included."""
    payload_offset: int
    """A multiple of 64."""
    payload_nbytes: int
    _before: bytes
    _after: bytes
    _crc_offsets: tuple[int, int]
    """Where the payload's CRC-32 goes in `_before` and in `_after`."""

    def seal(self, crc32: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after a payload with this CRC-32."""
        crc = crc32.to_bytes(4, "little")
        before, after = self._crc_offsets
        return (
            self._before[:before] + crc + self._before[before + 4 :],
            self._after[:after] + crc + self._after[after + 4 :],
        )

    def unseal(self, before: bytes, after: bytes) -> int | None:
        """Return the CRC-32 in what `seal` has returned; None for any other bytes."""
        start = self._crc_offsets[0]
        crc32 = int.from_bytes(before[start : start + 4], "little")
        return crc32 if self.seal(crc32) == (before, after) else None


@lru_cache(maxsize=4096)
def item_frame(dtype: DType, sizes: tuple[int, ...]) -> ItemFrame:
    """Return the frame of an item with a row-major tensor of `sizes` logical elements.

    Raises:
        UsageError: A dtype that torch does not have, or sizes that end inside a byte.
    """
    pickled = _tensor_pickle(dtype, sizes)
    payload_nbytes = dtype.num_bytes(math.prod(sizes))
    names = {
        "archive/data.pkl": pickled,
        "archive/.format_version": b"1",
        "archive/.storage_alignment": b"%d" % _ALIGNMENT,
        "archive/byteorder": b"little",
    }
    before = bytearray()
    directory = bytearray()
    for name, content in names.items():
        crc32 = zlib.crc32(content)
        directory += _central(name, crc32, len(content), len(before))
        before += _local(name, crc32, len(content), b"") + content
    header_offset = len(before)
    # torch pads with an extra field of this kind; its own four bytes count.
    wide = struct.pack("<2H2Q", 1, 16, payload_nbytes, payload_nbytes) if payload_nbytes >= _FULL32 else b""
    bare = header_offset + 30 + len(_PAYLOAD) + len(wide) + 4
    padding = -bare % _ALIGNMENT
    extra = wide + struct.pack("<2H", 0x4246, padding) + b"Z" * padding
    before += _local(_PAYLOAD, 0, payload_nbytes, extra)
    crc_in_directory = len(directory) + 16
    directory += _central(_PAYLOAD, 0, payload_nbytes, header_offset)
    version_offset = len(before) + payload_nbytes
    version = b"3\n"
    directory += _central("archive/version", zlib.crc32(version), len(version), version_offset)
    after = _local("archive/version", zlib.crc32(version), len(version), b"") + version
    crc_in_after = len(after) + crc_in_directory
    start = version_offset + len(after)
    after += directory + _end(num_entries=len(names) + 2, nbytes=len(directory), start=start)
    return ItemFrame(
        version_offset + len(after),
        len(before),
        payload_nbytes,
        bytes(before),
        bytes(after),
        (header_offset + 14, crc_in_after),
    )


def _local(name: str, crc32: int, nbytes: int, extra: bytes) -> bytes:
    """Return a local header."""
    short = min(nbytes, _FULL32)
    version = 45 if nbytes >= _FULL32 else 20
    head = LOCAL.pack(b"PK\3\4", version, _UTF8, 0, 0, _DATE, crc32, short, short, len(name), len(extra))
    return head + name.encode() + extra


def _central(name: str, crc32: int, nbytes: int, offset: int) -> bytes:
    """Return a line of the central directory."""
    wide = b"".join(struct.pack("<Q", n) for n in (nbytes, nbytes, offset) if n >= _FULL32)
    extra = struct.pack("<2H", 1, len(wide)) + wide if wide else b""
    short = min(nbytes, _FULL32)
    version = 45 if wide else 20
    head = CENTRAL.pack(
        *(b"PK\1\2", version, version, _UTF8, 0, 0, _DATE, crc32, short, short),
        *(len(name), len(extra), 0, 0, 0, 0, min(offset, _FULL32)),
    )
    return head + name.encode() + extra


def _end(*, num_entries: int, nbytes: int, start: int) -> bytes:
    """Return the end records of a directory of `nbytes` bytes at `start`."""
    wide = b""
    if start >= _FULL32:
        wide = END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, num_entries, num_entries, nbytes, start)
        wide += LOCATOR.pack(b"PK\6\7", 0, start + nbytes, 1)
    return wide + END.pack(b"PK\5\6", 0, 0, num_entries, num_entries, nbytes, min(start, _FULL32), 0)


def _tensor_pickle(dtype: DType, sizes: tuple[int, ...]) -> bytes:
    """Return `data.pkl`: protocol 2, `_rebuild_tensor_v2` for classic dtypes and `_rebuild_tensor_v3` for new ones."""
    if dtype.torch_name is None:
        raise UsageError(f"{dtype.name} cannot be stored in DCP: torch has no such dtype")
    if dtype.pack > 1:
        if not sizes or sizes[-1] % dtype.pack:
            raise UsageError(f"{list(sizes)} elements of {dtype.name} end inside a byte")
        sizes = (*sizes[:-1], sizes[-1] // dtype.pack)
    strides = tuple(math.prod(max(size, 1) for size in sizes[dim + 1 :]) for dim in range(len(sizes)))
    num_elems = math.prod(sizes)
    is_typed = dtype.torch_storage is not None
    memo = 0

    def put(opcodes: bytes) -> bytes:
        nonlocal memo
        memo += 1
        return opcodes + b"q%c" % (memo - 1)

    def text(value: str) -> bytes:
        return put(b"X" + len(value).to_bytes(4, "little") + value.encode())

    def numbers(values: tuple[int, ...]) -> bytes:
        if not values:
            return b")"
        body = b"".join(map(push_int, values))
        return put(body + b"\x85\x86\x87"[len(values) - 1 :][:1] if len(values) <= 3 else b"(" + body + b"t")

    rebuild = "_rebuild_tensor_v2" if is_typed else "_rebuild_tensor_v3"
    storage = f"torch\n{dtype.torch_storage}" if is_typed else "torch.storage\nUntypedStorage"
    length = num_elems if is_typed else num_elems * dtype.bits * dtype.pack // 8
    out = b"\x80\x02" + put(f"ctorch._utils\n{rebuild}\n".encode()) + b"(("
    out += text("storage") + put(f"c{storage}\n".encode()) + text("0") + text("cpu") + push_int(length)
    out += put(b"t") + b"Q" + push_int(0) + numbers(sizes) + numbers(strides) + b"\x89"
    out += put(put(b"ccollections\nOrderedDict\n") + b")R")
    if not is_typed:
        out += put(f"ctorch\n{dtype.torch_name}\n".encode())
    out += put(b"t")
    return out + put(b"R") + b"."
