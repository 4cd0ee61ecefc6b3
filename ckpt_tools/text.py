"""Text for terminals: names from files made harmless, and how wide they are.

A name in a checkpoint is input like any other. Control characters drive terminals, bidirectional overrides
reorder a line, invisible characters make two names look alike, and lone surrogates cannot be encoded.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")

# Printable by category, yet invisible: joiners, Hangul fillers, inherent vowels, variation selectors, blank.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)

MAX_SHOWN_CHARS = 1024
"""Characters of a name that are shown; a longer one ends in an ellipsis, so that no message grows with its input."""


def escape_name(text: str) -> str:
    r"""Return `text` with everything that does not print as itself shown as \xNN, \uNNNN or \UNNNNNNNN.

    Escaped are controls (C0, DEL, C1), line separators, bidirectional and zero-width marks, lone surrogates,
    spaces other than U+0020, and unassigned or private characters. What is printable stays, backslashes too.
    The result has at most `MAX_SHOWN_CHARS` characters.

    Source: Unicode general categories (UAX #44) as `str.isprintable` reads them, plus the default-ignorable
    characters that it counts as printable.
    """
    start = text[: MAX_SHOWN_CHARS + 1]
    if not (start.isascii() and start.isprintable()):
        start = _escape_all(start)
    return start if len(start) <= MAX_SHOWN_CHARS else start[: MAX_SHOWN_CHARS - 1] + "…"


MAX_MESSAGE_CHARS = 8192  # Characters of one part of an error or a finding
_MAX_WORD = 100  # Characters of a mistyped word that are compared
_LONG_WORD = re.compile(rf"\S{{{MAX_SHOWN_CHARS + 1},}}")


def escape_message(text: str) -> str:
    """Return a sentence that may quote names from files, as `escape_name` would show them: for errors and findings.

    A word has at most `MAX_SHOWN_CHARS` characters and the whole `MAX_MESSAGE_CHARS`. Escaping twice changes nothing.
    """
    text = _shorten(text)[:MAX_MESSAGE_CHARS]
    if not (text.isascii() and text.isprintable()):
        text = _shorten(_escape_all(text))[:MAX_MESSAGE_CHARS]
    return text


def first_few(names: Collection[str], limit: int = 3) -> str:
    """List up to `limit` names, escaped, and how many more there are: "a, b, c and 4 more"."""
    shown = ", ".join(escape_name(name) for name in islice(names, limit))
    return shown + (f" and {len(names) - limit:,} more" if len(names) > limit else "")


_NUMBER = re.compile(r"(\d{1,18})", re.ASCII)


def counted(number: int, noun: str) -> str:
    """Return "1 tensor", "2 tensors"."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def natural_key(name: str) -> tuple[int | str, ...]:
    """Return what sorts `step-9` before `step-10`: texts and numbers take turns."""
    return tuple(int(part) if i % 2 else part for i, part in enumerate(_NUMBER.split(name)))


def natural_order(items: Iterable[Item], name: Callable[[Item], str] = str) -> list[Item]:
    """Return `items` with layer 2 before layer 10; whatever differs in more than a number keeps its order."""
    seen: dict[tuple[int | str, ...], int] = {}
    placed = []
    for item in items:
        parts = natural_key(name(item))
        places = (part if i % 2 else seen.setdefault(parts[: i + 1], len(seen)) for i, part in enumerate(parts))
        placed.append((tuple(places), item))
    return [item for _, item in sorted(placed, key=lambda pair: pair[0])]


def nearest(word: str, words: Iterable[str]) -> str | None:
    """Return the known word that is most like `word`, if any is."""
    import difflib  # which takes 3 ms, and only mistakes need it

    found = difflib.get_close_matches(word[:_MAX_WORD], sorted(words), n=1, cutoff=0.7)
    return found[0] if found else None


def did_you_mean(word: str, words: Iterable[str]) -> str | None:
    """Return the question of a hint, if a known word is like the one that was given."""
    near = nearest(word, words)
    return None if near is None else f"did you mean {near}?"


def _shorten(text: str) -> str:
    return _LONG_WORD.sub(lambda word: word[0][: MAX_SHOWN_CHARS - 1] + "…", text)


def _escape_all(text: str) -> str:
    return "".join(char if char.isprintable() and not _INVISIBLE.match(char) else _escape(ord(char)) for char in text)


def _escape(code: int) -> str:
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def display_width(text: str) -> int:
    """Return how many terminal columns an escaped name takes (wide East Asian characters take two)."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


MAX_PATH_BYTES = 4096  # Bytes of a file name relative to the root: Linux's PATH_MAX


MAX_COMPONENT_BYTES = 255  # Bytes of one component of it: NAME_MAX of every common file system


def is_plain_path(file: str) -> bool:
    """Is `file` a relative name, with forward slashes, that stays inside whatever root it is joined to?"""
    try:
        raw = file.encode("utf-8", "surrogateescape")  # names on disk need not be text
    except UnicodeEncodeError:
        return False
    if b"\0" in raw or len(raw) > MAX_PATH_BYTES:
        return False
    return all(part not in (b"", b".", b"..") and len(part) <= MAX_COMPONENT_BYTES for part in raw.split(b"/"))
