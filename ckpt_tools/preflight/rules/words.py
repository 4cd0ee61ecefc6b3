"""CKPT14x: words that an option takes, CKPT15x: options that need or exclude each other, and older rules of that kind.

All are rows of tables: `words.tsv`; `pairs.tsv`, and `rules.tsv` for what is said of them in the reference.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase

from ckpt_tools.preflight.rules.conditions import frameworks_of, holds, option_in, options_of, rows_of
from ckpt_tools.preflight.rules.rule import (
    ALL,
    Case,
    Check,
    NotKnownError,
    Rule,
    Setting,
    Violation,
    error_rule,
    shown,
    warning_rule,
)
from ckpt_tools.preflight.spelling import is_typo
from ckpt_tools.text import first_few

_LIKE = 0.85
"""How alike two words are, from 0 to 1, of which one is taken for a slip of the pen for the other."""


@error_rule(
    "CKPT140: a misspelt word",
    why="The option takes a few words, this is none of them, and one of them is nearly the same: the trainer stops when"
    " it looks the word up",
    fix="the word that was meant",
)
def misspelt(case: Case) -> Iterator[Violation]:
    """Words and the releases that take them: `words.tsv`."""
    for found, words, near in _strange(case):
        if near is not None:
            what = f"{found}: it takes {first_few(words, 12)}"
            yield Violation(found.key, what, case.written(found.key, near))


@warning_rule(
    "CKPT141: a word that no known release takes",
    why="The option takes a few words, and this is none of those of the releases that ckpt knows: the trainer stops at"
    " it, unless its release is newer",
    fix="one of the words that the option takes",
)
def unknown_word(case: Case) -> Iterator[Violation]:
    """Words and the releases that take them: `words.tsv`."""
    for found, words, near in _strange(case):
        if near is None:
            what = f"{found}: none of {first_few(words, 12)}"
            yield Violation(found.key, what, case.written(found.key, first_few(words, 30)))


def _strange(case: Case) -> Iterator[tuple[Setting, Collection[str], str | None]]:
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
                    if isinstance(item, str) and word and "/" not in word and not _is_among(word, words):
                        near = difflib.get_close_matches(word, words, n=5)
                        yield Setting(key=found.key, value=item), [*dict.fromkeys((*near, *words))], _meant(word, words)


def _is_among(word: str, words: Collection[str]) -> bool:
    return any(fnmatchcase(word, one) for one in words)


def _meant(word: str, words: Collection[str]) -> str | None:
    folded = {_folded(one): one for one in words}
    if _folded(word) in folded:
        return folded[_folded(word)]
    for near in difflib.get_close_matches(word, words, n=1, cutoff=0.6):
        if is_typo(word, near):
            return near
        if [c for c in word if c.isdigit()] == [c for c in near if c.isdigit()] and _ratio(word, near) >= _LIKE:
            return near
    return next((one for one in words if len(word) > 3 and one.startswith(word + "_")), None)


def _folded(word: str) -> str:
    return word.lower().replace("-", "").replace("_", "")


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _check_of(rule: str) -> Check:
    """Return the check of a rule whose violations are rows of `pairs.tsv`."""

    def check(case: Case) -> Iterator[Violation]:
        for row in rows_of("pairs.tsv"):
            if row["rule"] == rule and row["framework"] in (case.framework, case.config.framework):
                with suppress(NotKnownError):
                    if holds(case, row["conditions"]):
                        yield _violation(case, row)

    return check


TABLE_RULES = tuple(
    Rule(
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


def _violation(case: Case, row: Mapping[str, str]) -> Violation:
    """Make the violation of a row: its first option that is there is named, and shown with its value."""
    names = [options_of(one) for one in row["conditions"].split()]
    there = [found for found in (option_in(case, one) for one in names) if found is not None and found.key]
    key = there[0].key if there else names[0][0]
    values = ", ".join(dict.fromkeys(f"{one.key}: {_brief(one)}" for one in there))
    return Violation(key, f"{row['what']} ({values})" if values else row["what"], row["fix"].replace("{key}", key))


def _brief(found: Setting) -> str:
    return "…" if isinstance(found.value, (list, dict)) else shown(found.value)
