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
    assert lines[0] == "~ layers.{0-29}.mlp.weight ×30: values differ, relative change 0.01 (most 0.5)"
    assert lines[1] == "30 differ, 30 equal, 0 only in A, 0 only in B"
    figures = "median 0.01, most 0.5: layers.29.mlp.weight"
    assert lines[2] == f"relative change |B − A| / |A| of the tensors that differ: {figures}"
    assert len(lines) == 3
    assert main([*args, "--tensors"]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 32
    assert re.fullmatch(r"~ layers\.0\.mlp\.weight: values differ in \d+ of 256 .*, relative change 0\.01\d?", lines[0])


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


@pytest.fixture
def models(tmp_path):
    """Three layers of 128, and twelve of 256 with another dtype; and what differs in one layer by a NaN."""
    sizes = {"small": (3, 8, torch.float32), "large": (12, 16, torch.float32), "cast": (3, 8, torch.bfloat16)}
    for name, (layers, hidden, dtype) in sizes.items():
        tensors = {f"model.layers.{n}.mlp.up_proj.weight": torch.ones(4, hidden, dtype=dtype) for n in range(layers)}
        tensors["model.embed_tokens.weight"] = torch.ones(32, hidden, dtype=dtype)
        save_file(tensors, tmp_path / f"{name}.safetensors")
    tensors = {f"model.layers.{n}.mlp.up_proj.weight": torch.full((4, 8), 1.5) for n in range(3)}
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors | {"model.embed_tokens.weight": torch.ones(32, 8)}, tmp_path / "nan.safetensors")
    return {path.stem: str(path) for path in tmp_path.glob("*.safetensors")}


def test_another_model_is_one_line_first_and_one_cause(models, capsys) -> None:
    said = "another model: 12 layers instead of 3, hidden 16 instead of 8"
    assert main(["diff", models["small"], models["large"]]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        said,
        f"+ model.layers.{{3-11}}.mlp.up_proj.weight ×9: only in {models['large']}",
        "~ model.embed_tokens.weight: shape [32, 8] and [32, 16]",
        "~ model.layers.{0-2}.mlp.up_proj.weight ×3: shape [4, 8] and [4, 16]",
    ]
    assert main(["verify", models["small"], "--against", models["large"]]) == 3
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == f"error: other-model: {models['large']}: {said}"
    assert len((out + err).splitlines()) <= 15
    assert main(["verify", models["small"], "--against", models["large"], "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert len(found["findings"]) == 14
    (cause,) = found["causes"]
    assert cause["count"] == 14


def test_another_vocabulary_or_dtype_or_a_part_is_no_other_model(models, tmp_path, capsys) -> None:
    tensors = {f"model.layers.{n}.mlp.up_proj.weight": torch.ones(4, 8) for n in range(3)}
    save_file(tensors | {"model.embed_tokens.weight": torch.ones(40, 8)}, tmp_path / "tokens.safetensors")
    save_file(tensors, tmp_path / "model-00001-of-00002.safetensors")
    for other in ("tokens", "model-00001-of-00002"):
        assert not api.diff(models["small"], tmp_path / f"{other}.safetensors").other_model
    assert not api.diff(models["small"], models["cast"]).other_model
    assert main(["diff", models["small"], models["cast"]]) == 3
    assert "~ model.layers.{0-2}.mlp.up_proj.weight ×3: dtype F32 and BF16" in capsys.readouterr().out


def test_nan_is_seen_in_a_line_for_several(models, capsys) -> None:
    for sides, side in ((("small", "nan"), "B"), (("nan", "small"), "A")):
        assert main(["diff", *(models[each] for each in sides)]) == 3
        line = capsys.readouterr().out.splitlines()[0]
        assert line.startswith("~ model.layers.{0-2}.mlp.up_proj.weight ×3: values differ, relative change 0.")
        assert line.endswith(f"; 1 of them: {side} with NaN, Inf or numbers too large to square")


def test_names_that_no_model_has_are_folded_without_harm(tmp_path, capsys) -> None:
    names = ["1" * 19, "2" * 40, "3" * 60, "0x1.5", "0x1.6", "a.007.b", "a.7.b", "\u0663.w", "\u0664.w"]
    save_file({name: torch.zeros(2) for name in names}, tmp_path / "a.safetensors")
    save_file({name: torch.ones(2) for name in names}, tmp_path / "b.safetensors")
    assert main(["diff", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert sum(int(line.partition("×")[2].partition(":")[0] or 1) for line in lines if line.startswith("~")) == len(
        names
    )


ODD = torch.tensor([0.0, -0.0, 1.0, float("nan"), float("inf"), -float("inf"), 3e38, 1e-38])
WORDS = r"values differ (?:by up to (\S+) )?in ([\d,]+) of [\d,]+ elements(?:, first at \[(.*?)\])?"


TYPES = ["float32", "float64", "bfloat16", "float8_e4m3fn", "int16", "bool", "complex64"]


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in TYPES])
def test_what_differs_is_what_torch_finds(tmp_path, dtype) -> None:
    """In several blocks of 4 MiB, with NaNs, infinities and both zeros in all pairings."""
    torch.manual_seed(1)
    a = torch.randn(1100, 1100).mul(9).to(dtype)
    b = a.clone()
    b[1000, 7:90] = torch.randn(83).mul(3).to(dtype) if dtype != torch.bool else False
    if dtype.is_floating_point and dtype.itemsize > 1:
        a[1050, :64], b[1050, :64] = ODD.repeat(8).to(dtype), ODD.repeat_interleave(8).to(dtype)
    for name, tensor in (("a", a), ("b", b)):
        save_file({"w": tensor}, tmp_path / f"{name}.safetensors")
    paths = [str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")]
    bits = [each.contiguous().view(torch.uint8).reshape(a.numel(), -1) for each in (a, b)]
    unequal = (bits[0] != bits[1]).any(1)
    first = divmod(int(unequal.nonzero()[0]), 1100)
    found = re.match(WORDS, api.diff(*paths).changed[0].what)
    assert found is not None
    assert (int(found[2].replace(",", "")), found[3]) == (int(unequal.sum()), f"{first[0]}, {first[1]}")
    if not dtype.is_floating_point or dtype.itemsize == 1:
        return
    for rtol, atol in ((0.0, 1e-3), (0.5, 0.0), (1e30, 0.0), (0.0, 1e39)):
        near = torch.isclose(b.double(), a.double(), rtol=rtol, atol=atol, equal_nan=True)
        changed = api.diff(*paths, rtol=rtol, atol=atol).changed
        if near.all():
            assert not changed
            continue
        found = re.match(WORDS, changed[0].what)
        apart = (b.double() - a.double()).abs()[~near].nan_to_num(torch.inf, torch.inf).max()
        assert found is not None
        assert int(found[2].replace(",", "")) == int((~near).sum())
        assert float(found[1]) == pytest.approx(float(apart), rel=1e-5)
