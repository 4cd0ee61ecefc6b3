"""Layers go 0, 1, 2, 10, 11 wherever a result lists them, whatever order a file has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from ckpt_tools import api
from ckpt_tools.cli import main
from ckpt_tools.runs.manage import RunManager

LAYERS = list(range(12))


@pytest.fixture
def sides(tmp_path: Path) -> tuple[str, str]:
    """Two models of twelve layers that differ in every one; safetensors puts 10 before 2."""
    torch.manual_seed(0)
    for side in "ab":
        tensors = {f"model.layers.{layer}.mlp.up_proj.weight": torch.randn(24, 4) for layer in LAYERS}
        tensors |= {f"model.layers.{layer}.{side}.weight": torch.randn(24, 4) for layer in LAYERS}
        tensors["model.layers.11.mlp.up_proj.weight"][0, 0] = float("nan")
        tensors["model.layers.2.mlp.up_proj.weight"][0, 0] = float("nan")
        save_file(tensors, tmp_path / f"{side}.safetensors")
    return str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")


def _layers(names) -> list[int]:
    return list(dict.fromkeys(int(re.findall(r"layers\.(\d+)\.", name)[0]) for name in names if "layers." in name))


def test_results_list_layers_by_their_numbers(sides, capsys) -> None:
    def document(*argv: str) -> dict:
        main([*argv, "--json"])
        return json.loads(capsys.readouterr().out)

    a, b = sides
    found = document("diff", a, b)
    assert _layers(found["only_in_a"]) == _layers(found["only_in_b"]) == LAYERS
    assert _layers(each["fqn"] for each in found["changed"]) == LAYERS
    found = document("stats", a, "--against", b)
    assert _layers(each["fqn"] for each in found["tensors"]) == LAYERS
    assert list(found["updates"]["layer"]) == list(map(str, LAYERS))
    assert _layers(each["fqn"] for each in document("stats", a)["tensors"]) == LAYERS
    assert _layers(each["fqn"] for each in document("inspect", a, "--tensors")["tensors"]) == LAYERS
    found = document("verify", a, "--against", b)
    assert _layers(each["what"] for each in found["findings"] if each["code"] == "extra-tensor") == LAYERS
    found = document("verify", a, "--level", "values")
    assert _layers(re.findall(r"layers\.\d+\.", found["findings"][0]["what"])) == [2, 11]


def test_map_of_ranks_and_files_go_by_numbers(tmp_path: Path, sides) -> None:
    api.shard(sides[0], tmp_path / "run", mesh="dp_shard=12", num_workers=1)
    summary = api.inspect(tmp_path / "run")
    assert _layers(f"{block.name}." for block in summary.blocks) == LAYERS
    assert [file.file for file in summary.files][-2:] == ["__10_0.distcp", "__11_0.distcp"]
    (tmp_path / "run" / "__2_0.distcp").unlink()
    (tmp_path / "run" / "__11_0.distcp").unlink()
    found = api.verify(tmp_path / "run")
    assert list(dict.fromkeys(each.file for each in found.findings)) == ["__2_0.distcp", "__11_0.distcp"]
    assert [each.file for each in found.read if each.file.startswith("__")][:4] == [
        "__0_0.distcp",
        "__1_0.distcp",
        "__3_0.distcp",
        "__4_0.distcp",
    ]


def test_quarantine_of_one_second_goes_by_step() -> None:
    leftovers = {f"trash-{step}": f"step-{step}" for step in (100, 10, 9)}
    run = SimpleNamespace(
        _settings=SimpleNamespace(quarantine_s=60.0),
        _folder=SimpleNamespace(age=lambda _: 1.0),
        _now=SimpleNamespace(leftovers=leftovers),
    )
    assert list(RunManager._quarantine(run)) == ["step-9", "step-10", "step-100"]
