"""Key maps on tensors, and other libraries' own code to hold them against."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from operator import mul
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from ckpt_tools.checkpoint.dtypes import BY_TORCH_NAME
from ckpt_tools.checkpoint.names.convert import Converted
from ckpt_tools.checkpoint.names.keymap import KeyMap
from ckpt_tools.checkpoint.names.mosaic import STACKED, Mosaic, whole

Tensors = dict[str, torch.Tensor]


def put_together(mosaic: Mosaic, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The tensor that a mosaic is."""
    result = None
    for piece in mosaic.pieces:
        source = tensors[piece.source].contiguous()
        result = torch.full(mosaic.shape, -1, dtype=source.dtype) if result is None else result
        steps = [0 if a == STACKED else source.stride(a) * piece.steps[a] for a in piece.axes]
        start = source.storage_offset() + sum(map(mul, piece.starts, source.stride()))
        where = tuple(slice(o, o + s) for o, s in zip(piece.box.offsets, piece.box.sizes, strict=True))
        result[where] = source.as_strided(piece.box.sizes, steps, start)
    assert result is not None
    return result


def described(tensors: Mapping[str, torch.Tensor]) -> dict[str, Mosaic]:
    return {
        name: whole(name, BY_TORCH_NAME[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def done(found: Converted, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    made = {n: torch.zeros(m.shape) if m.is_zeros else put_together(m, tensors) for n, m in found.mosaics.items()}
    return made | {alias: made[name] for alias, name in found.aliases.items() if name in made}


def forward(
    key_map: KeyMap, hub: Mapping[str, torch.Tensor], config: Mapping[str, object], zeros: bool = False
) -> Tensors:
    """What a map makes of the hub's tensors; with `zeros`, what no tensor of the hub says, too."""
    found = key_map.forward(described(hub), config)
    kept = {name: one for name, one in found.mosaics.items() if zeros or not one.is_zeros}
    return done(replace(found, mosaics=kept), hub)


def backward(key_map: KeyMap, other: Mapping[str, torch.Tensor], config: Mapping[str, object]) -> Tensors:
    found = key_map.backward(described(other), config)
    return {name: put_together(one, other) for name, one in found.mosaics.items()}


def assert_same(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in theirs.items() if not torch.equal(tensor, ours[name])] == []


class _Anything(type):
    """A class with whatever is asked of it: decorators that change nothing."""

    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_settings: lambda decorated: decorated


class _Stub(types.ModuleType):
    """A module that is not there: whatever is taken from it is a class without contents."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        inner = {"Config": type("Config", (), {}), "__class_getitem__": classmethod(lambda cls, _key: cls)}
        made = _Anything(name, (), inner)
        setattr(self, name, made)
        return made


def per_expert(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Experts one by one, as files have them, of those of a live model."""
    made: Tensors = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for at, both in enumerate(tensor):
                made[f"{stem}.{at}.gate_proj.weight"], made[f"{stem}.{at}.up_proj.weight"] = both.chunk(2)
        elif last == "down_proj":
            made |= {f"{stem}.{at}.down_proj.weight": one for at, one in enumerate(tensor)}
        else:
            made[name] = tensor
    return made


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: tuple[str, ...], real: tuple[str, ...]) -> None:
        self.roots, self.real = roots, real

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.roots and name not in self.real:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Stub(spec.name)

    def exec_module(self, module) -> None:
        pass


@contextmanager
def alone(package: str, module: str, *others: str, stubs: tuple[str, ...] = ()) -> Iterator[types.ModuleType]:
    """A module of a package that is installed, without what it imports: only `others` are real as well.

    Skips the test where the package, or the version that had the module, is not there.
    """
    root, real = package.partition(".")[0], (module, *others)
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # of the package that it is in
        spec = None
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    home = Path(next(iter(spec.submodule_search_locations)))
    tail = module.removeprefix(f"{package}.").replace(".", "/")
    if not (home / f"{tail}.py").exists():
        pytest.skip(f"the {package} that is installed has no {module}")
    before = set(sys.modules)
    finder = _Stubs((root, *stubs), real)
    try:
        for name in real:
            parts = name.split(".")
            for end in range(1, len(parts)):
                inner = ".".join(parts[:end])
                if inner not in sys.modules:
                    made = types.ModuleType(inner)
                    below = inner.removeprefix(package).strip(".").replace(".", "/")
                    made.__path__ = [str(home / below) if inner.startswith(package) else str(home.parent)]
                    sys.modules[inner] = made
        sys.meta_path.insert(0, finder)
        yield importlib.import_module(module)
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in finder.roots:
                del sys.modules[name]
