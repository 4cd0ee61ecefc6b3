"""Write pickles of protocol 2 from inert values: the opcodes that CPython's pickler writes, and `torch.save` with it.

What was read by `_pickle_objects.parse_exactly` becomes a pickle again that makes the same objects, and shares them.

Source: CPython `Lib/pickle.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from ckpt_tools.checkpoint.formats._pickle_values import KEY, PERSISTENT_ID, GlobalName, Record
from ckpt_tools.errors import UnreadableError

_BATCH = 1000
"""Items of a dict or list that one opcode adds."""
_TUPLES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}


class _Opcode(NamedTuple):
    """Bytes to write when everything before them is written, and the value that they complete."""

    code: bytes
    value: object = None


def build_pickle(value: object) -> bytes:
    """Return the pickle of a value that is made of what `parse_pickle` returns.

    An object that is met twice is one object for whoever reads it.
    """
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
