"""Load an optimizer's state from a DCP checkpoint: every rank its own boxes, and nothing is unpickled."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from ckpt_tools.checkpoint.entries import BlobEntry, KeyPath, TensorEntry
from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.checkpoint.formats.step import open_optimizer
from ckpt_tools.checkpoint.formats.torch_value import MAX_VALUE_BYTES, parse_value
from ckpt_tools.checkpoint.transform import is_optimizer, strip_wrappers
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.fsdp2.collective import together
from ckpt_tools.fsdp2.local import assemble, read_parts, torch_dtype
from ckpt_tools.fsdp2.read import BoxReader, as_whole
from ckpt_tools.fsdp2.state import OPTIMIZER_KEY
from ckpt_tools.text import first_few

Item = TensorEntry | BlobEntry


def load_optimizer(model: nn.Module, optimizer: Optimizer, path: str | os.PathLike[str]) -> None:
    """Give `optimizer` the state and the options of its groups from a checkpoint.

    Collective. Understands what `save_checkpoint`, PyTorch's `get_optimizer_state_dict` (flat or not) and accelerate
    write. Groups may be cut differently than when they were saved, as long as the parameters of a group agree in
    their options. Parameters that had no state when saved have none afterwards.

    Args:
        model: Sharded, with its checkpoint loaded; not necessarily on the mesh of the save.
        optimizer: Made of this model's parameters, after the load.
        path: A DCP directory, or a trainer's step.

    Raises:
        UnreadableError: No optimizer state in there, or not that of these parameters.
        UsageError: Parameters that are not the model's, or groups that cannot be told apart.
    """

    def read() -> dict[str, Any]:
        with open_optimizer(os.fspath(path)) as opened:
            return read_optimizer(model, optimizer, opened)

    optimizer.load_state_dict(together(read))


@contextmanager
def switch_optimizer(model: nn.Module, *optimizers: Optimizer) -> Iterator[None]:
    """Shard inside, and keep optimizers that were made before: their groups get the sharded parameters.

        with switch_optimizer(model, optimizer):
            shard_model(model, mesh)
            load_checkpoint(model, path)

    Options of the groups, schedulers and hooks stay. State that an optimizer has is cut like its parameters. Raise
    UsageError for a parameter that is not the model's.
    """
    names = {id(parameter): name for name, parameter in names_of(model).items()}
    held = [[_members(names, group, "switch_optimizer") for group in one.param_groups] for one in optimizers]
    yield
    own = names_of(model)
    for optimizer, groups in zip(optimizers, held, strict=True):
        for group, members in zip(optimizer.param_groups, groups, strict=True):
            for index, name in enumerate(members):
                before, after = group["params"][index], own[name]
                group["params"][index] = after
                if before is not after and (state := optimizer.state.pop(before, None)) is not None:
                    optimizer.state[after] = {key: _cut_like(value, after) for key, value in state.items()}


@torch.no_grad()
def step_on_whole(optimizer: Optimizer) -> None:
    """Step an optimizer that needs whole matrices (Muon, Shampoo): gather one, let every rank compute, keep the shard.

    Call it in place of `optimizer.step()`. Collective. State stays sharded between steps, one parameter is whole at a
    time. For optimizers whose state is by parameter.
    """
    groups = optimizer.param_groups
    try:
        for group in groups:
            for parameter in [p for p in group["params"] if p.grad is not None]:
                whole = nn.Parameter(_gather(parameter))
                whole.grad = _gather(parameter.grad)
                optimizer.state[whole] = {k: _gather(v) for k, v in optimizer.state.pop(parameter, {}).items()}
                optimizer.param_groups = [group | {"params": [whole]}]
                optimizer.step()
                parameter.copy_(_cut_like(whole, parameter))
                optimizer.state[parameter] = {k: _cut_like(v, parameter) for k, v in optimizer.state.pop(whole).items()}
    finally:
        optimizer.param_groups = groups


def _gather(value: Any) -> Any:  # noqa: ANN401 - a tensor, or a number
    return value.full_tensor() if isinstance(value, DTensor) else value


def _cut_like(value: Any, parameter: torch.Tensor) -> Any:  # noqa: ANN401 - a tensor, or a number
    if isinstance(value, torch.Tensor) and isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return value


def _members(names: Mapping[int, str], group: Mapping[str, Any], where: str) -> list[str]:
    """Return the names of a group's parameters; `names` has those of the model, by id."""
    if any(id(parameter) not in names for parameter in group["params"]):
        raise UsageError(
            "the optimizer contains a parameter that does not belong to the model",
            where=where,
            hint="create the optimizer from the model's own parameters: shard_model and load_checkpoint replace them",
        )
    return [names[id(parameter)] for parameter in group["params"]]


def names_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters by the names that optimizer state has for them."""
    return {strip_wrappers(name): parameter for name, parameter in model.named_parameters()}


def read_optimizer(
    model: nn.Module, optimizer: Optimizer, opened: Opened, *, root: str = "", device: torch.device | None = None
) -> dict[str, Any]:
    """Read the state for `load_state_dict`, of the optimizer under the key `root`; "" finds it."""
    stored = _Stored(opened, root)
    fqns = {id(parameter): name for name, parameter in names_of(model).items()}
    names = set(fqns.values())
    if deeper := [owner for owner in stored.state if owner not in names and owner.rpartition(".")[0] in names]:
        raise UsageError(
            f"optimizer state in nested lists or dicts is not supported: {first_few(deeper, 4)}",
            where=opened.source.root,
            hint="load it with torch.distributed.checkpoint, or start with a new optimizer",
        )
    reader = BoxReader(opened)
    state: dict[int, dict[str, Any]] = {}
    groups = []
    number = 0
    for group in optimizer.param_groups:
        members = _members(fqns, group, "load_optimizer")
        options = {key: value for key, value in group.items() if key != "params"}
        options |= stored.options(members)
        options["params"] = list(range(number, number + len(members)))
        groups.append(options)
        for name, parameter in zip(members, group["params"], strict=True):
            found = stored.state.get(name)
            if found:
                state[number] = {key: read_item(item, parameter, reader, opened, device) for key, item in found.items()}
            elif parameter.requires_grad and not stored.knows(name):
                raise UnreadableError(
                    f"the checkpoint has no optimizer state of {name!r}",
                    where=opened.source.root,
                    hint="it was saved with other trainable parameters; freeze this one or start with a new optimizer",
                )
            number += 1
    return {"state": state, "param_groups": groups}


def read_item(
    item: Item, like: object, reader: BoxReader, opened: Opened, device: torch.device | None = None
) -> object:
    """Return a stored value: cut like the tensor that it belongs to when it has its shape, else whole."""
    if isinstance(item, TensorEntry) and isinstance(like, torch.Tensor) and item.shape == tuple(like.shape) != ():
        local = read_parts(like, partial(reader.read, as_whole(item), dtype=torch_dtype(item.dtype)))
        place = like.device if device is None else device
        if place.type == "meta":
            place = torch.device(like.device_mesh.device_type if isinstance(like, DTensor) else "cpu")
        return assemble(local.to(place), like)
    return _whole(item, reader, opened)


def _whole(item: Item, reader: BoxReader, opened: Opened) -> object:
    if isinstance(item, BlobEntry):
        return _plain(item, opened)
    return reader.read_whole(as_whole(item), torch_dtype(item.dtype))


def _plain(blob: BlobEntry, opened: Opened) -> object:
    where = f"{blob.span.file}, item {blob.fqn!r}"
    if blob.span.nbytes > MAX_VALUE_BYTES:
        raise UnreadableError(f"{blob.span.nbytes} bytes for an option", where=where)
    return parse_value(opened.source.read(blob.span.file, blob.span.offset, blob.span.nbytes), where=where)


class _Stored:
    """The optimizer's part of a checkpoint, by parameter."""

    def __init__(self, opened: Opened, root: str) -> None:
        self._opened = opened
        self.state: dict[str, dict[str, Item]] = defaultdict(dict)
        """Parameter → name → item."""
        self._groups: dict[str, dict[str, Item]] = defaultdict(dict)
        """Number of a group, or a parameter in the flat form → option → item."""
        checkpoint = opened.checkpoint
        items: list[Item] = [*checkpoint.tensors, *checkpoint.blobs]
        if not root and any(item.path[:1] == (OPTIMIZER_KEY,) for item in items):
            root = OPTIMIZER_KEY  # not that of a critic beside it
        for item in items:
            if item.path[:1] == (root,) or (not root and (is_optimizer(item) or item.fqn.startswith("param_groups."))):
                self._add(item)
        if not self.state and not self._groups:
            raise UnreadableError(
                "the checkpoint contains no optimizer state",
                where=opened.source.root,
                hint="save it with save_checkpoint(model, optimizer, path)",
            )
        self._members = {number: self._members_of(number) for number in self._groups}

    def _add(self, item: Item) -> None:
        path: KeyPath = item.path if len(item.path) > 2 else tuple(item.fqn.split("."))
        nested = list(map(str, path))
        # The flat form lies under one root: ("optimizer", "state.<fqn>.exp_avg")
        for keys in (nested, ".".join(nested).split(".")):
            start = next((i for i, key in enumerate(keys[:3]) if key in ("state", "param_groups")), None)
            if start is not None and len(keys) >= start + 3:
                owner, name = strip_wrappers(".".join(keys[start + 1 : -1])), keys[-1]
                (self.state if keys[start] == "state" else self._groups)[owner][name] = item
                return

    def _members_of(self, number: str) -> frozenset[str]:
        item = self._groups[number].get("params")
        if item is None:
            return frozenset({number})
        value = _plain(item, self._opened) if isinstance(item, BlobEntry) else None
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise UnreadableError("the parameters of a group are not a list of names", where=item.fqn)
        return frozenset(strip_wrappers(name) for name in value)

    def knows(self, name: str) -> bool:
        """Was this parameter in a group when the optimizer was saved?"""
        return any(name in members for members in self._members.values())

    def options(self, names: Sequence[str]) -> dict[str, object]:
        """Return the options that the groups of these parameters had; raise UsageError if they differ."""
        found: dict[str, object] | None = None
        reader = BoxReader(self._opened)
        for number, members in self._members.items():
            if members.isdisjoint(names):
                continue
            items = {key: item for key, item in self._groups[number].items() if key != "params"}
            options = {key: _whole(item, reader, self._opened) for key, item in items.items()}
            if found is not None and not _is_equal(options, found):
                raise UsageError(
                    "the parameters of one group had different options when they were saved",
                    where="load_optimizer",
                    hint="create the same groups as when it was saved: parameter_groups with the same arguments",
                )
            found = options
        return found or {}


def _is_equal(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    if one.keys() != other.keys():
        return False
    return all(
        torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]  # type: ignore[arg-type]
        for key, value in one.items()
    )
