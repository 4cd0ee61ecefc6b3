"""Prints how many of transformers' model classes the table of names covers, and why it lacks the others.

Compares files alone: the table, and hub_gaps.tsv, which bin/names writes beside it. Exits with 1 where they contradict
each other, or the installed transformers is another release than theirs.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "ckpt_tools" / "checkpoint" / "names" / "transformers.txt"
GAPS = Path(__file__).with_suffix(".tsv")


def write_gaps(release: str, num_classes: int, reasons: dict[str, str]) -> None:
    """Write the classes that the table lacks, each with the reason."""
    lines = [
        f"# {num_classes} classes of transformers {release}; written by bin/names",
        *map("\t".join, reasons.items()),
    ]
    GAPS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_gaps() -> tuple[str, int, dict[str, str]]:
    """Return the release, how many classes it has, and class → why the table lacks it."""
    head, *lines = GAPS.read_text(encoding="utf-8").splitlines()
    found = re.fullmatch(r"# (\d+) classes of transformers (\S+); written by bin/names", head)
    assert found is not None, head
    return found[2], int(found[1]), dict(line.split("\t", 1) for line in lines)


def reason_of(error: Exception) -> str:
    """Return why a class does not build from its default config."""
    if needed := re.search(r"requires the (\S+) library", str(error)):
        return f"needs {needed[1]}"
    said = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"does not build from its default config: {type(error).__name__}: {said[:110]}"


def main() -> int:
    """Print one line, and what is wrong; the exit code."""
    release, num_classes, gaps = read_gaps()
    text = TABLE.read_text(encoding="utf-8")
    covered = set(re.findall(r"^\[(\S+)\]$", text, re.MULTILINE))
    installed = metadata.version("transformers")
    wrong = [f"{name} is in the table and among the gaps" for name in sorted(covered & gaps.keys())]
    wrong += [f"{name} has no reason" for name, why in gaps.items() if not why]
    if len(covered) + len(gaps) != num_classes:
        wrong.append(f"{len(covered)} covered and {len(gaps)} gaps are not {num_classes} classes")
    if f"# of transformers {release}\n" not in text or installed != release:
        wrong.append(f"table and gaps must be of transformers {installed}: run bin/names")
    whys = Counter(why.partition(":")[0] for why in gaps.values()).most_common()
    plural = {"does not build from its default config": "do not build from their default config"}
    shown = ", ".join(f"{count} {plural.get(why, why.replace('needs', 'need'))}" for why, count in whys)
    print(f"{len(covered):,} of {num_classes:,} classes; {len(gaps)} absent: {shown}", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
