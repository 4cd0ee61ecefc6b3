"""Tables on narrow terminals: no number is torn apart, nothing goes missing that is not said elsewhere."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from reports import results
from safetensors.torch import save_file
from steps.toy_steps import save_trainer

from ckpt_tools.cli import main
from ckpt_tools.cli.screen import Screen
from ckpt_tools.preflight.report import describe_verdict

ROWS = [
    (f"model.layers.{n}.mlp.up_proj.weight", "F32", "[4096, 14336]", "1,234,567", "12.3 GiB", "a sentence " * n)
    for n in (0, 1, 5, 40)
]
COLUMNS = "name, dtype, shape, >elements, >bytes, what"


def _drawn(width: int, **options) -> list[str]:
    stream = io.StringIO()
    Screen(stream=stream, width=width, **options).table(COLUMNS, ROWS)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", range(50, 121, 5))
def test_wide_table_goes_on_in_more_lines_and_keeps_every_cell(width: int) -> None:
    lines = _drawn(width, folds=True)
    assert max(map(len, lines)) <= width
    for row in ROWS:
        for cell in row[:-1]:
            number = sum(cell in other for other in ROWS)
            assert sum(line.count(cell) for line in lines) == number, (cell, lines)
    assert " ".join(" ".join(lines).split()).count("a sentence") == 46


def test_pipes_get_a_line_per_row() -> None:
    assert len(_drawn(60)) == len(ROWS) + 1


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tensors = {f"model.layers.{n}.self_attn.q_proj.weight": torch.randn(8, 8) for n in range(4)}
    tensors |= {f"model.layers.{n}.post_attention_layernorm.weight": torch.full((4,), float("nan")) for n in range(4)}
    save_file(tensors, "new.safetensors")
    save_file({name: tensor.nan_to_num() + 1 for name, tensor in tensors.items()}, "old.safetensors")
    save_trainer(tmp_path / "out" / "checkpoint-3")
    save_trainer(tmp_path / "out" / "checkpoint-10")
    return tmp_path


COMMANDS = [
    ["inspect", "new.safetensors"],
    ["inspect", "new.safetensors", "--tensors"],
    ["inspect", "new.safetensors", "--mesh", "dp_shard=4"],
    ["inspect", "new.safetensors", "--mesh", "dp_shard=64", "--by", "rank"],
    ["inspect", "new.safetensors", "--tensor", "model.layers.0.self_attn.q_proj.weight"],
    ["inspect", "out/checkpoint-3"],
    ["stats", "new.safetensors"],
    ["stats", "new.safetensors", "--against", "old.safetensors", "--rank"],
    ["watch", "out", "--status"],
    ["prune", "out", "--keep-last", "1", "-n"],
]


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_tables_of_commands_fit(argv, width: int, place, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    main(argv)
    lines = capsys.readouterr().out.splitlines()
    assert lines
    wide = [line for line in lines if len(line) > width and line.startswith("  ") and "ckpt " not in line]
    assert not wide


def test_what_has_no_figures_says_why(place, capsys) -> None:
    assert main(["stats", "new.safetensors", "--against", "old.safetensors"]) == 3
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    (norms,) = (row for row in rows if row[:1] == ["model.layers.*.post_attention_layernorm.weight"])
    assert norms[1:] == ["×4", "nothing", "finite", "16", "NaN", "or", "Inf"]
    assert ["0", "NaN", "or", "Inf"] in rows


def test_preflight_goes_and_says_what_was_not_checked() -> None:
    whole = results.preflight()
    skipped = replace(whole, checks=(*whole.checks[:-1], replace(whole.checks[-1], ok=None)))
    made = "config, rules, memory, checkpoint, smoke; 0 warnings"
    assert describe_verdict(whole, begins="GO") == f"GO: {made}"
    assert describe_verdict(skipped, begins="GO") == "GO (not checked: smoke): " + made.replace(", smoke", "")
    failed = replace(whole, findings=results.FINDINGS)
    assert describe_verdict(failed, begins="GO").startswith("NOT ok: ")
