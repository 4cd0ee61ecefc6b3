"""Rows of `bin/pairs`: options, formats, roots and names together come out right, or are refused with a way on."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from pairs.run import COMMANDS, Row, Wrong, rows_of, run_row
from pairs.world import covering

_SEED = 3


@pytest.mark.full
def test_rows_come_out_right_or_are_refused(tmp_path: Path) -> None:
    outcomes = [run_row(command, row, tmp_path) for command, row in rows_of(40, _SEED)]
    assert outcomes.count("right") > 8


def test_rows_of_names_that_ckpt_knows_come_out_right(tmp_path: Path) -> None:
    rows = [
        (command, row) for command, row in rows_of(40, _SEED) if row["content"] == "hub" and row["format"] != "ranks"
    ]
    assert [run_row(command, row, tmp_path) for command, row in rows].count("right") > 2


@pytest.mark.parametrize(
    ("command", "given"),
    [
        ("rename", {"format": "dcp", "state": "optimizer"}),  # its hint named options of other commands
        ("gather", {"format": "pt", "content": "fp8", "names": "torchtitan"}),  # had none
    ],
)
def test_refusal_has_a_hint_whose_options_there_are(command: str, given: Row, tmp_path: Path) -> None:
    row = {dim: values[0] for dim, values in COMMANDS[command].items()} | given
    assert run_row(command, row, tmp_path) != "right"


def test_row_that_comes_out_wrong_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {dim: values[0] for dim, values in COMMANDS["gather"].items()} | {"format": "dcp"}
    assert run_row("gather", row | {"dtype": "bf16"}, tmp_path) == "right"
    monkeypatch.setattr("pairs.run.cast", lambda model, row, skip: {n: t.half() for n, t in model.items()})
    with pytest.raises(Wrong, match=r"torch\.float32, .* and not .*torch\.float16"):
        run_row("gather", row, tmp_path)


def test_rows_have_every_pair_of_values() -> None:
    dims = {"a": ("1", "2", "3"), "b": ("x", "y"), "c": ("", "z")}
    rows = covering(dims, {}, random.Random(0))
    for (a, xs), (b, ys) in itertools.combinations(dims.items(), 2):
        assert {(row[a], row[b]) for row in rows} == {*itertools.product(xs, ys)}
