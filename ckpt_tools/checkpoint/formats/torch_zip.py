"""What `torch.save` writes: one item of a `.distcp` file, which is a whole zip for one tensor, or a zip with many.

Only stored (uncompressed) entries, and of an item only what one dense tensor needs; everything else is refused by name.
The central directory counts: torch writes local headers without sizes.

Sources: PKWARE APPNOTE 6.3.10 (zip, zip64); torch `serialization.py`, `_utils.py`, `caffe2/serialize` (2.13).
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.formats._pickle_values import PERSISTENT_ID, GlobalName, Record, build_pickle
from ckpt_tools.checkpoint.formats._torch_tensor import ItemHead, PickledTensor, parse_tensor_pickle
from ckpt_tools.errors import UnreadableError, UsageError

# The bytes around the payloads of a `torch.save` zip, one or many, as `torch.load` wants them; the pickle is what
# torch's own pickler writes for a contiguous CPU tensor, byte for byte.

CENTRAL = struct.Struct("<4s6H3I5H2I")
LOCAL = struct.Struct("<4s5H3I2H")
END = struct.Struct("<4s4H2IH")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR = struct.Struct("<4sIQI")

_ALIGNMENT = 64  # Payloads begin at multiples of this within their archive, as torch aligns storages
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

    nbytes: int  # Length of the whole archive, payloads included
    starts: tuple[int, ...]  # Where each payload begins; multiples of 64
    lengths: tuple[int, ...]  # Bytes of each
    before: bytes  # Everything up to the first payload; up to `_end` where there is none
    _headers: tuple[bytes, ...]  # What stands right before each payload but the first
    _end: bytes  # What follows the last payload and its CRC-32
    _crc_offsets: tuple[int, ...]  # Where in `_end` each payload's CRC-32 goes

    def seal(self, crcs: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, bytes) of all that is not in `before` and no payload, for payloads with these CRC-32s."""
        # What follows a payload is yielded as soon as its CRC-32 is drawn.
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

    nbytes: int  # Length of the whole item, payload included
    payload_offset: int  # A multiple of 64
    payload_nbytes: int
    before: bytes  # What comes before the payload, whatever that is
    _after: bytes
    _crc_offset: int  # Where the payload's CRC-32 goes in `_after`, beside its beginning

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
    """Return the frame of an archive, whose `data.pkl` (`pickled`) names the storages "0", "1" and so on."""
    # `lengths` are the bytes of each storage that is a payload; `known` is the content of those before, a part of the
    # frame.
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


Read = Callable[[int, int], bytes]  # (offset, nbytes) → exactly these bytes of the archive

_Bounds = tuple[int, ...]  # Increasing: no entry may reach past the next number

_WINDOW = 1024  # Bytes read at either end at once: torch's directory and what comes before its payload fit in
_MAX_ENTRIES = 64
_MAX_SMALL_BYTES = 1 << 16  # Bound of data.pkl and other small entries, in bytes
_MAX_ARCHIVE_ENTRIES = 1 << 16
_MAX_ARCHIVE_DIRECTORY_BYTES = 16 << 20
_MAX_STORAGES = 1 << 20  # Entries of a file with many tensors
_MAX_STORAGES_DIRECTORY_BYTES = 256 << 20
_PIECE_BYTES = 1 << 20  # Bytes of a record that are read at once for its CRC-32

_SMALL = {".storage_alignment": rb"\d{1,9}", ".data/serialization_id": rb"[\0-\x7f]*", "version": rb"([1-9]|10)\s*"}
"""Records that torch parses before it loads anything, as far as it takes them."""

_U64 = struct.Struct("<Q")

_FLAG_DESCRIPTOR = 0x08
_FLAGS = 0x800 | _FLAG_DESCRIPTOR  # All that a stored entry may have: a UTF-8 name, and sizes that follow the data
_IS_DIRECTORY = 0x10  # External attribute of MS-DOS: torch's zip reader hands out memory not written to


class _ZipEntry(NamedTuple):
    """One line of the central directory."""

    name: str
    crc32: int
    nbytes: int
    offset: int  # Of the local header


class _Archive:
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
    """Read the head of one tensor item, an archive of `item_nbytes`."""
    # `read` returns (offset, nbytes) of it: it is called twice for what torch and ckpt write, once when that is small.
    # `thorough` looks at every entry, also at those that only torch reads, and checks its content against its CRC-32.
    item = _Archive(item_nbytes, read)
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
    """Check every record of any `torch.save` zip against its CRC-32, whatever it holds; nothing is unpickled."""
    # Return False when some records have no CRC-32, or when this is no zip at all. Without `content`, only its
    # directory is read. Memory is bounded by the directory and one piece.
    begins = nbytes >= 4 and read(0, 4) == b"PK\3\4"
    ends = nbytes >= END.size and read(nbytes - END.size, 4) == b"PK\5\6"
    if not begins and not ends:
        return False
    if not begins:
        raise UnreadableError("the item does not begin with the zip that ends it")
    item = _Archive(nbytes, read)
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


class ArchiveRecord(NamedTuple):
    """A file of an archive."""

    start: int  # First byte of its content in the archive
    nbytes: int
    crc32: int | None  # CRC-32 of its content; None where the writer computed none


def parse_archive(nbytes: int, read: Read) -> dict[str, ArchiveRecord]:
    """Return every record of a `torch.save` zip, by its name below the folder that all of them lie in."""
    item = _Archive(nbytes, read)
    entries, bounds = _parse_directory(
        item, max_entries=_MAX_STORAGES, max_directory_bytes=_MAX_STORAGES_DIRECTORY_BYTES
    )
    root = _root(entries)
    return {
        entry.name[len(root) :]: ArchiveRecord(
            _data_start(item, entry, bounds), entry.nbytes, entry.crc32 if entry.crc32 or not entry.nbytes else None
        )
        for entry in entries.values()
    }


def check_small(name: str, content: bytes) -> None:
    """Refuse a small record, by its name below the archive's folder, that torch.load does not parse."""
    if name in _SMALL and re.fullmatch(_SMALL[name], content) is None:
        raise UnreadableError(f"torch.load does not accept the archive's {name}, got {content[:40]!r}")


def _check_entries(
    item: _Archive, entries: dict[str, _ZipEntry], root: str, record: _ZipEntry, bounds: _Bounds
) -> None:
    if f"{root}version" not in entries:
        raise UnreadableError("the archive has no version, without which torch does not load it")
    for entry in entries.values():
        if entry is not record:
            check_small(entry.name[len(root) :], _small(item, entries, entry.name, bounds))


def _head(item: _Archive, record: _ZipEntry, pickled: PickledTensor, bounds: _Bounds) -> ItemHead:
    """Hold the data record against what the pickle says, and find the tensor in it."""
    if record.nbytes != pickled.storage_nbytes:
        what = f"the data record has {record.nbytes} bytes, but its tensor's storage has {pickled.storage_nbytes}"
        raise UnreadableError(what)
    start = _data_start(item, record, bounds)
    is_whole = pickled.head.payload_nbytes == record.nbytes
    # A writer that did not compute the CRC leaves 0; for no bytes at all 0 is right.
    knows_crc = is_whole and (record.crc32 != 0 or record.nbytes == 0)
    return replace(
        pickled.head, payload_offset=start + pickled.head.payload_offset, crc32=record.crc32 if knows_crc else None
    )


def _parse_directory(
    item: _Archive, *, max_entries: int = _MAX_ENTRIES, max_directory_bytes: int = _MAX_SMALL_BYTES
) -> tuple[dict[str, _ZipEntry], _Bounds]:
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
        raise UnreadableError(f"the archive's directory has {count} entries in {nbytes} bytes, which no tensor has")
    entries = _parse_entries(item.get(start, nbytes), count, start)
    return entries, (*(entry.offset for entry in entries.values()), start)


def _parse_end64(item: _Archive, locator: bytes, end: int) -> tuple[int, tuple[int, int, int, int, int, int]]:
    _, disk, offset, num_disks = LOCATOR.unpack(locator)
    if disk or num_disks != 1 or offset + END64.size + LOCATOR.size != end:
        raise UnreadableError("the archive's zip64 locator does not point at the record before it")
    magic, size, _, _, disk, start_disk, here, count, nbytes, start = END64.unpack(item.get(offset, END64.size))
    if magic != b"PK\6\6" or size != END64.size - 12:
        raise UnreadableError("the archive's zip64 end record is malformed")
    return offset, (disk, start_disk, here, count, nbytes, start)


def _parse_entries(directory: bytes, count: int, start: int) -> dict[str, _ZipEntry]:
    entries: dict[str, _ZipEntry] = {}
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
                what = "a TorchScript archive: a program with its weights, which ckpt does not read"
                hint = "if you trust it: torch.save(torch.jit.load(FILE).state_dict(), NEW)"
                raise UnreadableError(what, hint=hint)
            if name.endswith("/archive_format"):
                what = "an archive of torch.export: a program with its weights, which ckpt does not read"
                hint = "if you trust it: torch.save(dict(torch.export.load(FILE).state_dict), NEW)"
                raise UnreadableError(what, hint=hint)
            if method or packed != nbytes:
                raise UnreadableError(f"entry '{name}' of the archive is compressed")
            if name in entries:
                raise UnreadableError(f"the archive has two entries '{name}'")
            if offset < previous_end or offset + LOCAL.size + name_length + nbytes > start:
                raise UnreadableError(f"entry '{name}' of the archive overlaps what lies around it")
            previous_end = offset + LOCAL.size + name_length + nbytes
            entries[name] = _ZipEntry(name, crc32, nbytes, offset)
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


def _root(entries: dict[str, _ZipEntry]) -> str:
    """Return the one folder that all entries lie in, with its slash."""
    first = next(iter(entries))
    root = first[: first.find("/") + 1]
    if not root or not all(name.startswith(root) for name in entries):
        raise UnreadableError("the archive's entries do not share one folder")
    return root


def _data_start(item: _Archive, entry: _ZipEntry, bounds: _Bounds) -> int:
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


def _small(item: _Archive, entries: dict[str, _ZipEntry], name: str, bounds: _Bounds) -> bytes:
    entry = entries.get(name)
    if entry is None:
        raise UnreadableError(f"the archive has no {name}")
    if entry.nbytes > _MAX_SMALL_BYTES:
        raise UnreadableError(f"the archive's {name} has {entry.nbytes} bytes")
    content = item.get(_data_start(item, entry, bounds), entry.nbytes)
    if entry.crc32 and zlib.crc32(content) != entry.crc32:
        raise UnreadableError(f"entry '{name}' of the archive is damaged: its CRC-32 differs")
    return content
