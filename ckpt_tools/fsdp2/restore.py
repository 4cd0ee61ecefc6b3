"""Train state on its way back: read as a whole, then installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from ckpt_tools.description.checkpoint import KeyPath, TensorEntry
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.opening import Opened
from ckpt_tools.fsdp2.agree import this_rank, world_size
from ckpt_tools.fsdp2.optimizer import Item, names_of, read_item
from ckpt_tools.fsdp2.read import BoxReader
from ckpt_tools.fsdp2.rng import RngState
from ckpt_tools.fsdp2.state import MODEL_KEY, OPTIMIZER_KEY, PerRank, fill, rebuild

_Items = Mapping[KeyPath, Item]


class Restored:
    """What was read of a checkpoint beside the model; `wanted` are the names to load."""

    def __init__(self, opened: Opened, wanted: Mapping[str, object]) -> None:
        self.modules: dict[str, tuple[nn.Module, dict[str, torch.Tensor], Any]] = {}
        """Name → module, and what `read_state` returned for it."""
        self.values: dict[str, object] = {}
        """Name → value that is no object."""
        self.missing: tuple[str, ...] = ()
        """Names, or parts of what they name, that the checkpoint lacks."""
        self.notes: list[str] = []
        self._opened = opened
        self._wanted = wanted
        self._reader = BoxReader(opened)
        self._optimizers: list[tuple[Optimizer, nn.Module, list[list[str]], dict[str, Any]]] = []
        self._objects: dict[str, Any] = {}
        self._items: dict[str | int, dict[KeyPath, Item]] = {}
        every: list[Item] = [*opened.checkpoint.tensors, *opened.checkpoint.blobs]
        for item in every:
            if item.path:
                self._items.setdefault(item.path[0], {})[item.path[1:]] = item

    @property
    def roots(self) -> list[str]:
        """The keys that the checkpoint has."""
        return list(map(str, self._items))

    @property
    def unread(self) -> tuple[str, ...]:
        """The keys beside the model that nobody asked for; of a model without a root, objects alone."""
        asked = {*self._wanted, MODEL_KEY, *([OPTIMIZER_KEY] if self._optimizers else ())}
        blobs = [str((*blob.path, blob.fqn)[0]) for blob in self._opened.checkpoint.blobs]
        names = (*(self.roots if MODEL_KEY in self._items else blobs), *self._opened.checkpoint.sealed)
        return tuple(dict.fromkeys(name for name in names if name not in asked))

    def has(self, name: str) -> bool:
        """Is there anything of this name?"""
        return name in self._items

    def add_optimizer(self, optimizer: Optimizer, model: nn.Module, state: dict[str, Any]) -> None:
        """Remember an optimizer's state, and the names of its parameters, which the load replaces."""
        names = {id(parameter): name for name, parameter in names_of(model).items()}
        groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        self._optimizers.append((optimizer, model, groups, state))

    def read(self, name: str, value: object) -> None:
        """Read an object's state, or a value."""
        items = self._items.get(name)
        if items is None:
            self.missing += (name,)
            return
        if isinstance(value, PerRank):
            self._read_own(name, value, items)
            return
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise UsageError("a tensor on meta cannot be filled", where=f"state[{name!r}]", hint="pass None for it")
        if isinstance(value, Stateful):
            self._objects[name] = self._rebuild(items, value.state_dict(), name)
        else:
            self.values[name] = self._rebuild(items, value, name)
            self.missing += tuple(_compare(value, self.values[name], name))

    def _read_own(self, name: str, value: PerRank, items: _Items) -> None:
        ranks = sorted({int(path[0]) for path in items if path and str(path[0]).isdecimal()})
        rank, world = this_rank(), world_size()
        source = rank if rank in ranks else min(ranks, default=-1)
        if ranks != list(range(world)):
            self.notes.append(f"{name}: saved on {len(ranks)} ranks, loaded on {world}")
            if source < 0 or not isinstance(value, RngState):
                self.notes[-1] += "; each rank has its own, and nobody knows what another number of ranks should get"
                self.missing += (name,)
                return
            self.notes[-1] += (
                f"; ranks {len(ranks)} to {world - 1} begin streams of their own"
                if len(ranks) < world
                else f"; the streams of ranks {world} to {ranks[-1]} are not continued"
            )
        own = {path[1:]: item for path, item in items.items() if path[0] == str(source)}
        found = self._rebuild(own, value.state_dict()[str(rank)], f"{name}.{source}")
        self._objects[name] = {str(rank): found} if source == rank else found

    def _rebuild(self, items: _Items, like: object, name: str) -> Any:  # noqa: ANN401
        def read(item: Item, like: object) -> object:
            note = f"{name}: tensors that were stored in parts are whole on every rank; nothing says how to cut them"
            is_cut = isinstance(item, TensorEntry) and len(item.chunks) > 1
            if is_cut and not isinstance(like, torch.Tensor) and note not in self.notes:
                self.notes.append(note)
            return read_item(item, like, self._reader, self._opened)

        return rebuild(items, like, read, self.notes, name)

    def install(self) -> None:
        """Give everything to its owner; the modules have theirs."""
        for optimizer, model, groups, state in self._optimizers:
            parameters = names_of(model)
            for group, names in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = [parameters[name] for name in names]
            optimizer.load_state_dict(state)
        for name, state in self._objects.items():
            value: Any = self._wanted[name]
            if isinstance(value, RngState) and str(this_rank()) not in state:
                value.start(state)
            else:
                value.load_state_dict(state)
        for name, value in self.values.items():
            fill(self._wanted[name], value)


def _compare(like: object, found: object, name: str) -> list[str]:
    """Return the names that a given value has and the checkpoint's has not; raise UsageError if tensors differ."""
    if isinstance(like, Mapping) and isinstance(found, Mapping):
        lacking = [f"{name}.{key}" for key in like if key not in found]
        both = [key for key in like if key in found]
        return lacking + [fqn for key in both for fqn in _compare(like[key], found[key], f"{name}.{key}")]
    if isinstance(like, torch.Tensor) and isinstance(found, torch.Tensor):
        if like.shape != found.shape or like.is_floating_point() != found.is_floating_point():
            has, wants = (f"{list(tensor.shape)} {tensor.dtype}" for tensor in (found, like))
            raise UsageError(f"the checkpoint has {has}, the tensor to fill is {wants}", where=f"state: {name}")
        return []
    return [name] if isinstance(like, (Mapping, torch.Tensor)) else []
