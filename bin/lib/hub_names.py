"""Writes ckpt_tools/maps/transformers.txt, the names of the installed transformers' models; takes some minutes.

With --check CLASS… says for which of these classes, and of those that they are made of, the file differs.
"""

from __future__ import annotations

import multiprocessing
import sys
import warnings
from pathlib import Path

from hub_models import Architecture, architectures, observe
from hub_table import render, sections_of

FILE = Path(__file__).resolve().parents[2] / "ckpt_tools" / "maps" / "transformers.txt"


def attempt(name: str) -> tuple[str, Architecture | None, str]:
    """Observe one class; or say why it does not build."""
    try:
        return name, observe(name), ""
    except Exception as error:
        return name, None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def main(arguments: list[str]) -> int:
    """Write or check; the exit code."""
    if arguments and arguments[0] != "--check":
        print("usage: bin/names [--check CLASS…]", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore")
    if arguments[1:]:
        return check(arguments[1:])
    known = architectures()
    if arguments:
        return check(known)
    with multiprocessing.get_context("fork").Pool() as pool:
        results = pool.map(attempt, known, chunksize=4)
    observed = {name: one for name, one, _ in results if one is not None}
    FILE.write_text(render(observed), encoding="utf-8")
    for name, one, why in results:
        if one is None:
            print(f"not known: {name}: {why}")
    print(f"wrote {FILE.name}: {len(observed)} of {len(known)} classes")
    return 0


def check(names: list[str]) -> int:
    """Compare the sections of some classes with the file's; 1 when one differs."""
    written = sections_of(FILE.read_text(encoding="utf-8"))
    stale = []
    for name in names:
        _, one, why = attempt(name)
        if one is None:
            stale += [f"{name}: {why}"] if name in written else []
            continue
        observed = {name: one}
        waiting = [part.kind for part in one.parts]
        while waiting:
            kind = waiting.pop()
            if kind not in observed:
                _, part, _ = attempt(kind)
                if part is not None:
                    observed[kind] = part
                    waiting += [inner.kind for inner in part.parts]
        made = sections_of(render(observed))
        stale += [kind for kind in observed if resolved(kind, made) != resolved(kind, written)]
    for line in dict.fromkeys(stale):
        print(f"differs: {line}")
    return 1 if stale else 0


def resolved(name: str, sections: dict[str, list[str]]) -> list[str]:
    """Return the lines of a section, with the names that it has from another one."""
    lines = sections.get(name, [])
    like = next((line.split()[1] for line in lines if line.startswith("like ")), None)
    names = [line for line in sections[like] if is_name(line)] if like else []
    return [line for line in lines if not line.startswith("like ")] + names


def is_name(line: str) -> bool:
    """Is it a line of names?"""
    words = line.split()
    return len(words) == 1 or words[0].startswith("?") or words[0] == "one-of"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
