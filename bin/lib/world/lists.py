"""The lists of option names that the readers know, made from the trainers' own releases; `known.py` writes them.

names.tsv says where each list comes from. Sources are parsed and never imported: fields of classes and of their bases
(`ast`), options of `add_argument` calls, keys of YAML files. A name stands under the newest release that has it, so
that a config for an older release is not blamed for what was renamed since.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from pathlib import Path

import yaml
from releases import HERE, Release, unpacked

LISTS = HERE.parents[2] / "ckpt_tools" / "preflight" / "configs" / "names"
_WIDTH = 118


def render(sources: list[list[str]], releases: list[Release]) -> str:
    """Return the text of a list.

    Args:
        sources: Its rows of names.tsv.
        releases: Those that names are taken from, oldest first.

    Raises:
        IndexUnreachableError: A release is not in the cache, and cannot be fetched.
    """
    order = [release.name for release in releases]
    lines = ["# Option names, under the newest release that has them. Written by bin/known --update; do not edit."]
    for section in dict.fromkeys(row[1].partition("/")[0] for row in sources):
        last: dict[str, str] = {}
        for at, _, project, kind, place, what in (
            (one[1].partition("/")[2], *one[1:]) for one in sources if one[1].partition("/")[0] == section
        ):
            above = f"{at}/" if at else ""  # a section `job/loss` has the names inside the option `loss`
            if kind == "words":
                last |= {above + name: place for name in what.split()} | last
                continue
            for release in releases:
                if release.project == project:
                    last |= {above + name: release.name for name in _names(release, kind, place, what)}
        for newest in sorted(set(last.values()), key=lambda name: _newest_first(name, order)):
            lines += ["", f"[{section}] {newest}"]
            lines += _wrapped(sorted(name for name, found in last.items() if found == newest))
    return "\n".join([*lines, ""])


def _newest_first(name: str, order: list[str]) -> tuple[int, str]:
    return (-order.index(name) if name in order else 1, name)


def _wrapped(names: list[str]) -> Iterator[str]:
    line = ""
    for name in names:
        if len(line) + len(name) + 1 > _WIDTH:
            yield line
            line = ""
        line = f"{line} {name}" if line else name
    if line:
        yield line


def _names(release: Release, kind: str, place: str, what: str) -> set[str]:
    """Return the names of one release, from one source of a list."""
    tree = unpacked(release)
    found: set[str] = set()
    if kind in ("fields", "trees"):
        classes = _classes(tree, place)
        for name in list(classes):
            if re.fullmatch(what, name):
                found |= _fields_of(classes, name, frozenset(), nested=kind == "trees").keys()
        return found
    for path in _matching(tree, place):
        if kind == "keys":
            found |= _keys_at(yaml.safe_load(path.read_text(encoding="utf-8")), what)
        elif kind == "paths":
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
            found |= {one for one in _paths(values) if f"{one}/".startswith(what)}
        elif kind == "defaults":
            found |= _defaults_of(yaml.safe_load(path.read_text(encoding="utf-8")))
        elif kind == "options":
            found |= {name for name, shape in _options(path) if what in (shape, "any")}
    return found


def _matching(tree: Path, place: str) -> list[Path]:
    return sorted(
        path for path in tree.rglob("*") if path.is_file() and fnmatchcase(path.relative_to(tree).as_posix(), place)
    )


@cache
def _classes(tree: Path, place: str) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return class → (names of its bases, its own fields with their types); an inner class is `Outer.Inner`."""
    found: dict[str, tuple[list[str], dict[str, str]]] = {}
    for path in (path for path in _matching(tree, place) if path.suffix == ".py"):
        for outer, node in _class_nodes(ast.parse(path.read_text(encoding="utf-8")), ""):
            bases = [ast.unparse(base) for base in node.bases]
            fields: dict[str, str] = {}
            for item in node.body:
                if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
                    continue
                kind = ast.unparse(item.annotation)
                if not kind.startswith("ClassVar"):
                    names = (item.target.id, *_aliases(item.value), *_aliases(item.annotation))
                    fields |= dict.fromkeys(names, kind)
            found[outer] = (bases, fields)
    return found


def _class_nodes(node: ast.AST, outer: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for item in ast.iter_child_nodes(node):
        if isinstance(item, ast.ClassDef):
            name = f"{outer}.{item.name}" if outer else item.name
            yield name, item
            yield from _class_nodes(item, name)


def _aliases(value: ast.AST | None) -> Iterator[str]:
    """Yield what pydantic's `alias=`, `validation_alias=` and AliasChoices call a field in a file."""
    for call in ast.walk(value) if value is not None else ():
        if not isinstance(call, ast.Call):
            continue
        given = [word.value for word in call.keywords if word.arg in ("alias", "validation_alias")]
        given += call.args if ast.unparse(call.func).endswith("AliasChoices") else []
        yield from (one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str))


def _fields_of(
    classes: dict[str, tuple[list[str], dict[str, str]]], name: str, seen: frozenset[str], *, nested: bool = False
) -> dict[str, str]:
    """Return the fields of a class and its bases; with `nested`, also those of the classes inside, as paths."""
    name = name if name in classes else name.rpartition(".")[2]
    if name not in classes or name in seen:
        return {}
    bases, own = classes[name]
    fields = {one: kind for base in bases for one, kind in _fields_of(classes, base, seen | {name}).items()} | own
    inner: dict[str, str] = {}
    for field, kind in fields.items() if nested else ():
        for other in re.findall(r"[\w.]+", kind):
            below = _fields_of(classes, other, seen | {name}, nested=True)
            inner |= {f"{field}/{one}": kind for one, kind in below.items()}
    return fields | inner


def _options(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (option, shape) of every add_argument call: switch, list or value."""
    yield from _options_in(ast.parse(path.read_text(encoding="utf-8")), {})


def _options_in(node: ast.AST, loops: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    """Go through a tree; `loops` has the words that the variable of each `for` around it stands for."""
    if isinstance(node, ast.For) and isinstance(node.target, ast.Name) and isinstance(node.iter, (ast.Tuple, ast.List)):
        words = tuple(item.value for item in node.iter.elts if isinstance(item, ast.Constant))
        loops = {**loops, node.target.id: tuple(str(word) for word in words)}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
        given_as = {word.arg: ast.unparse(word.value) for word in node.keywords}
        is_switch = given_as.get("action", "").strip("'\"") in ("store_true", "store_false", "store_const")
        shape = "switch" if is_switch else "list" if "nargs" in given_as else "value"
        for given in node.args:
            yield from ((name[2:], shape) for name in _texts(given, loops) if name.startswith("--"))
    for inner in ast.iter_child_nodes(node):
        yield from _options_in(inner, loops)


def _texts(node: ast.AST, loops: dict[str, tuple[str, ...]]) -> list[str]:
    """Return what a constant or an f-string over loop variables can be."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name):
        return list(loops.get(node.value.id, ()))
    if not isinstance(node, ast.JoinedStr):
        return []
    parts = [_texts(part, loops) for part in node.values]
    return ["".join(words) for words in product(*parts)]


def _defaults_of(values: object) -> set[str]:
    """Return the defaults list of a Hydra config; a name with a blank would be two words of a list."""
    given = values.get("defaults") if isinstance(values, dict) else None
    pairs = (item if isinstance(item, dict) else {item: None} for item in given or ())
    return {str(key) if file is None else f"{key}:{file}" for pair in pairs for key, file in pair.items()}


def _paths(values: object, above: str = "") -> Iterator[str]:
    """Yield the key paths of a tree, with slashes; a name with a blank would be two words of a list."""
    for key, value in values.items() if isinstance(values, dict) else ():
        path = f"{above}{key}"
        if re.fullmatch(r"[\w.\-/]+", path):
            yield path
            yield from _paths(value, f"{path}/")


def _keys_at(values: object, path: str) -> set[str]:
    for part in path.split(".") if path else ():
        values = values.get(part) if isinstance(values, dict) else None
    return {str(key) for key in values} if isinstance(values, dict) else set()
