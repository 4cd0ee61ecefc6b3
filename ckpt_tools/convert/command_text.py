"""A conversion as a text that another process, on another machine, can run again."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, get_args, get_origin

from ckpt_tools.options import Parameter, parameters
from ckpt_tools.storage.locations import absolute

VERBS = ("shard", "reshard", "gather")
_OF_A_RUN = ("destination", "part", "only_commit", "dry_run", "overwrite", "num_workers", "progress")
"""Options that say how a process runs, not what is made."""


def build_command(options: Hashable) -> str:
    """Return what an options class of one of `VERBS` asks for; "" where an option cannot be written down.

    Paths are absolute. What is secret is in no option.
    """
    verb = type(options).__name__.removesuffix("Options").lower()
    given = {}
    for each in parameters(type(options)):
        value = getattr(options, each.name)
        if each.name not in _OF_A_RUN and value != each.default:
            given[each.name] = absolute(os.fspath(value)) if each.is_path else value
    try:
        return json.dumps([verb, given]) if verb in VERBS else ""
    except TypeError:
        return ""


def parse_command(text: str, stated: Mapping[str, Sequence[Parameter]]) -> tuple[str, Mapping[str, Any]] | None:
    """Return the verb and its options; None where the text is no command.

    `stated` has for every verb the options that it takes.
    """
    try:
        verb, given = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None
    if not isinstance(verb, str) or verb not in stated or not isinstance(given, dict):
        return None
    known = {each.name: each for each in stated[verb] if each.name not in _OF_A_RUN}
    is_one = all(name in known and _is_value(known[name], value) for name, value in given.items())
    needed = {name for name, each in known.items() if each.default is inspect.Parameter.empty}
    return (verb, given) if is_one and needed <= given.keys() else None


def _is_value(option: Parameter, value: object) -> bool:
    kinds = (option.hint, *get_args(option.hint))
    if isinstance(value, list):
        return any(get_origin(kind) is Sequence for kind in kinds) and all(isinstance(each, str) for each in value)
    return type(value) in kinds or (isinstance(value, str) and (option.is_path or value in option.words))
