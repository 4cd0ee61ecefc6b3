"""Options on a command line that override those of a file, read as the trainer reads them.

Source: HfArgumentParser and tyro (`--name value`, `--name=value`, `--switch`; `_` or `-`), click for axolotl, Hydra's
override grammar for verl, OmegaConf's `from_cli` (`key=value`) for LLaMA-Factory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpt_tools.preflight.configs.document import Document
from ckpt_tools.preflight.configs.hydra import plain_value
from ckpt_tools.preflight.configs.options import is_variable

_OPTION = re.compile(r"--[A-Za-z][\w.-]*")
_SHORT = re.compile(r"--?[A-Za-z][\w.-]*")
_ASSIGNMENT = re.compile(r"(?P<sign>[+~]{0,2})(?P<path>[A-Za-z_][\w@]*(\.\w+)*)(=(?P<value>.*))?", re.DOTALL)


def parse_options(words: Sequence[str]) -> tuple[dict[str, object], tuple[str, ...]]:
    """Return option → its text, True for a switch, a list for several words; and the words that are no option's."""
    values: dict[str, object] = {}
    others: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        name, equals, value = word.partition("=")
        if _OPTION.fullmatch(name) is None:
            others.append(word)
            continue
        taken: list[object] = [value] if equals else []
        while not equals and at < len(words) and _SHORT.fullmatch(words[at].partition("=")[0]) is None:
            taken.append(str(words[at]))
            at += 1
        key = name.lstrip("-").replace("-", "_")
        if not taken and key.startswith("no_") and key not in _NEGATIVE:
            key, taken = key.removeprefix("no_"), [False]
        values[key] = True if not taken else _content(taken[0]) if len(taken) == 1 else taken
    return values, tuple(others)


def _content(value: object) -> object:
    """Return an option's value; a mapping is written as JSON."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


_NEGATIVE = frozenset({"no_cuda", "no_python", "no_local_rank", "no_ssh"})
"""Options that begin with `no_` and negate no other."""


def overridden(document: Document, words: Sequence[str]) -> Document:
    """Return a file with values that the words of a command line override.

    Words that stand for nobody knows which options are among its `words_unread`.
    """
    options, others = parse_options(words)
    values: Mapping[str, object] = document.values or {}
    for name, value in options.items():
        values = _put(values, name.split("."), value)
    unread = []
    for word in others:
        found = _ASSIGNMENT.fullmatch(word)
        if found is None or (found["value"] is None and found["sign"] != "~"):
            unread += [word] if is_variable(word) else []
        elif found["sign"] == "~":
            values = _put(values, found["path"].split("."), None)
        else:
            values = _put(values, found["path"].split("."), plain_value(found["value"] or ""))
    return replace(
        document,
        values=values,
        overrides=(*document.overrides, *words),
        words_unread=(*document.words_unread, *unread),
    )


def _put(values: Mapping[str, object], parts: Sequence[str], value: object) -> Mapping[str, object]:
    inner = values.get(parts[0])
    if len(parts) > 1:
        value = _put(inner if isinstance(inner, Mapping) else {}, parts[1:], value)
    return {**values, parts[0]: value}
