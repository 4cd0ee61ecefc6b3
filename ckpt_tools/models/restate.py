"""The dtype that a config.json gives its weights, stated anew with every other byte as it was.

Source: transformers writes `dtype` (`torch_dtype` before 4.56) into the config and into its sub-configs, and loads in
that dtype when asked for `dtype="auto"`, whatever the files hold.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.errors import UnreadableError
from ckpt_tools.models.config import CONFIG_NAME

_KEYS = ("dtype", "torch_dtype")
_FLOATS = ("bfloat16", "float16", "half", "float32", "float", "float64", "double")  # Those that `--dtype` casts
_PREFIX = "torch."
_OTHER_CONFIG = "quantization_config"  # Says how weights are packed; its dtypes are not theirs
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]:,]')


@dataclass(frozen=True, slots=True, kw_only=True)
class Restated:
    """A config that names another dtype."""

    text: bytes
    before: tuple[str, ...]  # What it said, each once


@dataclass(slots=True)
class _Container:
    """An object or array that is being passed."""

    is_object: bool
    name: str  # The key under which it lies; empty in an array
    key: str | None = None  # The key that was read, once there is one
    has_colon: bool = False
    is_model: bool = False  # It has a `model_type`
    found: list[tuple[int, int, str]] = field(default_factory=list)  # (start, end, value) of what names a dtype in it

    @property
    def is_config(self) -> bool:
        """Transformers' names of sub-configs end in `_config`, or they are configs of models themselves."""
        return self.name != _OTHER_CONFIG and (self.is_model or self.name.endswith("_config"))


def restate_dtype(text: bytes, dtype: DType) -> Restated | None:
    """Return a config with `dtype` wherever it and its sub-configs name that of the weights; None when it says so."""
    # Everything else stays as it is, order and white space included, and so do values that name no type of `--dtype`.
    try:
        document = text.decode()
        json.loads(document)  # as leniently as transformers: Infinity, and the last of equal keys
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise UnreadableError(f"not JSON: {reason}", where=CONFIG_NAME) from error
    parts: list[str] = []
    before: list[str] = []
    position = 0
    for start, end, value in sorted(_dtypes(document)):
        prefix = _PREFIX if value.startswith(_PREFIX) else ""
        wanted = f"{prefix}{dtype.torch_name}"
        if value != wanted:
            parts += [document[position:start], f'"{wanted}"']
            before.append(value)
            position = end
    if not before:
        return None
    return Restated(text="".join([*parts, document[position:]]).encode(), before=tuple(dict.fromkeys(before)))


def _dtypes(document: str) -> list[tuple[int, int, str]]:
    """Return (start, end, value) of every string that names the weights' dtype, quotes included; one pass."""
    root = _Container(is_object=False, name="")
    stack = [root]
    for token in _TOKEN.finditer(document):
        text, top = token.group(), stack[-1]
        match text[0]:
            case "{" | "[":
                name = top.key or "" if top.is_object else ""
                stack.append(_Container(is_object=text == "{", name=name))
            case "}" | "]":
                stack.pop()
                # What lies in an array or in an object of other meaning is passed over; the root is the config.
                if top.is_object and (stack[-1] is root or (stack[-1].is_object and top.is_config)):
                    stack[-1].found += top.found
            case ":":
                top.has_colon = True
            case ",":
                top.key, top.has_colon = None, False
            case _ if top.is_object and not top.has_colon:
                top.key = str(json.loads(text))
                top.is_model = top.is_model or top.key == "model_type"
            case _ if top.is_object and top.key in _KEYS:
                value = str(json.loads(text))
                if value.removeprefix(_PREFIX) in _FLOATS:
                    top.found.append((token.start(), token.end(), value))
    return root.found
