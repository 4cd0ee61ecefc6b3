"""Memory grows with the tensors and not faster; it does not grow with the ranks of a plan that is only printed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_tools import api

pytestmark = pytest.mark.full


HERE = Path(__file__).resolve().parent
CKPT = str(Path(sys.prefix, "bin", "ckpt"))
# `measure` sees nothing below the memory of its own process, which must therefore be a small one.
MEASURE = (
    "import json, sys; from pathlib import Path; from measure import measure; "
    "print(measure(json.loads(sys.argv[1]), Path(sys.argv[2])).peak_rss_bytes)"
)
TERABYTE = 10**12


def peak_bytes(log: Path, *arguments: str) -> int:
    """Peak memory of the whole process `ckpt …`."""
    command = [sys.executable, "-c", MEASURE, json.dumps([CKPT, *arguments]), str(log)]
    return int(subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True).stdout)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Three checkpoints of 1 TB in holes, each of twice as many tensors and files as the one before."""
    root = tmp_path_factory.mktemp("sparse")
    made = {}
    for num_tensors in (8_000, 16_000, 32_000):
        made[num_tensors] = root / str(num_tensors)
        options = [str(made[num_tensors]), str(num_tensors), str(num_tensors // 400), str(TERABYTE)]
        subprocess.run([sys.executable, str(HERE / "sparse.py"), *options], check=True)
    return made


def test_sparse_checkpoint_is_large_and_takes_no_room(sparse: dict[int, Path]) -> None:
    described = api.open_checkpoint(sparse[8_000])
    assert len(described.tensors) == 8_000
    assert described.total_bytes == pytest.approx(TERABYTE, rel=0.02)
    assert sum(path.stat().st_blocks * 512 for path in sparse[8_000].iterdir()) < 20_000_000


@pytest.mark.parametrize("command", ["inspect", "verify", "shard"])
def test_memory_is_linear_in_the_tensors(sparse: dict[int, Path], tmp_path: Path, command: str) -> None:
    peaks = []
    for path in sparse.values():
        more = {
            "inspect": [],
            "verify": ["--level", "structure"],
            "shard": [str(tmp_path / "none"), "--mesh", "dp_shard=64", "--dry-run"],
        }[command]
        peaks.append(peak_bytes(tmp_path / "log", command, str(path), *more))
    small, middle, large = peaks
    # Twice as many more tensors take twice as much more, and some slack for how an allocator rounds.
    assert large - middle <= 2.2 * (middle - small) + 6_000_000, peaks
    assert (large - small) / 24_000 < 3_000, peaks


def test_memory_of_a_dry_run_does_not_grow_with_the_ranks(sparse: dict[int, Path], tmp_path: Path) -> None:
    few, many = (
        peak_bytes(tmp_path / "log", "shard", str(sparse[8_000]), str(tmp_path / "none"), "--mesh", mesh, "--dry-run")
        for mesh in ("dp_shard=8", "dp_shard=4096")
    )
    assert many <= few + 20_000_000


def test_bench_scale_prints_a_row_per_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    from scale import run_scale, to_json, to_markdown

    cases = list(run_scale(CKPT, tmp_path, repeats=1, tensors=(10, 20), ranks=(2, 4)))
    assert [(case.command.split()[0], case.num_tensors, case.num_ranks) for case in cases] == [
        *(("inspect", 10, None), ("verify", 10, None), ("shard", 10, 2)),
        *(("inspect", 20, None), ("verify", 20, None), ("shard", 20, 2), ("shard", 20, 4)),
    ]
    lines = to_markdown(cases).splitlines()
    assert len(lines) == 2 + len(cases)
    assert lines[2].startswith("| inspect | 10 | 1 | – | ")
    assert [row["num_ranks"] for row in to_json(cases)] == [case.num_ranks for case in cases]
    assert {path.name for path in tmp_path.iterdir()} == {"log"}
