"""How to build the model of a smoke run, what to feed it, and where its loss is."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ckpt_tools.errors import UnclearLossError, UsageError
from ckpt_tools.models.builtin import SmallTransformer
from ckpt_tools.models.replace_parameters import adopt_computed
from ckpt_tools.text import first_few

BATCH_SIZE = 2  # Samples per data-parallel rank
SEQ_LEN = 16  # Tokens per sample

Batch = dict[str, Any]  # What forward takes, by name: tensors, lists and dicts of tensors, numbers


class Recipe(ABC):
    """A way to build a model. Made once; every rank, and the reference, build from it."""

    title: str = ""  # Class of the model and where it comes from
    is_cut: bool = False  # The model has fewer layers than it should
    keeps_dropout: bool = False  # Models are built with the dropout that they have

    @abstractmethod
    def build(self) -> nn.Module:
        """Return the model on the current default device, in training mode."""

    @abstractmethod
    def make_batch(self, model: nn.Module) -> Batch:
        """Return a batch on the CPU, from torch's random state."""

    def batch(self, model: nn.Module, seed: int) -> Batch:
        """Return the batch of a seed: the same one in every process."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            return self.make_batch(model)

    def notes_on(self, batch: Batch) -> tuple[str, ...]:  # noqa: ARG002 - most have none
        """Return what this batch does not try."""
        return ()

    def sized_batch(self, model: nn.Module, *, samples: int, tokens: int) -> Batch | None:  # noqa: ARG002 - most cannot
        """Return a batch of this size on the default device; None where that of a seed is to be grown."""
        return None

    def blocks(self, model: nn.Module) -> Any:  # noqa: ANN401 - what `shard_model` takes
        """Return the units to wrap, as the model itself says."""
        return getattr(model, "fsdp_blocks", "auto")

    def forward_methods(self, model: nn.Module) -> Any:  # noqa: ANN401 - what `shard_model` takes
        """Return the methods to register, as the model itself says."""
        return getattr(model, "fsdp_forward_methods", ())

    def tp_plan(self, model: nn.Module) -> Any:  # noqa: ANN401 - what `shard_model` takes
        """Return the tensor-parallel plan, as the model itself says, for a mesh that has the axis."""
        return getattr(model, "fsdp_tp_plan", "auto")

    def shallower(self, num_layers: int) -> Recipe | None:  # noqa: ARG002 - most cannot
        """Return the same model with fewer layers, None where that is not known to be possible."""
        return None

    @property
    def num_layers(self) -> int | None:
        """Layers of the deepest stack, None when unknown."""
        return None


class ModuleRecipe(Recipe):
    """The built-in model, or one from a factory ("pkg.mod:callable")."""

    def __init__(self, factory: str | None = None) -> None:
        self._factory = factory
        self._computed: tuple[str, ...] = ()
        self.title = "SmallTransformer (built in)" if factory is None else factory

    def build(self) -> nn.Module:
        """Call the factory; on the meta device, what `__init__` computes is computed all the same."""
        if self._factory is None:
            return SmallTransformer().train()
        model = self._call(self._factory)
        if torch.get_default_device().type == "meta":
            factory = self._factory
            self._computed = adopt_computed(model, lambda: self._call(factory))
        if not self.keeps_dropout:
            without_dropout(model)
        return model.train()

    def _call(self, factory: str) -> nn.Module:
        model = find_callable(factory)()
        if not isinstance(model, nn.Module):
            raise UsageError(f"the factory returned a {type(model).__name__}, not a torch.nn.Module", where=factory)
        return model

    def notes_on(self, batch: Batch) -> tuple[str, ...]:  # noqa: ARG002 - of the model
        """Say what a script that builds on the meta device has to compute again."""
        if not self._computed:
            return ()
        what = f"{len(self._computed)} tensors that __init__ computes and no checkpoint holds were built off the meta"
        return (f"{what} device ({first_few(self._computed)}): a script that builds on meta has to compute them again",)

    def make_batch(self, model: nn.Module) -> Batch:
        """Ask the model, or draw tokens."""
        example = getattr(model, "example_batch", None)
        if callable(example):
            batch = example(BATCH_SIZE, SEQ_LEN)
            if not isinstance(batch, Mapping):
                what = f"example_batch returned a {type(batch).__name__}, not a dict of tensors"
                raise UsageError(what, where=self.title)
            return dict(batch)
        vocabulary = _vocabulary(model)
        if vocabulary is None:
            hint = "give the model a method example_batch(batch_size, seq_len) that returns a dict of tensors"
            raise UsageError("the inputs of the model's forward are not known", where=self.title, hint=hint)
        tokens = torch.randint(0, vocabulary, (BATCH_SIZE, SEQ_LEN))
        takes_labels = "labels" in inspect.signature(model.forward).parameters
        return {"input_ids": tokens} | ({"labels": tokens.clone()} if takes_labels else {})


def find_callable(spec: str) -> Any:  # noqa: ANN401 - anything callable
    """Import "pkg.mod:callable"; the current directory is looked at last."""
    name, _, path = spec.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found: Any = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            hint = "run from the directory that holds it, or set PYTHONPATH"
            raise UsageError(f"no module named {error.name!r}", where=f"--factory {spec}", hint=hint) from error
        raise
    for part in path.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise UsageError(f"{name!r} has no callable {path!r}", where=f"--factory {spec}")
    return found


def without_dropout(model: nn.Module) -> None:
    """Set every dropout to 0."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):  # noqa: SLF001 - the base of all dropouts
            module.p = 0.0
        elif isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            module.dropout = 0.0


def _vocabulary(model: nn.Module) -> int | None:
    for owner in (model, getattr(model, "config", None)):
        size = getattr(owner, "vocab_size", None)
        if isinstance(size, int):
            return size
    first = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    return None if first is None else first.num_embeddings


def call(model: nn.Module, batch: Batch) -> object:
    """Run forward: with the batch as keyword arguments where it takes them, else with the dict."""
    try:
        inspect.signature(model.forward).bind(**batch)
    except TypeError:
        return model(batch)
    return model(**batch)


def find_loss(output: object, named: str | None = None) -> str | None:
    """Return where the loss is in what forward returned: a dotted name, "" for all of it, None when there is none."""
    # A field `loss` is the loss, and so is the only scalar that has a gradient. `named` is where the user says it is
    # ("1", "losses.total"). Several scalars of which nothing says which one it is are an `UnclearLossError`.
    if named is not None:
        found = _part(output, named)
        if not isinstance(found, torch.Tensor) or not found.requires_grad:
            what = "a tensor without gradient" if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
            what = f"what forward returns at {named!r} cannot be the loss: it is {what}"
            raise UnclearLossError(what, hint=_SAY_WHICH)
        return named
    if isinstance(output, torch.Tensor):
        return "" if output.numel() == 1 else None
    if isinstance(_part(output, "loss"), torch.Tensor):
        return "loss"
    items = (
        output.items()
        if isinstance(output, Mapping)
        else enumerate(output if isinstance(output, (list, tuple)) else ())
    )
    scalars = {
        str(name): item
        for name, item in items
        if isinstance(item, torch.Tensor) and item.is_floating_point() and item.numel() == 1
    }
    certain = [name for name, item in scalars.items() if not item.dim() and item.requires_grad]
    if len(certain) == 1:
        return certain[0]
    if scalars:
        what = "none has a gradient" if not certain else f"{len(certain)} have a gradient"
        raise UnclearLossError(f"forward returns scalars at {first_few(scalars, 5)}, of which {what}", hint=_SAY_WHICH)
    return None


_SAY_WHICH = 'choose the loss: --loss NAME (a position, a key, "losses.total"), or fsdp_loss on the model'


def _part(value: object, path: str) -> object:
    """Return what lies at a dotted path of keys, positions and attributes; None when nothing does."""
    for name in path.split(".") if path else ():
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, (list, tuple)) and name.lstrip("-").isdecimal():
            value = value[int(name)] if -len(value) <= int(name) < len(value) else None
        else:
            value = getattr(value, name, None)
    return value


def loss_of(output: object, at: str | None) -> torch.Tensor:
    """Return the loss at a place that `find_loss` found; for None the mean square of the floating-point tensors."""
    if at is not None:
        loss = _part(output, at)
        if not isinstance(loss, torch.Tensor):
            raise UsageError(f"this time forward returned no loss at {at!r}, but a {type(loss).__name__}")
        return loss.float().mean()
    parts = [tensor for tensor in _tensors(output) if tensor.is_floating_point()]
    if torch.is_grad_enabled():
        parts = [tensor for tensor in parts if tensor.requires_grad]
    if not parts:
        what = f"forward returned no loss, and no tensor that has a gradient, but a {type(output).__name__}"
        raise UsageError(what, hint="return a loss, or an object with .loss")
    return torch.stack([part.float().square().mean() for part in parts]).sum()


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
