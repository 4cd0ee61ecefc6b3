"""`PYTHONPATH=tests python -m corrupt.attacks [PREFIX]`: run the corpus, or a part of it, and print the totals."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from corrupt.attacks.audit import GROUPS, Report, run_group
from corrupt.attacks.recipe import ALL, Corpus
from samples import memory_directory


def main() -> int:
    if "--list" in sys.argv:
        for recipe in ALL.values():
            print(f"{recipe.name:<40} {recipe.tries}")
        return 0
    total = Report()
    start = time.monotonic()
    with memory_directory() as directory:
        corpus = Corpus(root=Path(directory))
        corpus.build(only=sys.argv[1] if len(sys.argv) > 1 else "")
        print(f"built {len(corpus.cases)} in {time.monotonic() - start:.1f} s")
        for group in GROUPS:
            begin = time.monotonic()
            report = run_group(corpus, group)
            print(f"{group}: {report} in {time.monotonic() - begin:.1f} s")
            total.add(report)
        shutil.rmtree(directory, ignore_errors=True)
        Path(directory).mkdir()
    total.num_recipes = len(corpus.cases)
    for problem in total.problems[:500]:
        print(problem[:600])
    slowest = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in total.seconds.most_common(12))
    print(f"slowest: {slowest}; all {sum(total.seconds.values()):.1f} s")
    print(total)
    return 1 if total.problems else 0


if __name__ == "__main__":
    sys.exit(main())
