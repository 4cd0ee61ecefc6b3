"""docs/reference/json.md names the fields that commands print."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import toys

from ckpt_tools.cli import commands, main

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "json.md").read_text(encoding="utf-8")


def _stated() -> dict[str, set[str]]:
    """Command → its fields."""
    found = {}
    for names, fields in re.findall(r"^\| (`[a-z].*?) \| (.*) \|$", PAGE.partition("## One document")[2], re.MULTILINE):
        first = fields.partition("; with ")[0]
        for name in re.findall(r"`([a-z-]+)`", names):
            found.setdefault(name, set(re.findall(r"`(\w+)`", first)))
    return found


def test_json_page_has_a_row_for_every_command():
    assert set(_stated()) == set(commands.COMMANDS)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    at = tmp_path_factory.mktemp("json")
    toys.save("llama", at / "toy")
    assert main(["shard", str(at / "toy"), str(at / "start"), "--mesh", "dp_shard=2", "-q"]) == 0
    return at


@pytest.mark.parametrize(
    "words",
    ["inspect toy", "verify toy", "diff toy start", "stats toy", "scan toy", "gather start NEW", "env"],
)
def test_json_page_names_the_fields_that_are_printed(words, made, tmp_path, capsys):
    name, *paths = words.split()
    where = [str(tmp_path / "new") if path == "NEW" else str(made / path) for path in paths]
    capsys.readouterr()
    main([name, *where, "--json"])
    assert set(json.loads(capsys.readouterr().out)) - {"schema_version"} == _stated()[name]
