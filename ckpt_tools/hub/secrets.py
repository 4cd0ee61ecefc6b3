"""Search what is to be sent for access tokens. The rules are data: secrets.toml.

Every file that holds no weights is searched, and the header of safetensors, whose `__metadata__` is text. Only the
surroundings of long runs of letters and digits are searched, which a vocabulary has few of; there a rule's keyword
finds the place, and only then its pattern is tried. Every pattern is bounded: time is linear.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ckpt_tools.checkpoint.formats.file_names import is_weights
from ckpt_tools.checkpoint.formats.safetensors import MAX_HEADER_BYTES
from ckpt_tools.errors import UsageError
from ckpt_tools.hub.plan import LocalFile
from ckpt_tools.storage.source import Source
from ckpt_tools.text import escape_name
from ckpt_tools.units import format_size

MAX_SEARCHED_BYTES = 1 << 30  # Larger files that are no weights are not searched, and named in the notes
BLOCK_BYTES = 8 << 20
OVERLAP_BYTES = 8 << 10  # Of two blocks that follow each other; longer than any pattern
_MAX_NAMED = 5  # Places that an error names
_ALONE = (r"(?:(?<![A-Za-z0-9_])|(?<=\\[nrt]))", r"(?![A-Za-z0-9_])")
"""Before and after a token: no part of a word, other than an escape of JSON."""
_UUID = re.compile(rb"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
_RUN_BYTES = bytes(
    ord("a" if chr(byte).isascii() and (chr(byte).isalnum() or chr(byte) in "_-+/=%.~") else " ") for byte in range(256)
)
_RUN = b"a" * 20  # What a block is searched for once its bytes are only "part of a value" or not: no secret is shorter
_BEFORE_BYTES, _AFTER_BYTES = 256, 8


class Secret(NamedTuple):
    """Where something looks like a secret, never what it is; `line` is from 1, of a safetensors file in its header."""

    path: str
    line: int
    kind: str


def refuse_secrets(source: Source, files: Iterable[LocalFile], token: str | None) -> tuple[str, ...]:
    """Refuse to send a file with an access token, also the user's `token`; return notes on files too large for it."""
    notes: list[str] = []
    found: list[Secret] = []
    for file in files:
        start, nbytes = _text_of(source, file)
        if nbytes > MAX_SEARCHED_BYTES:
            notes.append(f"{escape_name(file.path)} was not searched for secrets: {format_size(nbytes)}")
        else:
            found += find_secrets(file.path, functools.partial(file.read, source), nbytes, token, start=start)
    if not found:
        return tuple(notes)
    first, *others = found
    also = [f"{each.path}, line {each.line}: {each.kind}" for each in others[: _MAX_NAMED - 1]]
    also += [f"and {len(others) - _MAX_NAMED + 1} more"] if len(others) >= _MAX_NAMED else []
    what = f"the file contains what looks like {first.kind}" + (f" (also {'; '.join(also)})" if also else "")
    hint = f"remove and revoke the secret, or leave the file out: --exclude {first.path}"
    raise UsageError(what, where=f"{first.path}, line {first.line}", hint=hint)


def _text_of(source: Source, file: LocalFile) -> tuple[int, int]:
    """Return (offset, bytes) of what is to be searched: nothing of weights, but for the header of safetensors."""
    if file.content is not None:
        return 0, len(file.content)
    if not is_weights(file.path):
        return 0, file.nbytes
    if file.path.endswith(".safetensors") and file.nbytes >= 8:
        return 8, min(int.from_bytes(source.read(file.path, 0, 8), "little"), file.nbytes - 8, MAX_HEADER_BYTES)
    return 0, 0


def find_secrets(
    path: str, read: Callable[[int, int], bytes], nbytes: int, token: str | None = None, *, start: int = 0
) -> tuple[Secret, ...]:
    """Return everything in a text that looks like a secret, in the order of the lines, once for each line and kind.

    `read` returns the bytes at (offset, length), where the text begins at `start`; `token` is a secret in any form.
    """
    found: dict[tuple[int, str], Secret] = {}
    lines, offset, stride = 0, 0, 1  # stride: bytes of a character
    while offset < nbytes:
        block = read(start + offset, min(BLOCK_BYTES, nbytes - offset))
        size = len(block)
        stride = 2 if offset == 0 and block.startswith((b"\xff\xfe", b"\xfe\xff")) else stride
        block = block.replace(b"\0", b"") if stride == 2 else block
        is_last = offset + size >= nbytes
        # What begins in the overlap is found with the next block, whole.
        end = len(block) if is_last else len(block) - OVERLAP_BYTES // stride
        for position, kind in sorted(_search(block, token)):
            if position < end:
                line = 1 + lines + block.count(b"\n", 0, position)
                found.setdefault((line, kind), Secret(path, line, kind))
        lines += block.count(b"\n", 0, end)
        offset += size if is_last else size - OVERLAP_BYTES
    return tuple(found.values())


Rules = Mapping[bytes, Sequence[tuple[str, re.Pattern[bytes], bool]]]
"""Keyword → (kind, what is matched there, whether the value must look random)."""


@functools.cache
def rules() -> tuple[Rules, Sequence[bytes]]:
    """Return the rules of secrets.toml, most specific kinds first, and the words that placeholders have."""
    import tomllib

    with open(os.path.join(os.path.dirname(__file__), "secrets.toml"), "rb") as file:
        document = tomllib.load(file)
    by_keyword: dict[bytes, list[tuple[str, re.Pattern[bytes], bool]]] = {}
    for rule in document["rules"]:
        before, after = ("", "") if rule.get("within") else _ALONE
        pattern = re.compile((before + rule["regex"] + after).encode(), re.ASCII)
        for keyword in rule["keywords"]:
            by_keyword.setdefault(keyword.encode(), []).append((rule["description"], pattern, "random" in rule))
    return (by_keyword, [word.encode() for word in document["allowlist"]["stopwords"]])


def _search(block: bytes, token: str | None) -> Iterator[tuple[int, str]]:
    """Yield (position, kind); a value that several rules know goes by the first."""
    if token and (position := block.find(token.encode())) >= 0:
        yield position, "your own access token of the hub"
    ends: set[int] = set()
    for start, end in _windows(block):
        window = block[start:end]
        lower = window.lower()
        for keyword, known in rules()[0].items():
            position = lower.find(keyword)
            while position >= 0:
                for kind, pattern, must_be_random in known:
                    match = pattern.match(window, position)
                    if match is None or start + match.end(1) in ends or is_placeholder(match[1]):
                        continue
                    if not must_be_random or is_random(match[1]):
                        ends.add(start + match.end(1))
                        yield start + position, kind
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
