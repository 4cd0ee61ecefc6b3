"""Options on a command line that override those of a file, read as the trainer reads them.

Source: Hydra's override grammar for verl, OmegaConf's `from_cli` (`key=value`) for LLaMA-Factory; for the others
`--name value` as in `flags`, whose dots tyro takes for sections.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpt_tools.errors import UsageError
from ckpt_tools.preflight.configs.document import Document
from ckpt_tools.preflight.configs.flags import read_flags
from ckpt_tools.preflight.configs.hydra import plain_value
from ckpt_tools.preflight.plain_values import is_variable

_ASSIGNMENT = re.compile(r"(?P<sign>[+~]{0,2})(?P<path>[A-Za-z_][\w@]*(\.\w+)*)(=(?P<value>.*))?", re.DOTALL)


def overridden(document: Document, words: Sequence[str], *, is_strict: bool = False) -> Document:
    """Return a file with values that the words of a command line override.

    Words for unknown options join its `words_unread`; those that set nothing are passed over unless `is_strict`.
    """
    first = next((at for at, word in enumerate(words) if word.startswith("--")), len(words))
    options, unread = read_flags(words[first:])
    values: Mapping[str, object] = document.values or {}
    for name, value in options.items():
        values = _put(values, name.split("."), value)
    for word in words[:first]:
        found = _ASSIGNMENT.fullmatch(word)
        if found is None or (found["value"] is None and found["sign"] != "~"):
            if is_strict and not is_variable(word):
                raise UsageError(f"{word!r} sets no option", where=word, hint="--name value, or key=value")
            unread += (word,) if is_variable(word) else ()
            continue
        value = None if found["sign"] == "~" else plain_value(found["value"] or "")
        values = _put(values, found["path"].split("."), value)
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
