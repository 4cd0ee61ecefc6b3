"""`ckpt diff` of two steps: by how much tensors changed, gathered by their place in the layers."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from ckpt_tools import api
from ckpt_tools.cli import main


@pytest.fixture
def steps(tmp_path):
    """Two steps of 30 layers: weights change by 1 %, those of the last layer by half; norms stay."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        before, after = {}, {}
        for layer in range(30):
            weight = torch.randn(16, 16)
            name = f"layers.{layer}.mlp.weight"
            before[name] = weight.to(dtype)
            after[name] = (weight * (1.5 if layer == 29 else 1.01)).to(dtype)
            before[f"layers.{layer}.norm.weight"] = after[f"layers.{layer}.norm.weight"] = torch.ones(4)
        save_file(before, tmp_path / f"before-{dtype}.safetensors")
        save_file(after, tmp_path / f"after-{dtype}.safetensors")
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_changes_are_gathered_by_place_with_their_sizes(steps, capsys, dtype) -> None:
    args = ["diff", str(steps / f"before-{dtype}.safetensors"), str(steps / f"after-{dtype}.safetensors")]
    assert main(args) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "~ layers.*.mlp.weight: 30 differ, by 0.01 of their size (most 0.5)"
    assert lines[1] == "30 differ, 30 equal, 0 only in A, 0 only in B"
    assert lines[2] == "changed by 0.01 of their size, most 0.5: layers.29.mlp.weight"
    assert len(lines) == 3
    assert main([*args, "--tensors"]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 32
    assert re.fullmatch(r"~ layers\.0\.mlp\.weight: values differ in \d+ of 256 .*, by 0\.01\d? of its size", lines[0])


def test_what_differs_or_is_damaged_is_false(tmp_path, capsys) -> None:
    files = [str(tmp_path / f"{name}.safetensors") for name in "ab"]
    for file, value in zip(files, (1.0, float("nan")), strict=True):
        save_file({"w": torch.full((4,), 2.0), "x": torch.full((2,), value)}, file)
    assert api.verify(files[0], level="values")
    assert not api.verify(files[1], level="values")
    assert api.diff(files[0], files[0])
    assert not api.diff(*files)
    for sides, odd in ((files, "B"), (files[::-1], "A")):
        assert main(["diff", *sides]) == 3
        assert f"; {odd} with NaN" in capsys.readouterr().out


def test_size_of_a_change_is_in_the_document(tmp_path, capsys) -> None:
    one = {
        "w": torch.full((4,), 3.0),
        "zero": torch.ones(2),
        "nan": torch.tensor([float("nan"), 1.0]),
        "n": torch.arange(3),
    }
    other = {
        "w": torch.full((4,), 2.0),
        "zero": torch.zeros(2),
        "nan": torch.tensor([2.0, 1.0]),
        "n": torch.arange(3) + 1,
    }
    save_file(one, tmp_path / "a.safetensors")
    save_file(other, tmp_path / "b.safetensors")
    assert main(["diff", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"), "--json"]) == 3
    changed = json.loads(capsys.readouterr().out)["changed"]
    assert {change["fqn"]: change["relative"] for change in changed} == {
        "w": pytest.approx(1 / 3),
        "zero": 1.0,
        "nan": None,
        "n": None,
    }
    assert next(change for change in changed if change["fqn"] == "nan")["what"].endswith(
        "; A with NaN, Inf or numbers too large to square"
    )


@pytest.mark.parametrize(("rtol", "code"), [(0.34, 0), (0.3, 3)])
def test_tolerance_is_of_the_first_one_and_needs_no_torch(rtol: float, code: int, tmp_path) -> None:
    for name, value in (("a", 3.0), ("b", 2.0)):
        tensors = {
            kind: torch.tensor([value, float("nan"), float("inf")], dtype=getattr(torch, kind))
            for kind in ("float32", "bfloat16")
        }
        save_file(tensors, tmp_path / f"{name}.safetensors")
    script = "import sys; sys.modules['torch'] = None; from ckpt_tools.cli import main; sys.exit(main(sys.argv[1:]))"
    argv = ["diff", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"), "--rtol", str(rtol)]
    assert subprocess.run([sys.executable, "-c", script, *argv], capture_output=True).returncode == code
