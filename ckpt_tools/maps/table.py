"""The table of architectures: which names their tensors have, live and on the hub. Read lazily, section by section.

One section per class of transformers::

    [LlamaForCausalLM]
    base model
    part model LlamaModel . -
    tie . tie_word_embeddings 0 lm_head.weight model.embed_tokens.weight
    rules - legacy
    lm_head.weight

`base`: the prefix with or without which transformers loads names. `part PATH CLASS CONFIG AUTO`: another section's
names under PATH; its config lies at CONFIG (``.``: the same) and AUTO says by which list its model_type chooses the
class (``-``: it is always this one). `without PATTERN`: what a part has not got here. `count PATTERN KEYS DEFAULT`:
where the config says how many layers there are. `tie SCOPE SWITCH DEFAULT TARGET SOURCE`: names of one tensor.
`rules SCOPE KEY`: a section of renamings (``-``: for the whole model). `ignored`, `may-miss`: regular expressions of
names that transformers drops, or does without. Other lines are names (see `patterns`), braces multiply; after ``?``
they depend on the config.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import cast

from ckpt_tools.maps.patterns import Node, add, graft, matches, missing, prune, tree
from ckpt_tools.maps.renames import Rule

_BRACES = re.compile(r"\{([^{}]*)\}")
_MAX_DEPTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """Two names of one tensor; regular expressions of the beginnings of names."""

    target: str
    source: str


@dataclass(slots=True, kw_only=True)
class Expected:
    """What the tensors of one architecture, with one config, are called."""

    architecture: str
    base: str
    names: Node
    counts: dict[str, int] = field(default_factory=dict)
    """Path of a number (see `patterns.missing`) → how many the config says."""
    count_keys: dict[str, str] = field(default_factory=dict)
    """The same paths → the config's key."""
    ties: list[Tie] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    may_miss: list[str] = field(default_factory=list)


class Table:
    """All architectures."""

    def __init__(self, text: str) -> None:
        self._sections: dict[str, list[str]] = {}
        self.source = ""
        """What the table was made from, for people."""
        lines: list[str] = []
        for line in text.splitlines():
            if line.startswith("["):
                lines = self._sections.setdefault(line[1:-1], [])
            elif line.startswith("# of "):
                self.source = line.removeprefix("# of ")
            elif line and not line.startswith("#"):
                lines.append(line)
        self._types = {
            auto: dict(cast(tuple[str, str], line.split()) for line in self._sections.get(f"types {auto}", ()))
            for auto in ("base", "causal", "backbone")
        }

    @property
    def architectures(self) -> tuple[str, ...]:
        """The names of the classes."""
        return tuple(name for name in self._sections if " " not in name)

    def architectures_of(self, names: Collection[str]) -> list[str]:
        """Return the architectures that have all of these live names, and all of whose names these are."""
        found = []
        there = tree(names)
        for architecture in self.architectures:
            expected = self.expected(architecture, {})
            if expected is None:
                continue
            if all(matches(expected.names, name, {}) for name in names):
                lacking = len(list(missing(expected.names, there, {})))
                found.append((lacking, len(architecture), architecture))
        return [architecture for lacking, _, architecture in sorted(found) if not lacking]

    def expected(self, architecture: str, config: Mapping[str, object]) -> Expected | None:
        """Return what the tensors of a model are called; None when the table does not know, or not a part of it."""
        if " " in architecture or architecture not in self._sections:
            return None
        expected = Expected(architecture=architecture, base=self._base(architecture), names=Node())
        names = self._build(architecture, config, "", "", expected, 0)
        if names is None:
            return None
        expected.names = names
        expected.rules = [
            rule
            for scope, key in self._rules(architecture, config, 0)
            for rule in self._parse_rules(key, scope, expected.base)
        ]
        return expected

    def _base(self, architecture: str) -> str:
        return next((line[5:] for line in self._sections[architecture] if line.startswith("base ")), "")

    def _build(
        self,
        architecture: str,
        config: Mapping[str, object] | None,
        path: str,
        folded: str,
        expected: Expected,
        depth: int,
    ) -> Node | None:
        """Return the names of one class; everything else goes into `expected` under `path`."""
        node = Node()
        if architecture not in self._sections or depth > _MAX_DEPTH:
            return None
        without: list[str] = []
        for line in self._sections[architecture]:
            match line.split():
                case ["base" | "rules", *_]:
                    pass
                case ["part", where, kind, key, auto]:
                    own = config if key == "." else dig(config, key)
                    own = cast(Mapping[str, object], own) if isinstance(own, Mapping) else None
                    chosen = self._chosen(kind, auto, own)
                    inside = self._build(chosen, own, f"{path}{where}.", f"{folded}{where}.", expected, depth + 1)
                    if inside is None:
                        return None
                    graft(node, where, inside)
                case ["without", pattern]:
                    without.append(pattern)
                case ["count", pattern, keys, default]:
                    if config is not None:
                        value = next(
                            (v for key in keys.split("|") if (v := dig(config, key)) is not None), int(default)
                        )
                        if type(value) is int and value >= 0:
                            expected.counts[folded + pattern] = value
                            expected.count_keys[folded + pattern] = keys.partition("|")[0]
                case ["tie", scope, switch, default, target, source]:
                    value = dig(config, switch) if config is not None else None
                    if bool(int(default)) if value is None else bool(value):
                        prefix = re.escape(path + ("" if scope == "." else f"{scope}."))
                        expected.ties.append(Tie(target=prefix + target, source=prefix + source))
                case ["ignored", pattern]:
                    expected.ignored.append(pattern)
                case ["may-miss", pattern]:
                    expected.may_miss.append(pattern)
                case ["?", name]:
                    for pattern in expand(name):
                        add(node, pattern, required=False)
                case [name]:
                    for pattern in expand(name):
                        add(node, pattern, required=True)
                case _:
                    raise ValueError(f"the table of names has a line that nothing reads: {line}")
        for pattern in without:
            prune(node, pattern)
        return node

    def _chosen(self, kind: str, auto: str, config: Mapping[str, object] | None) -> str:
        model_type = None if config is None else config.get("model_type")
        if auto == "-" or not isinstance(model_type, str):
            return kind
        return self._types[auto].get(model_type, "")

    def _rules(
        self, architecture: str, config: Mapping[str, object] | None, depth: int
    ) -> Iterator[tuple[str | None, str]]:
        """Yield (scope, section); where a config chooses another part, that part's rules in place of the usual ones."""
        if architecture not in self._sections or depth > _MAX_DEPTH:
            return
        base = self._base(architecture)
        other: dict[str, tuple[str, Mapping[str, object] | None]] = {}
        for line in self._sections[architecture]:
            if line.startswith("part "):
                _, where, kind, key, auto = line.split()
                own = config if key == "." else dig(config, key)
                own = cast(Mapping[str, object], own) if isinstance(own, Mapping) else None
                chosen = self._chosen(kind, auto, own)
                if chosen != kind or self._differs(chosen, own, depth + 1):
                    other[where.removeprefix(base).removeprefix(".")] = (chosen, own)
        last: list[tuple[str | None, str]] = []
        for line in self._sections[architecture]:
            if not line.startswith("rules "):
                continue
            _, where, key = line.split()
            scope = None if where == "-" else "" if where == "." else where
            if key == "legacy":
                last.append((scope, key))
            elif scope is None or not any(scope == part or scope.startswith(f"{part}.") for part in other if part):
                yield scope, key
        for where, (chosen, own) in other.items():
            for scope, key in self._rules(chosen, own, depth + 1):
                if key != "legacy":
                    yield ".".join(filter(None, (where, scope))), key
        yield from last

    def _differs(self, architecture: str, config: Mapping[str, object] | None, depth: int) -> bool:
        """Does a part's config choose other classes than its own section names?"""
        for line in self._sections.get(architecture, ()) if depth <= _MAX_DEPTH else ():
            if line.startswith("part "):
                _, _, kind, key, auto = line.split()
                own = config if key == "." else dig(config, key)
                own = cast(Mapping[str, object], own) if isinstance(own, Mapping) else None
                chosen = self._chosen(kind, auto, own)
                if chosen != kind or self._differs(chosen, own, depth + 1):
                    return True
        return False

    def _parse_rules(self, key: str, scope: str | None, base: str) -> Iterator[Rule]:
        for line in self._sections[f"rules {key}"]:
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


def dig(config: Mapping[str, object] | None, path: str) -> object:
    """Return the value at a dotted path; None where there is none."""
    value: object = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def expand(name: str) -> Iterator[str]:
    """Yield every name that braces multiply: ``a.{b,c}`` is ``a.b`` and ``a.c``."""
    parts = _BRACES.split(name)
    choices = [part.split(",") if index % 2 else [part] for index, part in enumerate(parts)]
    for chosen in itertools.product(*choices):
        yield "".join(chosen)


@cache
def load_table() -> Table:
    """Return the table that comes with ckpt."""
    return Table(resources.files(__package__).joinpath("transformers.txt").read_text(encoding="utf-8"))
