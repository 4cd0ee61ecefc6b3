"""A model's config.json: the one way to read it.

It is read as strictly as every other JSON that nobody vouches for, but for infinite numbers, which transformers writes
(Mamba's `time_step_limit`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.formats._json import parse_json
from ckpt_tools.checkpoint.formats.opening import read_document
from ckpt_tools.checkpoint.formats.repositories import PIPELINE_NAME, TRAINED
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.storage.locations import is_directory, is_file, open_source, read_named
from ckpt_tools.storage.source import Source
from ckpt_tools.text import escape_name

# The dtype that a config.json gives its weights, stated anew with every other byte as it was

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


CONFIG_NAME = "config.json"
MAX_CONFIG_BYTES = 16 << 20  # Real ones have some kilobytes, a megabyte with many labels


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A config.json."""

    values: Mapping[str, Any]
    where: str  # Its path, for messages

    @property
    def architecture(self) -> str | None:
        """The model's class: the first of transformers' `architectures`, else diffusers' `_class_name`."""
        listed = self.values.get("architectures")
        name = listed[0] if isinstance(listed, list) and listed else self.values.get("_class_name")
        return name if isinstance(name, str) else None


def config_path(model: str) -> str:
    """Return the path of the config.json that `model` names: the file, or the directory that holds it."""
    return os.path.join(model, CONFIG_NAME) if is_directory(model) else model


def component_of(path: str) -> tuple[str, str]:
    """Return the directory of the component that is trained, for that of a diffusers pipeline, and which it is."""
    # Any other path is returned as it is, with nothing to say.
    if not is_file(os.path.join(path, PIPELINE_NAME)):
        return path, ""
    with open_source(path) as source:
        files = source.list_files(max_depth=1)
    components = [os.path.dirname(name) for name in files if "/" in name and os.path.basename(name) == CONFIG_NAME]
    found = next((name for name in TRAINED if name in components), None)
    if found is None:
        listed = ", ".join(escape_name(name) for name in components) or "no component with a config.json"
        hint = f"name one of its directories: {os.path.join(path, components[0])}" if components else None
        raise UsageError(f"a diffusers pipeline without a transformer or unet: it has {listed}", where=path, hint=hint)
    others = ", ".join(escape_name(name) for name in components if name != found) or "none"
    return os.path.join(path, found), f"the {found} of the diffusers pipeline (other components: {others})"


def read_config(model: str, *, hint: str | None = None) -> ModelConfig:
    """Read the config.json that a user names: the file, or the directory that holds it."""
    path = config_path(model)
    text = read_named(path, what="the model's config", max_bytes=MAX_CONFIG_BYTES, refusal=UsageError, hint=hint)
    return parse_config(text, where=path)


def config_in(source: Source, name: str = CONFIG_NAME) -> ModelConfig:
    """Read the config.json of a directory that is open; raise `UnreadableError` when there is none."""
    where = os.path.join(source.root, name)
    return parse_config(read_document(source, name, MAX_CONFIG_BYTES), where=where)


def config_beside(source: Source, name: str = CONFIG_NAME) -> ModelConfig | None:
    """Read the config.json of a directory that is open; None when there is none."""
    try:
        return config_in(source, name)
    except UnreadableError as error:
        if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
            return None
        raise


def parse_config(text: bytes, *, where: str) -> ModelConfig:
    """Return what the text of a config.json says."""
    name = os.path.basename(where)
    values = parse_json(text, what=name, where=where, infinite=True)
    if not isinstance(values, dict):
        raise UnreadableError(f"{name} is not a JSON object", where=where)
    return ModelConfig(values=values, where=where)
