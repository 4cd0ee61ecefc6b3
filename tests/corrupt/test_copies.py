"""One rank's file copied over another's: found without a manifest. What is meant to be equal is no damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from corrupt import damage
from samples import MODEL, Tensors, content, shard_model, tensor

from ckpt_tools import api


def bare(tmp_path: Path, mesh: str, tensors: Tensors) -> Path:
    run = shard_model(tmp_path, mesh, tensors)
    damage.forget_manifest(run)
    return run


def ones(*shape: int) -> tuple[str, tuple[int, ...], bytes]:
    return "BF16", shape, b"\x80\x3f" * (shape[0] * (shape[1] if len(shape) > 1 else 1))


def zeros(*shape: int) -> tuple[str, tuple[int, ...], bytes]:
    return "F32", shape, bytes(4 * shape[0] * (shape[1] if len(shape) > 1 else 1))


def places(result) -> list[str]:
    return [text for text in result.not_checked if text.startswith("whether files of equal layout")]


EVEN = {"w": tensor("F32", 8, 4, seed=1), "norm": ones(8), "bias": zeros(4, 2)}


@pytest.mark.parametrize("level", ["structure", "data"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_rank_file_copied_over_another_is_found(tmp_path: Path, ranks: int, level: str) -> None:
    run = bare(tmp_path, f"dp_shard={ranks}", EVEN)
    before = api.verify(run, level=level)
    assert before.findings == ()
    assert len(places(before)) == 1
    shutil.copyfile(run / f"__{ranks - 1}_0.distcp", run / "__0_0.distcp")
    result = api.verify(run, level=level)
    assert [finding.code for finding in result.findings] == ["copied-file"]
    assert not result.ok
    assert f"__{ranks - 1}_0.distcp" in result.findings[0].what


def test_every_rank_file_copied_over_every_other_one_is_found_or_impossible(tmp_path: Path) -> None:
    run = bare(tmp_path, "dp_shard=3", MODEL)
    names = sorted(path.name for path in run.glob("*.distcp"))
    for one in names:
        for other in names:
            if one != other:
                whole = (run / other).read_bytes()
                shutil.copyfile(run / one, run / other)
                assert api.verify(run, level="structure").findings, (one, other)
                (run / other).write_bytes(whole)


def test_files_that_changed_places_are_not_checked_until_a_copy_is_compared(tmp_path: Path) -> None:
    run = bare(tmp_path, "dp_shard=2", {"w": tensor("F32", 8, 4, seed=1)})
    damage.swap(run / "__0_0.distcp", run / "__1_0.distcp")
    result = api.verify(run)
    assert result.ok
    assert "(2: __0_0.distcp, __1_0.distcp" in places(result)[0]
    against = api.verify(run, against=tmp_path / "model")
    assert not against.ok
    assert places(against) == []


block = content(64)
HEALTHY: dict[str, tuple[str, Tensors]] = {
    "zeros of optimizer state at step 0": ("dp_shard=2", {"exp_avg": zeros(8, 4), "exp_avg_sq": zeros(8, 4)}),
    "norms of one": ("dp_shard=4", {f"layers.{i}.norm.weight": ones(8) for i in range(3)}),
    "lora_B beside lora_A": ("dp_shard=2", {"a.lora_A": tensor("F32", 8, 4, seed=3), "a.lora_B": zeros(8, 4)}),
    "replicas": ("dp_replicate=2,dp_shard=2", {"w": tensor("F32", 8, 4, seed=4), "scale": tensor("F32", seed=5)}),
    "copied experts": ("dp_shard=2", {"experts": ("U8", (2, 64), block * 2), "attention": tensor("F32", 8, 4, seed=6)}),
    "frequencies in every layer": (
        "dp_shard=2",
        {f"{i}.inv_freq": ("U8", (64,), block) for i in range(3)} | {"w": tensor("F32", 4, 4, seed=7)},
    ),
    "empty and 0-d": ("dp_shard=2", {"e": tensor("F32", 0, 4), "step": tensor("I64", seed=8)}),
    "one rank": ("dp_shard=1", {"w": tensor("F32", 8, 4, seed=9), "again": tensor("F32", 8, 4, seed=9)}),
    "uneven": ("dp_shard=4", {"w": zeros(5, 4)}),
    "fp8 of one value": ("dp_shard=2", {"w": ("F8_E4M3", (8, 4), b"\x38" * 32)}),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_meant_to_be_equal_is_no_damage(tmp_path: Path, name: str) -> None:
    mesh, tensors = HEALTHY[name]
    assert api.verify(bare(tmp_path, mesh, tensors)).findings == ()


def test_nothing_is_unknown_with_a_manifest(tmp_path: Path) -> None:
    run = shard_model(tmp_path, "dp_shard=2", EVEN)
    assert places(api.verify(run)) == []
    shutil.copyfile(run / "__1_0.distcp", run / "__0_0.distcp")
    assert not api.verify(run).ok
