"""Plain values of a config: key paths (`config.process[0].train`) and truths."""

from __future__ import annotations

import re
from collections.abc import Mapping

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
