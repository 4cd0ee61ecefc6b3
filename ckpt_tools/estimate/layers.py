"""The layers of a model as rows of equal ones, and the model with some of them only. Imports torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ckpt_tools.estimate.pipeline import Stage
from ckpt_tools.estimate.report import UntrackedError

_INDEXED = re.compile(r"(.+)\.(\d+)")
_COUNTED = ("layer_idx", "layer_id", "layer_number", "block_idx")
"""What differs between layers that are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The blocks in one list of modules."""

    name: str
    """FQN of the list."""
    kinds: tuple[Hashable, ...]
    """What each of its members is; equal ones take the same memory."""
    start: int = 0
    """Of a stage: which member `kinds` begins with."""

    def shifted(self, indices: Iterable[int]) -> tuple[int, ...]:
        """Return indices into `kinds` as indices into the list."""
        return tuple(self.start + index for index in indices)


def rows_of(model: nn.Module, blocks: Iterable[str]) -> tuple[Row, ...]:
    """Return the lists that consist of blocks."""
    members: dict[str, set[int]] = defaultdict(set)
    for block in blocks:
        match = _INDEXED.fullmatch(block)
        if match is not None:
            members[match[1]].add(int(match[2]))
    found = []
    for name, indices in members.items():
        modules = model.get_submodule(name)
        if isinstance(modules, nn.ModuleList) and indices == set(range(len(modules))):
            found.append(Row(name=name, kinds=tuple(map(_kind, modules))))
    return tuple(found)


def _kind(layer: nn.Module) -> Hashable:
    """Return all that decides what a layer takes: classes, plain attributes, and the parameters."""
    parts: list[Hashable] = []
    for name, module in layer.named_modules():
        values = {key: value for key, value in vars(module).items() if isinstance(value, (bool, int, float, str))}
        plain = tuple(sorted((key, value) for key, value in values.items() if key not in _COUNTED))
        parts.append((name, type(module), plain))
    parts += [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters()]
    return tuple(parts)


def keep_layers(model: nn.Module, kept: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Leave out all layers but those in `kept`, by list; return the FQN of every layer left → the FQN that it had."""
    before: dict[str, str] = {}
    for name, indices in kept.items():
        modules = list(model.get_submodule(name).children())
        num = len(modules)
        path, _, key = name.rpartition(".")
        setattr(model.get_submodule(path), key, nn.ModuleList(modules[index] for index in indices))
        before |= {f"{name}.{new}": f"{name}.{old}" for new, old in enumerate(indices)}
        for config in _configs(model):
            for field, value in list(vars(config).items()):
                if isinstance(value, (list, tuple)) and len(value) == num:
                    config.__dict__[field] = type(value)(value[index] for index in indices)
    return before


def _configs(model: nn.Module) -> list[Any]:
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "__dict__"):
            found[id(config)] = config
    return list(found.values())


def cut_stage(model: nn.Module, stage: Stage) -> None:
    """Leave out embedding and output where a stage has none; raise UntrackedError if the model does not name them."""
    if not stage.has_embedding:
        embedding = _call(model, "get_input_embeddings")
        _replace(model, embedding)
    if not stage.has_output:
        output = _call(model, "get_output_embeddings")
        _replace(model, output)


def width_of(model: nn.Module) -> int:
    """Return the width of what an embedding puts out."""
    get = getattr(model, "get_input_embeddings", None)
    return int(get().embedding_dim) if callable(get) else 0


def _call(model: nn.Module, name: str) -> nn.Module:
    get = getattr(model, name, None)
    found = get() if callable(get) else None
    if not isinstance(found, nn.Module):
        raise UntrackedError(f"it is not known how a pipeline cuts a {type(model).__name__}")
    return found


def _replace(model: nn.Module, old: nn.Module) -> None:
    for module in model.modules():
        for key, child in list(module.named_children()):
            if child is old:
                setattr(module, key, nn.Identity())
