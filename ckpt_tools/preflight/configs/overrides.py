"""Options on a command line: flags as argparse has them, overrides as Hydra has them, and both on top of a file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.errors import UsageError
from ckpt_tools.preflight.configs.document import Document
from ckpt_tools.preflight.plain_values import is_variable
from ckpt_tools.transfer.placement.plain_yaml import MAX_NODES, load_yaml

# Options of a command line as argparse splits them: `--name value`, `--name=value`, `--name`, `--name a b`.
# Source: transformers `hf_argparser.py:HfArgumentParser`: every field is an option of one value, or of several where it
# is a list; a truth may stand alone, and has an opposite, `--no_name`; underscores may be written as hyphens.

_FLAG = re.compile(r"--[A-Za-z][\w.-]*")
_MANY = re.compile(
    r"\$([@*]|\{[@*]|\{?\w+\[[@*]|\{?\w*(ARGS|ARGUMENTS|OPTS|OPTIONS|EXTRA|FLAGS|PARAMS)\w*\}?$)", re.IGNORECASE
)
"""A variable that by its kind or name stands for options, not for the value of the one before it."""

Program = Callable[[Sequence[str], int], int]
"""Command, place of a word → how many words the program that begins there has; 0 where none does."""


def read_flags(words: Sequence[str]) -> tuple[dict[str, object], tuple[str, ...]]:
    """Return option → value, True where it stands alone, a list of several words; and what may hold any options."""
    values: dict[str, object] = {}
    unread: list[str] = []
    name = ""
    for word in words:
        if _FLAG.fullmatch(word.partition("=")[0]):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            values[name] = _plain_word(value) if equals else True
            if name.startswith("no_") and not equals and name != "no_cuda":
                values[name.removeprefix("no_")] = not values.pop(name)
            continue
        before = values.get(name, True)
        if is_variable(word) and (not name or before is not True or _MANY.search(word)):
            unread.append(word)
        elif name:
            values[name] = (
                _plain_word(word) if before is True else [*(before if isinstance(before, list) else [before]), word]
            )
    return values, tuple(unread)


def started(commands: Iterable[Sequence[str]], program: Program) -> Sequence[str] | None:
    """Return the words after a program in the first command that starts it; None where none does."""
    for command in commands:
        for at in range(len(command)):
            length = program(command, at)
            if length:
                return command[at + length :]
    return None


def _plain_word(word: str) -> object:
    """Return a word's value: JSON where it is an object, as a field of a dict is written."""
    if word.startswith("{"):
        try:
            return json.loads(word)
        except ValueError:
            return word
    return word


# Hydra's way of saying a config: overrides `a.b=c` on a command line, and values that point at others, `${a.b}`.
# Source: Hydra's override grammar (hydra.cc/docs/advanced/override_grammar/basic), OmegaConf's interpolations
# (omegaconf.readthedocs.io, "Variable interpolation"; `oc.select`).

_OVERRIDE = re.compile(r"(?P<sign>[+~]{0,2})(?P<path>[A-Za-z_]\w*(\.\w+)*)(=(?P<value>.*))?", re.DOTALL)
_GROUP = re.compile(r"[+~]{0,2}[A-Za-z_][\w@/.\-]*=.*", re.DOTALL)
_CONFIG_NAME = ("--config-name", "-cn")
_WHOLE = re.compile(r"\$\{(?P<path>\.*[A-Za-z_][\w.]*)\}")
_SELECT = re.compile(r"\$\{oc\.select:\s*(?P<path>[A-Za-z_][\w.]*)\s*(,\s*(?P<default>[^{}$]*))?\}")
_MAX_HOPS = 8
_MAX_PARTS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What a command line overrides."""

    values: Mapping[str, object]
    added: frozenset[str]  # Paths that were added with `+`: nobody knows them beforehand
    findings: tuple[Finding, ...]
    unread: tuple[str, ...] = ()
    """Words that stand for nobody knows which options: `$@`, `$EXTRA`, groups (`actor@a.b=megatron`), other configs."""
    groups: Mapping[str, str] = field(default_factory=dict)


def is_override(word: str) -> bool:
    """Does a word set an option below another one, `a.b=c`, as no command is called?"""
    match = _OVERRIDE.fullmatch(word)
    return match is not None and match["value"] is not None and "." in match["path"]


def read_overrides(tokens: Sequence[str], *, configs: Collection[str] = (), groups: Collection[str] = ()) -> Overrides:
    """Read the overrides among the words after a program; `configs` are known, of `groups` the choice is returned."""
    values: dict[str, object] = {}
    added: set[str] = set()
    findings: list[Finding] = []
    unread: list[str] = []
    chosen: dict[str, str] = {}
    for at, word in enumerate(tokens):
        group, _, choice = word.partition("=")
        if group in groups and not is_variable(choice):
            chosen[group] = choice
            continue
        match = _OVERRIDE.fullmatch(word)
        if match is None or (match["value"] is None and match["sign"] != "~"):
            name, equals, value = word.partition("=")
            if name in _CONFIG_NAME:
                value = value if equals else "".join(tokens[at + 1 : at + 2])
                unread += [] if value.removesuffix(".yaml") in configs else [f"{name}={value}"]
            elif is_variable(name) or _GROUP.fullmatch(word):
                unread.append(word)
            continue
        path, parts = match["path"], match["path"].split(".")
        if len(parts) > _MAX_PARTS:
            continue
        if match["sign"] == "~":
            _delete(values, parts)
            continue
        if match["sign"]:
            added.add(path)
        if not put(values, parts, plain_value(match["value"] or "")):
            what = f"{path} is set below an option that already has a value"
            findings.append(Finding.error("wrong-type", path, what, "remove one of the two"))
    return Overrides(
        values=values, added=frozenset(added), findings=tuple(findings), unread=tuple(unread), groups=chosen
    )


def put(values: dict[str, object], parts: list[str], value: object) -> bool:
    """Set what lies at a path; False where a value above it is none that has parts."""
    node = values
    for part in parts[:-1]:
        inner = node.setdefault(part, {})
        if not isinstance(inner, dict):
            return False
        node = inner
    node[parts[-1]] = value
    return True


def _delete(values: dict[str, object], parts: list[str]) -> None:
    node: object = values
    for part in parts[:-1]:
        node = node.get(part) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node.pop(parts[-1], None)


def plain_value(text: str) -> object:
    """Return the value of an override; what cannot be read as one stays text."""
    if "$" in text:
        return text
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    # Hydra's dicts have no space after the colon, YAML's need one.
    yaml_text = re.sub(r":(?=[^\s])", ": ", text) if text.startswith("{") else text
    is_plain = ":" in text or "#" in text or text.startswith(("-", "&", "*", "!", "|", ">"))
    try:
        if is_plain and not text.startswith(("[", "{")):
            return int(text) if len(text) < 20 else text
        return load_yaml(yaml_text, full=True)
    except ValueError:
        return text


def resolve(values: Mapping[str, object]) -> dict[str, object]:
    """Return a tree with `${…}` replaced by what it points at; what points nowhere in it stays what is written."""
    counter = count(1)

    def walk(value: object, path: tuple[str | int, ...]) -> object:
        if next(counter) > MAX_NODES:
            raise ValueError(f"more than {MAX_NODES} values, followed as often as they are pointed at")
        if isinstance(value, Mapping):
            return {key: walk(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item, (*path, i)) for i, item in enumerate(value)]
        if isinstance(value, str) and "$" in value:
            found = _follow(values, value, path)
            return value if found is _UNKNOWN else found
        return value

    tree = walk(values, ())
    return tree if isinstance(tree, dict) else {}


_UNKNOWN = object()


def _follow(values: Mapping[str, object], text: str, path: tuple[str | int, ...]) -> object:
    value: object = text
    here = path
    for _ in range(_MAX_HOPS):
        if not isinstance(value, str) or "$" not in value:
            # A mapping that is pointed at may point on in turn: it is not followed any further.
            return _UNKNOWN if isinstance(value, (Mapping, list)) and "${" in repr(value)[:10_000] else value
        match = _WHOLE.fullmatch(value) or _SELECT.fullmatch(value)
        if match is None:
            return _UNKNOWN
        name = match["path"].lstrip(".")
        ups = len(match["path"]) - len(name)  # leading dots begin at its own mapping, and above it
        here = (*(here[: len(here) - ups] if ups else ()), *name.split("."))
        value = values
        for part in here:
            value = value.get(str(part), _UNKNOWN) if isinstance(value, Mapping) else _UNKNOWN
        if value is _UNKNOWN:
            default = match.groupdict().get("default")
            return _UNKNOWN if default is None else plain_value(default.strip())
    return _UNKNOWN


# Options on a command line that override those of a file, read as the trainer reads them.
# Source: Hydra's override grammar for verl, OmegaConf's `from_cli` (`key=value`) for LLaMA-Factory; for the others
# `--name value` as in `flags`, whose dots tyro takes for sections.

_ASSIGNED = re.compile(r"(?P<sign>[+~]{0,2})(?P<path>[A-Za-z_][\w@]*(\.\w+)*)(=(?P<value>.*))?", re.DOTALL)


def overridden(document: Document, words: Sequence[str], *, is_strict: bool = False) -> Document:
    """Return a file with values that words override; those that set nothing are passed over unless `is_strict`."""
    first = next((at for at, word in enumerate(words) if word.startswith("--")), len(words))
    options, unread = read_flags(words[first:])
    values: Mapping[str, object] = document.values or {}
    for name, value in options.items():
        values = _put(values, name.split("."), value)
    for word in words[:first]:
        found = _ASSIGNED.fullmatch(word)
        if found is None or (found["value"] is None and found["sign"] != "~"):
            if is_strict and not is_variable(word):
                raise UsageError(f"{word!r} does not set an option", where=word, hint="--name value, or key=value")
            unread += (word,) if is_variable(word) else ()
            continue
        value = None if found["sign"] == "~" else plain_value(found["value"] or "")
        values = _put(values, found["path"].split("."), value)
    return replace(
        document, values=values, overrides=(*document.overrides, *words), words_unread=(*document.words_unread, *unread)
    )


def _put(values: Mapping[str, object], parts: Sequence[str], value: object) -> Mapping[str, object]:
    inner = values.get(parts[0])
    if len(parts) > 1:
        value = _put(inner if isinstance(inner, Mapping) else {}, parts[1:], value)
    return {**values, parts[0]: value}
