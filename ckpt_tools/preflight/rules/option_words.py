"""CKPT14x: words that an option takes, CKPT15x: options that need or exclude each other, and older rules of that kind.

All are rows of tables: `words.tsv`; `pairs.tsv`, and `rules.tsv` for what is said of them in the reference.

A condition is an option, and what it must be; several with blanks between must all hold:

    sample_packing        switched on: there, and neither null, false, no, 0 nor empty
    max_steps!            not switched on, or not there
    warmup_steps?         there, whatever it is
    rl=dpo|kto            one of these words (`true` for a switch, * for any letters); of a list, one of its items
    save_strategy!=steps  none of these words, or not there
    keep_latest_k<2       a number below 2, or below that of the option on the right; also `>` and `>=`
    save_steps%eval_steps a number that is no multiple of the other

`a/b` is an option with its names of two releases, and `fsdp.x` one inside another; `@engine` is a field of the run's
spec, and `@tp` a size of its mesh.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache

from ckpt_tools.options.preflight import Framework
from ckpt_tools.preflight.plain_values import is_typo
from ckpt_tools.preflight.rules.rule import (
    ALL,
    Check,
    ConfigRule,
    NotKnownError,
    Stated,
    Subject,
    Violation,
    error_rule,
    shown,
    warning_rule,
)
from ckpt_tools.preflight.spec import ParallelSpec
from ckpt_tools.tables import read_rows
from ckpt_tools.text import first_few

# Conditions on the options of a config, as the tables of this folder write them.

_CONDITION = re.compile(r"(?P<names>[@\w./\[\]-]+?)(?P<sign>!=|>=|[=<>%!?]|)(?P<words>(?<=[=<>%]).+)?")


def holds(case: Subject, conditions: str) -> bool:
    """Return True if all conditions hold; raise NotKnownError for an option whose value is not in the file."""
    return all(_holds(case, one) for one in conditions.split())


def _holds(case: Subject, condition: str) -> bool:
    names, sign, words = _parsed(condition)
    found = option_in(case, names)
    if sign in ("", "!"):
        return _is_given(found) == (sign == "")
    if sign == "?":
        return found is not None
    if sign in _COMPARED:
        number, other = None if found is None else found.number, _number(case, words)
        return number is not None and other is not None and _COMPARED[sign](number, other)
    is_one = found is not None and any(fnmatchcase(text, one) for text in _words(found) for one in words.split("|"))
    return is_one == (sign == "=")


def _number(case: Subject, text: str) -> float | None:
    """Return a number, or that of an option."""
    with suppress(ValueError):
        return float(text)
    found = option_in(case, tuple(text.split("/")))
    return None if found is None else found.number


def _leaves_rest(number: float, other: float) -> bool:
    """Steps below 1 are parts of the run, which are not written exactly."""
    return number > 0 < other and round(number * _PARTS) % round(other * _PARTS) != 0


_PARTS = 1_000_000
_COMPARED = {"<": operator.lt, ">": operator.gt, ">=": operator.ge, "%": _leaves_rest}


def option_in(case: Subject, names: tuple[str, ...]) -> Stated | None:
    """Return what a condition is about; a field of the spec (`@engine`) has no key."""
    own = names[0].removeprefix("@")
    if own == names[0]:
        return case.option(*names)
    if own not in ParallelSpec.__slots__:
        return Stated(key=case.axis_key(own), value=case.axis(own))
    value = getattr(case.spec, own)
    return None if value is None else Stated(key="", value=value)


def options_of(condition: str) -> tuple[str, ...]:
    """Return the names of the option that a condition is about."""
    return _parsed(condition)[0]


@cache
def _parsed(condition: str) -> tuple[tuple[str, ...], str, str]:
    match = _CONDITION.fullmatch(condition)
    if match is None:
        raise ValueError(f"not a condition: {condition}")  # the tables are our own, and tests read all of them
    return tuple(match["names"].split("/")), match["sign"], match["words"] or ""


def _is_given(found: Stated | None) -> bool:
    if found is None or found.is_off or found.value in ("", [], {}, 0.0):
        return False
    return not isinstance(found.value, str) or found.value.lower() not in ("none", "null")


def _words(found: Stated) -> frozenset[str]:
    values = found.value if isinstance(found.value, (list, tuple)) else (found.value,)
    texts = frozenset(str(value).lower() if isinstance(value, bool) else str(value).strip() for value in values)
    return texts | {"no"} if found.value is False else texts


@cache
def rows_of(table: str) -> tuple[Mapping[str, str], ...]:
    """Return the rows of a table of this folder; one of several frameworks (`trainer,axolotl`) is a row of each."""
    rows = read_rows(__package__, table)
    return tuple({**row, "framework": name} for row in rows for name in row.get("framework", "").split(","))


def frameworks_of(table: str, rule: str) -> tuple[Framework, ...]:
    """Return whose options a rule's rows are about."""
    names = {row["framework"] for row in rows_of(table) if row["rule"] == rule}
    return tuple(name for name in ALL if name in names)


def below_limits(case: Subject, rule: str) -> Iterator[tuple[Stated, str]]:
    """Yield the options that are less than a rule's rows of `limits.tsv` allow, and the least that they can be."""
    for row in rows_of("limits.tsv"):
        if (row["rule"], row["framework"]) == (rule, case.framework):
            with suppress(NotKnownError):
                found = case.option(row["option"])
                if found is not None and found.number is not None and not found.number >= float(row["least"]):
                    yield found, row["least"]


_LIKE = 0.85  # how alike two words are, from 0 to 1, of which one is taken for a slip of the pen for the other


@error_rule(
    "CKPT140: a misspelt word",
    why="The option accepts a few words, and this one is only similar to one of them: the trainer fails when"
    " it looks the word up",
    fix="write the intended word",
)
def misspelt(case: Subject) -> Iterator[Violation]:
    """Words and the releases that take them: `words.tsv`."""
    for found, words, near in _strange(case):
        if near is not None:
            what = f"{found}: must be one of {first_few(words, 12)}"
            yield Violation(found.key, what, case.written(found.key, near))


@warning_rule(
    "CKPT141: a word that no known release takes",
    why="The option accepts a few words, but not this one in any release that ckpt knows: the trainer fails,"
    " unless its release is newer",
    fix="use one of the words that the option accepts",
)
def unknown_word(case: Subject) -> Iterator[Violation]:
    """Words and the releases that take them: `words.tsv`."""
    for found, words, near in _strange(case):
        if near is None:
            what = f"{found}: not one of {first_few(words, 12)}"
            yield Violation(found.key, what, case.written(found.key, first_few(words, 30)))


def _strange(case: Subject) -> Iterator[tuple[Stated, Collection[str], str | None]]:
    """Yield the options whose words no release takes, what they take, and what was meant where that can be told."""
    for row in rows_of("words.tsv"):
        if row["framework"] not in (case.framework, case.config.framework):
            continue
        with suppress(NotKnownError):
            if row["when"] != "-" and not holds(case, row["when"]):
                continue
            found = case.option(*options_of(row["option"]))
            if found is not None:
                for item in found.value if isinstance(found.value, list) else [found.value]:
                    word, words = str(item).strip(), row["words"].split()
                    if row["case"] == "any":
                        word, words = word.lower(), [one.lower() for one in words]
                    is_among = any(fnmatchcase(word, one) for one in words)
                    if isinstance(item, str) and word and "/" not in word and not is_among:
                        near = [*dict.fromkeys((*difflib.get_close_matches(word, words, n=5), *words))]
                        yield Stated(key=found.key, value=item), near, _meant(word, words)


def _meant(word: str, words: Collection[str]) -> str | None:
    by_letters = {_letters(one): one for one in words}
    if _letters(word) in by_letters:
        return by_letters[_letters(word)]
    for near in difflib.get_close_matches(word, words, n=1, cutoff=0.6):
        if is_typo(word, near):
            return near
        is_like = difflib.SequenceMatcher(None, word, near).ratio() >= _LIKE
        if is_like and [c for c in word if c.isdigit()] == [c for c in near if c.isdigit()]:
            return near
    return next((one for one in words if len(word) > 3 and one.startswith(word + "_")), None)


def _letters(word: str) -> str:
    return word.lower().replace("-", "").replace("_", "")


def _check_of(rule: str) -> Check:
    """Return the check of a rule whose violations are rows of `pairs.tsv`."""
    rows = [row for row in rows_of("pairs.tsv") if row["rule"] == rule]

    def check(case: Subject) -> Iterator[Violation]:
        for row in rows:
            if row["framework"] in (case.framework, case.config.framework):
                with suppress(NotKnownError):
                    if holds(case, row["conditions"]):
                        yield _violation(case, row)

    return check


TABLE_RULES = tuple(
    ConfigRule(
        id=row["rule"],
        severity="error" if row["severity"] == "error" else "warning",
        title=row["title"],
        why=row["why"],
        fix=row["fix"],
        frameworks=ALL if row["rule"] in ("CKPT150", "CKPT151") else frameworks_of("pairs.tsv", row["rule"]),
        check=_check_of(row["rule"]),
    )
    for row in rows_of("rules.tsv")
)
"""Rules whose violations are rows of a table; by their ids they belong to the other rules' headings."""


def _violation(case: Subject, row: Mapping[str, str]) -> Violation:
    """Make the violation of a row: its first option that is there is named, or the first one where that must be set."""
    first, *_ = conditions = row["conditions"].split()
    names = [options_of(one) for one in conditions]
    there = [found for found in (option_in(case, one) for one in names) if found is not None and found.key]
    key = there[0].key if there and not first.endswith("!") else _missing_key(case, names[0][0])
    values = ", ".join(dict.fromkeys(f"{one.key}: {_brief(one)}" for one in there))
    return Violation(key, f"{row['what']} ({values})" if values else row["what"], row["fix"].replace("{key}", key))


def _missing_key(case: Subject, name: str) -> str:
    """Return how the file would write an option that it does not have."""
    option = name.partition("fsdp_config.fsdp_")[2]
    return case.fsdp_key(option) if option else case.key(name[1:]) if name[0] == "@" else name


def _brief(found: Stated) -> str:
    return "…" if isinstance(found.value, (list, dict)) else shown(found.value)
