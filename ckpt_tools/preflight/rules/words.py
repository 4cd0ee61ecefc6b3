"""CKPT14x: words that an option takes, and CKPT15x: options that need or exclude each other; both out of tables."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress

from ckpt_tools.preflight.rules.conditions import holds, options_of, rows_of
from ckpt_tools.preflight.rules.rule import Case, NotKnownError, Setting, Violation, error_rule, shown, warning_rule
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
            if found is None or not isinstance(found.value, str):
                continue
            words, word = row["words"].split(), found.text
            if row["case"] == "any":
                words, word = [one.lower() for one in words], word.lower()
            if word and word not in words and "/" not in word:
                yield found, words, _meant(word, words)


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


@error_rule(
    "CKPT150: options that exclude each other, or one that needs another",
    why="The trainer checks them together, and stops",
    fix="one of them, or the one that is missing",
)
def excluded(case: Case) -> Iterator[Violation]:
    """Pairs and their sources: `pairs.tsv`."""
    yield from _pairs(case, "error")


@warning_rule(
    "CKPT151: options of which one changes what the other means",
    why="It runs, but one of them is ignored, or newer releases do not have it",
    fix="what is said beside it",
)
def overruled(case: Case) -> Iterator[Violation]:
    """Pairs and their sources: `pairs.tsv`."""
    yield from _pairs(case, "warning")


def _pairs(case: Case, severity: str) -> Iterator[Violation]:
    for row in rows_of("pairs.tsv"):
        if row["severity"] != severity or row["framework"] not in (case.framework, case.config.framework):
            continue
        with suppress(NotKnownError):
            if holds(case, row["conditions"]):
                yield _violation(case, row)


def _violation(case: Case, row: Mapping[str, str]) -> Violation:
    """Make the violation of a row: its first option that is there is named, and shown with its value."""
    names = [options_of(one) for one in row["conditions"].split()]
    there = [found for found in (case.option(*one) for one in names) if found is not None]
    dashes = "--" if case.framework == "openrlhf" else ""
    key = there[0].key if there else dashes + names[0][0]
    values = ", ".join(dict.fromkeys(f"{one.key}: {_brief(one)}" for one in there))
    return Violation(key, f"{row['what']} ({values})" if values else row["what"], row["fix"])


def _brief(found: Setting) -> str:
    return "…" if isinstance(found.value, (list, dict)) else shown(found.value)
