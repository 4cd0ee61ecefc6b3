"""Hold ckpt against stock libraries on mutants of small checkpoints: whatever it calls good must load there, alike.

    bin/oracle [N] [--only FORMAT …] [--seed S] [--keep DIR]

A mutant is green where `verify` (level data) finds nothing, or `gather` ends and says `verified`. Then stock libraries
must load the same names, shapes, dtypes and bytes as ckpt reads and `gather` writes; where a manifest or a CRC-32
tells, they must be those of the file that was mutated. Exit code 1 with a mutant for which this does not hold.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(HERE.parent))

from formats.saved import Flat, read  # noqa: E402
from oracle.mutants import Files, mutant  # noqa: E402
from oracle.seeds import SEEDS, Seed, load_safetensors  # noqa: E402
from oracle.stock import Stock  # noqa: E402
from samples import memory_directory  # noqa: E402

from ckpt_tools import api  # noqa: E402
from ckpt_tools.errors import CkptError  # noqa: E402


@dataclass
class Tally:
    """What came of the mutants of one format."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """False greens: the number of the mutant, and why."""
    strict: Counter[str] = field(default_factory=Counter)
    """What ckpt says of mutants that stock loads with the values of the intact file."""


@dataclass(frozen=True)
class Verdict:
    """What ckpt makes of a mutant."""

    verified: bool
    """`verify` finds nothing."""
    gathered: Flat | None
    """What `gather` wrote, in any case."""
    is_held: bool
    """`gather` says `verified`."""
    said: str
    """Why it is red."""
    not_checked: tuple[str, ...] = ()


def ask_ckpt(path: Path, out: Path) -> Verdict:
    """Verify a mutant, gather it, and read it where one of them calls it good."""
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
        gathered, is_held, not_checked = load_safetensors(out), done.verified, (*not_checked, *done.not_checked)
    except CkptError as error:
        said = said or f"gather: {error.what}"
    return Verdict(verified, gathered, is_held, said, not_checked)


def judge(seed: Seed, kind: str, found: Verdict, ours: Flat, theirs: Flat | str, intact: Flat) -> str | None:
    """Say what is wrong with a green mutant, of which ckpt read `ours`; None if nothing is."""
    if isinstance(theirs, str) and not any(text.startswith("objects: ") for text in found.not_checked):
        return f"stock does not load it: {theirs}"
    if not isinstance(theirs, str) and ours != theirs:
        return f"stock loads others: {_difference(ours, theirs)}"
    if found.gathered is not None and not _root_of(found.gathered, ours):
        return f"gather wrote others: {_difference(found.gathered, ours)}"
    if seed.holds == "all" and not ours.items() <= intact.items():
        return f"changed in spite of the manifest: {_difference(ours, intact)}"
    if not (found.verified or found.is_held) or "sealed" in kind or "were swapped" in " ".join(found.not_checked):
        return None
    if seed.holds and (changed := sorted(n for n in ours.keys() & intact.keys() if ours[n] != intact[n])):
        return f"changed in spite of CRC-32s: {', '.join(changed)}"
    return None


def _root_of(written: Flat, values: Flat) -> tuple[str, ...]:
    """Return the roots below which exactly the written values lie, with their names."""
    roots = {name.removesuffix(next(iter(written), "")) for name in values}
    return tuple(
        r
        for r in roots
        if {r + n: v for n, v in written.items()} == {n: v for n, v in values.items() if n.startswith(r)}
    )


def _difference(a: Flat, b: Flat) -> str:
    names = sorted(n for n in a.keys() | b if a.get(n) != b.get(n))
    return ", ".join(f"{n}: {(a.get(n) or ('-',))[:2]} and {(b.get(n) or ('-',))[:2]}" for n in names[:3])


def hunt(name: str, count: int, *, seed: int, stock: Stock, keep: Path | None = None) -> Tally:
    """Try mutants of one format."""
    tally = Tally()
    with memory_directory() as root:
        path, out = Path(root) / "mutant", Path(root) / "out"
        path.mkdir()
        SEEDS[name].make(path)
        files: Files = {p.name: p.read_bytes() for p in path.iterdir() if p.is_file()}
        intact = stock.load(name, path)
        good = ask_ckpt(path / SEEDS[name].file, out)
        assert good.verified, good.said
        assert good.gathered, good.said
        assert not isinstance(intact, str), intact
        assert judge(SEEDS[name], "", good, read(path / SEEDS[name].file), intact, intact) is None
        for number in range(count):
            rng = random.Random(f"{name} {seed} {number}")
            kind, changed = mutant(files, rng)
            if all(files[each] == raw for each, raw in changed.items()):
                tally.counts["same"] += 1
                continue
            for each, raw in changed.items():
                (path / each).write_bytes(raw)
            try:
                wrong = _try(name, kind, path, out, stock, intact, tally)
            except Exception:
                wrong = traceback.format_exc()
            if wrong is not None:
                tally.counts["FALSE GREEN"] += 1
                tally.wrong.append(f"{name} {seed} {number} ({kind}, {', '.join(changed)}): {wrong}")
                if keep is not None:
                    shutil.copytree(path, keep / f"{name}-{seed}-{number}", dirs_exist_ok=True)
            for each in changed:
                (path / each).write_bytes(files[each])
    return tally


def _try(name: str, kind: str, path: Path, out: Path, stock: Stock, intact: Flat, tally: Tally) -> str | None:
    seed = SEEDS[name]
    found = ask_ckpt(path / seed.file, out)
    if not found.verified and found.gathered is None:
        theirs = stock.load(name, path)
        tally.counts["red"] += 1
        if theirs == intact:
            tally.counts["red, stock loads the same"] += 1
            tally.strict[re.sub(r"'[^']*'|\d+", "…", found.said)[:110]] += 1
        elif not isinstance(theirs, str):
            tally.counts["red, stock loads others"] += 1
        return None
    if found.verified:
        ours = read(path / seed.file)
        # A pickle with a CRC-32 that fits: of objects ckpt promises no more, and unpickles none.
        theirs = stock.load(name, path, set(ours) if "sealed" in kind else None)
        tally.counts["green" if found.gathered is not None else "green, gather red"] += 1
        if found.gathered is None:
            tally.strict[re.sub(r"'[^']*'|\d+", "…", found.said)[:110]] += 1
    else:  # what it leaves out may be damaged
        assert found.gathered is not None
        root = next((r for r in ("", "model.", "state_dict.") if {r + n for n in found.gathered} <= intact.keys()), "")
        ours = {root + n: value for n, value in found.gathered.items()}
        theirs = stock.load(name, path, set(ours))
        tally.counts["red, gather green"] += 1
        tally.strict["(gather green) " + re.sub(r"'[^']*'|\d+", "…", found.said)[:95]] += 1
        if isinstance(theirs, str) and ours.items() <= intact.items():  # stock wants records that hold no tensor
            tally.counts["salvaged: gather wrote what was saved, stock does not load it"] += 1
            return None
    wrong = judge(seed, kind, found, ours, theirs, intact)
    if wrong is None and not ours.items() <= intact.items():
        tally.counts["green, changed"] += 1
        if (
            seed.holds == "values"
            and "sealed" not in kind
            and not re.search("names|swapped", " ".join(found.not_checked))
        ):
            return f"changed without a word: {_difference(ours, intact)}"
    return wrong


def main() -> int:
    """Try N mutants, shared out over the formats, and print what came of them."""
    parser = argparse.ArgumentParser(prog="bin/oracle", description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", default=20_000, help="mutants of all formats together")
    parser.add_argument("--only", action="append", choices=list(SEEDS), help="a format (repeatable)")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations")
    parser.add_argument("--keep", type=Path, help="where false greens are kept")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    tempfile.tempdir = None
    names = options.only or list(SEEDS)
    totals, wrong, strict = Counter(), [], defaultdict(Counter)
    with Stock() as stock:
        for name in names:
            began = time.monotonic()
            tally = hunt(name, -(-options.count // len(names)), seed=options.seed, stock=stock, keep=options.keep)
            seconds = time.monotonic() - began
            shown = ", ".join(f"{n} {what}" for what, n in sorted(tally.counts.items()))
            print(f"oracle: {name}: {shown} ({seconds:.0f} s)", flush=True)
            totals += tally.counts
            wrong += tally.wrong
            for line in tally.wrong:
                print(f"  WRONG {line}", flush=True)
            for said, n in tally.strict.most_common():
                strict[said][name] += n
    print("Red, and stock loads the same values:")
    for said, where in sorted(strict.items(), key=lambda row: -row[1].total()):
        print(f"  {where.total():5d}  {said}  [{', '.join(f'{k} {n}' for k, n in where.most_common(4))}]")
    print(f"oracle: {', '.join(f'{n} {what}' for what, n in sorted(totals.items()))}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
