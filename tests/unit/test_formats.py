"""The table of formats: every line is a whole format, and what reads the table reads all of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckpt_tools.checkpoint.formats.format import Format
from ckpt_tools.checkpoint.formats.table import FORMATS, detect_format, find_format
from ckpt_tools.errors import UsageError
from ckpt_tools.options.common import From

ROOT = Path(__file__).parents[2]
ALL = [find_format(name) for name in FORMATS]


@pytest.mark.parametrize("found", ALL, ids=list(FORMATS))
def test_format_has_the_name_of_its_line_and_a_counterpart_that_leads_back(found: Format) -> None:
    assert find_format(found.name) is found
    assert found.suffix.startswith(".")
    if found.counterpart is not None:
        other = find_format(found.counterpart)
        assert other.is_file is not found.is_file
        assert other.counterpart == found.name


def test_no_format_has_an_empty_directory() -> None:
    assert detect_format({}, is_file=False) is None


def test_find_format_of_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(UsageError, match="'zip' is not a format") as caught:
        find_format("zip")
    assert str(caught.value.hint) == f"--from takes {', '.join(FORMATS)}"


def test_formats_page_has_a_row_for_each() -> None:
    page = (ROOT / "docs/reference/formats.md").read_text(encoding="utf-8")
    assert re.findall(r"^## `([\w-]+)`$", page, re.MULTILINE) == list(FORMATS)
    assert all(find_format(name).found_by and find_format(name).about for name in FORMATS)


def test_from_takes_what_the_table_has() -> None:
    (option,) = (part for part in From.__metadata__ if hasattr(part, "metavar"))
    assert option.metavar == "|".join(FORMATS)


def test_no_room_asks_a_format_for_its_name() -> None:
    asked = re.compile(r"format (==|!=|in|not in) ")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in (ROOT / "ckpt_tools").rglob("*.py")
        if "formats" not in path.parts
        for line in path.read_text(encoding="utf-8").splitlines()
        if asked.search(line)
    ]
    assert not found
