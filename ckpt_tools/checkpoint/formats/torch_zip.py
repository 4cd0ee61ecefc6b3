"""What `torch.save` writes: one item of a `.distcp` file, which is a whole zip for one tensor, or a zip with many.

Only stored (uncompressed) entries, and of an item only what one dense tensor needs; everything else is refused by name.
The central directory counts: torch writes local headers without sizes.

Sources: PKWARE APPNOTE 6.3.10 (zip, zip64); torch `serialization.py`, `_utils.py`, `caffe2/serialize` (2.13).
"""

from __future__ import annotations

import re
import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.formats._torch_tensor import ItemHead, PickledTensor, parse_tensor_pickle
from ckpt_tools.checkpoint.formats._torch_zip_writer import (
    CENTRAL,
    END,
    END64,
    LOCAL,
    LOCATOR,
    ArchiveFrame,
    ItemFrame,
    archive_frame,
    item_frame,
    plain_tensor,
)
from ckpt_tools.errors import UnreadableError

__all__ = [
    "ArchiveFrame",
    "ItemFrame",
    "ItemHead",
    "archive_frame",
    "check_archive",
    "item_ends",
    "item_frame",
    "parse_item",
    "parse_own_item",
    "plain_tensor",
]

Read = Callable[[int, int], bytes]
"""(offset, nbytes) → exactly these bytes of the archive."""

_Bounds = tuple[int, ...]
"""Increasing: no entry may reach past the next number."""

_WINDOW = 1024
"""Bytes read at either end at once: torch's directory and what comes before its payload fit in."""
_MAX_ENTRIES = 64
_MAX_SMALL_BYTES = 1 << 16
"""Bound of data.pkl and other small entries, in bytes."""
_MAX_ARCHIVE_ENTRIES = 1 << 16
_MAX_ARCHIVE_DIRECTORY_BYTES = 16 << 20
_MAX_STORAGES = 1 << 20
"""Entries of a file with many tensors."""
_MAX_STORAGES_DIRECTORY_BYTES = 256 << 20
_PIECE_BYTES = 1 << 20
"""Bytes of a record that are read at once for its CRC-32."""

_SMALL = {".storage_alignment": rb"\d{1,9}", ".data/serialization_id": rb"[\0-\x7f]*", "version": rb"([1-9]|10)\s*"}
"""Records that torch parses before it loads anything, as far as it takes them."""

_U64 = struct.Struct("<Q")

_FLAG_DESCRIPTOR = 0x08
_FLAGS = 0x800 | _FLAG_DESCRIPTOR
"""All that a stored entry may have: a UTF-8 name, and sizes that follow the data."""
_IS_DIRECTORY = 0x10
"""External attribute of MS-DOS. torch's zip reader believes it, and hands out memory that it has not written to."""
_FULL32 = 0xFFFFFFFF
_FULL16 = 0xFFFF


class _Entry(NamedTuple):
    """One line of the central directory."""

    name: str
    crc32: int
    nbytes: int
    offset: int
    """Of the local header."""


class _Item:
    """An item's bytes, its ends read at once."""

    __slots__ = ("_head", "_read", "_tail", "_tail_start", "nbytes")

    def __init__(self, nbytes: int, read: Read) -> None:
        self.nbytes = nbytes
        self._read = read
        if nbytes <= 4 * _WINDOW:
            self._head = self._tail = read(0, nbytes)
            self._tail_start = 0
        else:
            self._tail_start = nbytes - _WINDOW
            self._tail = read(self._tail_start, _WINDOW)
            self._head = b""

    def get(self, offset: int, nbytes: int) -> bytes:
        """Return bytes that must lie inside the item."""
        end = offset + nbytes
        if offset < 0 or end > self.nbytes:
            raise UnreadableError("the archive's directory points outside of the archive")
        if offset >= self._tail_start:
            return self._tail[offset - self._tail_start : end - self._tail_start]
        if end <= _WINDOW:
            if not self._head:
                self._head = self._read(0, _WINDOW)
            return self._head[offset:end]
        return self._read(offset, nbytes)


def item_ends(item_nbytes: int) -> tuple[tuple[int, int], ...]:
    """Return (offset, nbytes) of what `parse_item` and `parse_own_item` read, of what torch and ckpt write."""
    if item_nbytes <= 4 * _WINDOW:
        return ((0, item_nbytes),)
    return (0, _WINDOW), (item_nbytes - _WINDOW, _WINDOW)


def parse_item(item_nbytes: int, read: Read, *, thorough: bool = False) -> ItemHead:
    """Read the head of one tensor item, an archive of `item_nbytes`.

    `read` returns (offset, nbytes) of it: it is called twice for what torch and ckpt write, once when that is small.
    `thorough` looks at every entry, also at those that only torch reads, and checks its content against its CRC-32.
    """
    item = _Item(item_nbytes, read)
    entries, bounds = _parse_directory(item)
    root = _root(entries)
    pickled = parse_tensor_pickle(_small(item, entries, f"{root}data.pkl", bounds))
    byteorder = entries.get(f"{root}byteorder")
    if byteorder is not None and _small(item, entries, byteorder.name, bounds) != b"little":
        raise UnreadableError("the item is not little-endian")
    records = [entry for name, entry in entries.items() if name.startswith(f"{root}data/")]
    record = entries.get(f"{root}data/{pickled.key}")
    if len(records) != pickled.num_storages or record is None:
        raise UnreadableError(f"the archive has {len(records)} data records, data/{pickled.key} was expected")
    if thorough:
        _check_entries(item, entries, root, record, bounds)
    return _head(item, record, pickled, bounds)


def parse_own_item(item_nbytes: int, dtype: DType, sizes: tuple[int, ...], read: Read) -> ItemHead | None:
    """Return what `parse_item` would of an item whose frame is, byte for byte, the one that ckpt writes; else None."""
    if dtype.torch_name is None or (dtype.pack > 1 and (not sizes or sizes[-1] % dtype.pack)):
        return None
    frame = item_frame(dtype, sizes)
    if frame.nbytes != item_nbytes:
        return None
    end = frame.payload_offset + frame.payload_nbytes
    if item_nbytes <= 4 * _WINDOW:
        item = read(0, item_nbytes)
        before, after = item[: frame.payload_offset], item[end:]
    else:
        before, after = read(0, frame.payload_offset), read(end, item_nbytes - end)
    crc32 = frame.unseal(before, after)
    if crc32 is None:
        return None
    return ItemHead(
        dtype=dtype,
        shape=sizes,
        strides=None,
        payload_offset=frame.payload_offset,
        payload_nbytes=frame.payload_nbytes,
        crc32=crc32 if crc32 or not frame.payload_nbytes else None,
    )


def check_archive(nbytes: int, read: Read, *, content: bool = True) -> bool:
    """Check every record of any `torch.save` zip against its CRC-32, whatever it holds; nothing is unpickled.

    Return False when some records have no CRC-32, or when this is no zip at all. Without `content`, only its directory
    is read. Memory is bounded by the directory and one piece.
    """
    begins = nbytes >= 4 and read(0, 4) == b"PK\3\4"
    ends = nbytes >= END.size and read(nbytes - END.size, 4) == b"PK\5\6"
    if not begins and not ends:
        return False
    if not begins:
        raise UnreadableError("the item does not begin as the zip that ends it does")
    item = _Item(nbytes, read)
    entries, bounds = _parse_directory(
        item, max_entries=_MAX_ARCHIVE_ENTRIES, max_directory_bytes=_MAX_ARCHIVE_DIRECTORY_BYTES
    )
    if not content:
        return True
    is_whole = True
    for entry in entries.values():
        start, crc32 = _data_start(item, entry, bounds), 0
        for at in range(0, entry.nbytes, _PIECE_BYTES):
            crc32 = zlib.crc32(item.get(start + at, min(_PIECE_BYTES, entry.nbytes - at)), crc32)
        if crc32 != entry.crc32:
            if entry.crc32:
                raise UnreadableError(f"entry '{entry.name}' of the archive is damaged: its CRC-32 differs")
            is_whole = False
    return is_whole


class Record(NamedTuple):
    """A file of an archive."""

    start: int
    """First byte of its content in the archive."""
    nbytes: int
    crc32: int | None
    """CRC-32 of its content; None where the writer computed none."""


def parse_archive(nbytes: int, read: Read) -> dict[str, Record]:
    """Return every record of a `torch.save` zip, by its name below the folder that all of them lie in."""
    item = _Item(nbytes, read)
    entries, bounds = _parse_directory(
        item, max_entries=_MAX_STORAGES, max_directory_bytes=_MAX_STORAGES_DIRECTORY_BYTES
    )
    root = _root(entries)
    return {
        entry.name[len(root) :]: Record(
            _data_start(item, entry, bounds), entry.nbytes, entry.crc32 if entry.crc32 or not entry.nbytes else None
        )
        for entry in entries.values()
    }


def check_small(name: str, content: bytes) -> None:
    """Refuse a small record, by its name below the archive's folder, that torch.load does not parse."""
    if name in _SMALL and re.fullmatch(_SMALL[name], content) is None:
        raise UnreadableError(f"torch.load does not take the archive's {name}, got {content[:40]!r}")


def _check_entries(item: _Item, entries: dict[str, _Entry], root: str, record: _Entry, bounds: _Bounds) -> None:
    if f"{root}version" not in entries:
        raise UnreadableError("the archive has no version, without which torch does not load it")
    for entry in entries.values():
        if entry is not record:
            check_small(entry.name[len(root) :], _small(item, entries, entry.name, bounds))


def _head(item: _Item, record: _Entry, pickled: PickledTensor, bounds: _Bounds) -> ItemHead:
    """Hold the data record against what the pickle says, and find the tensor in it."""
    if record.nbytes != pickled.storage_nbytes:
        raise UnreadableError(
            f"the data record has {record.nbytes} bytes, its tensor's storage {pickled.storage_nbytes}"
        )
    start = _data_start(item, record, bounds)
    is_whole = pickled.head.payload_nbytes == record.nbytes
    # A writer that did not compute the CRC leaves 0; for no bytes at all 0 is right.
    knows_crc = is_whole and (record.crc32 != 0 or record.nbytes == 0)
    return replace(
        pickled.head,
        payload_offset=start + pickled.head.payload_offset,
        crc32=record.crc32 if knows_crc else None,
    )


def _parse_directory(
    item: _Item, *, max_entries: int = _MAX_ENTRIES, max_directory_bytes: int = _MAX_SMALL_BYTES
) -> tuple[dict[str, _Entry], _Bounds]:
    """Return the entries by name, and where each of them and then the central directory begins."""
    if item.nbytes < END.size:
        raise UnreadableError(f"an item of {item.nbytes} bytes is too short for a zip")
    end = item.nbytes - END.size
    magic, disk, start_disk, here, count, nbytes, start, comment = END.unpack(item.get(end, END.size))
    if magic != b"PK\5\6" or comment:
        raise UnreadableError("the archive does not end as a zip does: truncated, or bytes after its end")
    locator = item.get(end - LOCATOR.size, LOCATOR.size) if end >= LOCATOR.size else b""
    if locator.startswith(b"PK\6\7"):
        short = (disk, start_disk, here, count, nbytes, start)
        end, (disk, start_disk, here, count, nbytes, start) = _parse_end64(item, locator, end)
        for small, full, limit in zip(
            short, (0, 0, here, count, nbytes, start), (_FULL16,) * 4 + (_FULL32,) * 2, strict=True
        ):
            if small not in (full, limit):
                raise UnreadableError("the archive's two end records disagree")
    if disk or start_disk or here != count:
        raise UnreadableError("the archive is a part of a zip that is split over disks")
    if start + nbytes != end:
        raise UnreadableError(f"the archive's directory ends at byte {start + nbytes}, its end record is at {end}")
    if not 0 < count <= max_entries or nbytes > max_directory_bytes:
        raise UnreadableError(f"the archive's directory has {count} entries in {nbytes} bytes, which is no tensor's")
    entries = _parse_entries(item.get(start, nbytes), count, start)
    return entries, (*(entry.offset for entry in entries.values()), start)


def _parse_end64(item: _Item, locator: bytes, end: int) -> tuple[int, tuple[int, int, int, int, int, int]]:
    _, disk, offset, num_disks = LOCATOR.unpack(locator)
    if disk or num_disks != 1 or offset + END64.size + LOCATOR.size != end:
        raise UnreadableError("the archive's zip64 locator does not point at the record before it")
    magic, size, _, _, disk, start_disk, here, count, nbytes, start = END64.unpack(item.get(offset, END64.size))
    if magic != b"PK\6\6" or size != END64.size - 12:
        raise UnreadableError("the archive's zip64 end record is malformed")
    return offset, (disk, start_disk, here, count, nbytes, start)


def _parse_entries(directory: bytes, count: int, start: int) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    position = 0
    previous_end = 0
    try:
        for _ in range(count):
            (magic, _, _, flags, method, _, _, crc32, packed, nbytes, name_length, extra_length, comment_length,
             disk, _, attributes, offset) = CENTRAL.unpack_from(directory, position)  # fmt: skip
            name_end = position + CENTRAL.size + name_length
            name = str(directory[position + CENTRAL.size : name_end], "ascii")
            extra = directory[name_end : name_end + extra_length]
            position = name_end + extra_length
            if magic != b"PK\1\2" or comment_length or disk or flags & ~_FLAGS:
                raise UnreadableError("the archive's directory is malformed")
            if _FULL32 in (packed, nbytes, offset):
                nbytes, packed, offset = _widen(extra, nbytes, packed, offset)
            if attributes & _IS_DIRECTORY:
                raise UnreadableError(f"entry '{name}' of the archive is marked as a directory")
            if "/code/" in name or name.endswith("/constants.pkl"):
                raise UnreadableError(
                    "a TorchScript archive: a program with its weights, which ckpt does not read",
                    hint="where you trust it: torch.save(torch.jit.load(FILE).state_dict(), NEW)",
                )
            if method or packed != nbytes:
                raise UnreadableError(f"entry '{name}' of the archive is compressed")
            if name in entries:
                raise UnreadableError(f"the archive has two entries '{name}'")
            if offset < previous_end or offset + LOCAL.size + name_length + nbytes > start:
                raise UnreadableError(f"entry '{name}' of the archive overlaps what lies around it")
            previous_end = offset + LOCAL.size + name_length + nbytes
            entries[name] = _Entry(name, crc32, nbytes, offset)
    except (struct.error, UnicodeDecodeError) as error:
        raise UnreadableError("the archive's directory is malformed") from error
    if position != len(directory):
        raise UnreadableError("the archive's directory has bytes after its last entry")
    return entries


def _widen(extra: bytes, nbytes: int, packed: int, offset: int) -> tuple[int, int, int]:
    """Replace saturated numbers by those of the zip64 extra field, which has them in this order."""
    position = 0
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, position)
        if kind == 1:
            numbers = iter(_U64.iter_unpack(extra[position + 4 : position + 4 + size - size % 8]))
            wide = [next(numbers, (n,))[0] if n == _FULL32 else n for n in (nbytes, packed, offset)]
            return wide[0], wide[1], wide[2]
        position += 4 + size
    return nbytes, packed, offset


def _root(entries: dict[str, _Entry]) -> str:
    """Return the one folder that all entries lie in, with its slash."""
    first = next(iter(entries))
    root = first[: first.find("/") + 1]
    if not root or not all(name.startswith(root) for name in entries):
        raise UnreadableError("the archive's entries do not share one folder")
    return root


def _data_start(item: _Item, entry: _Entry, bounds: _Bounds) -> int:
    """Return where an entry's data begin, from its local header, which must not contradict the directory."""
    header = item.get(entry.offset, LOCAL.size)
    magic, _, flags, method, _, _, crc32, packed, nbytes, name_length, extra_length = LOCAL.unpack(header)
    start: int = entry.offset + LOCAL.size + name_length + extra_length
    later = flags & _FLAG_DESCRIPTOR  # CRC and sizes follow the data instead
    crcs = (entry.crc32, 0) if later else (entry.crc32,)
    sizes = (min(entry.nbytes, _FULL32), _FULL32, *((0,) if later else ()))
    if (
        magic != b"PK\3\4"
        or method
        or flags & ~_FLAGS
        or crc32 not in crcs
        or packed not in sizes
        or nbytes not in sizes
        or item.get(entry.offset + LOCAL.size, name_length) != entry.name.encode()
    ):
        raise UnreadableError(f"entry '{entry.name}' of the archive contradicts its directory")
    if start + entry.nbytes > bounds[bisect_right(bounds, entry.offset)]:
        raise UnreadableError(f"entry '{entry.name}' of the archive reaches into what follows it")
    return start


def _small(item: _Item, entries: dict[str, _Entry], name: str, bounds: _Bounds) -> bytes:
    entry = entries.get(name)
    if entry is None:
        raise UnreadableError(f"the archive has no {name}")
    if entry.nbytes > _MAX_SMALL_BYTES:
        raise UnreadableError(f"the archive's {name} has {entry.nbytes} bytes")
    content = item.get(_data_start(item, entry, bounds), entry.nbytes)
    if entry.crc32 and zlib.crc32(content) != entry.crc32:
        raise UnreadableError(f"entry '{name}' of the archive is damaged: its CRC-32 differs")
    return content
