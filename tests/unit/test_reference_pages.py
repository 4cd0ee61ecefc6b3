"""The generated references say of every command and function all that it takes, wherever it is described."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from bin_lib import LIB, bin_modules

import ckpt_tools
from ckpt_tools.cli.app import _load
from ckpt_tools.cli.commands import COMMANDS
from ckpt_tools.fsdp2.catalogue import CATALOGUE
from ckpt_tools.preflight.rules import RULES


@pytest.fixture(scope="module")
def pages() -> Any:
    cli, api, tables = bin_modules("cli_pages", "api_pages", "tables_pages")
    return type("Pages", (), {"cli": cli.render(), "api": api.render(), "tables": tables})


def _sections(page: str, mark: str) -> dict[str, str]:
    return {text.partition("\n")[0]: text for text in page.split(f"\n{mark} ")[1:]}


def test_cli_page_names_every_option_under_its_command_and_describes_it_once(pages: Any) -> None:
    sections = _sections(pages.cli, "##")
    for name in COMMANDS:
        options = {max(each.opts, key=len) for each in _load(name).params} - {"--help"}
        section = sections[f"ckpt {name}"]
        assert [each for each in options if each.startswith("-") and not re.search(rf"{each}[` ]", section)] == []
        for option in re.findall(r"`(--[\w-]+)`", section.partition("\nShared: ")[2]):
            assert f"{option}" in sections["Shared options"]
    described = re.findall(r"^- `-.*", pages.cli, re.MULTILINE)
    assert len(described) == len(set(described))


def test_api_page_describes_what_the_command_line_does_not_take(pages: Any) -> None:
    sections = _sections(pages.api, "###")
    for name, function in inspect.getmembers(ckpt_tools, inspect.isfunction):
        if name not in ckpt_tools.__all__ or "Args:" not in (inspect.getdoc(function) or ""):
            continue
        told, command = sections[name].partition("```\n")[2], name.replace("_", "-")
        taken = set[str]()
        if command in COMMANDS:
            assert f"(cli.md#ckpt-{command})" in told
            taken = {str(each.name) for each in _load(command).params}
        for each in inspect.signature(function).parameters.keys() - taken:
            assert f"`{each}`" in told


def test_what_all_commands_take_is_described_apart(pages: Any) -> None:
    shared = pages.cli.partition("## Shared options")[2].partition("\n## ")[0]
    assert all(f"{option}`: " in shared for option in ("--json", "--quiet", "--verbose"))


def test_rules_page_names_every_rule_once(pages: Any) -> None:
    page = pages.tables.render_rules()
    for one in RULES:
        assert page.count(f"### {one.id}: {one.title}\n") == 1
        assert one.why in page
        assert one.fix in page
    assert "\n\n\n" not in page
    assert page.endswith(".\n")


def test_diagnoses_page_has_every_id_and_is_what_the_code_says(pages: Any) -> None:
    page = pages.tables.render_diagnoses()
    assert (LIB.parents[1] / "docs" / "reference" / "diagnoses.md").read_text(encoding="utf-8") == page
    assert [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")] == list(CATALOGUE)
