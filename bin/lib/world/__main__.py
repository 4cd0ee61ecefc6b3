"""Runs preflight on every example that the trainers' own releases ship, and holds it against what is expected.

    bin/world [--update] [--show] [PROJECT …]

expected.tsv says what each example gets; judged.tsv says which error findings are true and why. The exit code is 1 when
an outcome differs from expected.tsv, when an error was not judged, when a config with unread options is green, or when
the package index cannot be reached.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import scores  # noqa: E402
from examples import find_examples  # noqa: E402
from outcomes import CRASH, ERROR, GREEN, NOT_CHECKED, REFUSED, Outcome, judge  # noqa: E402
from releases import IndexUnreachableError, Release, cache_directory, pinned, rows, unpacked  # noqa: E402

EXPECTED, JUDGED = HERE / "expected.tsv", HERE / "judged.tsv"
HEAD = "# Release and example, outcome, framework, errors and warnings by code. Written by bin/world --update."


def main(arguments: list[str]) -> int:
    """Run; the exit code."""
    parser = argparse.ArgumentParser(prog="bin/world", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("projects", nargs="*", metavar="PROJECT", help="only these (default: all of releases.tsv)")
    parser.add_argument("--update", action="store_true", help="rewrite the table of expected outcomes")
    parser.add_argument("--show", action="store_true", help="print every error and warning")
    given = parser.parse_args(arguments)
    releases = [one for one in pinned() if not given.projects or one.project in given.projects]
    if not releases:
        parser.error(f"releases.tsv has none of: {' '.join(given.projects)}")
    try:
        trees = [(release, unpacked(release)) for release in releases]
    except IndexUnreachableError as error:
        print(f"world: FAILED: the package index cannot be reached: {error}", file=sys.stderr)
        print(f"world: nothing was run. Releases that were fetched lie in {cache_directory()}", file=sys.stderr)
        return 1
    found: dict[str, Outcome] = {}
    heads = ("green", "error", "not checked", "no config", "error findings", "warnings", "seconds")
    print(f"{'release':22}{'files':>7}{'read':>7}" + "".join(f"{head:>{len(head) + 2}}" for head in heads))
    for release, tree in trees:
        start = time.perf_counter()
        mine = run(release, tree)
        if not mine:
            continue  # only names are taken from it
        print_row(release.name, mine, time.perf_counter() - start)
        found |= mine
    if len(trees) > 1:
        print_row("all", found, None)
    if given.show:
        show(found)
    newest = {release.project: release.name for release, _ in trees}
    text = scores.table(found, {*newest.values()}, rows(JUDGED))
    print(text)
    if given.update and not given.projects:
        scores.write(text)
    return check(found, {release.name for release, _ in trees}, update=given.update)


def run(release: Release, tree: Path) -> dict[str, Outcome]:
    """Return the outcome of every example of a release."""
    # A release is where its users start from: relative paths begin there.
    with tempfile.TemporaryDirectory(prefix="ckpt-world-") as scratch, contextlib.chdir(tree):
        return {
            f"{release.name}/{name}": judge(path) for name, path in find_examples(release.project, tree, Path(scratch))
        }


def print_row(name: str, outcomes: dict[str, Outcome], seconds: float | None) -> None:
    """Print a line of the summary."""
    verdicts = Counter(one.verdict for one in outcomes.values())
    crashed = f"  {verdicts[CRASH]} CRASHED" if verdicts[CRASH] else ""
    counts = [sum(one.count(severity) for one in outcomes.values()) for severity in ("error", "warning")]
    read = len(outcomes) - verdicts[REFUSED] - verdicts[CRASH]
    cells = (verdicts[GREEN], verdicts[ERROR], verdicts[NOT_CHECKED], verdicts[REFUSED], *counts)
    numbers = "".join(f"{cell:{width}}" for cell, width in zip(cells, (7, 7, 13, 11, 16, 10), strict=True))
    took = "" if seconds is None else f"{seconds:9.1f}"
    print(f"{name:22}{len(outcomes):7}{read:7}{numbers}{took}{crashed}", flush=True)


def show(found: dict[str, Outcome]) -> None:
    """Print every finding, and why files were refused."""
    for name, outcome in found.items():
        print(f"\n{name}: {outcome.verdict}, {outcome.framework}: {outcome.why}")
        for one in outcome.findings:
            print(f"    {one.severity} {one.code} at {one.where}: {one.what}")


def check(found: dict[str, Outcome], names: set[str], *, update: bool) -> int:
    """Hold outcomes against both tables; the exit code."""
    judged = rows(JUDGED)
    unjudged = [
        (name, one)
        for name, outcome in found.items()
        for one in outcome.findings
        if one.severity == "error"
        and not any(fnmatchcase(name, row[0]) and (one.code, one.where) == (row[1], row[2]) for row in judged)
    ]
    for name, one in unjudged:
        print(f"not judged: {name}: {one.code} at {one.where}: {one.what}")
    unread = [name for name, one in found.items() if one.verdict == GREEN and one.unread]
    for name in unread:
        print(f"green with unread options: {name}: {', '.join(found[name].unread)}")
    crashes = [name for name, outcome in found.items() if outcome.verdict == CRASH]
    for name in crashes:
        print(f"crashed: {name}\n{found[name].why}")
    new = {name: f"{one.verdict}\t{one.framework}\t{one.codes}" for name, one in found.items()}
    all_old = {row[0]: "\t".join(row[1:]) for row in rows(EXPECTED)} if EXPECTED.exists() else {}
    old = {name: line for name, line in all_old.items() if name.partition("/")[0] in names}
    if update:
        kept = {name: line for name, line in all_old.items() if name not in old}
        lines = [f"{name}\t{line}" for name, line in sorted((kept | new).items())]
        EXPECTED.write_text("\n".join([HEAD, *lines, ""]), encoding="utf-8")
        print(f"wrote {EXPECTED.name}: {len(lines)} examples")
    drifted = [] if update else sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    for name in drifted:
        print(f"differs: {name}\n    expected {old.get(name, 'nothing')}\n    found    {new.get(name, 'nothing')}")
    if drifted:
        print(f"{len(drifted)} outcomes differ from {EXPECTED.name}; where that is right: bin/world --update")
    return 1 if drifted or unjudged or unread or crashes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
