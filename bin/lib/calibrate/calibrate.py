"""`bin/calibrate`: what `ckpt estimate` says of runs whose memory others have published, as a table of Markdown."""

from __future__ import annotations

import json
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_tools import api
from ckpt_tools.estimate.case import FRAGMENTATION

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "dev" / "calibration.md"
LOW, HIGH = 0.85, 1.25
_GIB = 1 << 30
_BEGIN, _END = "<!-- bin/calibrate --update writes below -->\n", "<!-- and above -->\n"


@dataclass(frozen=True)
class Row:
    """A published figure."""

    name: str
    source: str
    model: Mapping[str, int]
    published: float
    """GiB."""
    measure: str
    options: Mapping[str, Any]
    reason: str


def rows() -> Iterator[Row]:
    """Yield every published figure."""
    found = tomllib.loads((Path(__file__).parent / "published.toml").read_text(encoding="utf-8"))
    for row in found["rows"]:
        gib = row["published"] * (10**9 / _GIB if row.get("gb") else 1)
        yield Row(
            name=row["name"],
            source=found["sources"][row["source"]],
            model=found["models"][row["model"]],
            published=gib,
            measure=row["measure"],
            options=row["options"],
            reason=row.get("reason", ""),
        )


def estimated(row: Row) -> float:
    """Return our figure for the same reading, in GiB."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 1 << 20,
        "tie_word_embeddings": False,
    } | dict(row.model)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        found = api.estimate(directory, **row.options).cases[0]
    if found.tracked is None:
        raise SystemExit(f"{row.name}: not tracked: {found.why_not_tracked}")
    peak = found.tracked.peak
    by_measure = {"allocated": peak, "reserved": peak * (1 + FRAGMENTATION), "device": found.needed}
    return by_measure[row.measure] / _GIB


def main(arguments: list[str]) -> int:
    """Print the table; `--update` writes it into the page. Other arguments choose rows by what their names contain."""
    words = [word for word in arguments if word != "--update"]
    lines = ["| run | source | read | published GiB | ours | ratio | |", "|---|---|---|---:|---:|---:|---|"]
    wrong = 0
    for row in rows():
        if words and not any(word in row.name for word in words):
            continue
        ours = estimated(row)
        ratio = ours / row.published
        wrong += not (LOW <= ratio <= HIGH or row.reason)
        source = row.source.split(" ")[0].split("/")[-1]
        line = (
            f"| {row.name} | {source} | {row.measure} | {row.published:.1f} | {ours:.1f} | {ratio:.2f} | {row.reason} |"
        )
        print(line, flush=True)
        lines.append(line)
    if "--update" in arguments:
        text = PAGE.read_text(encoding="utf-8")
        before, rest = text.split(_BEGIN)
        after = rest.split(_END)[1]
        PAGE.write_text(before + _BEGIN + "\n" + "\n".join(lines) + "\n\n" + _END + after, encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
