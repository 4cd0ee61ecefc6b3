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
from typing import Any, ClassVar


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


class _Empty:
    """What its instances are: every attribute, no elements; called with a function, they return it, as decorators."""

    def __new__(cls, *given: Any, **_: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) else object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *given: Any, **_: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) else None

    def __getattr__(self, name: str) -> Any:
        return getattr(type(self), name)

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    items = __iter__


def anything(name: str) -> type:
    """Return a class of that name."""
    return _Anything(name, (_Empty,), {})


class _Module(ModuleType):
    __path__: ClassVar[list[str]] = []  # type: ignore[misc]
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
