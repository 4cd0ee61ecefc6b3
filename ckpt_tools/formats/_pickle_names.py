"""What a pickle would import and call, as far as it can be read: nothing is imported, called or kept.

Where `inert_pickle` refuses, this goes on: whoever unpickles executes everything up to the first byte that is wrong.

Source: CPython `Lib/pickle.py` and `Lib/pickletools.py` (protocols 0 to 5).
"""

from __future__ import annotations

import codecs
import os
import pickletools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple

Read = Callable[[int, int], bytes]
"""(offset, nbytes) → exactly these bytes."""
Verdict = Literal["dangerous", "unknown", "torch"]
VERDICTS: tuple[Verdict, ...] = ("dangerous", "unknown", "torch")
"""The worst first."""

COMPUTED = "a name that the pickle computes"
_MAX_NAME_BYTES = 4096
_WINDOW = 1 << 20
"""Bytes that are read at once; of the beginning, fewer."""
_FIRST_WINDOW = 1 << 12
_MAX_LINE_BYTES = 64 << 20

_THROUGH = re.compile(
    r"[^.]+\.(?:.*\.)?(?:(?:os|posix|nt|sys|subprocess|builtins|importlib|shutil|socket|pickle|ctypes|runpy|pty|_os|_sys"
    r"|__\w+__)(?:\..*)?|eval|exec|execfile|system|popen|Popen|import_module|check_output|check_call|getoutput)"
)
"""Names that lead through a module or an object to something else: `torch.serialization.os.system`."""
_GETATTR = frozenset({"builtins.getattr", "__builtin__.getattr"})
_WRAPPERS = _GETATTR | {"functools.partial"}
"""What is as dangerous as what it is given: enums and nested classes need the first below protocol 4."""

_OPENERS = frozenset({"torch.storage._load_from_bytes"})
"""What loads a pickle in bytes, which is harmless where the bytes can be looked at."""

_LINE = pickletools.UP_TO_NEWLINE
_ARGUMENTS = {ord(op.code): (op.name, 0 if op.arg is None else op.arg.n) for op in pickletools.opcodes}
"""Opcode → its name, and bytes of its argument; negative as `pickletools` has it."""
_PREFIXES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_TEXTS = frozenset(name for name, _ in _ARGUMENTS.values() if "STRING" in name or "UNICODE" in name) | {
    "GLOBAL",
    "INST",
}
_POPS = {"APPEND": 1, "SETITEM": 2, "BUILD": 1, "POP": 1}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_CALLS = {"REDUCE": 2, "NEWOBJ": 2, "NEWOBJ_EX": 3}
"""Opcode → how many values it takes off the stack."""
_TO_MARK = frozenset(
    {"APPENDS", "SETITEMS", "ADDITEMS", "POP_MARK", "LIST", "DICT", "FROZENSET", "TUPLE", "INST", "OBJ"}
)
_NOTHING = frozenset({"PROTO", "FRAME", "READONLY_BUFFER"})


class _Name(NamedTuple):
    """Something importable, or what calling it makes."""

    name: str
    is_made: bool = False


class Span(NamedTuple):
    """Bytes that a pickle holds: perhaps a pickle, or an archive of them."""

    start: int
    nbytes: int
    is_text: bool = False
    """As UTF-8 of Latin-1, which is how protocol 2 has bytes."""


@dataclass(slots=True)
class Walk:
    """What was seen of one pickle."""

    end: int
    """Where it ends, or breaks."""
    is_whole: bool = False
    names: dict[str, bool] = field(default_factory=dict)
    """What is named → is it called?"""
    spans: dict[Span | bytes, None] = field(default_factory=dict)
    """Values of bytes, where they lie or as they are."""
    loose: set[str] = field(default_factory=set)
    """Wrappers that are given something dangerous, or what cannot be told."""
    used: set[str] = field(default_factory=set)
    """Wrappers that are called."""


@cache
def _table() -> tuple[frozenset[str], frozenset[str], re.Pattern[str], re.Pattern[str]]:
    """Return the plain names of both sections, and their patterns."""
    with open(os.path.join(os.path.dirname(__file__), "_pickle_names.txt"), encoding="utf-8") as file:
        text = file.read()
    plain: list[frozenset[str]] = []
    patterns: list[re.Pattern[str]] = []
    for section in text.split("\n[")[1:]:
        names = [name for line in section.splitlines()[1:] if not line.startswith("#") for name in line.split()]
        below = ".*" if not plain else r"(?:.*\.)?_*[A-Z][^.]*"
        found = (
            re.escape(name[:-1]) + below if name.endswith(".*") else re.escape(name).replace(r"\*\*", ".*")
            for name in names
            if "*" in name
        )
        joined = "|".join(each.replace(r"\*", "[^.]*") for each in found)
        plain.append(frozenset(name for name in names if "*" not in name))
        patterns.append(re.compile(joined))
    return plain[0], plain[1], patterns[0], patterns[1]


@cache
def judge(name: str) -> Verdict:
    """Say what a name may do: run or load something, no more than torch needs, or that nobody knows."""
    dangerous, harmless, worse, better = _table()
    if name in harmless:
        return "torch"
    if name in dangerous or name == COMPUTED or worse.fullmatch(name) or _THROUGH.fullmatch(name):
        return "dangerous"
    return "torch" if better.fullmatch(name) else "unknown"


def walk(read: Read, size: int, start: int = 0) -> Walk:
    """Follow the pickle that begins at `start` to its end, or to where it breaks.

    Args:
        read: Reads the file.
        size: Its length.
        start: First byte.
    """
    found = Walk(end=start)
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    for name, at, nbytes, content in _opcodes(read, size, found):
        if name == "MEMOIZE" or name.endswith("PUT"):
            memo[len(memo) if content is None else content] = stack[-1] if stack else None
        elif name == "MARK":
            marks.append(len(stack))
        elif name in _TO_MARK:
            items = _take(stack, len(stack) - (marks.pop() if marks else 0))
            if name in ("LIST", "DICT", "FROZENSET", "TUPLE"):
                stack.append(items if name == "TUPLE" else None)
            elif name == "INST":
                stack.append(_call(found, _named(found, content), items))
            elif name == "OBJ":
                stack.append(_call(found, items[0] if items else None, items[1:]))
        elif name in _POPS:
            if name == "POP" and marks and marks[-1] == len(stack):
                marks.pop()
            else:
                _take(stack, _POPS[name])
        elif name in _TUPLES:
            stack.append(_take(stack, _TUPLES[name]))
        elif name in _CALLS:
            function, args, *_ = (*_take(stack, _CALLS[name]), None, None)
            stack.append(_call(found, function, args))
        elif name not in _NOTHING:
            stack.append(_value(found, name, stack, memo, at, nbytes, content))
    for name in found.used - found.loose:
        del found.names[name]
    return found


def _value(
    found: Walk,
    name: str,
    stack: list[Any],
    memo: Mapping[int, Any],
    at: int,
    nbytes: int,
    content: Any,  # noqa: ANN401 - a text or a number, by opcode
) -> object:
    """Return what an opcode puts on the stack; None for what no name can be made of."""
    if name.endswith("GET"):
        return memo.get(content)
    if name == "GLOBAL":
        return _named(found, content)
    if name == "STACK_GLOBAL":
        both = _take(stack, 2)
        is_plain = len(both) == 2 and all(isinstance(each, str) for each in both)
        return _named(found, "\n".join(both) if is_plain else COMPUTED)
    if name.startswith("EXT"):
        return _named(found, f"copyreg.extension_{content}")
    if name in ("BINPERSID", "DUP"):
        (below,) = _take(stack, 1) or (None,)
        stack += [below] * (name == "DUP")
        return below if name == "DUP" else None
    if "UNICODE" in name or "STRING" in name:
        return content if content is not None else Span(at, nbytes, is_text="UNICODE" in name)
    if nbytes and "BYTE" in name:
        found.spans[span := Span(at, nbytes)] = None
        return span
    return None


def _opcodes(read: Read, size: int, found: Walk) -> Iterator[tuple[str, int, int, Any]]:
    """Yield every opcode: name, where its argument begins and how long it is, and its text where that is short."""
    base, buffer, at = found.end, b"", found.end
    while at < size:
        if at + 10 > base + len(buffer) and base + len(buffer) < size:
            window = _WINDOW if buffer else _FIRST_WINDOW
            base, buffer = at, read(at, min(window, size - at))
        name, kind = _ARGUMENTS.get(buffer[at - base], ("", 0))
        start, nbytes, end = at + 1, kind, at + 1 + kind
        if kind == _LINE:
            base, buffer, end = _line_end(read, size, base, buffer, start, 1 + (name in ("GLOBAL", "INST")))
            start, nbytes = at + 1, end - at - 2
        elif kind < 0:
            width = _PREFIXES[kind]
            nbytes = int.from_bytes(buffer[start - base : start - base + width], "little")
            start += width
            end = start + nbytes
        if not name or end > size or end < start:
            return
        content: Any = None
        if name in _INDICES:
            content = _INDICES[name](buffer[start - base : start - base + nbytes])
        elif name in _TEXTS and (nbytes <= _MAX_NAME_BYTES or kind == _LINE):
            if end > base + len(buffer):
                base, buffer = at, read(at, max(end - at, min(_WINDOW, size - at)))
            content = _text(name, buffer[start - base : start - base + nbytes])
            if content is None:
                return
        found.end = at = end
        if name == "STOP":
            found.is_whole = True
            return
        yield name, start, nbytes, content


def _line_end(read: Read, size: int, base: int, buffer: bytes, start: int, lines: int) -> tuple[int, bytes, int]:
    """Return where some lines end, past the last newline (0: nowhere), and the buffer that they are in."""
    wanted = _WINDOW
    while True:
        end = start - base
        for _ in range(lines):
            end = buffer.find(b"\n", end) + 1
            if not end:
                break
        if end:
            return base, buffer, base + end
        if base == start and len(buffer) >= min(_MAX_LINE_BYTES, size - start):
            return base, buffer, 0
        base, buffer = start, read(start, min(wanted, size - start))
        wanted *= 8


def _text(name: str, content: bytes) -> str | None:
    """Return the text of an argument; None where unpickling breaks on it."""
    try:
        if name == "STRING":
            return codecs.escape_decode(content.strip()[1:-1])[0].decode("latin-1")
        if name == "UNICODE":
            return content.decode("raw-unicode-escape")
        return content.decode(
            "latin-1" if "STRING" in name else "utf-8", "surrogatepass" if "UNICODE" in name else "strict"
        )
    except (ValueError, Warning):  # of escapes, where warnings are errors
        return None


def _line_index(content: bytes) -> int:
    try:
        return int(content)
    except ValueError:
        return -1  # unpickling breaks on it


def _raw_index(content: bytes) -> int:
    return int.from_bytes(content, "little")


_INDICES = dict.fromkeys(("PUT", "GET"), _line_index) | dict.fromkeys(
    ("BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "EXT1", "EXT2", "EXT4"), _raw_index
)
"""Opcode → what reads the number that it has."""


def _take(stack: list[Any], count: int) -> tuple[Any, ...]:
    """Take the last values off the stack, or as many as there are."""
    items = tuple(stack[max(len(stack) - count, 0) :])
    del stack[len(stack) - len(items) :]
    return items


def _named(found: Walk, name: str | None) -> _Name:
    name = (name or "").replace("\n", ".", 1)
    found.names.setdefault(name, False)
    return _Name(name)


def _call(found: Walk, function: object, args: object) -> object:
    """Note a call, and return what stands for its result."""
    given = args if isinstance(args, tuple) else ()
    found.loose.update(each.name for each in given if isinstance(each, _Name) and each.name in _WRAPPERS)
    if not isinstance(function, _Name):
        return None
    name = function.name
    if function.is_made:
        found.names[f"{name}()"] = True
        return None
    if name in _WRAPPERS:
        match given:
            case (_Name(target, False), str(attribute), *_) if name in _GETATTR and not attribute.startswith("_"):
                inner = f"{target}.{attribute}"
            case (_Name(target, False), *_) if name not in _GETATTR:
                inner = target
            case _:
                inner = COMPUTED
        if judge(inner) == "dangerous":
            found.loose.add(name)
        found.used.add(name)
        if inner != COMPUTED:
            found.names.setdefault(inner, False)
        return _Name(inner)
    found.names[name] = True
    if name == "_codecs.encode" and given and isinstance(given[0], str | Span):
        found.spans[given[0].encode("latin-1", "replace") if isinstance(given[0], str) else given[0]] = None
        return Span(0, 0)
    if name in _OPENERS and not (given and isinstance(given[0], Span)):
        found.names[COMPUTED] = True
    return _Name(name, is_made=True)
