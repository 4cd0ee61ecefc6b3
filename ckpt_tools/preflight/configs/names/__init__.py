"""Lists of option names, as the trainers' releases have them: text files that `bin/known` writes.

A name may be a path, `critic/optim/lr`: an option inside another one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

from ckpt_tools.tables import read_packaged

_RELEASE = re.compile(r"(?P<project>[a-z][\w-]*?)-(?P<version>\d+(\.\w+)*)")


@cache
def inside(names: frozenset[str], option: str) -> frozenset[str]:
    """Return the names inside an option, of those that are paths."""
    return frozenset(name[len(option) + 1 :] for name in names if name.startswith(f"{option}/"))


@cache
def gone(name: str) -> Mapping[str, str]:
    """Return option → the last release that had it, of those (no paths) that the newest one does not have any more."""
    found: dict[str, str] = {}
    kept: set[str] = set()
    for section in _sections(name):
        newest: dict[str, str] = {}
        for option, release in newest_release(name, section).items():
            match = _RELEASE.fullmatch(release)
            if match is None or "/" in option or newest.setdefault(match["project"], release) == release:
                kept.add(option)
            else:
                found[option] = release
    return {option: release for option, release in found.items() if option not in kept}


@cache
def installed_and_listed(name: str) -> tuple[str, str] | None:
    """Return the release of a trainer on this machine and that of its list, where that is more than one behind."""
    lists = (newest_release(name, section).values() for section in _sections(name))
    releases = dict.fromkeys(release for names in lists for release in names)
    match = next(filter(None, map(_RELEASE.fullmatch, releases)), None)
    try:
        here = version(match["project"]) if match is not None else ""
    except PackageNotFoundError:
        return None
    ours, theirs = (tuple(map(int, re.findall(r"\d+", text)[:2])) for text in (match["version"] if match else "", here))
    is_behind = len(theirs) == 2 and len(ours) == 2 and (theirs[0] > ours[0] or theirs > (ours[0], ours[1] + 1))
    return (f"{match['project']} {here}", match[0]) if is_behind and match is not None else None


def _sections(name: str) -> tuple[str, ...]:
    text = read_packaged(__name__, f"{name}.txt")
    return tuple(dict.fromkeys(re.findall(r"^\[(.+?)\] ", text, re.MULTILINE)))


def known(name: str, *sections: str) -> frozenset[str]:
    """Return the names of some sections of a list, of all releases."""
    return frozenset(option for section in sections for option in newest_release(name, section))


@cache
def newest_release(name: str, section: str) -> Mapping[str, str]:
    """Return option → the newest release that has it, of the releases that the list was made from."""
    found: dict[str, str] = {}
    release = None
    for line in read_packaged(__name__, f"{name}.txt").splitlines():
        if line.startswith("["):
            title, _, heading = line[1:].partition("] ")
            release = heading if title == section else None
        elif release is not None and not line.startswith("#"):
            found |= dict.fromkeys(line.split(), release)
    return MappingProxyType(found)
