"""The tables of the package that lie beside their modules: rows are whole, and say what their readers can use."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

import ckpt_tools
from ckpt_tools.checkpoint.formats.file_names import read_part_name
from ckpt_tools.checkpoint.formats.step_layouts import trainer_layout
from ckpt_tools.checkpoint.identity import TrainerName
from ckpt_tools.checkpoint.names.foreign import origins, origins_of
from ckpt_tools.tables import read_rows

PACKAGE = Path(ckpt_tools.__file__).parent
TABLES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.tsv"))


@pytest.mark.parametrize("table", TABLES)
def test_every_row_has_a_text_in_every_column(table: str) -> None:
    folder, _, name = table.rpartition("/")
    rows = read_rows(f"ckpt_tools.{folder.replace('/', '.')}", name)
    assert rows
    assert [row for row in rows for text in row.values() if not text.strip() or text != text.strip()] == []
    assert len({tuple(row.values()) for row in rows}) == len(rows)


def test_a_row_that_is_too_short_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "short.tsv").write_text("# A comment\none\ttwo\n1\t2\n\n3\n")
    monkeypatch.setattr("ckpt_tools.tables.read_packaged", lambda _, name: (tmp_path / name).read_text())
    with pytest.raises(ValueError, match="zip"):
        read_rows("ckpt_tools.nowhere", "short.tsv")


def test_every_trainer_has_a_layout() -> None:
    layouts = {trainer: trainer_layout(trainer) for trainer in get_args(TrainerName)}
    rows = read_rows("ckpt_tools.checkpoint.formats", "step_layouts.tsv")
    assert [row["trainer"] for row in rows] == list(layouts)
    assert all(bool(one.refusal) == bool(one.instead) for one in layouts.values())
    for one in layouts.values():
        assert "{" not in one.start.format(destination="d").replace('{"state_dict": state}', "")
        assert "{" not in one.instead.format(source="s")


def test_who_names_tensors_is_told_by_codes_and_says_a_way_on() -> None:
    assert len({origin.code for origin in origins()}) == len(origins())
    for origin in origins():
        assert set(re.findall(r"\{(\w*)\}", origin.way_on)) <= {"source"}
    assert origins_of(["layers.0.ffn_norm.weight"])[0].code == "torchtitan"


def test_words_of_columns_are_those_that_readers_know() -> None:
    assert {row["paged"] for row in read_rows("ckpt_tools.estimate", "optimizers.tsv")} == {"yes", "no"}
    rows = read_rows("ckpt_tools.checkpoint.formats", "unsupported.tsv")
    assert {row["told_by"].split()[0] for row in rows} == {"inside", "ending", "byte"}


def test_numbers_of_parts_are_in_every_pattern() -> None:
    for row in read_rows("ckpt_tools.checkpoint.formats", "part_names.tsv"):
        assert {"stem", "i"} <= re.compile(row["names"]).groupindex.keys()
        assert row["first"] in ("0", "1")
    part = read_part_name("layer_07-model_00-model_states.pt")
    assert part is not None
    assert part.index == 7
