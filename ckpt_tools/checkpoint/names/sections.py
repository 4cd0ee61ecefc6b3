"""The sections of the table of architectures, as they are written.

One section per class of transformers::

    [LlamaForCausalLM]
    base model
    part model LlamaModel . -
    tie . tie_word_embeddings 0 lm_head.weight model.embed_tokens.weight
    lm_head.weight

`base`: the prefix with or without which transformers loads names. `part PATH CLASS CONFIG AUTO`: another section's
names under PATH; its config lies at CONFIG (``.``: the same) and AUTO says by which list its model_type chooses the
class (``-``: it is always this one). `without PATTERN`: what a part has not got here. `count PATTERN KEYS DEFAULT`:
where the config says how many layers there are. `tie SCOPE SWITCH DEFAULT TARGET SOURCE`: names of one tensor.
`rules SCOPE KEY`: a section of renamings (``-``: for the whole model); those of `legacy` come
last in every model. `ignored`, `may-miss`: regular expressions of
names that transformers drops, or does without. `like CLASS`: the names are also those of another section. Other lines
are names (see `patterns`), braces multiply; after ``?`` they depend on the config, with a number as a bundle, and
`one-of` says of which bundles one is always there. After ``maybe`` a whole part depends on the config.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ckpt_tools.checkpoint.names.patterns import NUMBERS, Node, add, find
from ckpt_tools.checkpoint.names.renames import Rule

_BRACES = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A model inside a model."""

    path: str
    kind: str
    """Its class, unless its config chooses another."""
    config: str
    """Where its config lies in the whole's; empty for the same."""
    auto: str
    """By which list the config's model_type chooses the class; empty when it is always this one."""
    is_optional: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """How many layers there are."""

    pattern: str
    keys: tuple[str, ...]
    """Paths in the config; the first that is there counts."""
    default: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TieLine:
    """Names of one tensor, when the config says so."""

    scope: str
    switch: str
    default: bool
    target: str
    source: str


@dataclass(slots=True)
class Section:
    """One class."""

    base: str = ""
    parts: list[Part] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)
    ties: list[TieLine] = field(default_factory=list)
    rules: list[tuple[str | None, str]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    may_miss: list[str] = field(default_factory=list)
    like: str = ""
    names: list[tuple[str, str]] = field(default_factory=list)
    """(mark, names with braces); the mark is empty, "?" or "?" and the number of a bundle."""
    one_of: list[tuple[str, ...]] = field(default_factory=list)


def parse_section(lines: Iterable[str]) -> Section:
    """Parse the lines of one class; raise `ValueError` for a line that has no meaning."""
    section = Section()
    for line in lines:
        match line.split():
            case ["base", prefix]:
                section.base = prefix
            case ["part" | "maybe" as word, path, kind, config, auto]:
                config, auto = config.strip("."), auto.strip("-")
                section.parts.append(Part(path=path, kind=kind, config=config, auto=auto, is_optional=word == "maybe"))
            case ["without", pattern]:
                section.without.append(pattern)
            case ["count", pattern, keys, default]:
                section.counts.append(Count(pattern=pattern, keys=tuple(keys.split("|")), default=int(default)))
            case ["tie", scope, switch, default, target, source]:
                scope = "" if scope == "." else scope + "."
                section.ties.append(
                    TieLine(scope=scope, switch=switch, default=default == "1", target=target, source=source)
                )
            case ["rules", scope, key]:
                section.rules.append((None if scope == "-" else scope.strip("."), key))
            case ["ignored", pattern]:
                section.ignored.append(pattern)
            case ["may-miss", pattern]:
                section.may_miss.append(pattern)
            case ["like", kind]:
                section.like = kind
            case ["one-of", *numbers]:
                section.one_of.append(tuple(f"?{number}" for number in numbers))
            case [name]:
                section.names.append(("", name))
            case [mark, name] if mark.startswith("?"):
                section.names.append((mark, name))
            case _:
                raise ValueError(f"the table of names has a line without a meaning: {line}")
    return section


def add_names(root: Node, section: Section) -> None:
    """Add the names that a section writes out itself to the tree."""
    bundles: dict[str, list[str]] = {}
    for mark, braced in section.names:
        for name in expand(braced):
            add(root, name, required=not mark)
            if mark not in ("", "?"):
                bundles.setdefault(mark, []).append(name)
    for names in bundles.values():
        head, _ = split(names[0])
        find(root, head).bundles.append(tuple(split(name)[1] for name in names))
    for marks in section.one_of:
        head, _ = split(bundles[marks[0]][0])
        find(root, head).one_of.append(tuple(tuple(split(name)[1] for name in bundles[mark]) for mark in marks))


def split(pattern: str) -> tuple[str, str]:
    """Return a pattern up to its last number, and the rest of it."""
    components = pattern.split(".")
    last = max((end for end, component in enumerate(components, 1) if component in NUMBERS), default=0)
    return ".".join(components[:last]), ".".join(components[last:])


def expand(name: str) -> Iterator[str]:
    """Yield every name that braces multiply: ``a.{b,c}`` is ``a.b`` and ``a.c``."""
    parts = _BRACES.split(name)
    choices = [part.split(",") if index % 2 else [part] for index, part in enumerate(parts)]
    for chosen in itertools.product(*choices):
        yield "".join(chosen)


def parse_rules(lines: Iterable[str], scope: str | None, base: str) -> Iterator[Rule]:
    """Parse the renamings of one section for a part of a model."""
    for line in lines:
        kind, _, rest = line.partition(" ")
        operations = ""
        if kind == "convert":
            operations, _, rest = rest.partition(" ")
        sources, _, targets = rest.partition(" -> ")
        yield Rule(
            kind=kind,
            operations=operations,
            sources=tuple(sources.split(" + ")),
            targets=tuple(targets.split(" + ")),
            scope=scope,
            base=base,
        )
