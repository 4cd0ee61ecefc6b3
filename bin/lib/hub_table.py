"""Makes the table of names out of what was observed; see `ckpt_tools.maps.table` for its form."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache

import transformers
from hub_models import AUTO, Architecture, Observed
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from ckpt_tools.maps import patterns
from ckpt_tools.maps.patterns import Node, add, graft, is_number, prune

Flags = dict[str, bool]
"""Pattern → is it required?"""


class Compiler:
    """Turns observations into sections; a part's before the whole's."""

    def __init__(self, observed: dict[str, Architecture]) -> None:
        self.observed = observed
        self.sections: dict[str, list[str]] = {}
        self.nodes: dict[str, Node] = {}

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
            removed, extra = _compare(inside, concrete, [seen for _, seen in one.observed], where, lists)
            if len(removed) + len(extra) > 12 and not part.auto:
                continue  # another model than that class's own: its names are written out
            parts[where] = f"part {where} {part.kind} {part.config or '.'} {part.auto or '-'}"
            for pattern in removed:
                prune(inside, pattern)
                without.append(f"without {where}.{pattern}")
            more |= extra
            graft(root, where, inside)
        flags = _flags([seen for _, seen in one.observed], lists, [part.path for part in one.parts], parts)
        flags |= more
        for pattern, required in flags.items():
            add(root, pattern, required=required)
        lines += sorted(parts.values())
        lines += sorted(without)
        lines += sorted(_counts(one, lists, list(parts)))
        for scope, switch, default, target, source in one.ties:
            lines.append(f"tie {scope or '.'} {switch} {int(default)} {target} {source}")
        lines += [f"rules {scope or '-'} {key}" for scope, key in one.rules]
        lines += [f"ignored {pattern}" for pattern in one.ignored_unexpected]
        lines += [f"may-miss {pattern}" for pattern in one.ignored_missing]
        lines += _name_lines(flags)
        self.sections[name] = lines
        self.nodes[name] = root
        return root


def _copy(node: Node) -> Node:
    copy = Node()
    graft(copy, "", node)
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


def _split(pattern: str) -> tuple[str, str]:
    """Return what lies up to the last number, and the rest."""
    head, star, rest = pattern.rpartition("*.")
    return head + star.removesuffix("."), rest


def _flags(observed: list[Observed], lists: frozenset[str], inside: list[str], parts: Iterable[str]) -> Flags:
    """Return the patterns of a class's own names."""
    taken = set(parts)
    own = [
        [name for name in seen.names if not _is_inside(name, [p for p in inside if fold(p, lists) in taken])]
        for seen in observed
    ]
    present: list[dict[str, set[str]]] = []
    instances: list[dict[str, set[str]]] = []
    for names in own:
        found: dict[str, set[str]] = defaultdict(set)
        where: dict[str, set[str]] = defaultdict(set)
        for name in names:
            pattern = fold(name, lists)
            head, _ = _split(pattern)
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
    for pattern in sorted(set().union(*present)):
        head, _ = _split(pattern)
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
        flags[".".join(spelt)] = required
    return flags


def _is_inside(name: str, paths: list[str]) -> bool:
    return any(name.startswith(path + ".") for path in paths)


def _kind(group: str, instances: list[dict[str, set[str]]]) -> str:
    """Which number is it: without holes, and always there?"""
    outer = group.removesuffix(".*") if group != "*" else ""
    above = _split(outer + ".")[0] if outer else ""
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
) -> tuple[list[str], Flags]:
    """Return what a part lacks here of its class's required names, and what it has beyond them."""
    removed: dict[str, None] = {}
    extra: Flags = {}
    for path in paths:
        for index, seen in enumerate(observed):
            names = [name[len(path) + 1 :] for name in seen.names if name.startswith(path + ".")]
            extra |= {
                f"{where}.{fold(name, _below(lists, where))}": False
                for name in names
                if not patterns.matches(inside, name, {})
            }
            if index == 0:
                for name in patterns.missing(inside, patterns.tree(names), {}):
                    removed[patterns.fold(inside, name)] = None
    shortened = {_shortest(inside, pattern, set(removed)) for pattern in removed}
    spelt = [pattern for pattern in sorted(shortened) if not any(pattern.startswith(s + ".") for s in shortened)]
    return spelt, extra


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
        if not label:
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
        if label.endswith("+") and key in one.defaults and base[group] and {n + 1 for n in base[group]} == set(grown):
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


def _name_lines(flags: Flags) -> list[str]:
    """Return names, siblings in braces, sorted."""
    lines = []
    for required in (True, False):
        names = [pattern for pattern, flag in flags.items() if flag is required]
        lines += [line if required else f"? {line}" for line in _braced(names)]
    return sorted(lines, key=lambda line: line.removeprefix("? "))


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
    """Return the section of one entry of transformers' conversion mapping."""
    lines = []
    for transform in get_checkpoint_conversion_mapping(key):
        kind = type(transform).__name__
        word = {"WeightRenaming": "rename", "PrefixChange": "rename", "GroupWeightRename": "group"}.get(kind)
        if kind == "Inkling2IndexOffsetWeightRename":
            word = f"shift{transform.offset:+d}"
        if hasattr(transform, "operations"):
            word = "convert " + ",".join(map(_operation, transform.operations))
        if word is None:
            raise ValueError(f"{key}: transformers has a new kind of renaming: {kind}")
        sources, targets = " + ".join(transform.source_patterns), " + ".join(transform.target_patterns)
        lines.append(f"{word} {sources} -> {targets}")
    return lines


def _operation(operation: object) -> str:
    dim = getattr(operation, "dim", None)
    return type(operation).__name__ + ("" if dim is None else f"({dim})")


def render(observed: dict[str, Architecture]) -> str:
    """Return the whole table."""
    compiler = Compiler(observed)
    for name in observed:
        compiler.compile(name)
    keys = sorted({key for one in observed.values() for _, key in one.rules})
    sections = {f"rules {key}": rule_lines(key) for key in keys}
    for auto, mapping in AUTO.items():
        types = []
        for model_type, kinds in mapping.items():
            kind = kinds if isinstance(kinds, str) else next((k for k in kinds if k in observed), "")
            if kind in observed:
                types.append(f"{model_type} {kind}")
        sections[f"types {auto}"] = sorted(types)
    sections |= compiler.sections
    text = [
        "# What the tensors of transformers' models are called. Written by bin/names; its form: ckpt_tools/maps/table.py",
        f"# of transformers {transformers.__version__}",
    ]
    for name in sorted(sections):
        text += ["", f"[{name}]", *sections[name]]
    return "\n".join(text) + "\n"
