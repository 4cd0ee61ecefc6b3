"""Writes checkpoint/names/transformers.txt, the names of the installed transformers' models; takes some minutes.

Beside it, hub_gaps.tsv says which classes it lacks, and why. CLASS… adds or replaces these and what they are made of
alone. With --check CLASS… says for which of these classes, and of those that they are made of, the file differs.
"""

from __future__ import annotations

import multiprocessing
import sys
import warnings

import transformers
from hub_gaps import TABLE as FILE, read_gaps, reason_of, write_gaps
from hub_models import Architecture, architectures, build, observe
from hub_table import render, sections_of


def attempt(name: str) -> tuple[str, Architecture | None, str]:
    """Observe one class; or say why it does not build."""
    try:
        return name, observe(name), ""
    except Exception as error:
        reason = reason_of(error)
        try:
            build(getattr(transformers, name), None)
        except Exception as plain:
            reason = reason_of(plain)
        return name, None, reason


def main(arguments: list[str]) -> int:
    """Write or check; the exit code."""
    warnings.filterwarnings("ignore")
    if arguments and arguments[0] != "--check":
        return update(arguments)
    if arguments[1:]:
        return check(arguments[1:])
    known = architectures()
    if arguments:
        return check(known)
    with multiprocessing.get_context("fork").Pool() as pool:
        results = pool.map(attempt, known, chunksize=4)
    observed = {name: one for name, one, _ in results if one is not None}
    FILE.write_text(render(observed), encoding="utf-8")
    write_gaps(transformers.__version__, len(known), {name: why for name, one, why in results if one is None})
    print(f"wrote {FILE.name}: {len(observed)} of {len(known)} classes")
    return 0


def update(names: list[str]) -> int:
    """Write the sections of some classes, and of their parts without one; the others stay. The exit code."""
    text = FILE.read_text(encoding="utf-8")
    written, gaps = sections_of(text), read_gaps()[2]
    for name in names:
        observed, why = closure(name)
        if not observed:
            gaps[name] = why
            continue
        gaps = {kind: why for kind, why in gaps.items() if kind not in observed}
        for title, lines in sections_of(render(observed)).items():
            if title.startswith("types "):
                written[title] = sorted({*written[title], *lines})
            elif title == name or title not in written:
                written[title] = lines
    head = text.partition("\n\n")[0]
    body = "\n\n".join("\n".join([f"[{title}]", *written[title]]) for title in sorted(written))
    FILE.write_text(f"{head}\n\n{body}\n", encoding="utf-8")
    num_classes = len(gaps) + sum(" " not in title for title in written)
    write_gaps(transformers.__version__, num_classes, dict(sorted(gaps.items())))
    return 0


def closure(name: str) -> tuple[dict[str, Architecture], str]:
    """Observe a class and those that it is made of; or say why it does not build."""
    _, one, why = attempt(name)
    observed = {} if one is None else {name: one}
    waiting = [] if one is None else [part.kind for part in one.parts]
    while waiting:
        kind = waiting.pop()
        if kind not in observed:
            _, part, _ = attempt(kind)
            if part is not None:
                observed[kind] = part
                waiting += [inner.kind for inner in part.parts]
    return observed, why


def check(names: list[str]) -> int:
    """Compare the sections of some classes with the file's; 1 when one differs."""
    written = sections_of(FILE.read_text(encoding="utf-8"))
    stale = []
    for name in names:
        observed, why = closure(name)
        if not observed:
            stale += [f"{name}: {why}"] if name in written else []
            continue
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
