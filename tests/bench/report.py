"""From samples to medians, ratios and a Markdown table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from measure import Sample

Kind = Literal["ckpt", "cp", "peer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contender in one job."""

    job: str
    """What was done: shard, gather, reshard or verify."""
    contender: str
    """Who did it."""
    kind: Kind
    """Ours, the yardstick, or another tool that does the same job."""
    samples: tuple[Sample, ...]
    """Its runs; empty when it failed."""
    times: int = 1
    """How many times the model's bytes were written."""

    @property
    def median_seconds(self) -> float | None:
        """Median wall time."""
        return statistics.median(sample.seconds for sample in self.samples) if self.samples else None

    @property
    def peak_rss_bytes(self) -> int | None:
        """Largest peak over all runs."""
        return max((sample.peak_rss_bytes for sample in self.samples), default=None)


def _fastest(rows: Sequence[Row], job: str, kind: Kind) -> float | None:
    medians = [row.median_seconds for row in rows if row.job == job and row.kind == kind]
    return min((seconds for seconds in medians if seconds is not None), default=None)


def ratio_to(row: Row, rows: Sequence[Row], kind: Kind) -> float | None:
    """How many times as long as the fastest of `kind` in the same job `row` takes."""
    mine, other = row.median_seconds, _fastest(rows, row.job, kind)
    return None if mine is None or other is None else mine / other


def to_json(rows: Sequence[Row], num_bytes: int) -> list[dict[str, object]]:
    """All figures, unrounded; null where there is none."""
    return [
        {
            "job": row.job,
            "contender": row.contender,
            "kind": row.kind,
            "seconds": [sample.seconds for sample in row.samples],
            "median_seconds": row.median_seconds,
            "throughput_bytes_per_s": row.times * num_bytes / row.median_seconds if row.median_seconds else None,
            "ratio_to_cp": ratio_to(row, rows, "cp"),
            "ratio_to_fastest_peer": ratio_to(row, rows, "peer"),
            "peak_rss_bytes": row.peak_rss_bytes,
        }
        for row in rows
    ]


def to_markdown(rows: Sequence[Row], num_bytes: int) -> str:
    """A table for people: × cp and × peer are times as long, less is better."""
    lines = [
        "| job | contender | median s | min – max s | GB/s | × cp | × fastest peer | peak RSS MB |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        seconds = row.median_seconds
        if seconds is None or row.peak_rss_bytes is None:
            lines.append(f"| {row.job} | {row.contender} | failed | | | | | |")
            continue
        times = [sample.seconds for sample in row.samples]
        to_cp, to_peer = ratio_to(row, rows, "cp"), ratio_to(row, rows, "peer")
        cells = (
            row.job,
            row.contender,
            f"{seconds:.2f}",
            f"{min(times):.2f} – {max(times):.2f}",
            f"{row.times * num_bytes / seconds / 1e9:.2f}",
            "" if to_cp is None else f"{to_cp:.2f}",
            "" if to_peer is None else f"{to_peer:.2f}",
            f"{row.peak_rss_bytes / 1e6:.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
