"""YAML as people write rules in it: mappings, lists, text, whole numbers, true and false. Nothing else is built.

The composer of PyYAML gives a graph of nodes; its constructors are not used: they take tags for wishes, raise what
they like on values that do not fit, merge mappings without bound, and take a duplicate key for an update.

Source: YAML 1.1 (https://yaml.org/spec/1.1/), core types of https://yaml.org/type/.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

MAX_NODES = 100_000
"""Values in one file, aliases counted as often as they are used: ten lines of aliases can stand for a billion."""
MAX_DEPTH = 32  # Mappings and lists inside one another; an alias of what it lies in has no end

_TAG = "tag:yaml.org,2002:"
_MERGE = _TAG + "merge"
_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]{0,14})")
_FRACTION = re.compile(r"[-+]?[0-9]{1,15}\.[0-9]{0,15}")
_MAX_NUMBER_CHARS = 64


def load_yaml(text: str, *, full: bool = False) -> object:
    """Return what a YAML document says, in dicts with text for keys, lists, str, int, float, bool and None.

    Dates stay the text that they are, and so do fractions in other notations. `full` takes what PyYAML's own loader
    takes and files of rules do not need: numbers in every notation (`100_000`, `2.0e-5`), and mappings merged with
    `<<`. The message of a `ValueError` has one line or several.
    """
    try:
        composer = _Composer(text)  # looks at every character
        try:
            node = composer.get_single_node()
        finally:
            composer.dispose()
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    return None if node is None else _Builder(full=full).build(node, 0)


class _Composer(yaml.SafeLoader):
    """PyYAML's composer, which stops where the text is more, or other, than anything that will be built of it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._num_nodes = 0
        self._keys: list[set[str]] = []
        """Those that each of the values has so far which lie around what is composed; of lists none."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:  # noqa: ANN401 - key or number
        """Compose one value of `parent`."""
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise _too_many()
        if parent is not None and len(self._keys) > MAX_DEPTH:
            raise _too_deep(parent.start_mark)
        if isinstance(parent, yaml.MappingNode) and isinstance(index, yaml.ScalarNode) and index.tag != _MERGE:
            if index.value in self._keys[-1]:
                raise ValueError(f"the key {index.value[:100]!r} is written twice{index.start_mark}")
            self._keys[-1].add(index.value)
        self._keys.append(set())
        node = super().compose_node(parent, index)
        self._keys.pop()
        return node


class _Builder:
    def __init__(self, *, full: bool) -> None:
        self._num_nodes = 0
        self._full = full

    def build(self, node: yaml.Node, depth: int) -> object:
        """Return the value of a node."""
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise _too_many()
        if depth > MAX_DEPTH:
            raise _too_deep(node.start_mark)
        kind = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.ScalarNode):
            return _any_number(kind, node) if self._full and kind in ("int", "float") else _scalar(kind, node)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self.build(item, depth + 1) for item in node.value]
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self._mapping(node, depth)
        raise _unknown(node)

    def _mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, object]:
        result: dict[str, object] = {}
        merged: dict[str, object] = {}
        for key_node, value_node in node.value:
            if self._full and key_node.tag == _MERGE:
                self._merge(value_node, depth, merged)
                continue
            key = self.build(key_node, depth + 1)
            if not isinstance(key, str):
                raise ValueError(f"a key that is not text{key_node.start_mark}")  # noqa: TRY004 - the content's fault
            result[key] = self.build(value_node, depth + 1)
        return merged | result

    def _merge(self, node: yaml.Node, depth: int, merged: dict[str, object]) -> None:
        """Add what `<<` adds to `merged`: a mapping, or several, of which the first wins."""
        value = self.build(node, depth + 1)
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, dict):
                raise ValueError(f"`<<` needs mappings{node.start_mark}")  # noqa: TRY004 - the content's fault
            for key, one in item.items():
                merged.setdefault(key, one)


def _too_many() -> ValueError:
    return ValueError(f"more than {MAX_NODES} values, aliases counted as often as they are used")


def _too_deep(mark: yaml.Mark) -> ValueError:
    return ValueError(f"more than {MAX_DEPTH} mappings and lists inside one another{mark}")


def _any_number(kind: str, node: yaml.ScalarNode) -> object:
    if len(node.value) > _MAX_NUMBER_CHARS:
        raise ValueError(f"a number of {len(node.value)} characters{node.start_mark}")
    constructor = yaml.constructor.SafeConstructor()
    try:
        number: int | float = (
            constructor.construct_yaml_int(node) if kind == "int" else constructor.construct_yaml_float(node)
        )
    except (ValueError, IndexError) as error:  # `!!int` before what is none
        raise _unknown(node) from error
    return number


def _scalar(kind: str, node: yaml.ScalarNode) -> object:
    text: str = node.value
    if kind == "float" and _FRACTION.fullmatch(text):
        return float(text)
    if kind in ("str", "float", "timestamp"):
        return text
    if kind == "null":
        return None
    if kind == "bool" and text.lower() in yaml.SafeLoader.bool_values:
        return yaml.SafeLoader.bool_values[text.lower()]
    if kind == "int" and _NUMBER.fullmatch(text):
        return int(text)
    raise _unknown(node)


def _unknown(node: yaml.Node) -> ValueError:
    kind = node.tag.removeprefix(_TAG)[:100]
    what = f"a value of type {kind!r}; only text, whole numbers, lists and mappings are allowed{node.start_mark}"
    return ValueError(what)
