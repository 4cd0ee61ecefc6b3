"""The table of architectures: which names their tensors have, live and on the hub."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from typing import cast

from ckpt_tools.checkpoint.names.patterns import NUMBERS, Node, add, find, matches, merge, missing, prune, tree
from ckpt_tools.checkpoint.names.transformers_renames import RenameRule
from ckpt_tools.tables import read_packaged

# The sections of the table of architectures, as they are written.
#
# One section per class of transformers::
#
#     [LlamaForCausalLM]
#     base model
#     part model LlamaModel . -
#     tie . tie_word_embeddings 0 lm_head.weight model.embed_tokens.weight
#     lm_head.weight
#
# `base`: the prefix with or without which transformers loads names. `part PATH CLASS CONFIG AUTO`: another section's
# names under PATH; its config lies at CONFIG (``.``: the same) and AUTO says by which list its model_type chooses the
# class (``-``: it is always this one). `without PATTERN`: what a part has not got here. `count PATTERN KEYS DEFAULT`:
# where the config says how many layers there are. `tie SCOPE SWITCH DEFAULT TARGET SOURCE`: names of one tensor.
# `rules SCOPE KEY`: a section of renamings (``-``: for the whole model); those of `legacy` come
# last in every model. `ignored`, `may-miss`: regular expressions of
# names that transformers drops, or does without. `like CLASS`: the names are also those of another section. Other lines
# are names (see `patterns`), braces multiply; after ``?`` they depend on the config, with a number as a bundle, and
# `one-of` says of which bundles one is always there. After ``maybe`` a whole part depends on the config.

_BRACES = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubPart:
    """A model inside a model."""

    path: str
    kind: str  # Its class, unless its config chooses another
    config: str  # Where its config lies in the whole's; empty for the same
    auto: str  # By which list the config's model_type chooses the class; empty when it is always this one
    is_optional: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """How many layers there are."""

    pattern: str
    keys: tuple[str, ...]  # Paths in the config; the first that is there counts
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
class ClassNames:
    """One class."""

    base: str = ""
    parts: list[SubPart] = field(default_factory=list)
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


def parse_section(lines: Iterable[str]) -> ClassNames:
    """Parse the lines of one class; raise `ValueError` for a line that has no meaning."""
    section = ClassNames()
    for line in lines:
        match line.split():
            case ["base", prefix]:
                section.base = prefix
            case ["part" | "maybe" as word, path, kind, config, auto]:
                config, auto = config.strip("."), auto.strip("-")
                section.parts.append(
                    SubPart(path=path, kind=kind, config=config, auto=auto, is_optional=word == "maybe")
                )
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
                raise ValueError(f"the table of names has an invalid line: {line}")
    return section


def add_names(root: Node, section: ClassNames) -> None:
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


def parse_rules(lines: Iterable[str], scope: str | None, base: str) -> Iterator[RenameRule]:
    """Parse the renamings of one section for a part of a model."""
    for line in lines:
        kind, _, rest = line.partition(" ")
        operations = ""
        if kind == "convert":
            operations, _, rest = rest.partition(" ")
        sources, _, targets = rest.partition(" -> ")
        yield RenameRule(
            kind=kind,
            operations=operations,
            sources=tuple(sources.split(" + ")),
            targets=tuple(targets.split(" + ")),
            scope=scope,
            base=base,
        )


_AUTO = ("base", "causal", "backbone")
_LEGACY = "legacy"
_MAX_DEPTH = 8
Config = Mapping[str, object]  # A config.json, or a part of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """Two names of one tensor; regular expressions of the beginnings of names."""

    target: str
    source: str
    switch: str = "tie_word_embeddings"  # The config's key that says so


@dataclass(slots=True, kw_only=True)
class Expected:
    """What the tensors of one architecture, with one config, are called."""

    architecture: str
    base: str
    names: Node = field(default_factory=Node)
    counts: dict[str, int] = field(default_factory=dict)  # Path of a number (`patterns.missing`) → how many
    count_keys: dict[str, str] = field(default_factory=dict)  # The same paths → the config's key
    ties: list[Tie] = field(default_factory=list)
    rules: list[RenameRule] = field(default_factory=list)  # What loading does, in its order
    save_rules: list[RenameRule] = field(default_factory=list)  # What saving does, in its order
    ignored: list[str] = field(default_factory=list)
    may_miss: list[str] = field(default_factory=list)
    by: str = ""  # Whose names they are: a release of transformers
    is_proven: bool = False  # Does the installed transformers say the same of this config?

    @property
    def digest(self) -> str:
        """Identifies what loading does, to the last letter."""
        return blake2b(repr((self.base, self.rules)).encode(), digest_size=16).hexdigest()


class Table:
    """All architectures; sections are parsed when they are asked for."""

    def __init__(self, text: str) -> None:
        self._lines: dict[str, list[str]] = {}
        self._parsed: dict[str, ClassNames] = {}
        self.source = ""
        """What the table was made from, for people."""
        lines: list[str] = []
        for line in text.splitlines():
            if line.startswith("["):
                lines = self._lines.setdefault(line[1:-1], [])
            elif line.startswith("# of "):
                self.source = line.removeprefix("# of ")
            elif line and not line.startswith("#"):
                lines.append(line)
        self._types = {
            auto: dict(cast(tuple[str, str], line.split()) for line in self._lines.get(f"types {auto}", ()))
            for auto in _AUTO
        }

    @property
    def architectures(self) -> tuple[str, ...]:
        """The names of the classes."""
        return tuple(name for name in self._lines if " " not in name)

    def architectures_of(self, names: Collection[str]) -> list[str]:
        """Return the architectures that have all of these live names, and all of whose names these are."""
        there = tree(names)
        found = []
        for architecture in self.architectures:
            expected = self.expected(architecture, {})
            if (
                expected is not None
                and all(matches(expected.names, name, {}) for name in names)
                and next(missing(expected.names, there, {}), None) is None
            ):
                found.append(architecture)
        return sorted(found, key=lambda name: (len(name), name))

    def expected(self, architecture: str, config: Config) -> Expected | None:
        """Return what the tensors of a model are called; None when the table does not know, or not a part of it."""
        section = self._section(architecture)
        if section is None:
            return None
        expected = Expected(architecture=architecture, base=section.base, by=self.source)
        if not self._build(section, config, ("", ""), expected.names, expected, 0):
            return None
        wanted = [*self._rules(section, config, 0), (None, _LEGACY)]
        expected.rules = [
            rule
            for scope, key in wanted
            for rule in parse_rules(self._lines.get(f"rules {key}", ()), scope, expected.base)
        ]
        expected.save_rules = [
            rule
            for scope, key in reversed(wanted)
            for rule in parse_rules(self._lines.get(f"save {key}", ()), scope, expected.base)
        ]
        return expected

    def _section(self, architecture: str) -> ClassNames | None:
        if architecture not in self._parsed:
            if " " in architecture or architecture not in self._lines:
                return None
            self._parsed[architecture] = parse_section(self._lines[architecture])
        return self._parsed[architecture]

    def _build(
        self,
        section: ClassNames,
        config: Config | None,
        at: tuple[str, str],
        names: Node,
        expected: Expected,
        depth: int,
    ) -> bool:
        """Add the names of one class to `names`, what else it says to `expected`; False when a part is not known."""
        path, keys = at  # what names and keys of the config have in front of them
        for part in section.parts:
            chosen, own = self._chosen(part, config)
            inside = Node()
            if chosen is None or depth == _MAX_DEPTH:
                return False
            below = f"{path}{part.path}.", keys + (f"{part.config}." if part.config else "")
            if not self._build(chosen, own, below, inside, expected, depth + 1):
                return False
            merge(find(names, part.path), inside, optional=part.is_optional)
        for pattern in section.without:
            prune(names, pattern)
        like = self._section(section.like) if section.like else None
        for one in filter(None, (like, section)):
            add_names(names, one)
        for count in section.counts if config is not None else ():
            value = next((v for key in count.keys if (v := dig(config, key)) is not None), count.default)
            if type(value) is int and value >= 0:
                expected.counts[path + count.pattern] = value
                expected.count_keys[path + count.pattern] = count.keys[0]
        for tie in section.ties:
            value = dig(config, tie.switch)
            if tie.default if value is None else bool(value):
                prefix = re.escape(path + tie.scope)
                found = Tie(target=prefix + tie.target, source=prefix + tie.source, switch=keys + tie.switch)
                expected.ties.append(found)
        expected.ignored += section.ignored
        expected.may_miss += section.may_miss
        return True

    def _chosen(self, part: SubPart, config: Config | None) -> tuple[ClassNames | None, Config | None]:
        """Return the section of a part, and its config if there is one."""
        found = dig(config, part.config) if part.config else config
        own = found if isinstance(found, Mapping) else None
        return self._section(self._kind(part, own)), own

    def _kind(self, part: SubPart, config: Config | None) -> str:
        model_type = None if config is None else config.get("model_type")
        return self._types[part.auto].get(model_type, "") if part.auto and isinstance(model_type, str) else part.kind

    def _rules(self, section: ClassNames, config: Config | None, depth: int) -> Iterator[tuple[str | None, str]]:
        """Yield (scope, section of rules); a part that the config chooses brings its own in place of the usual ones."""
        others = {
            part.path.removeprefix(section.base).removeprefix("."): part
            for part in section.parts
            if self._differs(part, config, depth)
        }
        for scope, key in section.rules:
            if scope is None or not any(scope == path or scope.startswith(f"{path}.") for path in others if path):
                yield scope, key
        for path, part in others.items():
            chosen, own = self._chosen(part, config)
            if chosen is not None:
                for scope, key in self._rules(chosen, own, depth + 1):
                    yield ".".join(filter(None, (path, scope))), key

    def _differs(self, part: SubPart, config: Config | None, depth: int) -> bool:
        """Does the config choose another class for the part, or for a part of it, than the table names?"""
        chosen, own = self._chosen(part, config)
        if chosen is None or depth == _MAX_DEPTH or self._kind(part, own) != part.kind:
            return chosen is not None
        return any(self._differs(inner, own, depth + 1) for inner in chosen.parts)


def dig(config: Config | None, path: str) -> object:
    """Return the value at a dotted path; None where there is none."""
    value: object = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


@cache
def load_table() -> Table:
    """Return the table that comes with ckpt."""
    return Table(read_packaged(__package__, "transformers.txt"))
