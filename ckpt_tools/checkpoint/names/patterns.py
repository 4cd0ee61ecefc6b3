"""Names of tensors with the numbers of layers and experts folded, and what is missing from a set of names.

A pattern is a dotted name. A component may be

- ``*``: a number; those that occur are 0, 1, … without holes, and there is at least one
- ``*?``: the same, but there may be none
- ``#`` and ``#?``: a number, with or without holes

A tensor is required when every model of the architecture has it wherever the innermost number before it occurs. Others
depend on the config. Those that always occur together are a bundle: all of them or none; and of some bundles one is
always there (a dense layer or experts).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

NUMBERS = ("*", "*?", "#", "#?")
"""Components that stand for a number."""
MAX_NUMBER = 1 << 16  # Higher ones are parts of names, not of layers: a bound on what a hostile name can ask for


@dataclass(slots=True)
class Node:
    """One component of patterns."""

    children: dict[str, Node] = field(default_factory=dict)  # Literal component → what follows
    number: str = ""  # Which of `NUMBERS` may stand here; empty for none
    numbered: Node | None = None  # What follows the number
    is_name: bool = False  # A name ends here
    is_required: bool = False
    bundles: list[tuple[str, ...]] = field(default_factory=list)  # Names below this, of which all or none are there
    one_of: list[tuple[tuple[str, ...], ...]] = field(default_factory=list)  # Bundles of which one is always there

    def step(self, component: str) -> Node | None:
        """Follow one component of a name."""
        found = self.children.get(component)
        if found is None and self.numbered is not None and is_number(component):
            return self.numbered
        return found


def is_number(component: str) -> bool:
    """Is it the number of a layer, written as Python writes it?"""
    return component.isascii() and component.isdecimal() and len(component) <= 5 and str(int(component)) == component


def add(root: Node, pattern: str, *, required: bool) -> None:
    """Add a pattern to the tree."""
    node = find(root, pattern)
    node.is_name = True
    node.is_required = required


def _looser(first: str, second: str) -> str:
    if not first:
        return second
    return ("#" if "#" in first + second else "*") + ("?" if "?" in first + second else "")


def find(root: Node, path: str) -> Node:
    """Return the node of a pattern's beginning, which is made where it is not there."""
    node = root
    for component in path.split(".") if path else ():
        if component in NUMBERS:
            if node.numbered is None:
                node.numbered = Node()
            node.number = _looser(node.number, component)
            node = node.numbered
        else:
            node = node.children.setdefault(component, Node())
    return node


def merge(node: Node, other: Node, *, optional: bool) -> None:
    """Add everything below `other` to what is below `node`; with `optional` nothing of it is required."""
    for component, child in _branches(other):
        loosened = component.removesuffix("?") + "?" if optional and component in NUMBERS else component
        merge(find(node, loosened), child, optional=optional)
    if other.is_name:
        node.is_name = True
        node.is_required = other.is_required and not optional
    node.bundles += other.bundles
    node.one_of += [] if optional else other.one_of


def patterns(root: Node) -> Iterator[tuple[str, bool]]:
    """Yield every pattern and whether it is required."""
    if root.is_name:
        yield "", root.is_required
    for component, child in _branches(root):
        for rest, required in patterns(child):
            yield (f"{component}.{rest}" if rest else component), required


def _branches(node: Node) -> Iterator[tuple[str, Node]]:
    yield from node.children.items()
    if node.numbered is not None:
        yield node.number, node.numbered


def matches(root: Node, name: str, counts: Mapping[str, int]) -> bool:
    """Is it a name of the architecture, with as many layers as `counts` says (see `missing`)?"""
    node: Node | None = root
    folded = ""
    for component in name.split("."):
        if node is None:
            return False
        following = node.step(component)
        is_counted = following is not None and following is node.numbered
        if is_counted and int(component) >= counts.get(folded + "*", MAX_NUMBER):
            return False
        folded += "*." if is_counted else f"{component}."
        node = following
    return node is not None and node.is_name


def prune(root: Node, path: str) -> None:
    """Remove the patterns that begin with `path`."""
    *parents, last = path.split(".")
    node = root
    for component in parents:
        following = node.numbered if component in NUMBERS else node.children.get(component)
        if following is None:
            return
        node = following
    if last in NUMBERS:
        node.number, node.numbered = "", None
    else:
        node.children.pop(last, None)


def pattern_of(root: Node, name: str) -> str:
    """Return the name with the numbers that the patterns know, or else all, as ``*``."""
    node: Node | None = root
    parts = []
    for component in name.split("."):
        known = node is not None and component in node.children
        parts.append("*" if not known and is_number(component) else component)
        node = node.step(component) if node is not None else None
    return ".".join(parts)


Tree = dict[str, "Tree"]  # Names by their components; a name ends where there is an empty key


def tree(names: Iterable[str]) -> Tree:
    """Return names by their components."""
    root: Tree = {}
    for name in names:
        node = root
        for component in name.split("."):
            node = node.setdefault(component, {})
        node[""] = {}
    return root


def missing(root: Node, found: Tree, counts: Mapping[str, int]) -> Iterator[str]:
    """Yield the required names that are not there; of a list without any element, its pattern."""
    # `counts` has, by the path of a numbered component (as "model.layers.*"), how many there are, where it is certain.
    yield from _missing(root, found, counts, "", "")


def _missing(node: Node, found: Tree, counts: Mapping[str, int], path: str, folded: str) -> Iterator[str]:
    if node.is_required and "" not in found:
        yield path.removesuffix(".")
    yield from (path + name for name in _unbundled(node, found))
    for component, child in node.children.items():
        yield from _missing(child, found.get(component, {}), counts, f"{path}{component}.", f"{folded}{component}.")
    if node.numbered is None:
        return
    present = sorted(int(key) for key in found if is_number(key) and key not in node.children)
    count = counts.get(folded + "*")
    if count is not None:
        wanted: Iterable[int] = range(min(count, MAX_NUMBER))
    elif node.number.startswith("*") and present:
        wanted = range(present[-1] + 1)
    else:
        wanted = present
    if count is None and not present and not node.number.endswith("?"):
        yield from (f"{path}*.{rest}" for rest, required in patterns(node.numbered) if required and "*" not in rest)
    for number in wanted:
        inside = found.get(str(number), {})
        if not inside and not node.number.startswith("*") and count is None:
            continue
        yield from _missing(node.numbered, inside, counts, f"{path}{number}.", f"{folded}*.")


def _unbundled(node: Node, found: Tree) -> Iterator[str]:
    """Yield the names below a node that others of their bundle call for."""
    for bundle in node.bundles:
        known = [name for name in bundle if _is_name(node, name)]
        there = [name for name in known if _has(found, name)]
        if there:
            yield from (name for name in known if name not in there)
    for bundles in node.one_of:
        names = [name for bundle in bundles for name in bundle]
        if all(_is_name(node, name) for name in names) and not any(_has(found, name) for name in names):
            yield names[0]


def _is_name(node: Node, name: str) -> bool:
    for component in name.split("."):
        if component not in node.children:
            return False
        node = node.children[component]
    return node.is_name


def _has(found: Tree, name: str) -> bool:
    for component in name.split("."):
        if component not in found:
            return False
        found = found[component]
    return "" in found
