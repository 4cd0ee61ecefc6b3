"""Text for terminals: names from files made harmless, and how wide they are.

A name in a checkpoint is input like any other. Control characters drive terminals, bidirectional overrides
reorder a line, invisible characters make two names look alike, and lone surrogates cannot be encoded.
"""

from __future__ import annotations

import re
import unicodedata

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
        start = "".join(
            char if char.isprintable() and not _INVISIBLE.match(char) else _escape(ord(char)) for char in start
        )
    return start if len(start) <= MAX_SHOWN_CHARS else start[: MAX_SHOWN_CHARS - 1] + "…"


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
