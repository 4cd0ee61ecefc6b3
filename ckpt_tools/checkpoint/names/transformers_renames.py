"""How transformers renames the tensors of a file to the names of the live model, from rules that are data.

Source: `WeightTransform`, `GroupWeightRename`, `WeightConverter` and `rename_source_key` of transformers 5.23
(`core_model_loading.py`). Renamings are applied one after another, then at most one conversion. A conversion whose
name has several targets fills them all; one with several sources needs them all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class RenameRule:
    """One line of transformers' conversion mapping."""

    kind: str  # "rename", "group" (renamings that its first source switches on), "shift+N" or "convert"
    operations: str = ""  # What a conversion does to the tensors, as transformers calls it
    sources: tuple[str, ...]  # Regular expressions
    targets: tuple[str, ...]
    scope: str | None = None  # Path of the part of the model whose names are meant; None for the whole
    base: str = ""  # The whole model's base prefix, with or without which a scope is found


@dataclass(slots=True)
class _Compiled:
    rule: RenameRule
    regex: re.Pattern[str]
    is_active: bool = False

    def apply(self, key: str) -> tuple[str, str | None]:
        """Return the new name, and the source that matched."""
        rule = self.rule
        prefix = ""
        if rule.scope is not None:
            scope = f"{rule.scope}." if rule.scope else ""
            base = f"{rule.base}." if rule.base else ""
            if key.startswith(base + scope):
                prefix = base + scope
            elif key.startswith(scope):
                prefix = scope
            else:
                return key, None
        inside = key[len(prefix) :]
        match = self.regex.search(inside)
        if match is None:
            return key, None
        name = next(group for group, value in match.groupdict().items() if value is not None)
        index = int(name[1:])
        first = self.regex.groupindex[name]
        if rule.kind == "group":
            if index == 0:
                self.is_active = True
            elif not self.is_active:
                return key, None
            target = re.sub(r"\\(\d+)", lambda m: match.group(first + int(m.group(1))), rule.targets[index])
        else:
            target = rule.targets[0]
            if r"\1" in target:
                captured = match.group(first + 1)
                if rule.kind.startswith("shift"):
                    captured = str(int(captured) + int(rule.kind.removeprefix("shift")))
                target = target.replace(r"\1", captured)
        return prefix + inside.replace(match.group(0), target, 1), rule.sources[index]


def _compile(rule: RenameRule) -> _Compiled:
    branches = []
    for index, source in sorted(enumerate(rule.sources), key=lambda item: -len(item[1])):
        pattern = source.replace("*.", r".*\.")
        if re.search(r"[a-zA-Z0-9]$", pattern):
            pattern += r"(?!\w)"
        branches.append(f"(?P<g{index}>{pattern})")
    return _Compiled(rule, re.compile("|".join(branches)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where one name goes."""

    name: str  # In the file
    new: str  # In the live model; of a conversion the first result, with ``*`` for the number of a list
    rule: RenameRule | None = None  # The conversion that it takes part in
    source: str = ""  # Which of the conversion's sources it is

    @property
    def targets(self) -> tuple[str, ...]:
        """All names that come of it."""
        if self.rule is None:
            return (self.new,)
        first, *others = self.rule.targets
        return (self.new, *(self.new.replace(first, other, 1) for other in others))


def routes(names: Iterable[str], rules: Sequence[RenameRule], base: str, has: Callable[[str], bool]) -> Iterator[Route]:
    """Yield where loading puts every name, in natural order: first renamings, then at most one conversion."""
    # `rules` are in the order in which transformers applies them. Names may have or lack the prefix `base`. Where a
    # name goes that the live model has not (`has`), is yielded all the same.
    renamings = [_compile(rule) for rule in rules if rule.kind != "convert"]
    converters = [_compile(rule) for rule in rules if rule.kind == "convert"]
    for name in sorted(names, key=_natural):
        route = _converted(name, _after(name, renamings), converters)
        route = replace(route, new=_with_base(route.new, base, has))
        if not has(route.new) and has(plain := _with_base(name, base, has)):
            route = Route(name=name, new=plain)
        yield route


def routes_back(names: Iterable[str], rules: Sequence[RenameRule]) -> Iterator[Route]:
    """Yield where saving puts every name of a live model: at most one conversion; `renamed` does the rest."""
    converters = [_compile(rule) for rule in rules if rule.kind == "convert"]
    for name in sorted(names, key=_natural):
        yield _converted(name, name, converters)


def renamed(names: Iterable[str], rules: Sequence[RenameRule]) -> dict[str, str]:
    """Return name → name after all renamings, in natural order: one of a group may switch the others on."""
    renamings = [_compile(rule) for rule in rules if rule.kind != "convert"]
    return {name: _after(name, renamings) for name in sorted(names, key=_natural)}


def _after(name: str, renamings: Iterable[_Compiled]) -> str:
    for renaming in renamings:
        name, _ = renaming.apply(name)
    return name


def _converted(name: str, new: str, converters: Iterable[_Compiled]) -> Route:
    for converter in converters:
        found, source = converter.apply(new)
        if source is not None:
            return Route(name=name, new=found, rule=converter.rule, source=source)
    return Route(name=name, new=new)


@dataclass(slots=True, kw_only=True)
class Renamed:
    """Where the names of a file go."""

    live: dict[str, list[str]] = field(default_factory=dict)  # Name in the live model → names in the file
    incomplete: dict[str, tuple[str, ...]] = field(default_factory=dict)  # Live name → patterns that it also needs
    foreign: list[str] = field(default_factory=list)  # Names in the file that go nowhere


def rename(
    names: Iterable[str], rules: Sequence[RenameRule], base: str, has: Callable[[str], bool], at_least: int = 0
) -> Renamed:
    """Return where transformers would put every name; arguments as those of `routes`."""
    # Lists that are stacked have no holes and at least `at_least` elements.
    result = Renamed()
    parts: dict[str, tuple[RenameRule, dict[str, list[str]]]] = {}
    for route in routes(names, rules, base, has):
        if not has(route.new):
            result.foreign.append(route.name)
            continue
        if route.rule is not None:
            _, columns = parts.setdefault(route.new, (route.rule, {source: [] for source in route.rule.sources}))
            columns[route.source].append(route.name)
        for target in route.targets:
            result.live.setdefault(target, []).append(route.name)
    for new, (rule, columns) in parts.items():
        most = max(map(len, columns.values()))
        is_list = rule.operations.startswith("MergeModulelist")
        lacking = [s for s, each in columns.items() if len(each) < most or (is_list and not _is_whole(each, at_least))]
        if lacking:
            result.incomplete[new] = tuple(lacking)
    return result


def _is_whole(names: Sequence[str], at_least: int) -> bool:
    """Have the names, in natural order, all numbers of a list of that length or longer?"""
    first, last = (name.split(".") for name in (names[0], names[-1]))
    number = next((one for other, one in zip(first, last, strict=False) if one != other), "0")
    return number == str(len(names) - 1) and len(names) >= at_least


def _with_base(name: str, base: str, has: Callable[[str], bool]) -> str:
    """Take the base prefix away or put it before, where that makes a name of the model."""
    if not base:
        return name
    without = re.sub(f"^{base}.", "", name, count=1)
    if name.startswith(base) and has(without):
        return without
    return f"{base}.{name}" if has(f"{base}.{name}") else name


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]
