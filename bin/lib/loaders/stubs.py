"""Stand-ins for what a loader's source imports and a toy model never calls.

A package that is not installed is made up, names and all; a module of an installed package is never replaced.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Anything(type):
    """A class that has every attribute, so that it can be inherited from, called and used as a decorator."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return anything(name)

    def __or__(cls, other: Any) -> Any:
        return other

    __ror__ = __or__

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


def anything(name: str) -> type:
    """Return a class of that name: its instances have every attribute and are empty."""

    def new(cls: type, *given: Any, **_: Any) -> Any:
        # Used as a decorator: what it decorates stays.
        return given[0] if len(given) == 1 and callable(given[0]) else object.__new__(cls)

    members = {
        "__new__": new,
        "__init__": lambda self, *_, **__: None,
        "__call__": lambda self, *given, **_: given[0] if len(given) == 1 and callable(given[0]) else None,
        "__getattr__": lambda self, each: getattr(type(self), each),
        "__iter__": lambda self: iter(()),
        "items": lambda self: iter(()),
    }
    return _Anything(name, (), members)


class _Module(ModuleType):
    __path__: list[str] = []
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return anything(name)


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages: frozenset[str], keep: frozenset[str]) -> None:
        self.packages = packages
        self.keep = keep

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        del path, target
        is_meant = any(name == each or name.startswith(f"{each}.") for each in self.packages)
        return ModuleSpec(name, self, is_package=True) if is_meant and name not in self.keep else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        del module


def stub(packages: Iterable[str], keep: Iterable[str] = ()) -> None:
    """Make up those of `packages` that are not installed, but for the modules of them in `keep`."""
    missing = [each for each in packages if importlib.util.find_spec(each.partition(".")[0]) is None]
    sys.meta_path.insert(0, _Finder(frozenset(missing), frozenset(keep)))
