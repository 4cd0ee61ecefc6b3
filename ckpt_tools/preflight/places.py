"""Where in the user's files something is written: the line of a key, of an option, of an override."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

_INDEX = re.compile(r"\[(\d+)\]")
_TABLE = re.compile(r"\s*\[\[?\s*([^\]\[]+?)\s*\]\]?\s*(#.*)?")
_ASSIGNED = re.compile(r"\s*([\w.\"'-]+)\s*=")

OVERRIDES = "the command line"  # Path of what follows `--`


@dataclass(frozen=True, slots=True)
class ConfigLocation:
    """A line of a file; 0 of no line in particular."""

    path: str
    line: int

    def __str__(self) -> str:
        """`config.yaml:12`."""
        return f"{self.path}:{self.line}" if self.line else self.path


class PlacedText(str):
    """A word of a command, which knows where it is written."""

    __slots__ = ("place",)
    place: ConfigLocation | None

    def __new__(cls, text: str, place: ConfigLocation | None = None) -> Self:
        """Make one."""
        made = super().__new__(cls, text)
        made.place = place
        return made


def place_of_option(words: Iterable[str], where: str) -> ConfigLocation | None:
    """Return where the last word stands that sets an option: `--name`, `--name=value`, `name=value`, or just so."""
    found = None
    name = where.lstrip("-+~").replace("-", "_")
    for word in words:
        if word == where or word.partition("=")[0].lstrip("-+~").replace("-", "_") == name:
            found = getattr(word, "place", None) or found
    return found


def line_of_key(text: str, kind: str, where: str) -> int | None:
    """Return the line of a key path in YAML, JSON or TOML; that of the mapping around it where it is not there."""
    parts = [part for part in _INDEX.sub(r".\1", where).split(".") if part]
    return _in_toml(text, parts) if kind == "TOML" else _in_yaml(text, parts)


def _in_yaml(text: str, parts: Sequence[str]) -> int | None:
    import yaml

    try:
        # JSON is YAML, except for tabs.
        node = yaml.compose(text.replace("\t", " "), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError):
        return None
    line = None
    at = 0
    while node is not None and at < len(parts):
        found: Mapping[str, tuple[yaml.Node, yaml.Node]] = {}
        if isinstance(node, yaml.MappingNode):
            found = {str(key.value): (key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)}
        elif isinstance(node, yaml.SequenceNode):
            found = {str(index): (item, item) for index, item in enumerate(node.value)}
        # A key may have dots itself.
        names = [".".join(parts[at:end]) for end in range(len(parts), at, -1)]
        name = next((one for one in names if one in found), None)
        if name is None:
            break
        key, node = found[name]
        line = key.start_mark.line + 1
        at += name.count(".") + 1
    return line


def _in_toml(text: str, parts: Sequence[str]) -> int | None:
    """Return the line by the heads and names that lines begin with; a name in a text of several lines may mislead."""
    section: list[str] = []
    best, depth = None, 0
    for number, line in enumerate(text.splitlines(), 1):
        head = _TABLE.fullmatch(line)
        assigned = None if head else _ASSIGNED.match(line)
        if head is not None:
            section = _names(head[1])
        path = section if head is not None else [*section, *_names(assigned[1])] if assigned is not None else []
        if len(path) > depth and list(parts[: len(path)]) == path:
            best, depth = number, len(path)
    return best


def _names(text: str) -> list[str]:
    return [part.strip().strip("\"'") for part in text.split(".")]
