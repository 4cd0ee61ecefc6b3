"""Read pickles without running them: opcodes in, inert values out.

A pickle is a program. This reader knows the few opcodes that describe data, refuses all others by name, and turns
every name of a class or function into a `GlobalName` and every call of one into a `Record`: nothing is imported,
called or looked up. Time and memory are linear in the input, and no step recurses.

Three rules make the result safe to walk, and cost nothing that CPython's picklers write:

- The memo grows by one: an index that is not the next one is refused, so no index can allocate.
- A container that has been put into another one is sealed; a pickle that changes it later would build a cycle.
- Only scalars, global names and records are dict keys, the last two by identity, so hashing never recurses and
  never meets many equal hashes.

Source: CPython `Lib/pickle.py` and `Modules/_pickle.c` (protocols 2 to 5).
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, repeat
from typing import Any, ClassVar

from ckpt_tools.checkpoint.formats._pickle_values import (
    ANY,
    DEFAULT_LIMITS,
    PERSISTENT_ID,
    GlobalName,
    PickleLimits,
    Record,
    collector_paused,
    describe,
    refused_opcode,
)
from ckpt_tools.errors import LimitError, UnreadableError

# The fast path of `inert_pickle`: one regular expression for a whole small object
# Nearly all of a large DCP `.metadata` is one pattern, written over and over: an instance whose state is a dict of two
# to four short values (numbers, strings, `torch.Size`). The C engine of `re` steps over all of its opcodes at once.
# What does not fit the pattern exactly is left to the general loop, which gives the same values.

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

_OBJECT_DEPTH = 5  # `Record.depth` of an object made here: record, state, size, arguments, tuple
_LEAF = 0  # `Record.depth` of what cannot change any more: a size
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
        """Read a run of objects; the EMPTY_TUPLE of the first stands before `position`, its class on the stack."""
        # Return the position after the last BUILD, with the records on the stack (the first in its class's place) and
        # the memo grown by exactly what the opcodes put there; or 0, with nothing changed.
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


_OPCODES_PER_CHECK = 1 << 14  # Opcodes between two looks at what has been made so far
_FREE_CONTAINERS = 1 << 12  # Containers and objects that any pickle may have, however short

Calls = Mapping[str, tuple[str, int]]
Sized = Mapping[int, tuple[Callable[..., Any], int, str]]
_U8, _U16, _U32, _U64 = (struct.Struct(each).unpack_from for each in ("<B", "<H", "<I", "<Q"))
_I32 = struct.Struct("<i").unpack_from
_NUMBERS = {0x4D: (_U16, 2), 0x4A: (_I32, 4), 0x47: (struct.Struct(">d").unpack_from, 8)}
"""BININT2, BININT and BINFLOAT → what reads the number, and its width."""
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False}  # NONE, NEWTRUE, NEWFALSE
SIZED: Sized = {
    0x8C: (_U8, 1, "_text"),  # SHORT_BINUNICODE
    0x58: (_U32, 4, "_text"),  # BINUNICODE
    0x8D: (_U64, 8, "_text"),  # BINUNICODE8
    0x43: (_U8, 1, "_bytes"),  # SHORT_BINBYTES
    0x42: (_U32, 4, "_bytes"),  # BINBYTES
    0x8E: (_U64, 8, "_bytes"),  # BINBYTES8
    0x8A: (_U8, 1, "_long"),  # LONG1
    0x8B: (_I32, 4, "_long"),  # LONG4
}
"""Opcode → what reads the length of its argument, the length's width, and the method that reads the argument."""

KEY_TYPES = frozenset({str, int, bool, float, bytes, type(None), GlobalName, Record})


def parse_pickle(
    data: bytes,
    *,
    allowed_globals: frozenset[str],
    limits: PickleLimits = DEFAULT_LIMITS,
    persistent_ids: bool = False,
    calls: Calls | None = None,
) -> object:
    """Return the value that a whole pickle describes, plain values, `GlobalName`s and `Record`s without cycles."""
    # It may mention the names ("module.attribute") in `allowed_globals`; with `persistent_ids`, BINPERSID is a `Record`
    # named `PERSISTENT_ID`. `calls`: name → the opcode that makes something of it, and of how many arguments; by
    # default all may. What else it names, calls or does is an `UnreadableError`.
    if len(data) > limits.max_bytes:
        raise LimitError(f"the pickle is {len(data)} bytes long, the limit is {limits.max_bytes}")
    with collector_paused():
        return PickleReader(data, allowed_globals, limits, persistent_ids, calls).read()


@dataclass(slots=True)
class PickleReader:
    """One run over one pickle; what `_pickle_objects` reads in another way are methods."""

    data: bytes
    allowed_globals: Container[str]
    limits: PickleLimits
    persistent_ids: bool
    calls: Calls | None = None
    depths: dict[int, int] = field(default_factory=dict)  # id → depth of what was made here; negative while it is open
    names: dict[str, GlobalName] = field(default_factory=dict)
    num_records: int = 0  # Records made by the general loop; those of the fast path take many bytes each
    has_runs: bool = True  # Look for what `ObjectRuns` matches
    sized: ClassVar[Sized] = SIZED

    def _seal(self, values: Iterable[object]) -> int:
        """Close `values` against changes, for they become part of something; return the greatest depth."""
        depths = self.depths
        deepest = 0
        for value in values:
            kind = type(value)
            if kind is Record:
                depth = value.depth  # type: ignore[attr-defined]
                if depth < 0:
                    depth = value.depth = -depth  # type: ignore[attr-defined]
            elif kind is tuple or kind is dict or kind is list:
                depth = depths.get(id(value), 0)
                if depth < 0:
                    depth = depths[id(value)] = -depth
            else:
                continue
            if depth > deepest:
                deepest = depth
        if deepest >= self.limits.max_depth:
            raise LimitError(f"the pickle nests more than {self.limits.max_depth} containers")
        return deepest

    def _tuple(self, items: tuple[object, ...]) -> tuple[object, ...]:
        if items:
            self.depths[id(items)] = self._seal(items) + 1
        return items

    def _open(self, container: object, kind: type, what: str) -> int:
        """Return the depth of a container that is about to be filled."""
        if type(container) is not kind:
            raise UnreadableError(f"{what} on {describe(container)}")
        depth = self.depths.get(id(container), 0)
        if depth >= 0:
            raise UnreadableError(f"{what} on a {kind.__name__} that is part of something, perhaps of itself")
        return depth

    def _extend(self, target: object, items: list[object], what: str) -> None:
        inner = self._seal(items)
        depth = self._open(target, list, what)
        target.extend(items)  # type: ignore[attr-defined]
        self.depths[id(target)] = min(depth, -1 - inner)

    def _update(self, target: object, items: list[object], what: str) -> None:
        inner = self._seal(items)
        depth = self._open(target, dict, what)
        if len(items) % 2:
            raise UnreadableError(f"{what} with a key but no value")
        keys = items[::2]
        for kind in set(map(type, keys)):
            if kind not in KEY_TYPES:
                raise UnreadableError(f"a dict key is a {kind.__name__}")
        known = len(target)  # type: ignore[arg-type]
        target.update(zip(keys, items[1::2], strict=True))  # type: ignore[attr-defined]
        if len(target) != known + len(keys):  # type: ignore[arg-type]
            raise UnreadableError("a dict has the same key twice")
        self.depths[id(target)] = min(depth, -1 - inner)

    def _call(self, function: object, args: object, what: str) -> object:
        if type(function) is not GlobalName:
            raise UnreadableError(f"{what} on {describe(function)}; it was not executed")
        if type(args) is not tuple:
            raise UnreadableError(f"{what} with {describe(args)} for arguments")
        if self.calls is not None:
            how, num_args = self.calls.get(function.name, ("", 0))
            if what != how or num_args not in (ANY, len(args)):
                raise UnreadableError(f"{function.name} is made by {what} of {len(args)} arguments, as no pickler does")
        depth = -1 - self._seal((args,))
        if function.name == "torch.Size" and len(args) == 1:
            dims = args[0]
            if type(dims) is tuple and all(type(dim) is int for dim in dims):
                depth = 0  # nothing of it can change any more
                self.depths.pop(id(args), None)  # what holds numbers alone stays shallow, wherever it comes again
                self.depths.pop(id(dims), None)
        self.num_records += 1
        return Record(function.name, args, None, depth)

    def _build(self, record: object, state: object) -> None:
        inner = self._seal((state,))
        if type(record) is not Record or (self.calls and self.calls[record.name][0] == "REDUCE"):
            raise UnreadableError(f"BUILD on {describe(record)}; it was not executed")
        if record.depth >= 0:
            raise UnreadableError("BUILD on a record that is part of something, perhaps of itself")
        if record.state is not None:
            raise UnreadableError("BUILD twice on one record")
        record.state = state
        record.depth = min(record.depth, -1 - inner)

    def _global(self, module: object, attribute: object) -> GlobalName:
        if type(module) is not str or type(attribute) is not str:
            raise UnreadableError("a global name is not made of two strings")
        name = f"{module}.{attribute}"
        known = self.names.get(name)
        if known is None:
            if name not in self.allowed_globals:
                shown = ascii(name[:200])
                raise UnreadableError(f"the pickle names {shown}, which is not allowed here; it was not executed")
            known = self.names[name] = GlobalName(name)
        return known

    def _text(self, start: int, nbytes: int) -> str:
        return str(self._bytes(start, nbytes), "utf-8")

    def _bytes(self, start: int, nbytes: int) -> bytes:
        if nbytes > self.limits.max_string_bytes:
            raise LimitError(f"a string of {nbytes} bytes, the limit is {self.limits.max_string_bytes}")
        return self.data[start : start + nbytes]

    def _long(self, start: int, nbytes: int) -> int:
        if not 0 <= nbytes <= self.limits.max_int_bytes:
            raise LimitError(f"an integer of {nbytes} bytes, the limit is {self.limits.max_int_bytes}")
        return int.from_bytes(self.data[start : start + nbytes], "little", signed=True)

    def _line(self, start: int) -> str:
        end = self.data.find(b"\n", start, start + self.limits.max_string_bytes + 1)
        if end < 0:
            raise UnreadableError("a global name without an end")
        return str(self.data[start:end], "utf-8")

    def _persistent(self, identifier: object) -> Record:
        args = (identifier,)
        return Record(PERSISTENT_ID, args, None, self._seal(args) + 1)

    def _put(self, index: int, memo: list[Any], value: object) -> None:
        if index != len(memo):
            raise UnreadableError(f"memo index {index}, the next one is {len(memo)}")
        memo.append(value)

    def _other(self, op: int, position: int, stack: list[Any], outer: list[list[Any]]) -> int:  # noqa: ARG002
        """Do what an opcode says that `_loop` does not know, and return the position after it."""
        raise refused_opcode(op, position - 1)

    def _check_end(self, position: int) -> None:
        if position != len(self.data):
            raise UnreadableError(f"{len(self.data) - position} bytes follow the end of the pickle")

    def _check_size(self, num_opcodes: int, num_open: int, position: int) -> None:
        """Refuse a pickle that makes more than what was read of it accounts for; called every so many opcodes."""
        limits = self.limits
        if num_opcodes >= limits.max_opcodes:
            raise LimitError(f"the pickle has more than {limits.max_opcodes} opcodes")
        if num_open > 2 * limits.max_depth:
            raise LimitError(f"the pickle nests more than {limits.max_depth} containers")
        if len(self.depths) + self.num_records > _FREE_CONTAINERS + position // limits.bytes_per_container:
            raise LimitError("the pickle creates more containers and objects than its length can fill")

    def read(self) -> object:
        """Run the loop, and turn what a malformed pickle makes Python raise into words."""
        if len(self.data) < 3 or self.data[0] != 0x80:
            raise UnreadableError("not a pickle of protocol 2 or later: it does not begin with PROTO")
        if not 2 <= self.data[1] <= 5:
            raise UnreadableError(f"pickle protocol {self.data[1]} is not one of 2..5")
        position = [0]
        try:
            return self._loop(position)
        except (IndexError, struct.error) as error:
            # Slices past the end come back short, so only the length tells truncation from underflow.
            what = "ends early" if position[0] >= len(self.data) - 9 else "reads a value that was never stored"
            raise UnreadableError(f"the pickle {what}, near byte {position[0]}") from error
        except UnicodeDecodeError as error:
            raise UnreadableError("a string in the pickle is not UTF-8") from error

    def _loop(self, reached: list[int]) -> object:  # noqa: C901 - one flat dispatch, ordered by frequency
        data = self.data
        depths = self.depths
        limits = self.limits
        # The fast path does not look at limits, so it serves only where they allow all that it reads.
        is_wide = limits.max_string_bytes >= 255 and limits.max_int_bytes >= 8 and limits.max_depth >= 16
        match_object = ObjectRuns(data, self.calls).match if is_wide and self.has_runs else None
        memo: list[Any] = []
        stack: list[Any] = []
        outer: list[list[Any]] = []  # the stacks below each MARK
        sized = {op: (unpack, width, getattr(self, make)) for op, (unpack, width, make) in self.sized.items()}
        i = 2
        try:
            for num_opcodes in count(0, _OPCODES_PER_CHECK):
                self._check_size(num_opcodes, len(outer), i)
                for _ in repeat(None, min(_OPCODES_PER_CHECK, limits.max_opcodes - num_opcodes)):
                    op = data[i]
                    i += 1
                    if op == 0x94:  # MEMOIZE
                        memo.append(stack[-1])
                    elif op == 0x68:  # BINGET
                        stack.append(memo[data[i]])
                        i += 1
                    elif op == 0x6A:  # LONG_BINGET
                        stack.append(memo[_U32(data, i)[0]])
                        i += 4
                    elif op == 0x71:  # BINPUT
                        self._put(data[i], memo, stack[-1])
                        i += 1
                    elif op == 0x72:  # LONG_BINPUT
                        self._put(_U32(data, i)[0], memo, stack[-1])
                        i += 4
                    elif op == 0x29:  # EMPTY_TUPLE
                        if data[i] == 0x81 and match_object and (end := match_object(i, stack, memo)):
                            i = end
                        else:
                            stack.append(())
                    elif op == 0x4B:  # BININT1
                        stack.append(data[i])
                        i += 1
                    elif op == 0x28:  # MARK
                        outer.append(stack)
                        stack = []
                    elif op in (0x81, 0x52):  # NEWOBJ, REDUCE
                        args = stack.pop()
                        stack[-1] = self._call(stack[-1], args, "NEWOBJ" if op == 0x81 else "REDUCE")
                    elif op == 0x62:  # BUILD
                        state = stack.pop()
                        self._build(stack[-1], state)
                    elif op == 0x75:  # SETITEMS
                        items, stack = stack, outer.pop()
                        self._update(stack[-1], items, "SETITEMS")
                    elif op in (0x7D, 0x5D):  # EMPTY_DICT, EMPTY_LIST
                        value: Any = {} if op == 0x7D else []
                        depths[id(value)] = -1
                        stack.append(value)
                    elif 0x85 <= op <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
                        items = [stack.pop() for _ in range(op - 0x84)]
                        stack.append(self._tuple(tuple(items[::-1])))
                    elif op in _NUMBERS:
                        unpack, width = _NUMBERS[op]
                        stack.append(unpack(data, i)[0])
                        i += width
                    elif op in sized:
                        unpack, width, make = sized[op]
                        length = unpack(data, i)[0]
                        stack.append(make(i + width, length))
                        i += width + length
                    elif op in _CONSTANTS:
                        stack.append(_CONSTANTS[op])
                    elif op == 0x74:  # TUPLE
                        items, stack = stack, outer.pop()
                        stack.append(self._tuple(tuple(items)))
                    elif op == 0x65:  # APPENDS
                        items, stack = stack, outer.pop()
                        self._extend(stack[-1], items, "APPENDS")
                    elif op == 0x61:  # APPEND
                        value = stack.pop()
                        self._extend(stack[-1], [value], "APPEND")
                    elif op == 0x73:  # SETITEM
                        value = stack.pop()
                        key = stack.pop()
                        self._update(stack[-1], [key, value], "SETITEM")
                    elif op == 0x95:  # FRAME
                        if _U64(data, i)[0] > len(data) - i - 8:
                            raise UnreadableError("the pickle ends early: a frame reaches past its end")
                        i += 8
                    elif op == 0x93:  # STACK_GLOBAL
                        attribute = stack.pop()
                        stack[-1] = self._global(stack[-1], attribute)
                    elif op == 0x63:  # GLOBAL
                        module = self._line(i)
                        i = data.index(b"\n", i) + 1
                        stack.append(self._global(module, self._line(i)))
                        i = data.index(b"\n", i) + 1
                    elif op == 0x51 and self.persistent_ids:  # BINPERSID
                        stack[-1] = self._persistent(stack[-1])
                    elif op == 0x2E:  # STOP
                        break
                    else:
                        i = self._other(op, i, stack, outer)
                else:
                    continue
                break
        finally:
            reached[0] = i
        self._check_end(i)
        if len(stack) != 1 or outer:
            raise UnreadableError("the pickle leaves more or less than one value")
        return stack[0]
