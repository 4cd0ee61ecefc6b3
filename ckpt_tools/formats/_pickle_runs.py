"""The fast path of `inert_pickle`: one regular expression for a whole small object.

Nearly all of a large DCP `.metadata` is one pattern, written over and over: an instance whose state is a dict of two
to four short values (numbers, strings, `torch.Size`). The C engine of `re` steps over all of its opcodes at once.
What does not fit the pattern exactly is left to the general loop, which gives the same values.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tools.formats._pickle_values import GlobalName, Record

_GET = rb"(?:h.|j....)"
_INT = rb"(?:K.|M..|J....|\x8a\x05.{5}|\x8a\x06.{6}|\x8a\x07.{7}|\x8a\x08.{8})"
# A global called with one tuple of integers. Tuple, arguments and result go to the memo; () is not memoised.
_DIMS = rb"(?:\)|(?:I\x85|II\x86|III\x87|\(I{4,8}t)\x94)".replace(b"I", _INT)
_SIZE = _GET + _DIMS + rb"\x85\x94R\x94"
# No \x94 may stand inside the string, so that its end is known; its length is compared afterwards.
_STRING = rb"\x8c.[^\x94]{0,255}\x94"
_PAIR = b"(" + _GET + b")(" + b"|".join((_SIZE, _GET, _INT, b"N", _STRING)) + b")"
# EMPTY_TUPLE NEWOBJ MEMOIZE EMPTY_DICT MEMOIZE MARK (key value){2,4} SETITEMS BUILD
_OBJECT = rb"\)\x81\x94\}\x94\(" + 2 * _PAIR + b"(?:" + _PAIR + b")?(?:" + _PAIR + b")?ub"
_CLASS_AND_OBJECT = b"(" + _GET + b")" + _OBJECT
_compiled = functools.cache(functools.partial(re.compile, flags=re.DOTALL))  # the long ones take milliseconds

_OBJECT_DEPTH = 5
"""`Record.depth` of an object made here: record, state, size, arguments, tuple."""
_LEAF = 0
"""`Record.depth` of what cannot change any more: a size."""
_SIZE_CALL = "torch.Size"
_UNKNOWN = object()
_PLAIN = frozenset({int, str, type(None), bool, GlobalName})


class ObjectRuns:
    """Matches small objects in one pickle; remembers what their short byte strings stand for."""

    __slots__ = ("_atoms", "_calls", "_data", "_keys", "_twins")

    def __init__(self, data: bytes, calls: Mapping[str, tuple[str, int]] | None) -> None:
        self._data = data
        self._calls = calls
        # The memo only grows, so a BINGET that has meant something once means the same ever after.
        self._keys: dict[bytes, str] = {}
        self._atoms: dict[bytes, Any] = {}
        self._twins: dict[bytes, tuple[Record, tuple[object, ...]]] = {}

    def match(self, position: int, stack: list[Any], memo: list[Any]) -> int:
        """Read a run of objects; the EMPTY_TUPLE of the first stands before `position`, its class on the stack.

        Returns:
            The position after the last BUILD, with the records on the stack (the first in its class's place) and
            the memo grown by exactly what the opcodes put there; or 0, with nothing changed.
        """
        if not stack or type(stack[-1]) is not GlobalName:
            return 0
        found = _compiled(_OBJECT).match(self._data, position - 1)
        if found is None or (record := self._record(stack[-1].name, found.groups(), memo)) is None:
            return 0
        stack[-1] = record
        data = self._data
        twins = self._twins
        follow = _compiled(_CLASS_AND_OBJECT).match
        while True:
            position = found.end()
            found = follow(data, position)
            if found is None:
                return position
            has_two_pairs = found[6] is None
            if has_two_pairs and (twin := twins.get(found[0])) is not None:
                # The same bytes mean the same sealed values, so one record can stand in all places.
                record, new = twin
                memo += new
                stack.append(record)
                continue
            class_bytes = found[1]
            name = self._atoms.get(class_bytes) or self._learn(class_bytes, memo)
            memo_length = len(memo)
            if type(name) is not GlobalName:
                return position
            record = self._record(name.name, found.groups()[1:], memo)
            if record is None:
                return position
            stack.append(record)
            if has_two_pairs:
                twins[found[0]] = (record, tuple(memo[memo_length:]))

    def _record(self, name: str, groups: Sequence[bytes | None], memo: list[Any]) -> Record | None:
        """Make one record from what `_OBJECT` captured, or None when that is not what it looks like."""
        if self._calls is not None and self._calls.get(name) != ("NEWOBJ", 0):
            return None  # the general loop says so
        state: dict[str, object] = {}
        record = Record(name, (), state, _OBJECT_DEPTH)
        new: list[object] = [record, state]
        keys = self._keys
        atoms = self._atoms
        num_pairs = 0
        captured = iter(groups)
        for key_bytes, atom in zip(captured, captured, strict=True):
            if key_bytes is None or atom is None:
                break
            num_pairs += 1
            key = keys.get(key_bytes)
            if key is None:
                found_key = _get(key_bytes, memo)
                if type(found_key) is not str:
                    return None
                key = keys[key_bytes] = found_key
            value = atoms.get(atom, _UNKNOWN)
            if value is _UNKNOWN:
                value = self._learn(atom, memo)
                if value is _UNKNOWN:
                    return None
            kind = type(value)
            if kind is tuple:
                size_name, args = value
                value = Record(size_name, args, None, _LEAF)
                if args[0]:
                    new.append(args[0])
                new += (args, value)
            elif kind is list:
                value = value[0]
                new.append(value)
            state[key] = value
        if len(state) != num_pairs:
            return None  # a key twice: the general loop says so
        memo += new
        return record

    def _learn(self, atom: bytes, memo: list[Any]) -> object:
        """Return what `atom` stands for: a plain value or leaf, (name, dims) for a size, [text] for a string."""
        first = atom[0]
        value: object
        if first in b"KMJ\x8a":
            number = _int(atom)
            if len(atom) > 3:
                return number  # large numbers rarely come twice
            value = number
        elif first == 0x4E:
            value = None
        elif first == 0x8C:
            if len(atom) != atom[1] + 3:
                return _UNKNOWN
            try:
                value = [str(atom[2:-1], "utf-8")]
            except UnicodeDecodeError:
                return _UNKNOWN
        else:
            fetched = value = _get(atom, memo)
            if len(atom) > 5 or (first == 0x68 and len(atom) > 2):
                if not isinstance(fetched, GlobalName) or fetched.name != _SIZE_CALL:
                    return _UNKNOWN
                numbers = _compiled(_INT).findall(atom[5 if first == 0x6A else 2 : -5].lstrip(b"("))
                value = (fetched.name, (tuple(map(_int, numbers)),))
            elif type(fetched) not in _PLAIN and not (isinstance(fetched, Record) and fetched.depth == _LEAF):
                return _UNKNOWN
        self._atoms[atom] = value
        return value


def _get(opcode: bytes, memo: list[Any]) -> object:
    """Return what a BINGET or LONG_BINGET fetches."""
    index = int.from_bytes(opcode[1:5] if opcode[0] == 0x6A else opcode[1:2], "little")
    return memo[index] if index < len(memo) else _UNKNOWN


def _int(opcode: bytes) -> int:
    """Return the number that BININT1, BININT2, BININT or LONG1 pushes."""
    if opcode[0] == 0x8A:
        return int.from_bytes(opcode[2:], "little", signed=True)
    return int.from_bytes(opcode[1:], "little", signed=opcode[0] == 0x4A)
