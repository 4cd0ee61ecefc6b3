"""Counts what drifts: rooms, arrows between them, files, lines, files with one importer, names with several meanings.

A room is a folder at the top of the package; an arrow says that a module of one imports a module of another.
"""

import argparse
import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "ckpt_tools"
MOST = {
    "rooms": 15, "arrows": 80, "files": 400, "lines of the package": 80_000, "lines of tests": 68_000,
    "files with one importer": 40, "class names with several meanings": 15, "lines of sections that no page shows": 300,
    "words that the glossary replaced": 0, "files of more than 650 lines": 0,
}  # fmt: skip
"""What the house should have at most."""
_FILES = (
    "walls moving hold ahead seen moments fold folding witness draws slim bands agree mixes stacks kept beneath "
    "tending look"
)
_NAMES = (
    "raise_walls held_against to_own own_job tended tender flight beside is_turned unshaped glance told alike "
    "strangers laying"
)
"""Words that said too little, and which others replaced: in names of files, and in any name."""
_RETIRED_FILES, _RETIRED = frozenset(f"{_FILES} {_NAMES}".split()), frozenset(_NAMES.split())


class House:
    """The modules of a checkout, and who imports whom."""

    def __init__(self, root: Path = ROOT) -> None:
        base = root / PACKAGE
        named = {".".join([PACKAGE, *p.relative_to(base).with_suffix("").parts]): p for p in base.rglob("*.py")}
        self.root = root
        self.files = {name.removesuffix(".__init__"): path for name, path in named.items()}
        self.texts = {name: path.read_text(encoding="utf-8") for name, path in self.files.items()}
        self.trees = {name: ast.parse(text) for name, text in self.texts.items()}

    def room(self, module: str) -> str:
        """Return the folder at the top that a module lies in; "" for a file at the top."""
        _, *inside = module.split(".")
        return inside[0] if len(inside) > 1 or (inside and self.files[module].name == "__init__.py") else ""

    @cached_property
    def imports(self) -> set[tuple[str, str]]:
        """Every pair of modules of which the first imports the second, at its top or late."""
        return {(one, two) for one in self.files for two in self._imported(self.trees[one]) if one != two}

    def _imported(self, tree: ast.AST) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                deep = {f"{node.module}.{each.name}" for each in node.names} & self.files.keys()
                yield from deep or {node.module} & self.files.keys()
            elif isinstance(node, ast.Import):
                yield from {each.name for each in node.names} & self.files.keys()

    @cached_property
    def rooms(self) -> dict[str, set[str]]:
        """Room → the rooms that it uses."""
        found: dict[str, set[str]] = {room: set() for room in sorted({self.room(each) for each in self.files} - {""})}
        for pair in self.imports:
            one, two = map(self.room, pair)
            if one and two and one != two:
                found[one].add(two)
        return found

    def layers(self) -> list[set[str]]:
        """Return the rows of import-linter's contract, from the top."""
        table = tomllib.loads((self.root / "pyproject.toml").read_text(encoding="utf-8"))
        contract = next(each for each in table["tool"]["importlinter"]["contracts"] if each["type"] == "layers")
        return [set(row.replace(" ", "").split("|")) for row in contract["layers"]]

    def lists(self) -> dict[str, list[str]]:
        """Return what stands behind the figures."""
        users, meanings = defaultdict(set), defaultdict(set)
        docs, words = [], []
        for one, two in self.imports:
            users[two].add(one)
        pages = [*(self.root / "docs" / "reference").rglob("*.md"), *(self.root / "docs").rglob("fsdp2.md")]
        shown = set(re.findall(r"\w+", "\n".join(page.read_text(encoding="utf-8") for page in pages)))
        for module, tree in self.trees.items():
            if module.rpartition(".")[2] in _RETIRED_FILES:
                words.append(module)
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    meanings[node.name.lstrip("_")].add(module)
                name = getattr(node, "name", None) or getattr(node, "arg", None)
                if isinstance(name, str) and name.strip("_").lower() in _RETIRED:
                    words.append(f"{module}:{getattr(node, 'lineno', 0)} {name}")
                if isinstance(node, ast.FunctionDef) and node.name not in shown:
                    section = re.search(r"^(Args|Returns|Raises):[\s\S]*", ast.get_docstring(node) or "", re.MULTILINE)
                    docs += [f"{module}:{node.lineno} {line}" for line in (section[0].splitlines() if section else ())]
        single = (m for m, by in users.items() if len(by) == 1 and self.files[m].name != "__init__.py")
        return {
            "arrows": [f"{one} → {two}" for one, used in self.rooms.items() for two in sorted(used)],
            "singles": sorted(f"{m} ← {by}" for m in single for by in users[m] if self.room(m) == self.room(by) != ""),
            "names": [f"{name}: {', '.join(sorted(of))}" for name, of in sorted(meanings.items()) if len(of) > 1],
            "docs": docs,
            "words": words,
        }

    def count(self) -> dict[str, int]:
        """Return every figure of `MOST`."""
        lists, sizes = self.lists(), {name: len(text.splitlines()) for name, text in self.texts.items()}
        tests = (path.read_text(encoding="utf-8") for path in (self.root / "tests").rglob("*.py"))
        figures = (
            len(self.rooms), len(lists["arrows"]), len(self.files), sum(sizes.values()),
            sum(len(text.splitlines()) for text in tests), len(lists["singles"]), len(lists["names"]),
            len(lists["docs"]), len(lists["words"]), sum(size > 650 for size in sizes.values()),
        )  # fmt: skip
        return dict(zip(MOST, figures, strict=True))


def main() -> None:
    """Print the counts, or what stands behind one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", choices=["arrows", "singles", "names", "docs", "words"])
    wanted, house = parser.parse_args().list, House()
    if wanted:
        print("\n".join(house.lists()[wanted]))
        return
    for what, number in house.count().items():
        print(f"{number:7,}  {what}" + (f"  (at most {MOST[what]:,})" if number > MOST[what] else ""))


if __name__ == "__main__":
    main()
