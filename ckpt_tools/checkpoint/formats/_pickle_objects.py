"""Read pickles that hold more than tensors, as trainers save them: any name and any object, all inert.

Where `inert_pickle` refuses what a format has no use for, this reader keeps it: an unknown class is a `Record` like any
other, and whoever walks the result decides by names what means something. It differs in these ways:

- A dict with an order is a dict, in Python 2's form as well; what else is filled after it was called keeps its
  content in `Record.content`.
- Objects may refer to themselves (omegaconf's configs do): whoever walks the result must expect cycles.
- A key that is not a scalar becomes a `Record`, so that it is hashed by identity.
- The pickle may be followed by other bytes: a legacy file of `torch.save` is several pickles in a row.
- Python 2's strings and memo indices, which begin at 1, are read: torchvision's first weights have them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ckpt_tools.checkpoint.formats._pickle_values import (
    KEY,
    PERSISTENT_ID,
    GlobalName,
    PickleLimits,
    Record,
    collector_paused,
    describe,
    refused_opcode,
)
from ckpt_tools.checkpoint.formats.inert_pickle import KEY_TYPES, SIZED, PickleReader, Sized
from ckpt_tools.errors import LimitError, UnreadableError

MAX_PICKLE_BYTES = 256 << 20  # Longest pickle: 91,000 tensors (DeepSeek-V3, expert by expert) have 20 MB
LIMITS = PickleLimits(
    max_bytes=MAX_PICKLE_BYTES, max_opcodes=200_000_000, max_depth=500, max_string_bytes=64 << 20, max_int_bytes=1 << 10
)
_DICTS = frozenset({"collections.OrderedDict", "collections.defaultdict"})
_SETS = frozenset({"builtins.set", "builtins.frozenset", "__builtin__.set", "__builtin__.frozenset"})
_GETATTR = frozenset({"__builtin__.getattr", "builtins.getattr"})


class _Every:
    """Contains every name."""

    def __contains__(self, name: object) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Pickled:
    """What `parse_objects` found."""

    value: object  # As `parse_pickle`, with cycles perhaps
    nbytes: int  # Where the pickle ends
    storages: Mapping[str, tuple[object, ...]]
    """Key → persistent id of every storage that is named, in the order in which they first are."""


def parse_objects(data: bytes) -> Pickled:
    """Read the pickle that `data` begins with."""
    with collector_paused():
        reader = _ObjectReader(data, _Every(), LIMITS, persistent_ids=True, has_runs=False)
        value = reader.read()
    return Pickled(value=value, nbytes=reader.end, storages=reader.storages)


def parse_exactly(data: bytes) -> object:
    """Read a pickle so that `_pickle_writer.build_pickle` writes one that makes the same: nothing is made simpler."""
    with collector_paused():
        reader = _ExactReader(data, _Every(), LIMITS, persistent_ids=True, has_runs=False)
        value = reader.read()
    if reader.end != len(data):
        raise UnreadableError(f"{len(data) - reader.end} bytes follow the end of the pickle")
    return value


@dataclass(slots=True)
class _ObjectReader(PickleReader):
    """One run over one pickle of objects."""

    end: int = 0
    storages: dict[str, tuple[object, ...]] = field(default_factory=dict)
    sized: ClassVar[Sized] = {
        **SIZED,
        0x55: (*SIZED[0x8C][:2], "_text_of_python_2"),  # SHORT_BINSTRING
        0x54: (*SIZED[0x8B][:2], "_text_of_python_2"),  # BINSTRING
        0x96: (*SIZED[0x8E][:2], "_bytes"),  # BYTEARRAY8
    }

    def _seal(self, values: Iterable[object]) -> int:  # noqa: ARG002
        return 0

    def _tuple(self, items: tuple[object, ...]) -> tuple[object, ...]:
        self.num_records += 1
        return items

    def _extend(self, target: object, items: list[object], what: str) -> None:
        if type(target) is Record:
            target.content = [] if target.content is None else target.content
            target = target.content
        if type(target) is not list:
            raise UnreadableError(f"{what} on {describe(target)}")
        target.extend(items)

    def _update(self, target: object, items: list[object], what: str) -> None:
        if len(items) % 2:
            raise UnreadableError(f"{what} with a key but no value")
        if type(target) is Record:
            self._extend(target, items, what)
            return
        if type(target) is not dict:
            raise UnreadableError(f"{what} on {describe(target)}")
        keys = items[::2]
        if not KEY_TYPES.issuperset(map(type, keys)):
            keys = [key if type(key) in KEY_TYPES else Record(KEY, (key,), None, 0) for key in keys]
        known = len(target)
        target.update(zip(keys, items[1::2], strict=True))
        if len(target) != known + len(keys):
            raise UnreadableError("a dict has the same key twice")

    def _call(self, function: object, args: object, what: str) -> object:
        if type(function) not in (GlobalName, Record):
            raise UnreadableError(f"{what} on {describe(function)}; it was not executed")
        if type(args) is not tuple:
            raise UnreadableError(f"{what} with {describe(args)} for arguments")
        self.num_records += 1
        name: str = function.name  # type: ignore[attr-defined]
        if name in _DICTS:
            made: dict[object, object] = {}
            is_plain = name.endswith("OrderedDict")  # the other one begins with a factory
            content = args[0] if args and is_plain else []
            if len(args) > 1 or type(content) not in (list, dict):
                raise UnreadableError(f"{name} of {len(args)} arguments, {describe(content)} the first: torch fails")
            pairs = [*content.items()] if type(content) is dict else content
            if not all(type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs):
                raise UnreadableError(f"{name} of something other than pairs")
            self._update(made, [each for pair in pairs for each in pair], what)
            return made
        if name in _GETATTR and len(args) == 2 and type(args[0]) is GlobalName and type(args[1]) is str:
            return GlobalName(
                f"{args[0].name}.{args[1]}", outer=args[0].name
            )  # a class inside of a class, before protocol 4
        if name in _SETS and len(args) == 1 and type(args[0]) is list:
            return args[0]
        return Record(name, args, None, 0)

    def _build(self, record: object, state: object) -> None:
        if type(record) is dict:
            return  # `_metadata` of a state dict: versions of modules
        if type(record) is not Record:
            raise UnreadableError(f"BUILD on {describe(record)}; it was not executed")
        record.state = state if record.state is None else (record.state, state)

    def _persistent(self, identifier: object) -> Record:
        self.num_records += 1
        if type(identifier) is tuple and len(identifier) > 2 and type(identifier[2]) is str:
            self.storages.setdefault(identifier[2], identifier)
        return Record(PERSISTENT_ID, (identifier,), None, 0)

    def _put(self, index: int, memo: list[Any], value: object) -> None:
        if index == 1 and not memo:
            memo.append(None)
        PickleReader._put(self, index, memo, value)  # noqa: SLF001 - slots dataclasses have no super()

    def _text_of_python_2(self, start: int, nbytes: int) -> str | bytes:
        if nbytes < 0:
            raise LimitError(f"a string of {nbytes} bytes")
        content = self._bytes(start, nbytes)
        try:
            return content.decode()
        except UnicodeDecodeError:  # the bytes of an array
            return content

    def _other(self, op: int, position: int, stack: list[Any], outer: list[list[Any]]) -> int:
        if op == 0x30 and stack:  # POP
            stack.pop()
        elif op == 0x8F:  # EMPTY_SET
            self.num_records += 1
            stack.append([])
        elif op == 0x92:  # NEWOBJ_EX
            options, args = stack.pop(), stack.pop()
            made = self._call(stack[-1], args, "NEWOBJ_EX")
            stack[-1] = made
            self._extend(made, [options], "NEWOBJ_EX")
        elif op in (0x90, 0x91, 0x31):  # ADDITEMS, FROZENSET, POP_MARK: the stack goes on as it was below the mark
            items, below = list(stack), outer.pop()
            stack[:] = below
            if op == 0x90:
                self._extend(stack[-1], items, "ADDITEMS")
            elif op == 0x91:
                self.num_records += 1
                stack.append(items)
        else:
            raise refused_opcode(op, position - 1)
        return position

    def _check_end(self, position: int) -> None:
        self.end = position


class _ExactReader(_ObjectReader):
    """One run over one pickle that will be written again."""

    __slots__ = ()
    sized: ClassVar[Sized] = {op: how for op, how in _ObjectReader.sized.items() if op != 0x96}

    def _extend(self, target: object, items: list[object], what: str) -> None:
        if type(target) is Record and not what.startswith("SETITEM"):
            raise UnreadableError(f"{what} on {describe(target)}")
        super()._extend(target, items, what)

    def _call(self, function: object, args: object, what: str) -> object:
        if type(function) is not GlobalName or function.outer or type(args) is not tuple:
            raise UnreadableError(f"{what} on {describe(function)}; it was not executed")
        self.num_records += 1
        match function.name, args:
            case name, (GlobalName(name=outer), str(inner)) if name in _GETATTR:
                return GlobalName(f"{outer}.{inner}", outer=outer)
        return Record(function.name, args, None, 0, is_new=what == "NEWOBJ")

    def _build(self, record: object, state: object) -> None:
        if type(record) is not Record or record.state is not None:
            raise UnreadableError(f"BUILD on {describe(record)}; it was not executed")
        record.state = state

    def _other(self, op: int, position: int, stack: list[Any], outer: list[list[Any]]) -> int:
        if op in (0x8F, 0x90, 0x91, 0x92):  # sets and others, which protocol 2 makes by calls
            raise refused_opcode(op, position - 1)
        return super()._other(op, position, stack, outer)
