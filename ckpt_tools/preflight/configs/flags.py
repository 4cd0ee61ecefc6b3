"""Options of a command line as argparse splits them: `--name value`, `--name=value`, `--name`, `--name a b`.

Source: transformers `hf_argparser.py:HfArgumentParser`: every field is an option of one value, or of several where it
is a list; a truth may stand alone, and has an opposite, `--no_name`; underscores may be written as hyphens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence

from ckpt_tools.preflight.plain_values import is_variable

_OPTION = re.compile(r"--[A-Za-z][\w.-]*")
_MANY = re.compile(
    r"\$([@*]|\{[@*]|\{?\w+\[[@*]|\{?\w*(ARGS|ARGUMENTS|OPTS|OPTIONS|EXTRA|FLAGS|PARAMS)\w*\}?$)", re.IGNORECASE
)
"""A variable that by its kind or name stands for options, not for the value of the one before it."""

Program = Callable[[Sequence[str], int], int]
"""Command, place of a word → how many words the program that begins there has; 0 where none does."""


def read_flags(words: Sequence[str]) -> tuple[dict[str, object], tuple[str, ...]]:
    """Return option → value, True where it stands alone, a list of several words; and what may hold any options."""
    values: dict[str, object] = {}
    unread: list[str] = []
    name = ""
    for word in words:
        if _OPTION.fullmatch(word.partition("=")[0]):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            values[name] = _plain(value) if equals else True
            if name.startswith("no_") and not equals and name != "no_cuda":
                values[name.removeprefix("no_")] = not values.pop(name)
            continue
        before = values.get(name, True)
        if is_variable(word) and (not name or before is not True or _MANY.search(word)):
            unread.append(word)
        elif name:
            values[name] = _plain(word) if before is True else [*_listed(before), word]
    return values, tuple(unread)


def started(commands: Iterable[Sequence[str]], program: Program) -> Sequence[str] | None:
    """Return the words after a program in the first command that starts it; None where none does."""
    for command in commands:
        for at in range(len(command)):
            length = program(command, at)
            if length:
                return command[at + length :]
    return None


def _plain(word: str) -> object:
    """Return a word's value: JSON where it is an object, as a field of a dict is written."""
    if word.startswith("{"):
        try:
            return json.loads(word)
        except ValueError:
            return word
    return word


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]
