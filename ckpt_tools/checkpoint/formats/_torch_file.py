"""A file that `torch.save` wrote, now (a zip) or before 1.6 (a stream): its pickle, inert, and where its storages lie.

Source: torch `serialization.py` (`_save`, `_legacy_save`, `_legacy_load`; 2.13).
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckpt_tools.checkpoint.dtypes import BY_TORCH_STORAGE
from ckpt_tools.checkpoint.entries import MAX_ELEMS, ByteSpan
from ckpt_tools.checkpoint.formats._pickle_objects import MAX_PICKLE_BYTES, Pickled, parse_exactly, parse_objects
from ckpt_tools.checkpoint.formats._pickle_values import GlobalName
from ckpt_tools.checkpoint.formats.torch_zip import ArchiveRecord, check_small, parse_archive
from ckpt_tools.errors import UnreadableError
from ckpt_tools.storage.source import Source
from ckpt_tools.text import escape_name

_ZIP = b"PK\3\4"
_FIRST_RECORD = re.compile(rb"[^/]+/(data\.pkl$|data/|version$|byteorder$|\.format_version$|constants|code/)")
_MAGIC = 0x1950A86A20F9469CFC6C  # The first of the pickles in a stream
_PROTOCOL = 1001
_FIRST_BYTES = 1 << 20  # Read at first of a pickle of unknown length; then eight times as many, and so on
_DEVICE = re.compile(
    r"cpu|meta|(cuda|mps|xpu|xla|hpu|npu|mlu|musa|ipu|mtia|vulkan|privateuseone|maia|hip)(:\d+)?", re.ASCII
)
"""Where a storage was when it was saved."""
_QUANTISED = {"QInt8Storage": 1, "QUInt8Storage": 1, "QInt32Storage": 4, "QUInt4x2Storage": 1, "QUInt2x4Storage": 1}
"""Bytes of an element of storages that are skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFile:
    """What lies in one file."""

    name: str
    value: object  # What was saved, as `parse_objects` returns it
    storages: Mapping[str, ArchiveRecord]  # Key → where the bytes of a storage lie in the file
    sums: tuple[tuple[ByteSpan, int], ...]  # Every part of the file whose CRC-32 is recorded, the pickle too
    num_unsummed: int  # Storages without one


def is_torch_file(head: bytes) -> bool:
    """Does a file begin so? A zip counts when its first record is one of `torch.save`'s."""
    if head.startswith(_ZIP):
        length = int.from_bytes(head[26:28], "little")
        return _FIRST_RECORD.match(head[30 : 30 + length]) is not None or length > len(head) - 30
    return head.startswith(b"\x80") and _MAGIC.to_bytes(10, "little") in head[:24]


def read_torch_file(source: Source, name: str, *, exactly: bool = False) -> TorchFile:
    """Read the pickle of a file and find its storages; no tensor is read."""
    # With `exactly`, the pickle of a zip is read so that it can be written again (`parse_exactly`).
    try:
        is_zip = source.read(name, 0, min(source.size(name), len(_ZIP))) == _ZIP
        if exactly or is_zip:
            return _read_zip(source, name, exactly=exactly)
        return _read_stream(source, name)
    except UnreadableError as error:
        if error.where is None:
            error.where = escape_name(os.path.join(source.root, name))
        raise


def _read_zip(source: Source, name: str, *, exactly: bool) -> TorchFile:
    records = parse_archive(source.size(name), lambda offset, nbytes: source.read(name, offset, nbytes))
    if "data.pkl" not in records:
        raise UnreadableError("the archive has no data.pkl: torch.save did not write it")
    for record in ("data.pkl", "byteorder"):
        if record in records and records[record].nbytes > MAX_PICKLE_BYTES:
            raise UnreadableError(f"{record} has {records[record].nbytes} bytes, the limit is {MAX_PICKLE_BYTES}")
    if "byteorder" in records and _content(source, name, records["byteorder"]) != b"little":
        raise UnreadableError("the file is not little-endian")
    content = _content(source, name, records["data.pkl"])
    if records["data.pkl"].crc32 not in (None, zlib.crc32(content)):
        raise UnreadableError("data.pkl is damaged: its CRC-32 differs", hint="restore the file or copy it again")
    for small in {"version", ".storage_alignment", ".data/serialization_id"} & records.keys():
        check_small(small, source.read(name, records[small].start, min(records[small].nbytes, 64)))
    value = parse_exactly(content) if exactly else _parse_whole(content)
    storages = {key[len("data/") :]: record for key, record in records.items() if key.startswith("data/")}
    spans = ((ByteSpan(file=name, offset=r.start, nbytes=r.nbytes), r.crc32) for r in records.values() if r.nbytes)
    return TorchFile(
        name=name,
        value=value,
        storages=storages,
        sums=tuple((span, crc32) for span, crc32 in spans if crc32 is not None),
        num_unsummed=sum(record.crc32 is None for record in storages.values()),
    )


def _parse_whole(content: bytes) -> object:
    pickled = parse_objects(content)
    if pickled.nbytes != len(content):
        raise UnreadableError(f"{len(content) - pickled.nbytes} bytes follow the end of the pickle")
    return pickled.value


def _content(source: Source, name: str, record: ArchiveRecord) -> bytes:
    return source.read(name, record.start, record.nbytes)


def _read_stream(source: Source, name: str) -> TorchFile:
    """Read five pickles in a row, and then every storage's length where it lies."""
    position = 0
    values = []
    for _ in range(5):
        pickled = _pickle_at(source, name, position)
        position += pickled.nbytes
        values.append(pickled)
    magic, protocol, system, saved, keys = (each.value for each in values)
    little = system.get("little_endian") if type(system) is dict else None
    if magic != _MAGIC or protocol != _PROTOCOL or type(little) is not bool or type(keys) is not list:
        raise UnreadableError("the file does not begin like one that torch.save before 1.6 wrote")
    if not little:
        raise UnreadableError("the file is not little-endian")
    if sorted(map(str, keys)) != sorted(values[3].storages):
        raise UnreadableError("the list of storages does not match the tensors' storages")
    for key, of in values[3].storages.items():  # nothing else of a stream is summed: a flipped bit shows here
        if type(of[3]) is not str or _DEVICE.fullmatch(of[3]) is None:
            raise UnreadableError(f"storage {key} is on the device {of[3]!r}, which torch.load does not support")
    storages = dict(_stream_storages(source, name, position, keys, values[3].storages))
    return TorchFile(name=name, value=saved, storages=storages, sums=(), num_unsummed=len(storages))


def _stream_storages(
    source: Source, name: str, position: int, keys: list[object], named: Mapping[str, tuple[object, ...]]
) -> Iterator[tuple[str, ArchiveRecord]]:
    size = source.size(name)
    for key in map(str, keys):
        width, num_elems = _width(named[key])
        (found,) = (int.from_bytes(source.read(name, position, 8), "little", signed=True),)
        if found != num_elems:
            raise UnreadableError(f"storage {key} has {found} elements, but its tensors record {num_elems}")
        yield key, ArchiveRecord(position + 8, num_elems * width, None)
        position += 8 + num_elems * width
    if position != size:
        state = "truncated" if position > size else "followed by unknown bytes"
        what = f"the file is {state}: its storages end at byte {position}, the file has {size}"
        raise UnreadableError(what, hint="restore the file or copy it again")


def _width(identifier: tuple[object, ...]) -> tuple[int, int]:
    """Return the bytes of an element of a storage, and how many there are."""
    match identifier:
        case ("storage", GlobalName(name=name), str(), str(), int(num_elems), *_):
            kind = name.rpartition(".")[2]
            dtype = BY_TORCH_STORAGE.get(kind)
            width = 1 if kind == "UntypedStorage" else _QUANTISED.get(kind, 0) if dtype is None else dtype.bits // 8
            if width and 0 <= num_elems <= MAX_ELEMS:
                return width, num_elems
    raise UnreadableError("a storage has an unknown type or an impossible length")


def _pickle_at(source: Source, name: str, position: int) -> Pickled:
    """Read the pickle that begins at `position`."""
    left = source.size(name) - position
    wanted = _FIRST_BYTES
    while True:
        content = source.read(name, position, max(0, min(wanted, left)))
        try:
            return parse_objects(content)
        except UnreadableError:
            if wanted >= min(left, MAX_PICKLE_BYTES):
                raise
        wanted = min(8 * wanted, MAX_PICKLE_BYTES)
