"""Attacks through the items of `.distcp` files, which torch unzips and unpickles."""

from __future__ import annotations

import io
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable

from corrupt.attacks.opcodes import PROTO, call, item, name, number, text, tuple_of, write_run
from corrupt.attacks.pickles import Payload
from corrupt.attacks.recipe import Case, add, attack, found, harmless

CENTRAL = b"PK\1\2"
LOCAL = b"PK\3\4"
END = b"PK\5\6"
PAYLOAD = bytes(range(24))


def _item(title: str, tries: str, make: Callable[[Case], bytes] | bytes, codes=None, **options) -> None:
    """An item that verify finds, and that no conversion takes."""

    def build(case: Case) -> None:
        raw = make(case) if callable(make) else make
        # `.metadata` must let it pass: an item is at least as long as its elements.
        write_run(case.source, content=raw, length=max(len(raw), 25))

    add(f"zip-{title}", tries, build, found() if codes is None else codes, **options)


def tensor_pickle(
    *,
    key: bytes = text("0"),
    num_elems: bytes = number(6),
    offset: bytes = number(0),
    shape: bytes = tuple_of(number(2), number(3)),
    strides: bytes = tuple_of(number(3), number(1)),
    storage: bytes | None = None,
    function: bytes | None = None,
    extra: bytes = b"",
) -> bytes:
    """data.pkl of a float32 tensor, sound unless told otherwise."""
    own = tuple_of(text("storage"), name("torch", "FloatStorage"), key, text("cpu"), num_elems) + b"Q"
    hooks = name("collections", "OrderedDict") + b")R"
    args = tuple_of(
        own if storage is None else storage, offset, shape, strides, b"\x89", hooks, *([extra] if extra else [])
    )
    return PROTO + (function or name("torch._utils", "_rebuild_tensor_v2")) + args + b"R."


def archive(
    pickled: bytes | None = None,
    entries: list[tuple[str, bytes]] | None = None,
    *,
    compression: int = zipfile.ZIP_STORED,
) -> bytes:
    """An item as Python's own zipfile writes it."""
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", compression) as file:
        warnings.simplefilter("ignore")  # duplicate names are the point
        for entry, content in entries or [
            ("archive/data.pkl", tensor_pickle() if pickled is None else pickled),
            ("archive/version", b"3\n"),
            ("archive/data/0", PAYLOAD),
        ]:
            file.writestr(entry, content)
    return out.getvalue()


def _patch(raw: bytes, magic: bytes, which: int, offset: int, new: bytes) -> bytes:
    """Overwrite bytes of the `which`th record with this magic."""
    at = -1
    for _ in range(which + 1):
        at = raw.index(magic, at + 1)
    return raw[: at + offset] + new + raw[at + offset + len(new) :]


U32 = struct.Struct("<I").pack
U16 = struct.Struct("<H").pack
U64 = struct.Struct("<Q").pack
NAMES = ("archive/data.pkl", "archive/version", "archive/data/0")
SOUND = [(NAMES[0], tensor_pickle()), (NAMES[1], b"3\n"), (NAMES[2], PAYLOAD)]

_item("sound", "nothing: what the others start from", archive(), harmless())


def _exploit(case: Case) -> bytes:
    import pickle

    return pickle.dumps(Payload(case.shell), 2)


_item("pickle-exploit", "data.pkl calls os.system", lambda case: archive(_exploit(case)))
_item("bare-exploit", "the item is a bare pickle that calls os.system", lambda case: _exploit(case) + bytes(64))
# fmt: off
_item("two-pickles", "an innocent data.pkl first, one that executes second",
    lambda case: archive(entries=[*SOUND, (NAMES[0], _exploit(case))]))
_item("two-pickles-swapped", "the one that executes first",
    lambda case: archive(entries=[(NAMES[0], _exploit(case)), *SOUND]))
_item("two-payloads", "two data records of one name", archive(entries=[*SOUND, (NAMES[2], PAYLOAD[::-1])]))
_item("two-records", "a second data record", archive(entries=[*SOUND, ("archive/data/1", PAYLOAD)]))
_item("no-record", "no data record", archive(entries=SOUND[:2]))
_item("no-pickle", "no data.pkl", archive(entries=SOUND[1:]))
_item("two-folders", "entries in two folders", archive(entries=[*SOUND, ("other/data.pkl", b"")]))
_item("no-folder", "entries in no folder", archive(entries=[(n.partition("/")[2], c) for n, c in SOUND]))
_item("parent-folder", "an entry named ../../x", archive(entries=[*SOUND, ("../../x", b"x")]))
_item("absolute-entry", "an absolute entry", archive(entries=[*SOUND, ("/etc/passwd", b"x")]))
_item("escape-entry", "an entry that drives the terminal", archive(entries=[*SOUND, ("other/\x1b[2J", b"x")]))
_item("many-entries", "a hundred entries", archive(entries=[*SOUND, *((f"archive/e{i}", b"") for i in range(100))]))
_item("deflated", "compressed entries: a megabyte becomes a gigabyte",
    archive(entries=[*SOUND[:2], (NAMES[2], bytes(1 << 20))], compression=zipfile.ZIP_DEFLATED))
_item("bzip2", "another compression", archive(compression=zipfile.ZIP_BZIP2))
_item("lzma", "another compression", archive(compression=zipfile.ZIP_LZMA))
_item("big-endian", "byteorder says big", archive(entries=[*SOUND, ("archive/byteorder", b"big")]))
_item("big-version", "a version of 100 kB", archive(entries=[SOUND[0], SOUND[2], (NAMES[1], bytes(100_000))]),
    found(diff=0, convert=0))
_item("big-pickle", "a data.pkl of 10 MB", archive(PROTO + b"N" * (10 << 20)))

# Headers that lie
_item("local-name", "the local header has another name", _patch(archive(), LOCAL, 2, 30, b"archive/data/1"))
_item("local-size", "the local header has another size", _patch(archive(), LOCAL, 2, 18, U32(8) * 2))
_item("local-crc", "the local header has another CRC-32", _patch(archive(), LOCAL, 2, 14, U32(1)))
_item("local-method", "the local header says deflated", _patch(archive(), LOCAL, 2, 8, U16(8)))
_item("local-extra", "the local header's extra field reaches over the data",
    _patch(archive(), LOCAL, 2, 28, U16(60_000)))
# fmt: on
_item("central-size", "the directory has another size", _patch(archive(), CENTRAL, 2, 20, U32(1000) * 2))
_item("central-size-small", "the directory has a smaller size", _patch(archive(), CENTRAL, 2, 20, U32(4) * 2))
_item("central-sizes-differ", "packed and unpacked size differ", _patch(archive(), CENTRAL, 2, 24, U32(1 << 30)))
_item("central-crc", "the directory has another CRC-32", _patch(archive(), CENTRAL, 2, 16, U32(1)))
_item("central-offset", "an entry outside of the item", _patch(archive(), CENTRAL, 2, 42, U32(0x7FFFFFFF)))
_item("central-offset-same", "two entries at one place", _patch(archive(), CENTRAL, 2, 42, U32(0)))
_item("central-disk", "an entry on another disk", _patch(archive(), CENTRAL, 2, 34, U16(1)))
_item("central-encrypted", "an encrypted entry", _patch(archive(), CENTRAL, 2, 8, U16(1)))
_item("central-comment", "a comment that reaches over the next entry", _patch(archive(), CENTRAL, 0, 32, U16(40)))
_item("central-name-length", "a name of 60 kB", _patch(archive(), CENTRAL, 0, 28, U16(60_000)))
_item("central-name-bytes", "a name that is not ASCII", _patch(archive(), CENTRAL, 0, 46, b"\xff\xfe"))
_item("zip64-missing", "saturated sizes without a zip64 field", _patch(archive(), CENTRAL, 2, 20, b"\xff" * 8))


def _with_extra(fields: bytes) -> bytes:
    """Saturate the sizes of the data record and put `fields` into its extra field."""
    raw = _patch(archive(), CENTRAL, 2, 20, b"\xff" * 8)
    raw = _patch(raw, CENTRAL, 2, 30, U16(len(fields)))
    at = raw.index(END)
    end = bytearray(raw[at:])
    end[12:16] = U32(struct.unpack_from("<I", end, 12)[0] + len(fields))
    return raw[:at] + fields + bytes(end)


# fmt: off
_item("zip64-right", "sizes in a zip64 field, and right: legal", _with_extra(U16(1) + U16(16) + U64(24) * 2),
    harmless())
_item("zip64-lies", "a zip64 field that says 2^63", _with_extra(U16(1) + U16(16) + U64(1 << 63) * 2))
_item("zip64-short", "a zip64 field that ends early", _with_extra(U16(1) + U16(16) + U64(24)))
_item("zip64-zeros", "an extra field of empty fields", _with_extra(bytes(4) * 4000))
_item("end-count", "the end record has another count", _patch(archive(), END, 0, 8, U16(2) * 2))
_item("end-count-huge", "the end record says 65535 entries", _patch(archive(), END, 0, 8, b"\xff" * 4))
_item("end-size", "the directory's size lies", _patch(archive(), END, 0, 12, U32(1 << 30)))
_item("end-start", "the directory's place lies", _patch(archive(), END, 0, 16, U32(0)))
_item("end-comment", "a comment behind the end", _patch(archive(), END, 0, 20, U16(4)) + b"abcd")
_item("end-comment-archive", "a second archive in the comment",
    lambda case: _patch(archive(), END, 0, 20, U16(len(archive(_exploit(case))))) + archive(_exploit(case)))
_item("two-archives", "a second directory behind the first", archive() + archive())
_item("two-directories", "the first directory is the one that executes",
    lambda case: archive(_exploit(case)) + archive())
# fmt: on
_item("trailing", "bytes behind the end", archive() + b"x")
_item("truncated", "the end is missing", archive()[:-1])
_item("nothing", "zeros", bytes(100))


def _end64(*, offset: int | None = None, count: int = 3, size: int | None = None, disks: int = 1) -> bytes:
    """An archive with zip64 end records."""
    raw = archive()
    at = raw.index(END)
    nbytes, start = struct.unpack_from("<2I", raw, at + 12)
    record = struct.pack(
        "<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, nbytes if size is None else size, start
    )
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, at if offset is None else offset, disks)
    return raw[:at] + record + locator + raw[at:]


_item("end64-right", "zip64 end records, and right: legal", _end64(), harmless())
_item("end64-elsewhere", "the locator points into the data", _end64(offset=40))
_item("end64-outside", "the locator points outside", _end64(offset=1 << 62))
_item("end64-count", "the end records disagree", _end64(count=2))
_item("end64-size", "the zip64 record lies about the directory", _end64(size=1 << 62))
_item("end64-disks", "a zip on several disks", _end64(disks=2))

# What data.pkl says


def _pickled(title: str, tries: str, codes=None, **options) -> None:
    _item(f"tensor-{title}", tries, archive(tensor_pickle(**options)), codes)


_pickled("key-traversal", "the storage is named ../../x", key=text("../../x"))
_pickled("key-nul", "the storage's name has a NUL", key=text("0\0"))
_pickled("key-number", "the storage's name is a number", key=number(0))
_pickled("key-long", "the storage's name has 10 kB", key=text("0" * 10_000))
_pickled("key-arabic", "a digit of another script", key=text("\u0660"))
_pickled("storage-huge", "a storage of 2^62 elements", num_elems=number(1 << 62))
_pickled("storage-negative", "a storage of -1 elements", num_elems=number(-1))
_pickled("storage-short", "a storage too short for its tensor", num_elems=number(5))
_pickled("storage-long", "a storage longer than its record", num_elems=number(600))
_pickled("storage-is-call", "the storage is the result of a call", storage=call(name("os", "system"), text("id")))
_pickled("offset-huge", "an offset of 2^62", offset=number(1 << 62))
_pickled("offset-negative", "an offset of -4", offset=number(-4))
_pickled("shape-huge", "a shape of 2^62 elements", shape=tuple_of(number(1 << 31), number(1 << 31)))
_pickled("shape-negative", "a negative shape", shape=tuple_of(number(-2), number(-3)))
# fmt: off
_pickled("shape-dims", "5000 dims, whose products take hours", shape=tuple_of(*[number(1 << 60)] * 5000),
    strides=tuple_of(*[number(1)] * 5000))
_pickled("strides-zero", "an expanded tensor", strides=tuple_of(number(0), number(0)))
_pickled("strides-overlap", "elements that share memory", strides=tuple_of(number(1), number(1)))
_pickled("strides-huge", "strides of 2^61", strides=tuple_of(number(1 << 61), number(1 << 61)))
_pickled("strides-negative", "negative strides", strides=tuple_of(number(-3), number(-1)))
_pickled("strides-transposed", "a transposed tensor: legal, and must come out right", {**harmless(), "diff": (0, 3)},
    strides=tuple_of(number(1), number(2)))
# fmt: on
_pickled("strides-fewer", "fewer strides than dims", strides=tuple_of(number(3)))
_pickled("flag-conj", "a lazy conjugation", extra=b"}" + text("conj") + b"\x88s")
_pickled("flag-escape", "a flag named to drive the terminal", extra=b"}" + text("\x1b[2J") + b"\x88s")
_pickled("function", "another rebuild function", function=name("torch._utils", "_rebuild_sparse_tensor"))
_pickled("function-eval", "eval for a rebuild function", function=name("builtins", "eval"))
_item("nested", "data.pkl nests sixty thousand tuples", archive(PROTO + b")" + b"\x85" * 60_000 + b"."))
_item("memo-bomb", "data.pkl asks for a memo of 2^29", archive(PROTO + b"]r\xff\xff\xff\x1f."))


@attack(
    "zip-crc-zero-bytes-changed",
    "the payload changed and its CRC-32 set to 0, not computed: not detectable",
    harmless(),
)
def _crc_zero(case: Case) -> None:
    raw = archive()
    raw = _patch(_patch(raw, LOCAL, 2, 14, U32(0)), CENTRAL, 2, 16, U32(0))
    write_run(case.source, content=raw)


@attack(
    "zip-payload-damaged",
    "a flipped bit under a CRC-32 that torch ignores",
    {**found(), "structure": (0,)},
    words="crc-32",
)
def _damaged(case: Case) -> None:
    raw = bytearray(item())
    at = raw.index(bytes(range(24)))
    raw[at] ^= 1
    assert zlib.crc32(raw)
    write_run(case.source, content=bytes(raw))
