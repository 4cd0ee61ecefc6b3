"""Models of the frameworks' configs: what a value may be, and findings instead of exceptions where it is not.

Values are taken in every form that the frameworks themselves take them: a truth may be the word `yes`, a count may be
text, a list of names may be joined by commas. What they would stop at is a finding here, and the option counts as not
given.

Source: `str_to_bool` in `accelerate/utils/environment.py` and `transformers/training_args.py`; argparse's `type=int`.
"""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError

from ckpt_tools.checkpoint import Finding, Severity
from ckpt_tools.preflight.configs.dtypes import dtype_name
from ckpt_tools.text import escape_name

TRUE_WORDS = ("1", "true", "t", "yes", "y", "on")
FALSE_WORDS = ("0", "false", "f", "no", "n", "off")
_MAX_DIGITS = 18
MAX_FINDINGS = 200
"""Findings of one kind on one file; whoever hands in another thing than a config needs no list of everything in it."""
_MAX_SHOWN = 60


def _count(value: object) -> int:
    if isinstance(value, str):
        text = value.strip()
        if text.removeprefix("-").removeprefix("+").isdecimal() and len(text) <= _MAX_DIGITS:
            return int(text)
    elif isinstance(value, float):
        if value.is_integer() and abs(value) < 10**_MAX_DIGITS:
            return int(value)
    elif type(value) is int and abs(value) < 10**_MAX_DIGITS:
        return value
    raise ValueError("a whole number")


def _positive(value: object) -> int:
    try:
        number = _count(value)
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError("a whole number, 1 or more")
    return number


def _number(value: object) -> float:
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise ValueError("a number")


def _truth(value: object) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower() if isinstance(value, (str, int)) else ""
    if word in TRUE_WORDS or word in FALSE_WORDS:
        return word in TRUE_WORDS
    raise ValueError("true or false")


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"  # a bare `no` in YAML
    if isinstance(value, (str, int, float)):
        return str(value).strip()
    raise ValueError("text")


def _names(value: object) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if isinstance(items, (list, tuple)) and all(isinstance(item, str) for item in items):
        return tuple(item.strip() for item in items if item.strip())
    raise ValueError("names, in a list or with commas between them")


def choice(*known: str, exact: bool = False) -> PlainValidator:
    """Return a validator of text that is one of some words; their case counts with `exact` only."""

    def check(value: object) -> str:
        try:
            word = _word(value)
        except ValueError:
            word = ""
        if not exact:
            word = {name.lower(): name for name in known}.get(word.lower(), word)
        if word in known:
            return word
        raise ValueError(f"one of {', '.join(known)}")

    return PlainValidator(check)


def _dtype(value: object) -> str:
    name = dtype_name(_word(value))
    if name is None:
        raise ValueError("a dtype: bf16, fp16 or fp32, or their long names")
    return name


Count = Annotated[int, PlainValidator(_count)]
"""A whole number, or its digits as text."""
Positive = Annotated[int, PlainValidator(_positive)]
"""A count of what no run can be without: processes, samples, tokens."""
Number = Annotated[float, PlainValidator(_number)]
"""A finite number."""
Truth = Annotated[bool, PlainValidator(_truth)]
"""true, false, or a word for it."""
Word = Annotated[str, PlainValidator(_word)]
"""Text; a number or a truth becomes the text that was written."""
Dtype = Annotated[str, PlainValidator(_dtype)]
"""bf16, f16 or f32, for any of their names."""
Names = Annotated[tuple[str, ...], PlainValidator(_names)]
"""Names, in a list or joined by commas."""


class Section(BaseModel):
    """One mapping of a config. Options that no field reads are kept as they are."""

    model_config = ConfigDict(extra="allow", protected_namespaces=(), frozen=True)

    known: ClassVar[frozenset[str]] = frozenset()
    """Options that the framework has and no field here reads."""
    unknown: ClassVar[Severity | None] = "warning"
    """What another option is: an error where the framework stops at it; None where it takes anything."""
    extensible: ClassVar[bool] = False
    """Do scripts add options of their own? Then one that resembles none of these is worth a mention only."""
    instead: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Option of another framework → what it is called here."""


SectionType = TypeVar("SectionType", bound=Section)
Spell = Callable[[str], str]
"""Key path in normalised values → key path in the user's file."""


def words(text: str) -> frozenset[str]:
    """Return the words of a text: long lists of options read better so."""
    return frozenset(text.split())


def join_path(*parts: str | int) -> str:
    """Return a key path: `config.process[0].train`."""
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def validate(
    model: type[SectionType], values: Mapping[str, object], *, spell: Spell = str
) -> tuple[SectionType, tuple[Finding, ...]]:
    """Return a config as its model, and what in it has a wrong type or is not known.

    Args:
        model: The framework's model.
        values: The config, normalised if need be.
        spell: Turns a path in `values` into the user's.
    """
    findings: list[Finding] = []
    left: Any = copy.deepcopy(dict(values))
    while True:
        try:
            checked = model.model_validate(left)
            break
        except ValidationError as error:
            # Every round removes what was wrong with the last, so this ends.
            for problem in error.errors(include_url=False, include_context=True):
                findings.append(_wrong_type(problem, spell))
                _remove(left, problem["loc"])
    # No more than are said: to find the nearest name takes a while.
    findings += islice(_unknown_keys(model, values, (), spell), max(0, MAX_FINDINGS - len(findings)))
    return checked, tuple(findings[:MAX_FINDINGS])


def _wrong_type(problem: Any, spell: Spell) -> Finding:  # noqa: ANN401 - pydantic's ErrorDetails, whose context is untyped
    kind = problem["type"]
    if kind == "value_error":
        expected = str(problem["ctx"]["error"])
    else:
        expected = "a list" if kind == "list_type" else "a mapping of options"
    where = escape_name(spell(join_path(*problem["loc"])))
    return Finding(
        code="wrong-type",
        severity="error",
        where=where,
        what=f"expected {expected}, found {describe(problem['input'])}",
        hint=f"{where}: {expected}",
    )


def _remove(values: Any, location: tuple[str | int, ...]) -> None:  # noqa: ANN401 - any value of a config
    *parents, last = location
    for part in parents:
        values = values[part]
    if isinstance(last, int):
        values[last] = {}  # an empty section: its neighbours keep their places
    else:
        del values[last]


def _unknown_keys(
    model: type[Section], values: Mapping[str, object], path: tuple[str | int, ...], spell: Spell
) -> Iterator[Finding]:
    sections = dict(_sections(model))
    names = option_names(model)
    for key, value in values.items():
        if key in sections:
            inner, is_list = sections[key]
            items = list(enumerate(value)) if is_list and isinstance(value, list) else [(None, value)]
            for index, item in items:
                if isinstance(item, Mapping):
                    yield from _unknown_keys(inner, item, (*path, key, *(() if index is None else (index,))), spell)
        elif key not in names and model.unknown is not None:
            near = model.instead.get(key) or nearest(key, names)
            written = spell(join_path(*path, near)).rpartition(".")[2] if near is not None else None
            severity: Severity = "info" if model.extensible and near is None else model.unknown
            yield unknown_key(spell(join_path(*path, key)), written, severity=severity)


def _sections(model: type[Section]) -> Iterator[tuple[str, tuple[type[Section], bool]]]:
    """Yield the fields that are sections themselves, and whether there is a list of them."""
    for name, field in model.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            inner = get_args(kind)[0] if get_origin(kind) is list else kind
            if isinstance(inner, type) and issubclass(inner, Section):
                yield field.alias or name, (inner, get_origin(kind) is list)


def option_names(model: type[Section]) -> frozenset[str]:
    """Return the options of a section, read here or not."""
    return model.known | {field.alias or name for name, field in model.model_fields.items()}


def unknown_key(where: str, near: str | None, *, severity: Severity, what: str = "key") -> Finding:
    """Return the finding on an option that the framework does not have.

    Args:
        where: Its key path, or the option itself.
        near: The nearest option that there is, in the user's spelling.
        severity: error where the framework stops, warning where it goes on as if the option were not there.
        what: key or option.
    """
    return Finding(
        code="unknown-key",
        severity=severity,
        where=escape_name(where),
        what=f"there is no such {what}" + (f"; the nearest one is {near}" if near else ""),
        hint=f"write {near}" if near else f"remove it, or see which version of the framework has this {what}",
    )


def nearest(key: str, names: frozenset[str]) -> str | None:
    """Return the known name that is most like `key`, if any is."""
    found = difflib.get_close_matches(key[:100], sorted(names), n=1, cutoff=0.7)
    return found[0] if found else None


def describe(value: object) -> str:
    """Say what a value is, for a message: `text 'eight'`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"text {_short(value)!r}"
    if isinstance(value, (int, float)):
        return f"the number {_short(str(value)) if abs(value) < 1e300 else 'beyond all bounds'}"
    if isinstance(value, Mapping):
        return f"a mapping of {len(value)} keys"
    return f"a list of {len(value)}" if isinstance(value, (list, tuple)) else type(value).__name__


def _short(text: str) -> str:
    text = escape_name(text)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"
