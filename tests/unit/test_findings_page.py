"""Every code that the package can give is on docs/reference/findings.md, and none that it cannot."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from bin_lib import bin_modules

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages() -> Any:
    """The modules of bin/lib: `page` and `codes`."""
    page, codes = bin_modules("findings_page", "finding_codes")
    return type("Pages", (), {"page": page, "codes": codes})


def test_findings_page_has_every_code_and_no_other(pages: Any) -> None:
    groups = pages.page.table()
    errors = groups.pop("Errors")
    rows = {code: row for group in groups.values() for code, row in group.items()}
    assert sum(map(len, groups.values())) == len(rows)
    found = pages.page.codes()
    assert sorted(rows) == sorted(found)
    assert sorted(errors) == sorted(pages.codes.error_codes())
    assert [code for code, row in (*rows.items(), *errors.items()) if len(row) not in (2, 3) or not all(row)] == []
    assert [code for code, row in rows.items() if len(row) > 2 and not set(row[2].split(" or ")) <= found[code]] == []


def test_findings_page_is_what_the_table_says(pages: Any) -> None:
    assert (ROOT / "docs" / "reference" / "findings.md").read_text(encoding="utf-8") == pages.page.render()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('Finding.error("one", a, b)', {"one": {"error"}}),
        ('Finding(code="one" if x else "two", severity="info", where=a, what=b)', {"one": {"info"}, "two": {"info"}}),
        ('ONE = "one"\ndef f():\n    yield Finding.warning(ONE, a, b)', {"one": {"warning"}}),
        ('def f():\n    code = error.finding or "one"\n    yield Finding.error(code, a, b)', {"one": {"error"}}),
        ('def _f(code, where): return Finding.info(code, where, b)\nx = _f("one", a)', {"one": {"info"}}),
        (
            "def f():\n    for code, what in (('one', 1), ('two', 2)):\n        yield Finding.error(code, a, b)",
            {"one": {"error"}, "two": {"error"}},
        ),
        (
            'def f(x):\n    make = Finding.error if x else Finding.info\n    yield make("one", a, b)',
            {"one": {"error", "info"}},
        ),
        ('x = replace(finding, code="one")', {"one": {"error"}}),
        (
            'class R:\n    def say(self, code, severity): Finding(code, severity)\nr.say("one", "info")',
            {"one": {"info"}},
        ),
        ('def f(x):\n    return Finding.error(f"{x}-failed", a, b)', {"*-failed": {"error"}}),
        ('say("committing")\nlog.error("what happened")', {}),
    ],
)
def test_codes_are_found_however_they_are_written(pages: Any, monkeypatch: Any, source: str, found: Any) -> None:
    tree = ast.parse(source)
    constants = {ast.unparse(each.targets[0]): each.value for each in tree.body if isinstance(each, ast.Assign)}
    one = pages.codes.Module("room/file.py", tree, constants)
    monkeypatch.setattr(pages.codes, "modules", lambda: [one])
    assert pages.codes.finding_codes() == found


def test_no_code_of_a_finding_is_beyond_the_source_reader(pages: Any) -> None:
    """A call whose code cannot be read from the source hands on one that is: of a function, a table, an error."""
    left = []
    for module in pages.codes.modules():
        for call, inside in filter(lambda each: pages.codes._maker(each[0]), pages.codes._calls(module.tree)):
            code = pages.codes._argument(call, 0, "code")
            is_told = isinstance(code, ast.Name | ast.Constant) or ast.unparse(code) in {"self.id", "one.id"}
            if not is_told and not pages.codes._texts(code, inside, module.constants):
                left.append(f"{module.path}:{call.lineno}")
    assert left == []
