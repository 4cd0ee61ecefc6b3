"""What `inert_pickle` makes of a pickle besides plain values, and how much it makes."""

from __future__ import annotations

import gc
import pickletools
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from ckpt_tools.errors import UnreadableError

PERSISTENT_ID = "persistent id"  # Name of the `Record` that BINPERSID makes; the blank keeps it apart from every global
KEY = "a key"  # Name of the `Record` around a key of a dict that is no scalar
ANY = -1  # Any number of arguments


@dataclass(frozen=True, slots=True, eq=False)
class GlobalName:
    """The name of something importable; never imported. One object per name and pickle."""

    name: str  # Module and attribute, joined by a dot
    outer: str = ""  # The class that it lies in, where a pickle takes it from there


@dataclass(slots=True, eq=False)
class Record:
    """What a pickle would have made by calling a global: never called. Equal and hashed by identity."""

    # Not frozen, for BUILD comes after the object; the reader seals a record when it becomes part of another value.

    name: str  # The global that would have been called, or `PERSISTENT_ID`
    args: tuple[object, ...]
    state: object  # What BUILD would have set; None without BUILD
    depth: int  # Reader's bookkeeping: nesting of the content, negative while the record may still change
    content: list[object] | None = None  # What would have been added, keys and values in turn (`_pickle_objects` alone)
    is_new: bool = False  # Made by NEWOBJ: its class would not have been called


@dataclass(frozen=True, slots=True, kw_only=True)
class PickleLimits:
    """How much a pickle may ask for."""

    max_bytes: int = 1 << 30
    max_opcodes: int = 400_000_000
    max_depth: int = 64
    max_string_bytes: int = 1 << 20  # Length of one string, bytes object or name, in bytes
    max_int_bytes: int = 8  # Width of an integer, in bytes of two's complement
    bytes_per_container: int = 7
    """Bytes of pickle that there must be, so far, for every tuple, list, dict and object that is not a plain row of
    values: an empty dict takes one byte in the file and two hundred in memory. A real `.metadata` has 13 and more."""


DEFAULT_LIMITS = PickleLimits()
_OPCODE_NAMES = {ord(op.code): op.name for op in pickletools.opcodes}


def describe(value: object) -> str:
    """Name the type of a value, never its content: that may be long, or hostile to a terminal."""
    return "a global name" if isinstance(value, GlobalName) else type(value).__name__


def refused_opcode(op: int, position: int) -> UnreadableError:
    """Return the error for an opcode that does something else than describe data."""
    name = _OPCODE_NAMES.get(op)
    what = f"pickle opcode {name}" if name else f"byte {op:#04x}, which is not a pickle opcode,"
    return UnreadableError(f"{what} at byte {position} is not allowed here; it was not executed")


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's cycle collector out of a stretch that makes millions of containers and no cycles."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


# Pickles of protocol 2, written from inert values: the opcodes that CPython's pickler writes, and `torch.save` with it.
# What `_pickle_objects.parse_exactly` has read becomes a pickle again that makes the same objects, and shares them.
# Source: CPython `Lib/pickle.py`.

_BATCH = 1000  # Items of a dict or list that one opcode adds
_TUPLES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}


class _Opcode(NamedTuple):
    """Bytes to write when everything before them is written, and the value that they complete."""

    code: bytes
    value: object = None


def build_pickle(value: object) -> bytes:
    """Return the pickle of a value that is made of what `parse_pickle` returns."""
    # An object that is met twice is one object for whoever reads it.
    out = bytearray(b"\x80\x02")
    memo: dict[object, int] = {}
    begun: set[int] = set()
    pending: list[object] = [value]
    while pending:
        each = pending.pop()
        if type(each) is _Opcode:
            out += each.code
            if each.value is not None:
                index = memo[_identity(each.value)] = len(memo)
                out += b"q%c" % index if index < 1 << 8 else b"r" + index.to_bytes(4, "little")
        elif (index := memo.get(_identity(each), -1)) >= 0:
            out += b"h%c" % index if index < 1 << 8 else b"j" + index.to_bytes(4, "little")
        elif (plain := _scalar(each)) is not None:
            out += plain
        else:
            if type(each) is tuple:
                if id(each) in begun:
                    raise UnreadableError("a tuple contains itself")
                begun.add(id(each))
            pending += reversed(list(_parts(each)))
    return bytes(out + b".")


def _identity(value: object) -> object:
    """Return what two values share that may be one object: texts and names, whichever they are, when they are equal."""
    return value if type(value) is str else ("global", value.name) if type(value) is GlobalName else id(value)


def _scalar(value: object) -> bytes | None:
    """Return the opcode of a value that is never met again as the same object; None for any other."""
    if value is None:
        return b"N"
    if value is True or value is False:
        return b"\x88" if value else b"\x89"
    if type(value) is int:
        return push_int(value)
    if type(value) is float:
        return b"G" + struct.pack(">d", value)
    return b")" if value == () and type(value) is tuple else None


def _parts(value: object) -> Iterable[object]:
    """Yield opcodes and values that, one after the other, make a value."""
    if type(value) is str:
        raw = value.encode(errors="surrogatepass")
        yield _Opcode(b"X" + len(raw).to_bytes(4, "little") + raw, value)
    elif type(value) is GlobalName:
        if value.outer:
            attribute = value.name[len(value.outer) + 1 :]
            yield from (GlobalName("__builtin__.getattr"), GlobalName(value.outer), attribute, _Opcode(b"\x86"))
            yield _Opcode(b"R", value)
        else:
            module, _, name = value.name.rpartition(".")
            yield _Opcode(f"c{module}\n{name}\n".encode(), value)
    elif type(value) is tuple:
        if len(value) > len(_TUPLES):
            yield _Opcode(b"(")
        yield from value
        yield _Opcode(_TUPLES.get(len(value), b"t"), value)
    elif type(value) is list:
        yield _Opcode(b"]", value)
        yield from _batches(value, 1, b"a", b"e")
    elif type(value) is dict:
        yield _Opcode(b"}", value)
        yield from _batches([part for pair in value.items() for part in pair], 2, b"s", b"u")
    elif type(value) is Record:
        yield from _record(value)
    else:
        raise UnreadableError(f"a {type(value).__name__} cannot be written into a pickle")


def _record(value: Record) -> Iterable[object]:
    if value.name == PERSISTENT_ID:
        yield from (value.args[0], _Opcode(b"Q"))
    elif value.name == KEY:
        yield value.args[0]
    else:
        yield GlobalName(value.name)
        yield value.args
        yield _Opcode(b"\x81" if value.is_new else b"R", value)
        yield from _batches(value.content or (), 2, b"s", b"u")
        if value.state is not None:
            yield from (value.state, _Opcode(b"b"))


def _batches(items: Iterable[object], width: int, one: bytes, many: bytes) -> Iterable[object]:
    """Yield the opcodes that add items to what lies on the stack, `width` values each."""
    values = list(items)
    for start in range(0, len(values), _BATCH * width):
        batch = values[start : start + _BATCH * width]
        if len(batch) == width:
            yield from (*batch, _Opcode(one))
        else:
            yield from (_Opcode(b"("), *batch, _Opcode(many))


def push_int(number: int) -> bytes:
    """Return the shortest opcode that pushes `number`, as CPython's pickler does."""
    if 0 <= number < 1 << 8:
        return b"K%c" % number
    if 0 <= number < 1 << 16:
        return b"M" + number.to_bytes(2, "little")
    if -(1 << 31) <= number < 1 << 31:
        return b"J" + number.to_bytes(4, "little", signed=True)
    raw = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a%c" % len(raw) + raw
