"""Plain values of a config: key paths (`config.process[0].train`) and truths."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from ckpt_tools.tables import read_rows

TRUE_WORDS = ("1", "true", "t", "yes", "y", "on")
FALSE_WORDS = ("0", "false", "f", "no", "n", "off")
"""Source: `str_to_bool` in `accelerate/utils/environment.py` and `transformers/training_args.py`."""

_DTYPES = {
    "bf16": ("bf16", "bfloat16", "b16"),
    "f16": ("f16", "fp16", "float16", "half", "16"),
    "f32": ("f32", "fp32", "float32", "float", "full", "32"),
}
_DTYPE_BY_NAME = {name: short for short, names in _DTYPES.items() for name in names}
_VARIABLE = re.compile(r"\$(\{|\(|[A-Za-z_@*#0-9])|`[^`]+`|\{\{.*\}\}|^\?\?\?$")


def is_variable(value: object) -> bool:
    """Does a value, or an item of a list, stand for something that is not in the file?"""
    if isinstance(value, (list, tuple)):
        return any(is_variable(item) for item in value)
    return isinstance(value, str) and _VARIABLE.search(value) is not None


def as_truth(value: object) -> bool | None:
    """Return a truth, which may be a word for one; None for anything else."""
    word = str(value).strip().lower()
    return True if word in TRUE_WORDS else False if word in FALSE_WORDS else None


def join_path(*parts: str | int) -> str:
    """Return the key path of some parts; a number is the place in a list."""
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def find_value(values: object, path: str, missing: object = None) -> object:
    """Return what lies at a key path, or `missing`; a key with dots of its own (`ds.zero_stage`) goes first."""
    if isinstance(values, Mapping) and path in values:
        return values[path]
    node = values
    for part in path.split("."):
        name, _, index = part.partition("[")
        if not isinstance(node, Mapping) or name not in node:
            return missing
        node = node[name]
        if index:
            at = int(index.rstrip("]"))
            if not isinstance(node, (list, tuple)) or at >= len(node):
                return missing
            node = node[at]
    return node


def dtype_name(text: str | None) -> str | None:
    """Return bf16, f16 or f32 for any of their names; None for others, `no` and nothing."""
    return None if text is None else _DTYPE_BY_NAME.get(text.strip().lower().removeprefix("torch."))


# Names that are nearly another: slips of the pen.

_TOKEN = re.compile(r"[._\-]+")
_NUMBERS = re.compile(r"\d+")
_MIN_TOKEN = 4  # letters of a word in which a slip of the pen can be told from another word: tp and cp are two words
_LONG_TOKEN = 7
_MAX_NAME = 100


def is_typo(key: str, name: str) -> bool:
    """Return True if `key` is a slip of the pen for `name`: the same words but for letters or endings; equal digits."""
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


@cache
def words_of(framework: str, what: str) -> tuple[str, ...]:
    """Return what a trainer calls something, as `trainers.tsv` has it; () where it has no word for it."""
    rows = (row for row in read_rows("ckpt_tools.preflight", "trainers.tsv") if row["what"] == what)
    return next((tuple(row["words"].split(" | ")) for row in rows if row["framework"] == framework), ())
