"""Models of the frameworks' configs: what a value may be, and findings instead of exceptions where it is not.

Values are taken in every form that the frameworks themselves take them: a truth may be the word `yes`, a count may be
text, a list of names may be joined by commas. What they would stop at is a finding here, and the option counts as not
given.

Source: argparse's `type=int`; for truths, `as_truth`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError, model_validator

from ckpt_tools.description.checkpoint import Finding, Severity
from ckpt_tools.preflight.configs.config import Options
from ckpt_tools.preflight.configs.options import Spell, account, check_names, options_of, without_variables
from ckpt_tools.preflight.plain_values import as_truth, dtype_name, join_path

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
    truth = as_truth(value) if isinstance(value, (str, int)) else None
    if truth is None:
        raise ValueError("true or false")
    return truth


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
    """One mapping of a config. Options that no field reads are kept as they are; null counts as not given."""

    model_config = ConfigDict(extra="allow", protected_namespaces=(), frozen=True)

    known: ClassVar[frozenset[str]] = frozenset()
    """Options that the framework has and no field here reads."""
    unknown: ClassVar[Severity | None] = "warning"
    """What another option is: an error where the framework stops at it; None where it takes anything."""
    extensible: ClassVar[bool] = False
    """Do scripts add options of their own? Then one that resembles none of these is worth a mention only."""
    instead: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Option of another framework → what it is called here."""

    def __init_subclass__(
        cls,
        *,
        known: frozenset[str] | None = None,
        unknown: Severity | Literal["as above"] | None = "as above",
        extensible: bool | None = None,
        instead: Mapping[str, str] | None = None,
    ) -> None:
        """Take what differs from the class above."""
        super().__init_subclass__()
        cls.known = cls.known if known is None else known
        cls.unknown = cls.unknown if unknown == "as above" else unknown
        cls.extensible = cls.extensible if extensible is None else extensible
        cls.instead = cls.instead if instead is None else instead

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        return {key: value for key, value in values.items() if value is not None}


SectionType = TypeVar("SectionType", bound=Section)


def validate(
    model: type[SectionType],
    values: Mapping[str, object],
    *,
    spell: Spell = str,
    added: Collection[str] = (),
    words: Iterable[str] = (),
    what: str = "key",
) -> tuple[SectionType, tuple[Finding, ...], Options]:
    """Return a config as its model, what in it has a wrong type or is not known, and how much of it is understood.

    An option whose value is not in the file counts as not given. `added` and `words` are those of `table.Source`.
    """
    findings: list[Finding] = []
    options = [
        replace(one, status="passed over", severity=None)
        if one.severity != "error" and join_path(*one.path) in added and one.status in ("unknown", "misspelt")
        else one
        for one in options_of(model, values)
    ]
    left: Any = copy.deepcopy(without_variables(values))
    while True:
        try:
            checked = model.model_validate(left)
            break
        except ValidationError as error:
            # Every round removes what was wrong with the last, so this ends.
            for problem in error.errors(include_url=False, include_context=True):
                findings.append(_wrong_type(problem, spell))
                _remove(left, problem["loc"])
    findings += check_names(options, spell=spell, what=what)
    return checked, tuple(findings[:MAX_FINDINGS]), account(options, spell=spell, words=words)


def _wrong_type(problem: Any, spell: Spell) -> Finding:  # noqa: ANN401 - pydantic's ErrorDetails, whose context is untyped
    kind = problem["type"]
    if kind == "value_error":
        expected = str(problem["ctx"]["error"])
    else:
        expected = "a list" if kind == "list_type" else "a mapping of options"
    where = spell(join_path(*problem["loc"]))
    return Finding.error(
        "wrong-type", where, f"expected {expected}, found {describe(problem['input'])}", f"{where}: {expected}"
    )


def _remove(values: Any, location: tuple[str | int, ...]) -> None:  # noqa: ANN401 - any value of a config
    *parents, last = location
    for part in parents:
        values = values[part]
    if isinstance(last, int):
        values[last] = {}  # an empty section: its neighbours keep their places
    else:
        del values[last]


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
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"
