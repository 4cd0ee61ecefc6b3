"""What a pickle would import and call, as far as it can be read: nothing is imported, called or kept.

Where `inert_pickle` refuses, this goes on: whoever unpickles executes everything up to the first byte that is wrong.

Source: CPython `Lib/pickle.py` and `Lib/pickletools.py` (protocols 0 to 5).
"""

from __future__ import annotations

import codecs
import pickletools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, BinaryIO, Literal, NamedTuple

from ckpt_tools.tables import read_packaged

Verdict = Literal["dangerous", "unknown", "torch"]
VERDICTS: tuple[Verdict, ...] = ("dangerous", "unknown", "torch")  # The worst first

COMPUTED = "a name that the pickle computes"
_MAX_NAME_BYTES = 4096
_MAX_LINE_BYTES = 64 << 20

_THROUGH = re.compile(
    r"[^.]+\.(?:.*\.)?(?:(?:os|posix|nt|sys|subprocess|builtins|importlib|shutil|socket|pickle|ctypes|runpy|pty|_os|_sys"
    r"|__\w+__)(?:\..*)?|eval|exec|execfile|system|popen|Popen|import_module|check_output|check_call|getoutput)"
)
"""Names that lead through a module or an object to something else: `torch.serialization.os.system`."""
_WRAPPERS = frozenset({"builtins.getattr", "__builtin__.getattr", "functools.partial"})
"""What is as dangerous as what it is given: enums and nested classes need `getattr` below protocol 4."""
_OPENERS = frozenset({"torch.storage._load_from_bytes"})
"""What loads a pickle in bytes, which is harmless where the bytes can be looked at."""

_LINE = pickletools.UP_TO_NEWLINE
_WIDTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
"""Kind of an argument that has a length → bytes of the length."""
_CHANGES = frozenset({"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD", "READONLY_BUFFER"})
"""Opcodes that leave the lowest value that they take where it was."""
_PUTS = frozenset({"MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"})
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
_BYTES = frozenset({"BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"})
_MARK = object()


_TEXTS: Mapping[str, Callable[[bytes], str]] = {
    "STRING": lambda line: codecs.escape_decode(line.strip()[1:-1])[0].decode("latin-1"),
    "UNICODE": lambda line: line.decode("raw-unicode-escape"),
    **dict.fromkeys(
        ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), lambda content: content.decode("utf-8", "surrogatepass")
    ),
    **dict.fromkeys(("BINSTRING", "SHORT_BINSTRING"), lambda content: content.decode("latin-1")),
}
_ARGUMENTS: Mapping[str, Callable[[bytes], Any]] = {
    **_TEXTS,
    **dict.fromkeys(("GLOBAL", "INST"), lambda lines: lines.decode().replace("\n", ".", 1)),
    **dict.fromkeys(("PUT", "GET"), lambda line: int(line.partition(b"\0")[0])),  # all that C's unpickler looks at
    **dict.fromkeys(
        ("BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "EXT1", "EXT2", "EXT4"),
        lambda content: int.from_bytes(content, "little"),
    ),
}
"""Opcode → what reads its argument."""


def _opcode(op: pickletools.OpcodeInfo) -> tuple[str, int, int, bool, bool, Callable[[bytes], Any] | None]:
    """Return its name, bytes of its argument (negative as `pickletools` has it), and what it does to the stack."""
    # That is: how many values it takes, besides those down to a mark; whether it takes those; whether it puts one
    # there.
    to_mark, changes = pickletools.markobject in op.stack_before, op.name in _CHANGES
    takes = op.stack_before.index(pickletools.markobject) if to_mark else len(op.stack_before)
    nbytes = 0 if op.arg is None else op.arg.n
    puts = bool(op.stack_after) and not changes
    return op.name, nbytes, takes - changes, to_mark, puts, _ARGUMENTS.get(op.name)


_OPCODES = {op.code.encode("latin-1"): _opcode(op) for op in pickletools.opcodes}


class _Name(str):
    """Something importable."""

    __slots__ = ()


class _Made(_Name):
    """What calling something importable makes."""

    __slots__ = ()


class Span(NamedTuple):
    """Bytes that a pickle holds: perhaps a pickle, or an archive of them."""

    start: int
    nbytes: int
    is_text: bool = False  # As UTF-8 of Latin-1, which is how protocol 2 has bytes


@dataclass(slots=True)
class Walk:
    """What was seen of one pickle."""

    end: int  # Where it ends, or breaks
    is_whole: bool = False
    names: Counter[str] = field(default_factory=Counter)
    """What is named, and how often; of `getattr` and `partial`, only what is not used in a way that can be told."""
    spans: dict[Span | bytes, None] = field(default_factory=dict)  # Values of bytes, where they lie or as they are


@cache
def _table() -> tuple[frozenset[str], re.Pattern[str], frozenset[str], re.Pattern[str]]:
    """Return the plain names and the pattern of the others: of what is dangerous, and of what is harmless."""
    dangerous, harmless = read_packaged(__package__, "_pickle_names.txt").split("\n[")[1:]
    return *_section(dangerous, ".*"), *_section(harmless, r"(?:.*\.)?_*[A-Z][^.]*")


def _section(text: str, below: str) -> tuple[frozenset[str], re.Pattern[str]]:
    names = [name for line in text.splitlines()[1:] if not line.startswith("#") for name in line.split()]
    escaped = (re.escape(name) for name in names if "*" in name)
    patterns = (re.sub(r"\\\.\\\*$", lambda _: rf"\.{below}", each).replace(r"\*\*", ".*") for each in escaped)
    joined = "|".join(each.replace(r"\*", "[^.]*") for each in patterns)
    return frozenset(name for name in names if "*" not in name), re.compile(joined)


@cache
def judge(name: str) -> Verdict:
    """Say what a name may do: run or load something, no more than torch needs, or that nobody knows."""
    dangerous, worse, harmless, better = _table()
    if name in harmless:
        return "torch"
    if name in dangerous or name == COMPUTED or worse.fullmatch(name) or _THROUGH.fullmatch(name):
        return "dangerous"
    return "torch" if better.fullmatch(name) else "unknown"


def walk(file: BinaryIO, size: int, start: int = 0) -> Walk:
    """Follow the pickle that begins at `start` in a file of `size` bytes to its end, or to where it breaks."""
    found = Walk(end=start)
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for name, takes, to_mark, puts, at, nbytes, content in _opcodes(file, size, found):
        if name in _PUTS:
            memo[len(memo) if content is None else content] = stack[-1] if stack else None
            continue
        items: list[Any] = []
        if to_mark:
            while stack and (item := stack.pop()) is not _MARK:
                items.append(item)
            items.reverse()
        elif takes:
            items = stack[-takes:]
            del stack[-takes:]
        if not puts:
            continue
        if name in _GETS:
            value = memo.get(content)
        elif name in _TEXTS:
            value = Span(at, nbytes, "UNICODE" in name) if content is None else content
        elif name in _BYTES:
            value = Span(at, nbytes)
            found.spans[value] = None
        else:
            value = _value(found, name, tuple(items), content)
        if type(value) is _Name:
            found.names[value] += 1
        stack += [value] * (2 if name == "DUP" else 1)
    found.names = +found.names
    return found


def _value(found: Walk, name: str, items: tuple[Any, ...], content: Any) -> object:  # noqa: ANN401
    """Return what an opcode puts on the stack, made of what it took; None for what no name can be made of."""
    match name, items:
        case (("EMPTY_TUPLE" | "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3"), _):
            return items
        case (("REDUCE" | "NEWOBJ" | "NEWOBJ_EX"), (function, args, *_)):
            return _call(found, function, args)
        case "STACK_GLOBAL", _:
            is_plain = len(items) == 2 and all(type(each) is str for each in items)
            return _Name(".".join(items) if is_plain else COMPUTED)
        case "GLOBAL", _:
            return _Name(content)
        case "INST", _:
            found.names[content] += 1
            return _call(found, _Name(content), items)
        case "OBJ", (function, *_):
            return _call(found, function, items[1:])
        case (("EXT1" | "EXT2" | "EXT4"), _):
            return _Name(f"copyreg.extension_{content}")
        case "DUP", (below,):
            return below
    return _MARK if name == "MARK" else None


def _opcodes(file: BinaryIO, size: int, found: Walk) -> Iterator[tuple[Any, ...]]:
    """Yield every opcode, where its argument begins and how long it is, and its text or number where that is short."""
    at = file.seek(found.end)
    while op := _OPCODES.get(file.read(1)):
        name, kind, *effect, read = op
        content = b""
        at += 1
        if kind == _LINE:
            lines = 2 if name in ("GLOBAL", "INST") else 1
            content = b"".join(file.readline(_MAX_LINE_BYTES) for _ in range(lines))
            nbytes, end = len(content) - 1, at + len(content)
            if content.count(b"\n") < lines:
                return
        else:
            width = _WIDTHS.get(kind, 0)
            nbytes = int.from_bytes(file.read(width), "little") if width else kind
            at += width
            end = at + nbytes
            if end > size:
                return
            if nbytes <= _MAX_NAME_BYTES:
                content = file.read(nbytes)
            else:
                file.seek(end)
        try:
            told = read(content[:nbytes]) if read and content else None
        except (ValueError, Warning):  # of escapes, where warnings are errors
            return
        found.end = at = end
        if name == "STOP":
            found.is_whole = True
            return
        yield name, *effect, end - nbytes, nbytes, told


def _call(found: Walk, function: object, args: object) -> object:
    """Note a call, and return what stands for its result."""
    if not isinstance(function, _Name):
        return None
    if isinstance(function, _Made):
        found.names[function] += 1
        return None
    first, second = (*(args if isinstance(args, tuple) else ()), None, None)[:2]
    if function in _WRAPPERS:
        is_plain = function == "functools.partial" or (type(second) is str and not second.startswith("_"))
        if type(first) is not _Name or not is_plain:
            return None
        found.names[function] -= 1
        return first if function == "functools.partial" else _Name(f"{first}.{second}")
    if function == "_codecs.encode" and type(first) in (str, Span):
        found.spans[first.encode("latin-1", "replace") if isinstance(first, str) else first] = None
        return Span(0, 0)
    if function in _OPENERS and type(first) is not Span:
        found.names[COMPUTED] += 1
    return _Made(f"{function}()")
