"""bin/loaders rewrites the rows that it has run, and leaves the others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

LIB = Path(__file__).parents[2] / "bin" / "lib" / "loaders"


@pytest.fixture
def table(tmp_path: Path, monkeypatch: Any) -> Any:
    monkeypatch.syspath_prepend(str(LIB))
    import table

    sys.modules.pop("table")
    monkeypatch.setattr(table, "FOLDER", tmp_path)
    return table


def test_rows_that_were_run_again_are_new_and_the_others_stay(table: Any, tmp_path: Path) -> None:
    def cell(family: str, error: float) -> Any:
        return table.Cell("sd15", family, "peft", "peft", failure="", error=error)

    table.write([cell("LoRA", 0.0), cell("DoRA", 0.5)])
    table.write([cell("DoRA", 1e-7)])
    rows = (tmp_path / "loaders.csv").read_text().splitlines()
    assert rows[0].startswith("model,family,peft,")
    assert [row.split(",")[:3] for row in rows[1:]] == [["sd15", "LoRA", "0"], ["sd15", "DoRA", "1e-07"]]


def test_tables_that_are_there_have_the_columns_of_today(table: Any) -> None:
    for name, rows in table._tables([]):
        text = (LIB.parents[2] / "docs" / "dev" / name).read_text(encoding="utf-8")
        assert text.splitlines()[0].replace('"', "") == ",".join(rows[0])
