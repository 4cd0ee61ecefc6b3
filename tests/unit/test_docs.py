"""Documents that point somewhere point at something that is there."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#([^)\s]+))?\)")


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_docs_relative_links_lead_to_files_that_exist(page: Path) -> None:
    broken = []
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path = (page.parent / target).resolve()
        if not path.exists() or (anchor and anchor not in _anchors(path)):
            broken.append(target)
    assert broken == []


FRONT = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_CODE = re.compile(r"```(?:sh|console)\n(.*?)```|`(ckpt [^`]+)`", re.DOTALL)


def _command_lines(text: str) -> list[list[str]]:
    """What a page tells to type, without comments, output and what is piped on."""
    lines = "\n".join(block or inline for block, inline in _CODE.findall(text)).splitlines()
    typed = [re.split(r"\s#|\s[|>]|;", line.removeprefix("$ "))[0] for line in lines]
    return [line.split() for line in typed if re.match(r"ckpt [a-z]", line)]


@pytest.mark.parametrize("page", FRONT, ids=lambda page: page.name)
def test_docs_commands_of_the_front_pages_exist_with_their_options(page: Path) -> None:
    from ckpt_tools.cli.app import _load
    from ckpt_tools.cli.commands import COMMANDS

    wrong = []
    for words in _command_lines(page.read_text(encoding="utf-8")):
        known = {opt for each in _load(words[1]).params for opt in each.opts} if words[1] in COMMANDS else None
        used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        if known is None or used - known - {"--help"}:
            wrong.append(words)
    assert wrong == []


def test_docs_readme_comes_to_the_point() -> None:
    """A command within 120 words, and all that ckpt is for within 60 lines."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.partition("```sh")[0].split()) <= 120
    first = "\n".join(text.splitlines()[:60])
    assert {words[1] for words in _command_lines(first)} >= {"gather", "shard", "reshard", "preflight", "export-lora"}
    assert all(f"\n{command} " in text for command in ("bin/demo", "bin/test"))


def test_docs_readme_names_every_exit_code_of_the_errors() -> None:
    from ckpt_tools import errors
    from ckpt_tools.cli.help_text import EXIT_CODES

    codes = {kind.exit_code for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "exit_code")}
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {int(code): meaning for code, meaning in rows} == EXIT_CODES
    assert codes | {0, 3, 130} == EXIT_CODES.keys()


def test_docs_every_command_of_the_house_is_executable_and_mentioned() -> None:
    guide = (ROOT / "docs" / "dev" / "contributing.md").read_text(encoding="utf-8")
    commands = [path for path in (ROOT / "bin").iterdir() if path.is_file() and path.suffix == ""]
    assert commands
    assert [path.name for path in commands if not os.access(path, os.X_OK)] == []
    assert [path.name for path in commands if f"`bin/{path.name}" not in guide] == []


def test_docs_guarantees_name_tests_that_exist() -> None:
    text = (ROOT / "docs" / "dev" / "reliability.md").read_text(encoding="utf-8")
    rows = [line for line in text.partition("| what holds |")[2].splitlines()[2:] if not line.startswith("| **")]
    assert len(rows) > 30
    assert [row for row in rows if "::test_" not in row] == []
    wrong = []
    for path, name in re.findall(r"`(tests/\w+/\w+\.py)::(\w+)`", text):
        if not (ROOT / path).exists() or f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8"):
            wrong.append(f"{path}::{name}")
    assert wrong == []


def test_docs_mutants_made_by_hand_change_what_is_there() -> None:
    """Whoever changes such a line changes its mutant with it."""
    table = tomllib.loads((ROOT / "tests" / "mutate" / "hand_made.toml").read_text(encoding="utf-8"))
    for file, rows in table["files"].items():
        assert rows.pop("tests") in table["tests"]
        text = (ROOT / file).read_text(encoding="utf-8")
        assert [name for name, (old, _) in rows.items() if text.count(old) != 1] == []
    files = {each for tests in table["tests"].values() for each in tests if not each.startswith("-")}
    assert [each for each in files if not (ROOT / "tests" / each).exists()] == []


def test_docs_guide_rules_parse() -> None:
    from ckpt_tools.transfer.placement.place import parse_rules

    text = (ROOT / "docs" / "guides" / "start-sharded.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml rules.yaml\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        parse_rules(block, where="rules.yaml")


def test_docs_rows_of_the_five_documents_name_tests_that_exist() -> None:
    """Every row has an answer and its proof: a test, a guide, or a command."""
    text = (ROOT / "docs" / "dev" / "seeds.md").read_text(encoding="utf-8")
    tables = text.split("\n## ")[1:]
    assert len(tables) == 5
    for table in tables:
        rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
        assert len(rows) >= 25, table.splitlines()[0]
        assert [row for row in rows if len(row) != 3 or not all(row)] == []
        assert [row for row in rows if not row[1].startswith(("works", "other: ", "not: "))] == []
    assert "being built" not in text
    wrong = []
    for path, name in re.findall(r"`(\w+/\w+\.(?:py|yaml))(?:::(\w+))?`", text):
        file = ROOT / "tests" / path
        if not file.exists() or (name and f"def {name}(" not in file.read_text(encoding="utf-8")):
            wrong.append(f"{path}::{name}")
    assert wrong == []
