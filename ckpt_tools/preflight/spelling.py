"""Names that are nearly another: slips of the pen."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

_TOKEN = re.compile(r"[._\-]+")
_NUMBERS = re.compile(r"\d+")
_MIN_TOKEN = 4
"""Letters of a word in which a slip of the pen can be told from another word: tp and cp are two words."""
_LONG_TOKEN = 7
_MAX_NAME = 100


def nearest(key: str, names: Collection[str]) -> str | None:
    """Return the known name that is most like `key`, if any is."""
    found = difflib.get_close_matches(key[:_MAX_NAME], sorted(names), n=1, cutoff=0.7)
    return found[0] if found else None


def is_typo(key: str, name: str) -> bool:
    """Return True if `key` is a slip of the pen for `name`, and no other name of its own.

    The same words in the same order, of which some have a letter too many, too few, changed or swapped, or end
    otherwise (`checkpoint`, `checkpointing`). Digits tell names apart: `load_in_8bit` is not `load_in_4bit`.
    """
    if len(key) > _MAX_NAME or key == name or _NUMBERS.findall(key) != _NUMBERS.findall(name):
        return False
    ours, theirs = _TOKEN.split(key.lower()), _TOKEN.split(name.lower())
    if "".join(ours) == "".join(theirs):
        return True
    if len(ours) != len(theirs):
        return _is_slip("".join(ours), "".join(theirs))
    return all(one == other or _is_slip(one, other) for one, other in zip(ours, theirs, strict=True))


def _is_slip(one: str, other: str) -> bool:
    if min(len(one), len(other)) < _MIN_TOKEN:
        return False
    short, long = sorted((one, other), key=len)
    if len(short) > _LONG_TOKEN - 1 and long.startswith(short) and len(long) - len(short) <= 3:
        return True
    if one[0] != other[0] and sorted(one) != sorted(other):
        return False  # encoder, decoder
    return _distance(one, other) <= (1 if len(short) < _LONG_TOKEN else 2)


def _distance(one: str, other: str) -> int:
    """Return the letters to insert, drop, change or swap with their neighbour (optimal string alignment)."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, char in enumerate(one, 1):
        earlier, before = before, row
        row = [i]
        for j, wanted in enumerate(other, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (char != wanted))
            if i > 1 and j > 1 and char == other[j - 2] and one[i - 2] == wanted:
                cost = min(cost, earlier[j - 2] + 1)
            row.append(cost)
    return row[-1]
