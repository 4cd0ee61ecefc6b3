"""A config's file → plain values, or the words of the commands in it. Nothing is expanded, imported or executed."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import chain

from ckpt_tools.errors import CkptError, LimitError, UnreadableError, UsageError
from ckpt_tools.preflight.configs.commands import Script, read_script
from ckpt_tools.preflight.places import ConfigLocation, line_of_key, place_of_option
from ckpt_tools.storage.source import read_named_file
from ckpt_tools.transfer.placement.plain_yaml import load_yaml

MAX_BYTES = 1 << 20  # Longest config that is read; real ones have some kilobytes
MAX_DEPTH = 64  # Mappings and lists inside one another
STDIN = "-"
_MAX_UPS = 3  # folders around that of a script in which the files that it names may begin
_MAX_DOTS = 10_000  # in TOML: tomllib takes time with the square of a key's parts

_OPTION = re.compile(r"(^|\s)--[A-Za-z][\w.-]*")
_OVERRIDE = re.compile(r"^[+~]{0,2}[A-Za-z_][\w@/]*(\.[\w@/]+)+=", re.MULTILINE)
_KINDS = {".json": "JSON", ".toml": "TOML", ".yaml": "YAML", ".yml": "YAML"}
_SHELLS = (".sh", ".bash", ".zsh", ".slurm", ".sbatch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document(Script):
    """A file: the `values` of YAML, JSON or TOML, the words of a script's `commands`, or both: options of one."""

    path: str
    values: Mapping[str, object] | None = None
    words_unread: tuple[str, ...] = ()  # Words of a command line that stand for nobody knows which options
    overrides: tuple[str, ...] = ()
    starts_more: str = ""
    text: str = ""
    kind: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """The words of all commands."""
        return tuple(chain.from_iterable(self.commands))

    def place(self, where: str) -> ConfigLocation | None:
        """Return where a key path or an option is written, as far as it can be told."""
        found = place_of_option((*self.words, *self.overrides), where)
        if found is None and self.kind and (line := line_of_key(self.text, self.kind, where)) is not None:
            found = ConfigLocation(self.path, line)
        return found

    def keyed(self) -> Mapping[str, object]:
        """Return the values; raise UsageError where there are commands instead."""
        if self.values is None:
            raise UsageError("expected a file with keys, found a command line", where=self.path)
        return self.values


def read_document(path: str, arguments: tuple[str, ...] | None = None) -> Document:
    """Read a config by its ending, or its look; `-` is a script on stdin. LimitError beyond `MAX_BYTES`."""
    return parse_document(_read_text(path), path, arguments)


def parse_document(text: str, path: str, arguments: tuple[str, ...] | None = None) -> Document:
    """Do as `read_document` with the text of a file."""
    ending = os.path.splitext(path)[1].lower()
    if ending in _SHELLS or text.startswith("#!"):
        return _commands(path, text, arguments)
    if ending in _KINDS or text.lstrip().startswith("{"):
        return _mapping(path, _KINDS.get(ending, "JSON"), text)
    try:
        values = load_yaml(text, full=True)
    except ValueError:
        values = None
    if isinstance(values, dict):
        return Document(path=path, values=values, text=text, kind="YAML")
    if _OPTION.search(text) or _OVERRIDE.search(text):
        return _commands(path, text, arguments)
    what = "this is not YAML, JSON or TOML with keys, and not a command line"
    raise UnreadableError(what, where=path, hint="pass the config that the trainer reads, with its usual extension")


def find_file(name: str, folders: Iterable[str]) -> str | None:
    """Return where a file that a config names lies: in the first of `folders` that has it."""
    places = (os.path.join(folder, name) for folder in folders)
    return next((place for place in places if "\0" not in place and os.path.isfile(place)), None)


def folders_of(path: str) -> list[str]:
    """Return where the files lie that a script names: beside it, where ckpt is started, or around the script."""
    here = "" if path == STDIN else os.path.dirname(path)
    return [here, "", *(os.path.join(here, *[os.pardir] * ups) for ups in range(1, _MAX_UPS + 1))]


def _commands(path: str, text: str, arguments: tuple[str, ...] | None) -> Document:
    def open_file(name: str) -> tuple[str, str] | None:
        place = find_file(name, folders_of(path))
        try:
            return None if place is None else (place, _read_text(place))
        except CkptError:
            return None

    try:
        script = read_script(text, path=path, open_file=open_file, arguments=arguments)
    except ValueError as error:
        raise UnreadableError(f"this is not a shell script that can be read: {error}", where=path) from None
    return Document(path=path, **{one.name: getattr(script, one.name) for one in fields(script)})


def _mapping(path: str, kind: str, text: str) -> Document:
    if kind == "TOML" and text.count(".") > _MAX_DOTS:
        raise LimitError(f"more than {_MAX_DOTS} dots, in keys and elsewhere", where=path)
    try:
        values = _parse(kind, text)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"not {kind}: {_first_line(error)}", where=path) from None
    if not isinstance(values, dict):
        found = "nothing" if values is None else "a list" if isinstance(values, list) else "a single value"
        raise UnreadableError(f"expected {kind} with keys, found {found}", where=path)
    return Document(path=path, values=values, text=text, kind=kind)


def _read_text(path: str) -> str:
    if path == STDIN:
        data = sys.stdin.buffer.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise LimitError(f"the config of more than {MAX_BYTES} bytes", where="stdin")
    else:
        data = read_named_file(path, what="the config", max_bytes=MAX_BYTES)
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UnreadableError(f"the config is not UTF-8 text: byte {error.start} is not", where=path) from None


def _parse(kind: str, text: str) -> object:
    if kind == "YAML":
        return load_yaml(text, full=True)
    values: object = tomllib.loads(text) if kind == "TOML" else json.loads(text, object_pairs_hook=_unique)
    _check_depth(values, 0)
    return values


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r} is written twice")
    return result


def _check_depth(value: object, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} objects and arrays inside one another")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_depth(item, depth + 1)


def _first_line(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deep"
    # PyYAML tells where in several lines, and shows pieces of the file.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ", ".join(lines[:4])
