"""What one process tells another: plain values and dataclasses as JSON, and back as their annotations say.

A type says all that there is to know of its values: nothing is written out field by field. pydantic reads dataclasses
as well, but takes no lone surrogates, which paths may hold, and 0.13 s to import.
"""

from __future__ import annotations

import collections
import collections.abc
import json
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

from ckpt_tools import errors
from ckpt_tools.errors import CkptError

T = TypeVar("T")


def dumps(value: object, *, sort_keys: bool = False) -> str:
    """Return a value as JSON: of JSON's own types, tuples, sets, mappings, paths, and dataclasses of these.

    Infinite numbers and NaN are written as Python reads them again.
    """
    return json.dumps(value, default=_plain, sort_keys=sort_keys)


def loads(kind: type[T], text: str) -> T:
    """Return the value of type `kind` that `dumps` wrote; raise `ValueError` for one of another type."""
    found: T = build(kind, json.loads(text))
    return found


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {name: getattr(value, name) for name in _hints(type(value))}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, frozenset | set):
        return sorted(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent between processes")


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    """Return the fields that make a dataclass, and their types."""
    found = typing.get_type_hints(kind)
    return {field.name: found[field.name] for field in fields(kind) if field.init}


def build(kind: Any, value: Any) -> Any:  # noqa: ANN401 - any type, and what it makes of parsed JSON
    """Return the value of type `kind` that parsed JSON stands for; raise `ValueError` where it stands for none."""
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (Any, object) or (origin is typing.Literal and value in inner):
        return value
    if origin in (typing.Union, types.UnionType):
        return _first(inner, value)
    if isinstance(origin, type) and is_dataclass(origin) and isinstance(value, dict):
        hints = _hints(origin)
        if value.keys() != hints.keys():
            raise ValueError(f"not the fields of a {origin.__name__}")
        return origin(**{name: build(hints[name], value[name]) for name in hints})
    if origin is collections.Counter and isinstance(value, dict):
        return collections.Counter({key: build(int, value[key]) for key in value})
    if origin in _MAPPINGS and isinstance(value, dict):
        # JSON's keys are text.
        return {build(inner[0], int(key) if inner[0] is int else key): build(inner[1], value[key]) for key in value}
    if origin is tuple and isinstance(value, list) and inner[-1] is not Ellipsis:
        return tuple(build(one, item) for one, item in zip(inner, value, strict=True))
    if origin in _MANY and isinstance(value, list):
        return _MANY[origin](build(inner[0], item) for item in value)
    if origin is float and type(value) is int:
        return float(value)
    if type(value) is not origin:
        raise ValueError(f"{kind} does not fit a {type(value).__name__}")
    return value


_MAPPINGS = (dict, collections.abc.Mapping)
_MANY: Mapping[Any, Callable[[Iterable[Any]], Any]] = {
    tuple: tuple, collections.abc.Sequence: tuple, list: list, frozenset: frozenset
}  # fmt: skip


def _first(kinds: tuple[Any, ...], value: Any) -> Any:  # noqa: ANN401
    for kind in kinds:
        with suppress(ValueError):
            return build(kind, value)
    raise ValueError(f"none of {kinds} fits a {type(value).__name__}")


def error_to_json(error: CkptError) -> dict[str, str | None]:
    """Return an error as another process can be told it."""
    return {"class": type(error).__name__, "what": error.what, "where": error.where, "hint": error.hint}


def error_from_json(parts: Mapping[str, Any]) -> CkptError:
    """Return the error that another process has told."""
    kind = getattr(errors, parts["class"], CkptError)
    error: CkptError = kind(parts["what"], where=parts["where"], hint=parts["hint"])
    return error
