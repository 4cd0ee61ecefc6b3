"""What `inert_pickle` makes of a pickle besides plain values, and how much it makes."""

from __future__ import annotations

import gc
import pickletools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ckpt_tools.errors import UnreadableError

PERSISTENT_ID = "persistent id"
"""Name of the `Record` that BINPERSID makes; the blank keeps it apart from every global."""
KEY = "a key"
"""Name of the `Record` around a key of a dict that is no scalar."""
ANY = -1
"""Any number of arguments."""


@dataclass(frozen=True, slots=True, eq=False)
class GlobalName:
    """The name of something importable; never imported. One object per name and pickle."""

    name: str
    """Module and attribute, joined by a dot."""
    outer: str = ""
    """The class that it lies in, where a pickle takes it from there."""


@dataclass(slots=True, eq=False)
class Record:
    """What a pickle would have made by calling a global: never called. Equal and hashed by identity.

    Not frozen, for BUILD comes after the object; the reader seals a record when it becomes part of another value.
    """

    name: str
    """The global that would have been called, or `PERSISTENT_ID`."""
    args: tuple[object, ...]
    state: object
    """What BUILD would have set; None without BUILD."""
    depth: int
    """Reader's bookkeeping: nesting of the content, negative while the record may still change."""
    content: list[object] | None = None
    """What would have been added to it, keys and values in turn for a mapping (`_pickle_objects` alone)."""
    is_new: bool = False
    """Made by NEWOBJ: its class would not have been called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PickleLimits:
    """How much a pickle may ask for."""

    max_bytes: int = 1 << 30
    max_opcodes: int = 400_000_000
    max_depth: int = 64
    max_string_bytes: int = 1 << 20
    """Length of one string, bytes object or name, in bytes."""
    max_int_bytes: int = 8
    """Width of an integer, in bytes of two's complement."""
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
    what = f"pickle opcode {name}" if name else f"byte {op:#04x}, which is no pickle opcode,"
    return UnreadableError(f"{what} at byte {position} has no place here; it was not executed")


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
