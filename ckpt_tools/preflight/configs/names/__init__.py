"""Lists of option names, as the trainers' releases have them: text files that `bin/known` writes.

A name may be a path, `critic/optim/lr`: an option inside another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType


@cache
def inside(names: frozenset[str], option: str) -> frozenset[str]:
    """Return the names inside an option, of those that are paths."""
    return frozenset(name[len(option) + 1 :] for name in names if name.startswith(f"{option}/"))


def known(name: str, *sections: str) -> frozenset[str]:
    """Return the names of some sections of a list, of all releases."""
    return frozenset(option for section in sections for option in newest_release(name, section))


@cache
def newest_release(name: str, section: str) -> Mapping[str, str]:
    """Return option → the newest release that has it, of the releases that the list was made from."""
    found: dict[str, str] = {}
    release = None
    for line in files(__name__).joinpath(f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            title, _, heading = line[1:].partition("] ")
            release = heading if title == section else None
        elif release is not None and not line.startswith("#"):
            found |= dict.fromkeys(line.split(), release)
    return MappingProxyType(found)
