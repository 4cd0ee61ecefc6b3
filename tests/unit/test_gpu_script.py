"""bin/gpu, which only a machine with a card can run: what it does where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

LIB = Path(__file__).resolve().parents[2] / "bin" / "lib"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(LIB))
    spec = spec_from_file_location("gpu_of_ckpt", LIB / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu", "--json", str(out), *arguments])
    return gpu.main(), json.loads(out.read_text())


def test_without_a_card_every_part_is_skipped_by_name_and_nothing_is_proven(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu.torch.cuda, "device_count", lambda: 0)
    code, document = _run(gpu, monkeypatch, tmp_path)
    assert code == document["exit_code"] == 4
    assert {part["state"] for part in document["parts"].values()} == {"skipped"}
    assert all("CUDA device" in part["why"] for part in document["parts"].values())
    assert {name for name in document["parts"] if name.startswith("memory")} == {f"memory, {c}" for c in gpu.CASES}
    assert document["versions"]["torch"]


def test_a_part_that_fails_or_hangs_is_told_and_ends(gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scripts = {"fails": "raise SystemExit('it broke')", "hangs": "import time; time.sleep(600)", "runs": "print('{}')"}
    real = subprocess.Popen

    def popen(command: list[str], **options: Any) -> subprocess.Popen[str]:
        return real([sys.executable, "-c", scripts[command[command.index("--part") + 1]]], **options)

    monkeypatch.setattr(gpu.subprocess, "Popen", popen)
    failed, hung, ran = (gpu.run_part(name, tmp_path, "cpu", 1.0 if name == "hangs" else 60.0) for name in scripts)
    assert (failed["state"], failed["why"]) == ("failed", "it broke")
    assert (hung["state"], hung["why"]) == ("failed", "not done after 1 s")
    assert (ran["state"], ran["figures"]) == ("ran", {})


@pytest.mark.full
@pytest.mark.parametrize(
    "part", ["load", "audit", "bandwidth", "memory, full"], ids=lambda part: part.partition(",")[0]
)
def test_rehearsal_of_a_part_runs_on_the_cpu(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str
) -> None:
    code, document = _run(gpu, monkeypatch, tmp_path, "--rehearse", "--only", part)
    assert document["parts"][part]["state"] == "ran", document["parts"]
    assert (code, document["rehearsal"]) == (4, True)  # it proves nothing about a GPU
