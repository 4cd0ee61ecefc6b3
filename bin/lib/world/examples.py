"""Which files of a release are examples: rules by project in examples.tsv.

Documentation shows command lines in fenced blocks; each that matches its rule is written to a file of its own, since
that is what a user would do with it.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from releases import HERE, rows

_FENCE = re.compile(r"^[ \t]*```[ \t]*(?P<kind>[\w-]*)[^\n]*\n(?P<text>.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_ENDINGS = {"yaml": ".yaml", "yml": ".yaml", "json": ".json", "toml": ".toml"}


def find_examples(project: str, tree: Path, scratch: Path) -> Iterator[tuple[str, Path]]:
    """Yield (name in the release, file); files that are made lie below `scratch`."""
    rules = [row for row in rows(HERE / "examples.tsv") if row[0] == project and row[1] != "part"]
    for name in sorted(_files(tree)):
        kinds = [row for row in rules if fnmatchcase(name, row[2])]
        if not kinds or any(row[1] == "!file" for row in kinds):
            continue
        if any(row[1] == "file" for row in kinds):
            yield name, tree / name
            continue
        if any(row[1] == "registry" for row in kinds):
            yield from _functions(name, tree, scratch)
            continue
        text = (tree / name).read_text(encoding="utf-8", errors="replace")
        for number, block in enumerate(_FENCE.finditer(text), 1):
            if any(re.search(row[3], block["text"], re.MULTILINE) for row in kinds):
                shown = f"{name}#{number}"
                path = scratch / f"{len(os.listdir(scratch))}{_ENDINGS.get(block['kind'], '.sh')}"
                path.write_text(block["text"], encoding="utf-8")
                yield shown, path


def _functions(name: str, tree: Path, scratch: Path) -> Iterator[tuple[str, Path]]:
    """Yield a launch line for each function of a registry that returns a config."""
    module = os.path.dirname(name).replace("/", ".")
    for node in ast.parse((tree / name).read_text(encoding="utf-8")).body:
        kind = ast.unparse(node.returns) if isinstance(node, ast.FunctionDef) and node.returns else ""
        if isinstance(node, ast.FunctionDef) and "Config" in kind and not node.name.startswith("_"):
            path = scratch / f"{len(os.listdir(scratch))}.sh"
            path.write_text(f"torchrun -m torchtitan.train --module {module} --config {node.name}\n")
            yield f"{name}#{node.name}", path


def _files(tree: Path) -> Iterator[str]:
    for folder, _, names in os.walk(tree):
        inside = os.path.relpath(folder, tree)
        for name in names:
            yield name if inside == "." else f"{inside.replace(os.sep, '/')}/{name}"
