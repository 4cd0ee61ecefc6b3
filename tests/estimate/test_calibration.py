"""What docs/dev/calibration.md says of published measurements."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def calibrate():
    path = ROOT / "bin" / "lib" / "calibrate" / "calibrate.py"
    found = importlib.util.spec_from_file_location("calibrate", path)
    module = importlib.util.module_from_spec(found)
    sys.modules["calibrate"] = module
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def table(calibrate):
    lines = calibrate.PAGE.read_text(encoding="utf-8").partition("\n## What is assumed")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.count("|") == 8]
    return {row[0]: row for row in cells[2:]}


def test_page_has_every_published_row_and_none_is_off_without_a_reason(calibrate, table):
    rows = list(calibrate.rows())
    assert len(rows) >= 20
    assert set(table) == {row.name for row in rows}
    for row in rows:
        published, ours, ratio = map(float, table[row.name][3:6])
        assert published == pytest.approx(row.published, abs=0.06), row.name
        assert ratio == pytest.approx(ours / published, abs=0.01), row.name
        assert calibrate.LOW <= ratio <= calibrate.HIGH or row.reason, row.name
        assert table[row.name][6] == row.reason, row.name


@pytest.mark.full
def test_row_computed_again_is_what_the_page_says(calibrate, table):
    pytest.importorskip("transformers")
    name = "70B FSDP 32, TP 8, full, compile, float8"
    (row,) = (row for row in calibrate.rows() if row.name == name)
    assert calibrate.estimated(row) == pytest.approx(float(table[name][4]), rel=0.01)
