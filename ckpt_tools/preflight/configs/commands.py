"""The commands of a shell script as lists of words. Variables stay what is written: `$MODEL`.

Source: POSIX Shell Command Language, 2.2 (quoting) and 2.3 (tokens), as far as `shlex` follows them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from ckpt_tools.text import escape_name

MAX_COMMAND_CHARS = 256 << 10
"""Longest command that is read: shlex takes time with the square of a word's length."""
_SEPARATORS = frozenset({";", "&&", "||", "|", "&", ";;"})


def split_commands(text: str) -> tuple[tuple[str, ...], ...]:
    r"""Return the words of each command of a script, in order.

    Lines that end in a backslash go on in the next one. As in a shell, a comment line ends the command above it. Quotes
    may span lines; a here-document is read as if it were part of the script.

    Raises:
        ValueError: A quote that is never closed, or a command beyond `MAX_COMMAND_CHARS`.
    """
    commands: list[tuple[str, ...]] = []
    for line in _logical_lines(text):
        commands += _simple_commands(_words(line))
    return tuple(commands)


def _logical_lines(text: str) -> Iterator[str]:
    pending: list[str] = []
    quote = ""
    for physical in text.split("\n"):
        if not quote and physical.lstrip().startswith("#"):
            # The newline after a backslash is gone: the comment ends with this line, and so does the command.
            yield "".join(pending)
            pending = []
            continue
        line, quote = _clean(physical, quote)
        stripped = line.rstrip()
        if quote:
            pending.append(line + "\n")
        elif stripped.endswith("\\") and not stripped.endswith("\\\\"):
            # A space after the backslash makes it a word of its own in a shell; nobody means that.
            pending.append(stripped[:-1] + " ")
        else:
            yield "".join([*pending, line])
            pending = []
    yield "".join(pending)


def _clean(line: str, quote: str) -> tuple[str, str]:
    """Return a line without its comment and without the descriptors of redirections, and the quote left open."""
    kept: list[str] = []
    escaped = False
    for i, char in enumerate(line):
        begins_word = i == 0 or line[i - 1].isspace()
        if escaped:
            escaped = False
        elif quote:
            escaped = char == "\\" and quote == '"'
            quote = "" if char == quote else quote
        elif char == "\\":
            escaped = True
        elif char in "'\"":
            quote = char
        elif char == "#" and begins_word:
            break
        elif char == "$" and line[i + 1 : i + 2] in ("'", '"'):
            continue  # $'…' is text with escapes, and no variable
        elif char in "12" and begins_word and line[i + 1 : i + 2] in ("<", ">"):
            continue
        kept.append(char)
    return "".join(kept), quote


def _words(line: str) -> list[str]:
    if len(line) > MAX_COMMAND_CHARS:
        raise ValueError(f"a command of {len(line)} characters, the limit is {MAX_COMMAND_CHARS}")
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError as error:
        begins = escape_name(" ".join(line.split())[:60])
        raise ValueError(f"{str(error).lower()}, in the command that begins with {begins!r}") from None


def _simple_commands(words: list[str]) -> Iterator[tuple[str, ...]]:
    command: list[str] = []
    skip = False
    for word in words:
        if word in _SEPARATORS:
            if command:
                yield tuple(command)
            command = []
        elif skip:
            skip = False
        elif word and set(word) <= set("<>&") and word.strip("&"):
            skip = True  # a redirection, and the file after it
        else:
            command.append(word)
    if command:
        yield tuple(command)
