"""OpenRLHF's command lines: the script that is started, its options as argparse splits them, and their age.

Options got dots between 0.10.1 and 0.10.2 (April 2026): a command line with names of both sides stops every release.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.preflight.configs.document import Document
from ckpt_tools.preflight.configs.launch import lost_options, several_commands
from ckpt_tools.preflight.configs.names import known, newest_release
from ckpt_tools.preflight.configs.options import is_variable

SCRIPTS = ("sft", "dpo", "rm", "ppo_ray", "ppo", "kto", "kd", "prm")
"""What `train_….py` there is, or was."""
SWITCHES = known("openrlhf", "switches", "plan_switches")
"""Options that take no word."""
LISTS = known("openrlhf", "lists")
"""Options that take several."""
PLAN = known("openrlhf", "plan_switches", "plan_values")
"""Options that the notes of the FSDP2 plan add; no release has them."""
NAMES = SWITCHES | known("openrlhf", "values", "plan_values", *SCRIPTS)
"""All options."""
_ENTRY = re.compile(rf"(.*[./])?train_(?P<script>{'|'.join(SCRIPTS)})(\.py)?")
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")


@cache
def _age(script: str) -> dict[str, str]:
    """Return option → the newest release in which a script has it; of any script for ''."""
    found = dict(newest_release("openrlhf", "switches")) | dict(newest_release("openrlhf", "values"))
    for name in SCRIPTS:
        if script in ("", name):
            found |= newest_release("openrlhf", name)
    return found


@cache
def options_with_dots(script: str) -> frozenset[str]:
    """Return the options that only releases with dots have."""
    return frozenset(name for name in _age(script) if "." in name)


@cache
def options_before_dots(script: str) -> frozenset[str]:
    """Return the options that no release with dots has any more, for one script."""
    age = _age(script)
    dotted = {age[name] for name in options_with_dots(script)}
    return frozenset(name for name, release in age.items() if "." not in name and release not in dotted)


@cache
def options_of_others(script: str) -> frozenset[str]:
    """Return the options that other scripts have in some release, and this one in none."""
    if not script:
        return frozenset()
    others = known("openrlhf", *(name for name in SCRIPTS if name != script))
    return others - known("openrlhf", script, "values") - PLAN


def find_entry(commands: Iterable[Sequence[str]]) -> tuple[int, int, str] | None:
    """Return (command, word, script) of the trainer that is started."""
    for i, command in enumerate(commands):
        for j, word in enumerate(command):
            match = _ENTRY.fullmatch(word)
            if match is not None:
                return i, j, match["script"]
    return None


def split_options(document: Document) -> tuple[str, tuple[str, ...], tuple[Finding, ...]]:
    """Return the script that is started and its words; without one, all words are options."""
    commands = document.commands
    found = find_entry(commands)
    if found is None:
        return "", document.words, ()
    index, at, script = found
    findings: list[Finding] = []
    rest = commands[index + 1 :]
    if find_entry(rest) is not None:
        findings.append(several_commands(document.path))
    findings += lost_options(rest, lambda word: word.startswith("--"))
    return script, commands[index][at + 1 :], tuple(findings)


def parse_options(words: Sequence[str]) -> tuple[dict[str, object], tuple[str, ...], tuple[Finding, ...]]:
    """Return option → its words, as argparse would split them, and the words that may be options themselves.

    What is no option's is passed over.
    """
    values: dict[str, object] = {}
    unread: list[str] = []
    findings: list[Finding] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        name, equals, value = word.partition("=")
        if not word.startswith("--") or _OPTION.fullmatch(name) is None:
            unread += [word] if is_variable(word) else []
            continue
        name = name.removeprefix("--")
        taken = [value] if equals else []
        while not equals and at < len(words) and not _is_option(words[at]):
            taken.append(words[at])
            at += 1
        most = 0 if name in SWITCHES else len(taken) if name in LISTS else 1
        unread += [extra for extra in taken[most:] if is_variable(extra)]
        taken = taken[:most] + [extra for extra in taken[most:] if not is_variable(extra)]
        if name in SWITCHES:
            if taken:
                findings.append(_bad_words(name, "no value, it is a switch", taken))
            values[name] = True
        elif name in LISTS:
            values[name] = taken
        elif taken:
            if len(taken) > 1:
                findings.append(_bad_words(name, "one value", taken))
            values[name] = taken[0]
        elif name in NAMES:
            findings.append(_bad_words(name, "a value", []))
        else:
            values[name] = True
    return values, tuple(unread), tuple(findings)


def _is_option(word: str) -> bool:
    return word.startswith("--") and _OPTION.fullmatch(word.partition("=")[0]) is not None


def _bad_words(name: str, expected: str, taken: Sequence[str]) -> Finding:
    found = " ".join(taken[:4]) or "none"
    return Finding.error(
        code="wrong-type",
        where=f"--{name}",
        what=f"expected {expected}, found {found}",
        hint=f"--{name} takes {expected}",
    )


def wrong_options(values: Mapping[str, object], script: str) -> Iterable[Finding]:
    """Yield the findings on options that are known, and not to the script that is started."""
    old = sorted(options_before_dots(script).intersection(values))
    new = sorted(options_with_dots("").intersection(values))
    if old and new:
        yield Finding.error(
            code="mixed-options",
            where=f"--{old[0]}",
            what=f"--{old[0]} and --{new[0]} belong to different versions: argparse stops at one of them",
            hint="use the names of one version",
        )
    for name in sorted(options_of_others(script).intersection(values)):
        ending = name.rpartition(".")[2]
        same = next((other for other in sorted(known("openrlhf", script)) if other.endswith(f".{ending}")), None)
        yield Finding.error(
            code="unknown-key",
            where=f"--{name}",
            what=f"train_{script} has no such option, in no release: argparse stops at it",
            hint=f"write --{same}" if same is not None else "remove it",
        )
