"""Holds the lists of option names against the trainers' newest releases, and says what came and what went.

    bin/known [TRAINER …] [--from RELEASE] [--update]

A TRAINER is a list: accelerate, axolotl, trainer, verl, … (default: all). The newest release is that of the package
index; RELEASE is a wheel, an sdist or a directory instead. --update rewrites the lists, and pins a new release of the
index in releases.tsv. Without it the exit code is 1 when a list is behind.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from lists import LISTS, render  # noqa: E402
from releases import (  # noqa: E402
    HERE as TABLES,
    IndexUnreachableError,
    Release,
    given_release,
    newest_release,
    pinned,
    rows,
)

_MAX_SHOWN = 40


def main(arguments: list[str]) -> int:
    """Run; the exit code."""
    sources = rows(TABLES / "names.tsv")
    lists = sorted({row[0] for row in sources})
    parser = argparse.ArgumentParser(prog="bin/known", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trainers", nargs="*", metavar="TRAINER", help=f"lists (default: all): {', '.join(lists)}")
    parser.add_argument("--from", dest="release", help="a wheel, an sdist or a directory of one TRAINER")
    parser.add_argument("--update", action="store_true", help="rewrite the lists, and pin new releases")
    given = parser.parse_args(arguments)
    unknown = sorted({*given.trainers} - {*lists})
    if unknown or (given.release and len(given.trainers) != 1):
        parser.error(f"no list is called {unknown[0]}" if unknown else "--from needs one TRAINER")
    behind = 0
    for name in given.trainers or lists:
        own = [row for row in sources if row[0] == name]
        try:
            behind += _compare(name, own, given.release, update=given.update)
        except (IndexUnreachableError, OSError) as error:
            print(f"known: FAILED: {name}: {error}", file=sys.stderr)
            return 1
    return 1 if behind and not given.update else 0


def _compare(name: str, sources: list[list[str]], release: str | None, *, update: bool) -> int:
    """Print what is new for one list; how many of its projects have a newer release."""
    releases, behind = pinned(), 0
    projects = sorted({row[2] for row in sources} - {"-"})
    for project in projects[:1] if release else projects:
        last = next(one for one in reversed(releases) if one.project == project)
        found = given_release(project, Path(release)) if release else newest_release(project)
        if found.version == last.version:
            print(f"{name}: {last.name} is the newest release")
            continue
        behind += 1
        print(f"{name}: the list is from {last.name}, the newest release is {found.name}")
        _print_changes(sources, last, found)
        releases.insert(releases.index(last) + 1, found)
    path, text = LISTS / f"{name}.txt", render(sources, releases)
    if not projects:
        print(f"{name}: no release on the index; names.tsv has its names")
    if update and text != (path.read_text(encoding="utf-8") if path.exists() else ""):
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.name}")
    if update and behind and not release:
        _pin(releases)
    return behind


def _print_changes(sources: list[list[str]], last: Release, found: Release) -> None:
    """Print the names of every section that only one of two releases of a project has."""
    own = [row for row in sources if row[2] == last.project]
    for section in dict.fromkeys(row[1] for row in own):
        rows_of = [row for row in own if row[1] == section]
        before, after = (_words(render(rows_of, [one])) for one in (last, replace(found, project=last.project)))
        for word, names in (("came", after - before), ("went", before - after)):
            shown = ", ".join(sorted(names)[:_MAX_SHOWN]) + (", …" if len(names) > _MAX_SHOWN else "")
            if names:
                print(f"  [{section}] {word}, {len(names)}: {shown}")


def _words(text: str) -> set[str]:
    return {word for line in text.splitlines() if line[:1] not in ("#", "[") for word in line.split()}


def _pin(releases: list[Release]) -> None:
    """Write releases.tsv with new lines; its comments stay."""
    path = TABLES / "releases.tsv"
    head = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    lines = [f"{one.project}\t{one.version}\t{one.file}\t{one.sha256}" for one in releases]
    path.write_text("\n".join([*head, *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
