"""How time and memory grow with tensors and ranks: sparse checkpoints of 1 TB, whose data nobody has to store."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from measure import Sample, measure

TENSORS = (1_000, 10_000, 30_000, 100_000)
RANKS = (8, 64, 512, 4096)
TENSORS_PER_FILE = 500
TOTAL_BYTES = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One command on one checkpoint."""

    command: str
    """Its name in the table."""
    num_tensors: int
    num_files: int
    num_ranks: int | None
    """Ranks of the mesh; None for commands that have none."""
    samples: tuple[Sample, ...]

    @property
    def median_seconds(self) -> float:
        """Median wall time of the whole process."""
        return statistics.median(sample.seconds for sample in self.samples)

    @property
    def median_cpu_seconds(self) -> float:
        """Median processor time."""
        return statistics.median(sample.cpu_seconds for sample in self.samples)

    @property
    def peak_rss_bytes(self) -> int:
        """Largest peak."""
        return max(sample.peak_rss_bytes for sample in self.samples)


def run_scale(
    ckpt: str, work: Path, *, repeats: int, tensors: Sequence[int] = TENSORS, ranks: Sequence[int] = RANKS
) -> Iterator[Case]:
    """Yield the cases: all commands against the number of tensors, then `shard --dry-run` against that of ranks."""
    for num_tensors in tensors:
        source = work / "sparse"
        num_files = max(1, num_tensors // TENSORS_PER_FILE)
        make = [sys.executable, str(Path(__file__).with_name("sparse.py")), str(source)]
        # In a process of its own: what this one takes, `measure` cannot tell from what the command takes.
        subprocess.run([*make, str(num_tensors), str(num_files), str(TOTAL_BYTES)], check=True)
        plan = [ckpt, "shard", str(source), str(work / "none"), "--dry-run", "--mesh"]
        commands: list[tuple[str, list[str], int | None]] = [
            ("inspect", [ckpt, "inspect", str(source)], None),
            ("verify --level structure", [ckpt, "verify", str(source), "--level", "structure"], None),
            ("shard --dry-run", [*plan, f"dp_shard={ranks[0]}"], ranks[0]),
        ]
        if num_tensors == tensors[-1]:
            commands += [("shard --dry-run", [*plan, f"dp_shard={number}"], number) for number in ranks[1:]]
        for name, command, num_ranks in commands:
            samples = tuple(measure(command, work / "log") for _ in range(repeats))
            yield Case(command=name, num_tensors=num_tensors, num_files=num_files, num_ranks=num_ranks, samples=samples)
        shutil.rmtree(source)


def to_markdown(cases: Sequence[Case]) -> str:
    """Return the table."""
    lines = [
        "| command | tensors | files | ranks | seconds | processor seconds | peak MB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for case in sorted(cases, key=lambda case: (case.command, case.num_ranks or 0, case.num_tensors)):
        lines.append(
            f"| {case.command} | {case.num_tensors:,} | {case.num_files} | {case.num_ranks or '–'} "
            f"| {case.median_seconds:.2f} | {case.median_cpu_seconds:.2f} | {case.peak_rss_bytes / 1e6:.0f} |"
        )
    return "\n".join(lines)


def to_json(cases: Sequence[Case]) -> list[dict[str, object]]:
    """All figures, unrounded."""
    return [
        {
            "command": case.command,
            "num_tensors": case.num_tensors,
            "num_files": case.num_files,
            "num_ranks": case.num_ranks,
            "seconds": [sample.seconds for sample in case.samples],
            "median_seconds": case.median_seconds,
            "median_cpu_seconds": case.median_cpu_seconds,
            "peak_rss_bytes": case.peak_rss_bytes,
        }
        for case in cases
    ]
