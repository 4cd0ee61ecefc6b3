"""Thousands of mutated pickles under the watch: none is executed, imports, opens or takes long.

    PYTHONPATH=tests .venv/bin/python -m corrupt.pickles [COUNT] [SEED]      22000 and 0 unless told otherwise

Two of three are a `.metadata`, the others the data.pkl of an item. What is mutated are sound ones, and the attacks of
the corpus, which make a file when they are executed. Each goes through `verify --level structure` or `inspect` in a
process with an audit hook and a memory limit (`attacks/watch.py`).
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from corrupt.attacks import pickles
from corrupt.attacks.audit import run_watched
from corrupt.attacks.opcodes import call, name, text, write_run
from corrupt.attacks.recipe import Corpus
from corrupt.attacks.zips import archive, tensor_pickle
from fuzz.mutate import mutate, random_operations
from fuzz.targets import TARGETS
from samples import memory_directory

BATCH = 2000
"""Pickles for one process: each lies in a directory of its own."""
MAX_SEED_BYTES = 1 << 14
MAX_SECONDS = 2.0
"""Of processor time, for one of them."""
KINDS = {"execution": "executions", "import": "imports", "open": "opens outside", "change": "changes outside"}


@dataclass
class Outcome:
    """What the runs showed."""

    tried: int = 0
    armed: int = 0
    """Pickles that still hold the command."""
    codes: Counter[int | None] = field(default_factory=Counter)
    deeds: Counter[str] = field(default_factory=Counter)
    """What the hook saw and the command did, by kind."""
    tracebacks: int = 0
    slowest: float = 0.0
    """Processor time of one run, in seconds."""
    peak_bytes: int = 0
    """Of resident memory, over all processes."""
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        deeds = ", ".join(f"{self.deeds[kind]} {kind}" for kind in KINDS.values())
        codes = ", ".join(f"{count} × {code}" for code, count in sorted(self.codes.items(), key=str))
        return (
            f"{self.tried} pickles, {self.armed} of them with a command to run: {deeds}, {self.tracebacks} tracebacks; "
            f"exit codes {codes}; longest {self.slowest:.2f} s, peak memory {self.peak_bytes >> 20} MiB"
        )


class Attack:
    """The pickles to mutate, and the directories that hold the mutations."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.canary = root / "canary"
        self._random = random.Random(seed)
        self._tokens = TARGETS["metadata"].tokens
        hostile = []
        for kind in ("pickle-", "exploit-"):
            corpus = Corpus(root=root / kind)
            corpus.build(only=kind)
            for case in corpus.cases.values():
                raw = (case.source / ".metadata").read_bytes()
                if len(raw) < MAX_SEED_BYTES:
                    hostile.append(raw.replace(os.fsencode(case.canary), self._canary_like(case.canary)))
            shutil.rmtree(corpus.root)
        self._metadata = (*TARGETS["metadata"].seeds, *hostile)
        command = f"touch {self.canary}"
        self.exploits = tuple(pickle.dumps(pickles.Payload(command), protocol) for protocol in range(6))
        self._items = (
            tensor_pickle(),
            tensor_pickle(function=name("os", "system"), extra=text(command)),
            tensor_pickle(storage=call(name("os", "system"), text(command))),
            *self.exploits,
        )

    def _canary_like(self, other: Path) -> bytes:
        """A canary of the same length as another one, so that a pickle stays whole."""
        own = os.fsencode(self.canary)
        return own + b"-" * (len(os.fsencode(other)) - len(own))

    def write(self, directory: Path, number: int) -> bytes:
        """Write the next checkpoint; return the pickle in it."""
        is_item = number % 3 == 2
        seeds: Sequence[bytes] = self._items if is_item else self._metadata
        chosen = self._random.choice(seeds)
        mutated = mutate(chosen, random_operations(self._random), tokens=self._tokens, others=seeds)
        if is_item:
            content = archive(mutated)
            write_run(directory, content=content, length=max(len(content), 25))
        else:
            write_run(directory)
            (directory / ".metadata").write_bytes(mutated)
        return mutated

    def executed(self) -> bool:
        """Did any of them run its command?"""
        return any(self.root.glob("canary*"))


def run_batch(attack: Attack, numbers: range, outcome: Outcome) -> None:
    """Write the checkpoints of `numbers`, and look at each of them once."""
    work = attack.root / "work"
    (work / "out").mkdir(parents=True)
    write_run(work / "sound")
    runs = []
    for number in numbers:
        source = work / str(number)
        raw = attack.write(source, number)
        outcome.armed += b"touch " in raw and b"system" in raw
        argv = ["inspect", str(source), "--tensors"] if number % 4 == 0 else ["verify", str(source)]
        argv += [] if number % 4 == 0 else ["--level", "structure"]
        own = {"id": number, "argv": argv, "roots": [str(source)], "writable": str(work / "out")}
        runs.append({**own, "destination": "", "remove": False, "then": []})
    sound = str(work / "sound")
    warm_up = [["inspect", sound, "--tensors"], ["verify", sound], ["verify", sound + "-absent"]]
    lines, problems = run_watched(work, warm_up, runs)
    outcome.problems += problems
    outcome.peak_bytes = max(outcome.peak_bytes, *(line.get("peak_bytes", 0) for line in lines))
    for result in lines:
        if "id" in result:
            _judge(result, outcome)
    shutil.rmtree(work)


def _judge(result: dict, outcome: Outcome) -> None:
    outcome.tried += 1
    outcome.codes[result["code"]] += 1
    outcome.slowest = max(outcome.slowest, result["seconds"])
    for kind, event, what in result["seen"]:
        outcome.deeds[KINDS[kind]] += 1
        outcome.problems.append(f"{result['id']}: {kind}: {event} {what}")
    if result["raised"] or "Traceback" in result["err"]:
        outcome.tracebacks += 1
        outcome.problems.append(f"{result['id']}: {(result['raised'] or result['err'])[-600:]}")
    if result["code"] not in (0, 3, 4):
        outcome.problems.append(f"{result['id']}: exit code {result['code']}: {result['err'][:400]}")
    if result["unsafe"]:
        outcome.problems.append(f"{result['id']}: raw characters in the output: {result['unsafe']}")
    if result["seconds"] > MAX_SECONDS:
        outcome.problems.append(f"{result['id']}: took {result['seconds']:.1f} s")


def run(count: int, seed: int = 0) -> Outcome:
    """Try `count` pickles: the same for the same seed, but for paths and the ids that torch makes up."""
    outcome = Outcome()
    with memory_directory() as root:
        attack = Attack(Path(root), seed)
        for start in range(0, count, BATCH):
            run_batch(attack, range(start, min(start + BATCH, count)), outcome)
        if attack.executed():
            outcome.deeds[KINDS["execution"]] += 1
            outcome.problems.append("a command was executed")
    return outcome


def main() -> int:
    """Run as many as the command line says, and print the totals."""
    count, seed = (*map(int, sys.argv[1:3]), *(22_000, 0)[len(sys.argv) - 1 :])
    outcome = run(count, seed)
    for problem in outcome.problems[:200]:
        print(problem[:600])
    print(f"seed {seed}: {outcome}")
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
