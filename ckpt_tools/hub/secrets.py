"""Search what is to be sent for access tokens. The rules are data: secrets.toml.

Everything is searched: texts in whatever encoding, weights, and what archives pack. Only the surroundings of long runs
of letters and digits are looked at, which a vocabulary has few of, and weights none; there a rule's keyword finds the
place, and only then its pattern is tried. Every pattern is bounded: time is linear.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import io
import lzma
import os
import re
import struct
import tarfile
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import IO, Any, NamedTuple

from ckpt_tools.checkpoint.formats.file_names import is_weights
from ckpt_tools.checkpoint.formats.scan import Stretch
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.hub.plan import LocalFile
from ckpt_tools.storage.source import Source
from ckpt_tools.text import escape_name

BLOCK_BYTES = 8 << 20
OVERLAP_BYTES = 8 << 10  # Of two blocks that follow each other; longer than any pattern
MAX_UNPACKED_BYTES = 1 << 30  # Of all that a file packs
_MAX_NESTED_BYTES = 64 << 20  # Of an archive inside of another
_MAX_DEPTH = 3
_MAX_NAMED = 5  # Places that an error names
_ALONE = (r"(?:(?<![A-Za-z0-9_])|(?<=\\[nrt]))", r"(?![A-Za-z0-9_])")
"""Before and after a token: no part of a word, other than an escape of JSON."""
_IN_BINARY = (r"(?:(?<![A-Za-z0-9_])|(?<=[^\t\n\r -~].))", r"(?![A-Za-z0-9_]{5})")
"""The same in a pickle or a picture, where a length stands before a text, and opcodes or a checksum behind it."""
_UUID = re.compile(rb"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
_RUN_BYTES = bytes(
    ord("a" if chr(byte).isascii() and (chr(byte).isalnum() or chr(byte) in "_-+/=%.~") else " ") for byte in range(256)
)
_RUN = b"a" * 20  # What a block is searched for once its bytes are only "part of a value" or not: no secret is shorter
_BEFORE_BYTES, _AFTER_BYTES = 256, 64
_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})|\\(?:u00|x)([0-9A-Fa-f]{2})|&#x([0-9A-Fa-f]{2});")
_COLOR = re.compile(rb"\x1b\[[0-9;?]*[@-~]")
_UNPACK: Mapping[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}
_CLOSED = {
    b"\x28\xb5\x2f\xfd": "compressed by Zstandard",
    b"\x04\x22\x4d\x18": "compressed by LZ4",
    b"PAR1": "Parquet, whose pages are compressed",
    b"7z\xbc\xaf": "a 7z archive",
    b"Rar!": "a RAR archive",
    b"%PDF": "a PDF, whose streams are compressed",
}
"""How a file begins that packs what is not looked into → what it is."""
_FAULTS: tuple[type[Exception], ...] = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, struct.error)
_FAULTS += (EOFError, OSError, ValueError, RuntimeError, MemoryError, OverflowError)


class Secret(NamedTuple):
    """Where something looks like a secret, never what it is; `line` is from 1."""

    path: str
    line: int
    kind: str


Unsearched = tuple[tuple[str, str], ...]
"""(path, why) of what was not searched; what an archive packs stands behind a "!"."""


def refuse_secrets(
    source: Source, files: Iterable[LocalFile], token: str | None, texts: Mapping[str, str | None] | None = None
) -> Unsearched:
    """Refuse to send an access token, or the user's `token`: in contents, in names of files, in `texts` by their names.

    Raises:
        UsageError: There is what looks like one; the message says where, and never what it is.
    """
    found: list[Secret] = []
    unsearched: list[tuple[str, str]] = []
    texts = texts or {}
    for name, text in texts.items():
        found += find_secrets(name, [(text or "").encode()], token)
    for file in files:
        if in_name := find_secrets(file.path, [file.path.encode()], token):
            what = f"the name of a file contains what looks like {in_name[0].kind}"
            raise UsageError(what, hint="revoke the secret, and rename the file")
        content = Stretch(file.path, file.nbytes, functools.partial(file.read, source)).open()
        found += _search_file(content, file.path, token, unsearched, [MAX_UNPACKED_BYTES])
    if not found:
        return tuple(unsearched)
    first, *others = found
    also = [f"{each.path}, line {each.line}: {each.kind}" for each in others[: _MAX_NAMED - 1]]
    also += [f"and {len(others) - _MAX_NAMED + 1} more"] if len(others) >= _MAX_NAMED else []
    is_file = first.path not in texts
    what = f"{'the file' if is_file else first.path} contains what looks like {first.kind}"
    what += f" (also {'; '.join(also)})" * bool(also)
    way = f", or leave the file out: --exclude {first.path.partition('!')[0]}" if is_file else ""
    where = f"{first.path}, line {first.line}" if is_file else None
    raise UsageError(what, where=where, hint=f"remove and revoke the secret{way}")


def _search_file(
    file: IO[bytes], path: str, token: str | None, unsearched: list[tuple[str, str]], budget: list[int], depth: int = 0
) -> Iterator[Secret]:
    """Yield every secret in a file, and in what it packs; `budget` is how much may still be unpacked.

    Memory: some blocks; of an archive inside of another all of it, up to `_MAX_NESTED_BYTES`.
    """
    blocks = iter(functools.partial(file.read, BLOCK_BYTES), b"")
    head = next(blocks, b"")
    yield from _find(path, chain([head], blocks), token)
    if why := next((why for magic, why in _CLOSED.items() if head.startswith(magic)), None):
        unsearched.append((path, why))
    try:
        for name, member in _members(file, head):
            inner = f"{path}!{escape_name(name)}"
            if member is None:
                unsearched.append((inner, "encrypted"))
                continue
            part: IO[bytes] = io.BufferedReader(_Unpacked(member, budget), 1 << 16)
            if _is_packed(part.peek(512)):  # type: ignore[attr-defined]
                if depth == _MAX_DEPTH:
                    unsearched.append((inner, f"deeper than {_MAX_DEPTH} archives"))
                    continue
                content = part.read(_MAX_NESTED_BYTES + 1)
                if len(content) > _MAX_NESTED_BYTES:
                    unsearched.append((inner, "an archive inside of another, and large"))
                    continue
                part = io.BytesIO(content)
            yield from _search_file(part, inner, token, unsearched, budget, depth + 1)
    except _UnsearchedError as error:
        unsearched.append((path, str(error)))
    except CkptError:
        raise
    except _FAULTS:
        unsearched.append((path, "packed in a way that cannot be read"))


class _UnsearchedError(Exception):
    """Why the rest of what a file packs is not searched."""


class _Unpacked(io.RawIOBase):
    """What a decompressor gives, as long as the budget lasts."""

    def __init__(self, stream: IO[bytes], budget: list[int]) -> None:
        self._stream, self._budget = stream, budget

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - any buffer
        block = self._stream.read(len(buffer))
        self._budget[0] -= len(block)
        if self._budget[0] < 0:
            raise _UnsearchedError("more is packed in it than is unpacked")
        buffer[: len(block)] = block
        return len(block)


def _is_packed(head: bytes) -> bool:
    """Return True for a file whose own bytes do not show all that is in it."""
    return head.startswith((*_UNPACK, b"PK\3\4", b"\x89PNG")) or head[257:262] == b"ustar"


def _members(file: IO[bytes], head: bytes) -> Iterator[tuple[str, IO[bytes] | None]]:
    """Yield (name, content) of what a file packs so that its own bytes do not show it; None for what is encrypted."""
    if not _is_packed(head):
        return
    file.seek(0)
    for magic, unpack in _UNPACK.items():
        if head.startswith(magic):
            yield "content", unpack(file)
    if head.startswith(b"PK\3\4"):
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                if info.flag_bits & 1:
                    yield info.filename, None
                    continue
                with archive.open(info) as member:
                    is_plain = info.compress_type == zipfile.ZIP_STORED
                    if not is_plain or _is_packed(member.peek(512)):  # type: ignore[attr-defined]
                        yield info.filename, member
    elif head[257:262] == b"ustar":
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for entry in archive:
                inside = archive.extractfile(entry) if entry.isfile() else None
                if inside is not None and _is_packed(inside.peek(512)):  # type: ignore[attr-defined]
                    yield entry.name, inside
    elif head.startswith(b"\x89PNG"):
        packed = (each for each in png_texts(file) if each[2])
        yield from ((keyword, io.BytesIO(text.encode())) for keyword, text, _ in packed)


def png_texts(file: IO[bytes]) -> Iterator[tuple[str, str, bool]]:
    """Yield (keyword, text, whether it is compressed) of a PNG (PNG 1.2, 4.2.3: tEXt, zTXt, iTXt)."""
    file.seek(0)
    is_png = file.read(8) == b"\x89PNG\r\n\x1a\n"
    while is_png and len(start := file.read(8)) == 8:
        size, kind = int.from_bytes(start[:4], "big"), start[4:]
        if kind not in (b"tEXt", b"zTXt", b"iTXt"):
            file.seek(size + 4, os.SEEK_CUR)
            continue
        keyword, _, rest = file.read(min(size, _MAX_NESTED_BYTES)).partition(b"\0")
        file.seek(4, os.SEEK_CUR)
        is_packed = kind == b"zTXt" or (kind == b"iTXt" and rest[:1] == b"\1")
        text = rest[1:] if kind == b"zTXt" else rest[2:].split(b"\0", 2)[-1] if kind == b"iTXt" else rest
        text = zlib.decompressobj().decompress(text, _MAX_NESTED_BYTES) if is_packed else text
        yield keyword.decode("latin-1"), text.decode("utf-8" if kind == b"iTXt" else "latin-1", "replace"), is_packed


def find_secrets(path: str, blocks: Iterable[bytes], token: str | None = None) -> tuple[Secret, ...]:
    """Return everything in consecutive blocks that looks like a secret, in order, once for each line and kind.

    `token` is a secret in any form.
    """
    return tuple(_find(path, blocks, token))


def _find(path: str, blocks: Iterable[bytes], token: str | None) -> Iterator[Secret]:
    """Yield them as the blocks come: whatever ends those early, what was seen is known."""
    found: set[tuple[int, str]] = set()
    lines, left = 0, b""
    following = iter(blocks)
    block: bytes | None = next(following, b"")
    while block is not None:
        after = next(following, None)
        window = left + block
        # What begins in the overlap is found with the next block, whole.
        end = len(window) if after is None else max(0, len(window) - OVERLAP_BYTES)
        left = window[end:]
        views = [(window, end)]
        if b"\0" in window and not is_weights(path):  # UTF-16, as Windows and cameras write it
            views.append((window.replace(b"\0", b""), end - window.count(b"\0", 0, end)))
        for view, stop in views:
            for position, kind in sorted(_search(view, token)):
                if position < stop:
                    line = 1 + lines + view.count(b"\n", 0, position)
                    if (line, kind) not in found:
                        yield Secret(path, line, kind)
                    found.add((line, kind))
        lines += window.count(b"\n", 0, end)
        block = after


Rules = Mapping[bytes, Sequence[tuple[str, re.Pattern[bytes], re.Pattern[bytes], bool]]]
"""Keyword → (kind, what is matched there in text and in binary, whether the value must look random)."""


@functools.cache
def rules() -> tuple[Rules, Sequence[bytes]]:
    """Return the rules of secrets.toml, most specific kinds first, and the words that placeholders have."""
    import tomllib

    with open(os.path.join(os.path.dirname(__file__), "secrets.toml"), "rb") as file:
        document = tomllib.load(file)
    by_keyword: dict[bytes, list[tuple[str, re.Pattern[bytes], re.Pattern[bytes], bool]]] = {}
    for rule in document["rules"]:
        around = (("", ""), ("", "")) if rule.get("within") else (_ALONE, _IN_BINARY)
        text, binary = (re.compile((a + rule["regex"] + b).encode(), re.ASCII | re.DOTALL) for a, b in around)
        for keyword in rule["keywords"]:
            by_keyword.setdefault(keyword.encode(), []).append((rule["description"], text, binary, "random" in rule))
    return (by_keyword, [word.encode() for word in document["allowlist"]["stopwords"]])


def _search(block: bytes, token: str | None) -> Iterator[tuple[int, str]]:
    """Yield (position, kind); a value that several rules know goes by the first."""
    if token and (position := block.find(token.encode())) >= 0:
        yield position, _OWN
    for start, end in _windows(block):
        window = block[start:end]
        for position, kind in _match(window):
            yield start + position, kind
        plain = _decode(window)
        if plain == window:
            continue
        if token and token.encode() in plain:
            yield start, _OWN
        lines, same_lines = ([0, *(each.end() for each in re.finditer(b"\n", text))] for text in (window, plain))
        for position, kind in _match(plain):
            yield start + lines[bisect_right(same_lines, position) - 1], kind


_OWN = "your own access token of the hub"


def _decode(window: bytes) -> bytes:
    """Return a text without colors, and with escaped ASCII as it is meant; lines stay lines."""
    if not any(sign in window for sign in (b"%", b"\\", b"\x1b", b"&#")):
        return window

    def plain(match: re.Match[bytes]) -> bytes:
        byte = int(match[1] or match[2] or match[3], 16)
        return bytes([byte]) if 32 <= byte < 127 or byte == 27 else b" "

    return _COLOR.sub(b"", _ESCAPE.sub(plain, window))


def _match(window: bytes) -> Iterator[tuple[int, str]]:
    """Yield (position, kind) of every value in a window that a rule knows."""
    ends: set[int] = set()
    lower, is_binary = window.lower(), b"\0" in window
    for keyword, known in rules()[0].items():
        position = lower.find(keyword)
        while position >= 0:
            for kind, text, binary, must_be_random in known:
                match = (binary if is_binary else text).match(window, position)
                if match is None or match.end(1) in ends or is_placeholder(match[1]):
                    continue
                if not must_be_random or is_random(match[1]):
                    ends.add(match.end(1))
                    yield position, kind
            position = lower.find(keyword, position + 1)


def _windows(block: bytes) -> Iterator[tuple[int, int]]:
    """Yield [start, end) around every run that is long enough for a secret, with what may name it before."""
    marked = block.translate(_RUN_BYTES)
    start = end = 0
    position = marked.find(_RUN)
    while position >= 0:
        run_end = marked.find(b" ", position)
        run_end = len(block) if run_end < 0 else run_end
        if position - _BEFORE_BYTES > end:
            if end:
                yield start, end
            start = max(0, position - _BEFORE_BYTES)
        end = min(len(block), run_end + _AFTER_BYTES)
        position = marked.find(_RUN, run_end)
    if end:
        yield start, end


def is_placeholder(value: bytes) -> bool:
    """Return True for what documentation writes in place of a secret: few letters repeated, the alphabet, EXAMPLE."""
    lower = value.lower()
    if any(word in lower for word in rules()[1]):
        return True
    steps = sum(after - before in (0, 1) for before, after in pairwise(value))
    return len(set(value)) < 4 or steps * 2 > len(value)


def is_random(value: bytes) -> bool:
    """Return True if a value looks random, unlike names and paths.

    Its longest piece between `_`, `-` and `/` decides: long, with digits, and changing between lower case, upper case
    and digits at least at every fifth character.
    """
    if _UUID.fullmatch(value):
        return True
    piece = max(re.split(rb"[_/+=-]", value), key=len)
    kinds = [0 if byte < 58 else 1 if byte < 91 else 2 for byte in piece]
    changes = sum(before != after for before, after in pairwise(kinds))
    return len(piece) >= 12 and 0 in kinds and 5 * changes >= len(piece)
