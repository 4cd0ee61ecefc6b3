"""Conditions on the options of a config, as the tables beside this file write them.

A condition is an option, and what it must be; several with blanks between must all hold:

    sample_packing        switched on: there, and neither null, false, no, 0 nor empty
    max_steps!            not switched on, or not there
    warmup_steps?         there, whatever it is
    rl=dpo|kto            one of these words (`true` for a switch); of a list, one of its items
    save_strategy!=steps  none of these words, or not there
    keep_latest_k<2       a number below 2, or below that of the option on the right; also `>` and `>=`
    save_steps%eval_steps a number that is no multiple of the other

`a/b` is an option with its names of two releases, and `fsdp.x` one inside another; `@engine` is the engine of the run,
and `@tp` a size of its mesh.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.resources import files

from ckpt_tools.options.preflight import Framework
from ckpt_tools.preflight.rules.rule import ALL, Case, NotKnownError, Setting

_CONDITION = re.compile(r"(?P<names>[@\w./\[\]-]+?)(?P<sign>!=|>=|[=<>%!?]|)(?P<words>(?<=[=<>%]).+)?")


def holds(case: Case, conditions: str) -> bool:
    """Return True if all conditions hold; raise NotKnownError for an option whose value is not in the file."""
    return all(_holds(case, one) for one in conditions.split())


def _holds(case: Case, condition: str) -> bool:
    names, sign, words = _parsed(condition)
    found = option_in(case, names)
    if sign in ("", "!"):
        return _is_given(found) == (sign == "")
    if sign == "?":
        return found is not None
    if sign in _COMPARED:
        number, other = None if found is None else found.number, _number(case, words)
        return number is not None and other is not None and _COMPARED[sign](number, other)
    return (found is not None and bool(_words(found).intersection(words.split("|")))) == (sign == "=")


def _number(case: Case, text: str) -> float | None:
    """Return a number, or that of an option."""
    with suppress(ValueError):
        return float(text)
    found = case.option(*text.split("/"))
    return None if found is None else found.number


def _leaves_rest(number: float, other: float) -> bool:
    """Steps below 1 are parts of the run, which are not written exactly."""
    return number > 0 < other and round(number * _PARTS) % round(other * _PARTS) != 0


_PARTS = 1_000_000
_COMPARED = {"<": operator.lt, ">": operator.gt, ">=": operator.ge, "%": _leaves_rest}


def option_in(case: Case, names: tuple[str, ...]) -> Setting | None:
    """Return what a condition is about; what the run comes to (`@engine`) has no key."""
    if names[0] == "@engine":
        return Setting(key="", value=case.spec.engine)
    return Setting(key="", value=case.axis(names[0][1:])) if names[0].startswith("@") else case.option(*names)


def options_of(condition: str) -> tuple[str, ...]:
    """Return the names of the option that a condition is about."""
    return _parsed(condition)[0]


@cache
def _parsed(condition: str) -> tuple[tuple[str, ...], str, str]:
    match = _CONDITION.fullmatch(condition)
    if match is None:
        raise ValueError(f"not a condition: {condition}")  # the tables are our own, and tests read all of them
    return tuple(match["names"].split("/")), match["sign"], match["words"] or ""


def _is_given(found: Setting | None) -> bool:
    if found is None or found.is_off or found.value in ("", [], {}, 0.0):
        return False
    return not isinstance(found.value, str) or found.value.lower() not in ("none", "null")


def _words(found: Setting) -> frozenset[str]:
    values = found.value if isinstance(found.value, (list, tuple)) else (found.value,)
    texts = frozenset(str(value).lower() if isinstance(value, bool) else str(value).strip() for value in values)
    return texts | {"no"} if found.value is False else texts


@cache
def rows_of(name: str) -> tuple[Mapping[str, str], ...]:
    """Return the rows of a table beside this file; its first line names the columns."""
    text = files(__package__).joinpath(name).read_text(encoding="utf-8")
    head, *rows = [line.split("\t") for line in text.splitlines() if line and not line.startswith("#")]
    return tuple(dict(zip(head, row, strict=True)) for row in rows)


def frameworks_of(table: str, rule: str) -> tuple[Framework, ...]:
    """Return whose options a rule's rows are about."""
    names = {row["framework"] for row in rows_of(table) if row["rule"] == rule}
    return tuple(name for name in ALL if name in names)


def below_limits(case: Case, rule: str) -> Iterator[tuple[Setting, str]]:
    """Yield the options that are less than a rule's rows of `limits.tsv` allow, and the least that they can be."""
    for row in rows_of("limits.tsv"):
        if (row["rule"], row["framework"]) == (rule, case.framework):
            with suppress(NotKnownError):
                found = case.option(row["option"])
                if found is not None and found.number is not None and not found.number >= float(row["least"]):
                    yield found, row["least"]
