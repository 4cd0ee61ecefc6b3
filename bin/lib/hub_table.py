"""Makes the table of names out of what was observed; see `ckpt_tools.checkpoint.names.table` for its form."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache

import transformers
from hub_models import AUTO, FORM, Architecture, Observed
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightTransform

from ckpt_tools.checkpoint.names import patterns
from ckpt_tools.checkpoint.names.patterns import Node, find, is_number, merge, prune
from ckpt_tools.checkpoint.names.table import add_names, parse_section, split
from ckpt_tools.models.ask_transformers import rule_of

_WORTH_SHARING = 4
"""Lines of names; fewer are written out even where another section has them."""
_Places = frozenset[tuple[int, str]]
"""(observation, elements of lists) where something was seen."""
Flags = dict[str, bool]
"""Pattern → is it required?"""


class Compiler:
    """Turns observations into sections; a part's before the whole's."""

    def __init__(self, observed: dict[str, Architecture]) -> None:
        self.observed = observed
        self.sections: dict[str, list[str]] = {}
        self.nodes: dict[str, Node] = {}
        self.owners: dict[tuple[str, ...], str] = {}

    def compile(self, name: str) -> Node:
        """Make the section of a class and of its parts."""
        if name in self.nodes:
            return self.nodes[name]
        one = self.observed[name]
        lists = _list_patterns(seen for _, seen in one.observed)
        lines: list[str] = []
        if one.base_prefix:
            lines.append(f"base {one.base_prefix}")
        root = Node()
        parts: dict[str, str] = {}
        more: Flags = {}
        without: list[str] = []
        for part in one.parts:
            if part.kind not in self.observed or part.kind == name:
                continue
            where = fold(part.path, lists)
            if where in parts:
                continue
            inside = _copy(self.compile(part.kind))
            concrete = [p.path for p in one.parts if fold(p.path, lists) == where]
            removed, extra, optional = _compare(inside, concrete, [seen for _, seen in one.observed], where, lists)
            if len(removed) + len(extra) > 12 and not part.auto:
                continue  # another model than that class's own: its names are written out
            parts[where] = (
                f"{'maybe' if optional else 'part'} {where} {part.kind} {part.config or '.'} {part.auto or '-'}"
            )
            for pattern in removed:
                without.append(f"without {where}.{pattern}")
            more |= extra
            merge(find(root, where), inside, optional=optional)
            for pattern in removed:
                prune(root, f"{where}.{pattern}")
        own = _own_names([seen for _, seen in one.observed], lists, [part.path for part in one.parts], parts)
        flags, bundles, one_of = _flags(own, lists)
        flags = more | flags
        lines += sorted(parts.values())
        lines += sorted(without)
        lines += sorted(_counts(one, lists, list(parts)))
        for scope, switch, default, target, source in one.ties:
            lines.append(f"tie {scope or '.'} {switch} {int(default)} {target} {source}")
        lines += [f"rules {scope or '-'} {key}" for scope, key in one.rules if key != "legacy"]
        of_parts = {line for part in parts.values() for line in self.sections[part.split()[2]]}
        lines += [line for pattern in one.ignored_unexpected if (line := f"ignored {pattern}") not in of_parts]
        lines += [f"may-miss {pattern}" for pattern in one.ignored_missing]
        names = _name_lines(flags, bundles, one_of)
        add_names(root, parse_section(names))
        same = self.owners.setdefault(tuple(names), name)
        lines += names if same == name or len(names) < _WORTH_SHARING else [f"like {same}"]
        self.sections[name] = lines
        self.nodes[name] = root
        return root


def _copy(node: Node) -> Node:
    copy = Node()
    merge(copy, node, optional=False)
    return copy


def _list_patterns(observed: Iterable[Observed]) -> frozenset[str]:
    """Return the folded paths of all lists."""
    paths = sorted({path for seen in observed for path in seen.open_lists}, key=lambda path: path.count("."))
    lists: set[str] = set()
    for path in paths:
        lists.add(fold(path, frozenset(lists)))
    return frozenset(lists)


@cache
def fold(name: str, lists: frozenset[str]) -> str:
    """Return a name with the numbers of list elements as ``*``."""
    folded: list[str] = []
    for component in name.split("."):
        folded.append("*" if is_number(component) and ".".join(folded) in lists else component)
    return ".".join(folded)


def _own_names(
    observed: list[Observed], lists: frozenset[str], inside: list[str], parts: Iterable[str]
) -> list[list[str]]:
    """Return the names of every observation that lie in no part."""
    taken = set(parts)
    paths = [path for path in inside if fold(path, lists) in taken]
    return [[name for name in seen.names if not _is_inside(name, paths)] for seen in observed]


def _flags(own: list[list[str]], lists: frozenset[str]) -> tuple[Flags, list[list[str]], list[tuple[int, ...]]]:
    """Return the patterns of a class's own names, the bundles of optional ones, and pairs of which one is there."""
    present: list[dict[str, set[str]]] = []
    instances: list[dict[str, set[str]]] = []
    for names in own:
        found: dict[str, set[str]] = defaultdict(set)
        where: dict[str, set[str]] = defaultdict(set)
        for name in names:
            pattern = fold(name, lists)
            head, _ = split(pattern)
            depth = head.count(".") + 1 if head else 0
            found[pattern].add(".".join(name.split(".")[:depth]))
            components, folded = name.split("."), pattern.split(".")
            for end, component in enumerate(folded, 1):
                if component == "*":
                    where[".".join(folded[:end])].add(".".join(components[:end]))
        present.append(found)
        instances.append(where)
    numbers = {group: _kind(group, instances) for where in instances for group in where}
    flags: Flags = {}
    spelling: dict[str, str] = {}
    for pattern in sorted(set().union(*present)):
        head, _ = split(pattern)
        required = all(
            found[pattern] == (where[head] if head else {""})
            for found, where in zip(present, instances, strict=True)
            if not head or where[head]
        )
        folded = pattern.split(".")
        spelt = [
            numbers[".".join(folded[:end])] if component == "*" else component
            for end, component in enumerate(folded, 1)
        ]
        spelling[pattern] = ".".join(spelt)
        flags[spelling[pattern]] = required
    bundles, one_of = _bundles([p for p in spelling if not flags[spelling[p]]], present, instances)
    return flags, [[spelling[pattern] for pattern in bundle] for bundle in bundles], one_of


def _bundles(
    optional: list[str], present: list[dict[str, set[str]]], instances: list[dict[str, set[str]]]
) -> tuple[list[list[str]], list[tuple[int, ...]]]:
    """Return the patterns that were always seen together, and pairs of bundles of which one was always seen."""

    def occurrence(names: Iterable[str]) -> _Places:
        return frozenset(
            (index, path) for index, found in enumerate(present) for name in names for path in found.get(name, ())
        )

    modules: dict[str, list[str]] = defaultdict(list)
    for pattern in set().union(*present):
        modules[pattern.rpartition(".")[0]].append(pattern)
    # A bias occurs where its config says so, in those modules that are there: only modules that are there together
    # have their biases together.
    by_occurrence: dict[tuple[str, _Places, _Places], list[str]] = defaultdict(list)
    for pattern in optional:
        head, rest = split(pattern)
        if rest:
            key = (head, occurrence([pattern]), occurrence(modules[pattern.rpartition(".")[0]]))
            by_occurrence[key].append(pattern)
    bundles: list[list[str]] = []
    numbers: dict[tuple[str, _Places, _Places], int] = {}
    pairs: list[tuple[int, ...]] = []
    for (head, where, module), names in by_occurrence.items():
        everywhere = {
            (index, path) for index, paths in enumerate(instances) for path in (paths[head] if head else [""])
        }
        elsewhere = frozenset(everywhere - where)
        other = (head, elsewhere, elsewhere)
        if len(names) == 1 and (where != module or other not in by_occurrence):
            continue
        bundles.append(names)
        numbers[head, where, module] = len(bundles)
        if where == module and other in numbers:
            pairs.append((numbers[other], len(bundles)))
    return bundles, pairs


def _is_inside(name: str, paths: list[str]) -> bool:
    return any(name.startswith(path + ".") for path in paths)


def _kind(group: str, instances: list[dict[str, set[str]]]) -> str:
    """Which number is it: without holes, and always there?"""
    outer = group.removesuffix(".*") if group != "*" else ""
    above = split(outer + ".")[0] if outer else ""
    without_holes, always = True, True
    for where in instances:
        by_outer: dict[str, set[int]] = defaultdict(set)
        for path in where[group]:
            head, _, number = path.rpartition(".")
            by_outer[head].add(int(number))
        without_holes = without_holes and all(found == set(range(len(found))) for found in by_outer.values())
        depth = above.count(".") + 1 if above else 0
        holders = {".".join(path.split(".")[:depth]) for path in by_outer}
        always = always and (holders == where[above] if above else bool(by_outer))
    return ("*" if without_holes else "#") + ("" if always else "?")


def _compare(
    inside: Node, paths: list[str], observed: list[Observed], where: str, lists: frozenset[str]
) -> tuple[list[str], Flags, bool]:
    """Hold a part against its class.

    Returns:
        The required names that it never has here, those that it has beyond its class's or may lack, and whether it is
        missing as a whole in some config.
    """
    lacking: list[set[str]] = []
    extra: Flags = {}
    optional = False
    for seen in observed:
        for path in paths:
            names = [name[len(path) + 1 :] for name in seen.names if name.startswith(path + ".")]
            optional = optional or not names
            if not names:
                continue
            extra |= {
                f"{where}.{fold(name, _below(lists, where))}": False
                for name in names
                if not patterns.matches(inside, name, {})
            }
            missing = patterns.missing(inside, patterns.tree(names), {})
            lacking.append({patterns.pattern_of(inside, name) for name in missing})
    always = set.intersection(*lacking) if lacking else set()
    for pattern in set().union(*lacking) - always:
        extra[f"{where}.{pattern}"] = False
    shortened = {_shortest(inside, pattern, always) for pattern in always}
    spelt = [pattern for pattern in sorted(shortened) if not any(pattern.startswith(s + ".") for s in shortened)]
    return spelt, extra, optional


def _below(lists: frozenset[str], where: str) -> frozenset[str]:
    return frozenset(path[len(where) + 1 :] for path in lists if path.startswith(where + "."))


def _shortest(inside: Node, pattern: str, removed: set[str]) -> str:
    """Return the shortest beginning of a pattern below which everything required is removed."""
    components = pattern.split(".")
    everything = [p.replace("*?", "*").replace("#?", "*").replace("#", "*") for p, r in patterns.patterns(inside) if r]
    for end in range(1, len(components)):
        head = ".".join(components[:end])
        if all(p in removed for p in everything if p == head or p.startswith(head + ".")):
            return head
    return pattern


def _counts(one: Architecture, lists: frozenset[str], parts: list[str]) -> Iterator[str]:
    """Yield the lists whose length is what one key of the config says."""
    base = _lengths(one.observed[0][1], lists)
    deciding: dict[str, set[str]] = defaultdict(set)
    for label, seen in one.observed:
        if label in ("", FORM):
            continue
        lengths = _lengths(seen, lists)
        for group in base:
            if lengths.get(group) != base[group]:
                deciding[group].add(label)
    for group, labels in deciding.items():
        if any(group.startswith(part + ".") for part in parts) or len(labels) != 1:
            continue
        (label,) = labels
        key = label.removesuffix("+")
        variant = next(seen for other, seen in one.observed if other == label)
        grown = _lengths(variant, lists).get(group, frozenset())
        is_default = any(
            _lengths(s, lists).get(group, frozenset()) == {one.defaults.get(key)}
            for other, s in one.observed
            if not other
        )
        if label.endswith("+") and is_default and {n + 1 for n in base[group]} == set(grown):
            name = key.rpartition(".")[2]
            other = one.aliases.get(name, "")
            keys = "|".join(filter(None, (key, *(key[: -len(name)] + alias for alias in other.split("|") if alias))))
            yield f"count {group} {keys} {one.defaults[key]}"


def _lengths(seen: Observed, lists: frozenset[str]) -> dict[str, frozenset[int]]:
    numbers: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for name in seen.names:
        components, folded = name.split("."), fold(name, lists).split(".")
        for end, component in enumerate(folded, 1):
            if component == "*":
                head = ".".join(components[: end - 1])
                numbers[".".join(folded[:end])][head].add(int(components[end - 1]))
    return {
        group: frozenset(len(found) for found in by_head.values())
        for group, by_head in numbers.items()
        if all(found == set(range(len(found))) for found in by_head.values())
    }


def _name_lines(flags: Flags, bundles: list[list[str]], one_of: list[tuple[int, ...]]) -> list[str]:
    """Return names, siblings in braces, sorted."""
    numbers = {pattern: number for number, bundle in enumerate(bundles, 1) for pattern in bundle}
    by_mark: dict[str, list[str]] = defaultdict(list)
    for pattern, required in flags.items():
        by_mark["" if required else f"?{numbers.get(pattern, '')} "].append(pattern)
    lines = [f"{mark}{line}" for mark, names in by_mark.items() for line in _braced(names)]
    return [
        *(f"one-of {first} {second}" for first, second in one_of),
        *sorted(lines, key=lambda line: line.rpartition(" ")[2]),
    ]


def _braced(names: Iterable[str]) -> list[str]:
    """Multiply siblings with the same names below them out: the inverse of `table.expand`."""
    tree: dict = {}
    for name in names:
        node = tree
        for component in name.split("."):
            node = node.setdefault(component, {})
        node[""] = {}
    return sorted(line.removesuffix(".") for line in _lines(tree))


def _lines(node: dict) -> list[str]:
    by_rest: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for component, child in node.items():
        if component == "":
            by_rest[("",)].append("")
        else:
            by_rest[tuple(_lines(child))].append(component)
    lines = []
    for rest, components in by_rest.items():
        if components == [""]:
            lines.append("")
            continue
        head = components[0] if len(components) == 1 else "{" + ",".join(sorted(components)) + "}"
        lines += [f"{head}.{tail}" if tail else head for tail in rest]
    return sorted(lines)


def rule_lines(key: str) -> list[str]:
    """Return the section of one entry of transformers' conversion mapping: what loading does."""
    return [_rule_line(key, transform) for transform in get_checkpoint_conversion_mapping(key)]


def save_lines(key: str) -> list[str]:
    """Return what saving does, in its order; a prefix that loading drops is not known to have been there."""
    transforms = reversed(get_checkpoint_conversion_mapping(key))
    return [
        _rule_line(key, transform.reverse_transform())
        for transform in transforms
        if type(transform).__name__ != "PrefixChange"
    ]


def _rule_line(key: str, transform: WeightTransform) -> str:
    rule = rule_of(transform)
    if rule is None:
        raise ValueError(f"{key}: transformers has a new kind of renaming: {type(transform).__name__}")
    word = f"{rule.kind} {rule.operations}".strip()
    return f"{word} {' + '.join(rule.sources)} -> {' + '.join(rule.targets)}"


def render(observed: dict[str, Architecture]) -> str:
    """Return the whole table."""
    compiler = Compiler(observed)
    for name in observed:
        compiler.compile(name)
    keys = sorted({key for one in observed.values() for _, key in one.rules})
    sections = {f"rules {key}": rule_lines(key) for key in keys}
    sections |= {f"save {key}": lines for key in keys if key != "legacy" and (lines := save_lines(key))}
    for auto, mapping in AUTO.items():
        types = []
        for model_type, kinds in mapping.items():
            kind = kinds if isinstance(kinds, str) else next((k for k in kinds if k in observed), "")
            if kind in observed:
                types.append(f"{model_type} {kind}")
        sections[f"types {auto}"] = sorted(types)
    sections |= compiler.sections
    text = [
        "# What the tensors of transformers' models are called. Written by bin/names; its form: maps/table.py",
        f"# of transformers {transformers.__version__}",
    ]
    for name in sorted(sections):
        text += ["", f"[{name}]", *sections[name]]
    return "\n".join(text) + "\n"


def sections_of(text: str) -> dict[str, list[str]]:
    """Return the lines of every section of a table."""
    sections: dict[str, list[str]] = {}
    for block in text.split("\n\n")[1:]:
        title, *lines = block.strip("\n").splitlines()
        sections[title[1:-1]] = lines
    return sections
