"""The bench itself: its figures, its generator, and one small run of the whole."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

HERE = Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def _bench_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


def _rows():
    from measure import Sample
    from report import Row

    def row(contender, kind, *seconds):
        samples = tuple(Sample(seconds=s, peak_rss_bytes=int(s * 1e6)) for s in seconds)
        return Row(job="shard", contender=contender, kind=kind, samples=samples)

    return [
        row("ckpt", "ckpt", 3.0, 1.0, 2.0),
        row("cp", "cp", 2.5, 2.5, 1.5),
        row("slow", "peer", 30.0),
        row("quick", "peer", 10.0, 20.0),
        row("broken", "peer"),
    ]


def test_report_rows_give_medians_and_ratios() -> None:
    from report import ratio_to

    ours, copy, _, quick, broken = rows = _rows()
    assert ours.median_seconds == 2.0
    assert ours.peak_rss_bytes == 3_000_000
    assert ratio_to(ours, rows, "cp") == pytest.approx(0.8)
    assert ratio_to(ours, rows, "peer") == pytest.approx(2.0 / 15.0)
    assert ratio_to(copy, rows, "cp") == 1.0
    assert ratio_to(quick, rows, "peer") == 1.0
    assert ratio_to(broken, rows, "cp") is None


def test_report_table_shows_a_failed_peer_as_failed() -> None:
    from report import to_markdown

    lines = to_markdown(_rows(), 4_000_000_000).splitlines()
    assert lines[2] == "| shard | ckpt | 2.00 | 1.00 – 3.00 | 2.00 | 0.80 | 0.13 | 3 |"
    assert lines[-1].startswith("| shard | broken | failed |")


def test_measure_child_reports_time_and_the_peak_of_the_largest_process(tmp_path: Path) -> None:
    # The grandchild is the large one; measured from a small process, as bin/bench is.
    grow = "import time; x = bytearray(150_000_000); time.sleep(0.2)"
    command = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grow!r}])"]
    script = (
        "import json, sys; from pathlib import Path; from measure import measure; "
        "sample = measure(json.loads(sys.argv[1]), Path(sys.argv[2])); "
        "print(sample.seconds, sample.peak_rss_bytes)"
    )
    outer = [sys.executable, "-c", script, json.dumps(command), str(tmp_path / "log")]
    done = subprocess.run(outer, cwd=HERE, capture_output=True, text=True, check=True)
    seconds, peak = done.stdout.split()
    assert float(seconds) >= 0.2
    assert 150_000_000 < int(peak) < 200_000_000


def test_measure_failing_command_raises_with_its_last_words(tmp_path: Path) -> None:
    from measure import CommandError, measure

    with pytest.raises(CommandError, match=r"exit code 3[\s\S]*no luck"):
        measure(["sh", "-c", "echo no luck >&2; exit 3"], tmp_path / "log")


def test_generate_directory_is_an_indexed_safetensors_checkpoint_of_about_the_size(tmp_path: Path) -> None:
    from generate import generate

    generate(tmp_path / "hf", 3_000_000, 3, 64)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == pytest.approx(3_000_000, rel=0.05)
    assert len(set(index["weight_map"].values())) == 3
    for file in set(index["weight_map"].values()):
        with safe_open(tmp_path / "hf" / file, framework="np") as opened:
            assert set(opened.keys()) == {name for name, at in index["weight_map"].items() if at == file}


@pytest.mark.full
@pytest.mark.zoo
def test_bench_small_run_prints_every_job_and_leaves_nothing(tmp_path: Path) -> None:
    options = "--size 2MB --hidden 64 --files 2 --ranks 4 --repeats 1 --no-peers --json"
    command = [sys.executable, str(HERE / "run.py"), *options.split(), "--workdir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    jobs = ["shard", "gather", "reshard", "verify", "merge", "export", "gather-bin", "gather-ranks", "dequantize"]
    jobs += ["gather-zero"] * (importlib.util.find_spec("deepspeed") is not None)
    assert [(row["job"], row["kind"]) for row in results] == [(j, k) for j in jobs for k in ("ckpt", "cp")]
    assert all(row["median_seconds"] > 0 for row in results)
    assert list(tmp_path.iterdir()) == []
