"""Hold ckpt against stock libraries on mutants of small checkpoints: whatever it calls good must load there, alike.

    bin/oracle [N] [--only FORMAT …] [--seed S] [--keep DIR]

A mutant is green where `verify` (level data) finds nothing, or `gather` ends well. Then stock libraries must load the
same names, shapes, dtypes and bytes as ckpt reads and `gather` writes; where a manifest or a CRC-32 tells, they must be
those of the file that was mutated. Exit code 1 with a mutant for which this does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from formats.saved import Flat, read
from oracle.mutants import mutant
from oracle.seeds import SEEDS, Seed, load
from oracle.stock import Stock
from samples import memory_directory

from ckpt_tools import api
from ckpt_tools.errors import CkptError


class Verdict(NamedTuple):
    """What ckpt makes of a mutant."""

    verified: bool
    """`verify` finds nothing."""
    gathered: Flat | None
    """What `gather` wrote."""
    is_held: bool
    """`gather` says `verified`."""
    said: str
    """Why it is red."""
    not_checked: tuple[str, ...] = ()


def ask_ckpt(path: Path, out: Path) -> Verdict:
    """Verify a mutant, and gather it."""
    said, verified, gathered, is_held, not_checked = "", False, None, False, ()
    try:
        result = api.verify(path, level="data", num_workers=1)
        verified, not_checked = not result.findings, result.not_checked
        said = ", ".join(sorted({finding.code for finding in result.findings}))
    except CkptError as error:
        said = error.what
    shutil.rmtree(out, ignore_errors=True)
    try:
        done = api.gather(path, out, num_workers=1, allow_foreign_names=True)
        gathered, is_held, not_checked = load(out), done.verified, (*not_checked, *done.not_checked)
    except CkptError as error:
        said = said or f"gather: {error.what}"
    return Verdict(verified, gathered, is_held, said, not_checked)


def judge(seed: Seed, kind: str, found: Verdict, ours: Flat, theirs: Flat | str, intact: Flat) -> str | None:
    """Say what is wrong with a green mutant, of which ckpt read `ours`; None if nothing is."""
    unsaid = " ".join(found.not_checked)
    if isinstance(theirs, str) and not re.search(r"\bobjects: ", unsaid):
        return f"stock does not load it: {theirs}"
    if not isinstance(theirs, str) and ours != theirs:
        return f"stock loads others: {difference(ours, theirs)}"
    if found.gathered is not None and not any(_lies_below(found.gathered, ours, name) for name in ours):
        return f"gather wrote others: {difference(found.gathered, ours)}"
    if seed.holds == "all" and not ours.items() <= intact.items():
        return f"changed in spite of the manifest: {difference(ours, intact)}"
    if seed.holds != "values" or "sealed" in kind or "were swapped" in unsaid or not (found.verified or found.is_held):
        return None
    if changed := sorted(n for n in ours.keys() & intact.keys() if ours[n] != intact[n]):
        return f"changed in spite of CRC-32s: {', '.join(changed)}"
    if not ours.items() <= intact.items() and "names" not in unsaid:
        return f"changed without a word: {difference(ours, intact)}"
    return None


def _lies_below(written: Flat, values: Flat, name: str) -> bool:
    """Is what was written exactly what lies below a root, which its first name has in `name`?"""
    root = name.removesuffix(next(iter(written), ""))
    return {root + n: v for n, v in written.items()} == {n: v for n, v in values.items() if n.startswith(root)}


def difference(a: Flat, b: Flat) -> str:
    """Say what differs."""
    names = sorted(n for n in a.keys() | b if a.get(n) != b.get(n))
    shown = ", ".join(f"{n}: {(a.get(n) or ('-',))[:2]} and not {(b.get(n) or ('-',))[:2]}" for n in names[:3])
    return f"{len(names)} tensors, {shown}"


def hunt(name: str, count: int, *, seed: int, stock: Stock, keep: Path | None = None) -> tuple[Counter[str], list[str]]:
    """Try mutants of one format; return what came of them, and false greens with their numbers."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    with memory_directory() as root:
        path, out = Path(root) / "mutant", Path(root) / "out"
        path.mkdir()
        SEEDS[name].make(path)
        given, files = path / SEEDS[name].file, {p.name: p.read_bytes() for p in path.iterdir()}
        intact, good = stock.load(path), ask_ckpt(given, out)
        assert not isinstance(intact, str), intact
        assert good.verified, good.said
        assert judge(SEEDS[name], "", good, read(given), intact, intact) is None
        for number in range(count):
            kind, changed = mutant(files, random.Random(f"{name} {seed} {number}"))
            if all(files[each] == raw for each, raw in changed.items()):
                continue
            for each, raw in changed.items():
                (path / each).write_bytes(raw)
            try:
                found = _try(name, kind, given, out, stock, intact, counts)
            except Exception:
                found = traceback.format_exc()
            counts["mutants"] += 1
            if found is not None:
                wrong.append(f"{name} {seed} {number} ({kind}, {', '.join(changed)}): {found}")
                if keep is not None:
                    shutil.copytree(path, keep / f"{name}-{seed}-{number}", dirs_exist_ok=True)
            for each in changed:
                (path / each).write_bytes(files[each])
    return counts, wrong


def _try(name: str, kind: str, given: Path, out: Path, stock: Stock, intact: Flat, counts: Counter[str]) -> str | None:
    found, path = ask_ckpt(given, out), given if given.is_dir() else given.parent
    said = re.sub(r"'[^']*'|\d+", "…", found.said)[:100]
    if not found.verified and found.gathered is None:
        theirs = stock.load(path)
        counts["red"] += 1
        if not isinstance(theirs, str):
            counts["red, stock loads the same" if theirs == intact else "red, stock loads others"] += 1
            counts[f"  strict: {said}"] += theirs == intact
        return None
    if found.verified:  # a pickle whose CRC-32 fits: of objects ckpt promises no more, and unpickles none
        ours = read(given)
        theirs = stock.load(path, set(ours) if "sealed" in kind else None)
        counts["green" if found.gathered is not None else "green, gather red"] += 1
    else:  # what `gather` leaves out may be damaged
        written = found.gathered or {}
        root = next((r for r in ("", "model.", "state_dict.") if {r + n for n in written} <= intact.keys()), "")
        ours = {root + n: value for n, value in written.items()}
        theirs = stock.load(path, set(ours))
        counts["gather green, verify red"] += 1
        if isinstance(theirs, str) and ours.items() <= intact.items():  # stock wants records that hold no tensor
            return None
    counts["green with other values or names, alike in stock"] += not ours.items() <= intact.items()
    return judge(SEEDS[name], kind, found, ours, theirs, intact)


def main() -> int:
    """Try N mutants, shared out over the formats, and print what came of them."""
    parser = argparse.ArgumentParser(prog="bin/oracle", description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", default=20_000, help="mutants of all formats together")
    parser.add_argument("--only", action="append", choices=list(SEEDS), help="a format (repeatable)")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations")
    parser.add_argument("--keep", type=Path, help="where false greens are kept")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    totals, failed = Counter[str](), 0
    names = options.only or list(SEEDS)
    with contextlib.closing(Stock()) as stock:
        for name in names:
            began, count = time.monotonic(), -(-options.count // len(names))
            counts, wrong = hunt(name, count, seed=options.seed, stock=stock, keep=options.keep)
            shown = ", ".join(f"{what} {n}" for what, n in sorted(counts.items()) if not what.startswith(" "))
            print(f"oracle: {name}: {shown}; FALSE GREEN {len(wrong)} ({time.monotonic() - began:.0f} s)", flush=True)
            print("".join(f"  WRONG {line}\n" for line in wrong), end="", flush=True)
            totals, failed = totals + counts, failed + len(wrong)
    print("".join(f"{n:7d} {what}\n" for what, n in totals.most_common()), end="")
    print(f"oracle: {totals['mutants']} mutants, {failed} false greens")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
