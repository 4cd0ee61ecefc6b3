"""The bytes around the payloads of a `torch.save` zip, one or many, as `torch.load` wants them.

Sources: as `torch_zip`; the pickle is what torch's own pickler writes for a contiguous CPU tensor, byte for byte.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.formats._pickle_values import PERSISTENT_ID, GlobalName, Record
from ckpt_tools.checkpoint.formats._pickle_writer import build_pickle
from ckpt_tools.errors import UsageError

CENTRAL = struct.Struct("<4s6H3I5H2I")
LOCAL = struct.Struct("<4s5H3I2H")
END = struct.Struct("<4s4H2IH")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR = struct.Struct("<4sIQI")

_ALIGNMENT = 64
"""Payloads begin at multiples of this within their archive, as torch aligns storages."""
_FULL16 = 0xFFFF
_FULL32 = 0xFFFFFFFF
_UTF8 = 0x800
_LATER = 0x08
"""Flag of an entry whose CRC-32 and sizes follow its content: torch writes payloads so, and nothing before a payload
depends on its bytes."""
_DATE = 0x21  # 1980-01-01, the first day of zip


@dataclass(frozen=True, slots=True)
class ArchiveFrame:
    """A `torch.save` zip without its payloads."""

    nbytes: int
    """Length of the whole archive, payloads included."""
    starts: tuple[int, ...]
    """Where each payload begins; multiples of 64."""
    lengths: tuple[int, ...]
    """Bytes of each."""
    before: bytes
    """Everything up to the first payload; up to `_end` where there is none."""
    _headers: tuple[bytes, ...]
    """What stands right before each payload but the first."""
    _end: bytes
    """What follows the last payload and its CRC-32."""
    _crc_offsets: tuple[int, ...]
    """Where in `_end` each payload's CRC-32 goes."""

    def seal(self, crcs: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, bytes) of all that is not in `before` and no payload, for payloads with these CRC-32s.

        What follows a payload is yielded as soon as its CRC-32 is drawn.
        """
        end = bytearray(self._end)
        behind: list[bytes | bytearray] = [*self._headers, end] if self.starts else []
        placed = zip(self.starts, self.lengths, self._crc_offsets, behind, strict=True)
        for (start, length, at, follows), crc32 in zip(placed, crcs, strict=True):
            end[at : at + 4] = crc32.to_bytes(4, "little")
            yield start + length, _descriptor(crc32, length) + bytes(follows)
        if not self.starts:
            yield len(self.before), self._end


@dataclass(frozen=True, slots=True)
class ItemFrame:
    """An item, an archive of one payload, without it."""

    nbytes: int
    """Length of the whole item, payload included."""
    payload_offset: int
    """A multiple of 64."""
    payload_nbytes: int
    before: bytes
    """What comes before the payload, whatever that is."""
    _after: bytes
    _crc_offset: int
    """Where the payload's CRC-32 goes in `_after`, beside its beginning."""

    def after(self, crc32: int) -> bytes:
        """Return the bytes after a payload with this CRC-32."""
        crc, at = crc32.to_bytes(4, "little"), self._crc_offset
        return self._after[:4] + crc + self._after[8:at] + crc + self._after[at + 4 :]

    def unseal(self, before: bytes, after: bytes) -> int | None:
        """Return the CRC-32 in what `after` has returned; None for any other bytes."""
        crc32 = int.from_bytes(after[4:8], "little")
        return crc32 if self.before == before and self.after(crc32) == after else None


@lru_cache(maxsize=4096)
def item_frame(dtype: DType, sizes: tuple[int, ...]) -> ItemFrame:
    """Return the frame of an item with a row-major tensor of `sizes` logical elements."""
    frame = archive_frame(build_pickle(plain_tensor("0", dtype, sizes)), [dtype.num_bytes(math.prod(sizes))])
    (start,), (length,) = frame.starts, frame.lengths
    ((_, after),) = frame.seal([0])
    crc_offset = len(after) - len(frame._end) + frame._crc_offsets[0]  # noqa: SLF001
    return ItemFrame(frame.nbytes, start, length, frame.before, after, crc_offset)


def archive_frame(pickled: bytes, lengths: Sequence[int], known: Sequence[bytes] = ()) -> ArchiveFrame:
    """Return the frame of an archive, whose `data.pkl` (`pickled`) names the storages "0", "1" and so on.

    `lengths` are the bytes of each storage that is a payload; `known` is the content of those before, a part of the
    frame.
    """
    names = {
        "archive/data.pkl": pickled,
        "archive/.format_version": b"1",
        "archive/.storage_alignment": b"%d" % _ALIGNMENT,
        "archive/byteorder": b"little",
        **{f"archive/data/{key}": content for key, content in enumerate(known)},
    }
    before = bytearray()
    directory = bytearray()
    for name, content in names.items():
        crc32 = zlib.crc32(content)
        directory += _central(name, crc32, len(content), len(before))
        before += _local(name, crc32, len(content), b"") + content
    position = len(before)
    headers, starts, crcs = [], [], []
    for key, length in enumerate(lengths, len(known)):
        name = f"archive/data/{key}"
        header = _payload_header(name, length, position)
        crcs.append(len(directory) + 16)
        directory += _central(name, 0, length, position, flags=_LATER)
        headers.append(header)
        starts.append(position + len(header))
        position = starts[-1] + length + len(_descriptor(0, length))
    version = b"3\n"
    directory += _central("archive/version", zlib.crc32(version), len(version), position)
    last = _local("archive/version", zlib.crc32(version), len(version), b"") + version
    start = position + len(last)
    end = last + directory + _end(num_entries=len(names) + len(lengths) + 1, nbytes=len(directory), start=start)
    return ArchiveFrame(
        position + len(end),
        tuple(starts),
        tuple(lengths),
        bytes(before) + b"".join(headers[:1]),
        tuple(headers[1:]),
        end,
        tuple(len(last) + at for at in crcs),
    )


def _payload_header(name: str, nbytes: int, position: int) -> bytes:
    """Return the local header of a payload, filled up so that the payload is aligned."""
    wide = struct.pack("<2H2Q", 1, 16, 0, 0) if nbytes >= _FULL32 else b""
    # torch pads with an extra field of this kind; its own four bytes count.
    padding = -(position + LOCAL.size + len(name) + len(wide) + 4) % _ALIGNMENT
    return _local(name, 0, nbytes, wide + struct.pack("<2H", 0x4246, padding) + b"Z" * padding, flags=_LATER)


def _descriptor(crc32: int, nbytes: int) -> bytes:
    """Return what follows a payload: its CRC-32, and its size as stored and as unpacked."""
    return struct.pack("<4sI2Q" if nbytes >= _FULL32 else "<4s3I", b"PK\7\10", crc32, nbytes, nbytes)


def _local(name: str, crc32: int, nbytes: int, extra: bytes, *, flags: int = 0) -> bytes:
    """Return a local header."""
    version = 45 if nbytes >= _FULL32 else 20
    short = _FULL32 if nbytes >= _FULL32 else 0 if flags & _LATER else nbytes
    head = LOCAL.pack(b"PK\3\4", version, _UTF8 | flags, 0, 0, _DATE, crc32, short, short, len(name), len(extra))
    return head + name.encode() + extra


def _central(name: str, crc32: int, nbytes: int, offset: int, *, flags: int = 0) -> bytes:
    """Return a line of the central directory."""
    wide = b"".join(struct.pack("<Q", n) for n in (nbytes, nbytes, offset) if n >= _FULL32)
    extra = struct.pack("<2H", 1, len(wide)) + wide if wide else b""
    short = min(nbytes, _FULL32)
    version = 45 if wide else 20
    head = CENTRAL.pack(
        *(b"PK\1\2", version, version, _UTF8 | flags, 0, 0, _DATE, crc32, short, short),
        *(len(name), len(extra), 0, 0, 0, 0, min(offset, _FULL32)),
    )
    return head + name.encode() + extra


def _end(*, num_entries: int, nbytes: int, start: int) -> bytes:
    """Return the end records of a directory of `nbytes` bytes at `start`."""
    wide = b""
    if start >= _FULL32 or num_entries >= _FULL16:
        wide = END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, num_entries, num_entries, nbytes, start)
        wide += LOCATOR.pack(b"PK\6\7", 0, start + nbytes, 1)
    count = min(num_entries, _FULL16)
    return wide + END.pack(b"PK\5\6", 0, 0, count, count, nbytes, min(start, _FULL32), 0)


def plain_tensor(key: str, dtype: DType, sizes: tuple[int, ...]) -> Record:
    """Return the call that rebuilds a row-major tensor of `sizes` logical elements, alone in the storage `key`."""
    if dtype.torch_name is None:
        raise UsageError(f"{dtype.name} cannot be stored: torch has no such dtype")
    if dtype.pack > 1:
        if not sizes or sizes[-1] % dtype.pack:
            raise UsageError(f"{list(sizes)} elements of {dtype.name} end inside a byte")
        sizes = (*sizes[:-1], sizes[-1] // dtype.pack)
    strides = tuple(math.prod(max(size, 1) for size in sizes[dim + 1 :]) for dim in range(len(sizes)))
    num_elems = math.prod(sizes)
    order = Record("collections.OrderedDict", (), None, 0)
    if dtype.torch_storage is not None:
        identifier = ("storage", GlobalName(f"torch.{dtype.torch_storage}"), key, "cpu", num_elems)
        storage = Record(PERSISTENT_ID, (identifier,), None, 0)
        return Record("torch._utils._rebuild_tensor_v2", (storage, 0, sizes, strides, False, order), None, 0)
    nbytes = num_elems * dtype.bits * dtype.pack // 8
    identifier = ("storage", GlobalName("torch.storage.UntypedStorage"), key, "cpu", nbytes)
    storage = Record(PERSISTENT_ID, (identifier,), None, 0)
    kind = GlobalName(f"torch.{dtype.torch_name}")
    return Record("torch._utils._rebuild_tensor_v3", (storage, 0, sizes, strides, False, order, kind), None, 0)
