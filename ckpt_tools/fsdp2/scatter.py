"""Load what only rank 0 has: it sends every rank its own boxes, and nobody else needs the whole model."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from ckpt_tools.description.layout import Box
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.formats.opening import Opened, open_path
from ckpt_tools.fsdp2.agree import share, this_rank, together, world_size
from ckpt_tools.fsdp2.load import LoadReport, device_of, install, targets_of
from ckpt_tools.fsdp2.local import assemble, local_box
from ckpt_tools.fsdp2.names import describe_misfit, match_names
from ckpt_tools.fsdp2.read import BoxReader, Whole
from ckpt_tools.fsdp2.ties import tied_groups
from ckpt_tools.text import first_few

Source = Mapping[str, torch.Tensor] | str | os.PathLike[str]
"""Whole tensors by name, or the path of a checkpoint that only rank 0 sees."""


def rank0_load(model: nn.Module, source: Source | None, *, strict: bool = True) -> LoadReport:
    """Give every parameter and buffer of `model` its values from what rank 0 has.

    Collective. Rank 0 holds whole tensors on the CPU (one at a time when it reads a checkpoint), the others only
    their own parts. Use it when the checkpoint lies on one machine alone, or was made in memory (quantised).

    Args:
        model: Sharded; on meta on every rank, or real on rank 0.
        source: On rank 0; ignored on the others.
        strict: Every name of the model must be there, and every tensor must be wanted.

    Raises:
        UnreadableError: Names that are missing or unexpected, with `strict`.
        UsageError: Shapes that differ, or ranks whose models do.
    """
    targets, shared = targets_of(model)
    names = tuple(name for name in targets if name not in shared)
    boxes = _gather_boxes({name: local_box(targets[name]) for name in names})
    sender = _Sender(model, targets, shared, source) if this_rank() == 0 else None
    try:
        together(lambda: None if sender is None else sender.open(strict=strict))
        found, missing, unexpected = share(([], (), ()) if sender is None else sender.facts())
        place = device_of(model)
        state: dict[str, torch.Tensor] = {}
        for name in found:
            like = targets[name]
            whole = together(lambda name=name: None if sender is None else sender.read(name))  # type: ignore[misc]
            local = _exchange(whole, like.dtype, [by_name[name] for by_name in boxes], place)
            state[name] = assemble(local, like)
    finally:
        if sender is not None:
            sender.close()
    report = LoadReport(
        missing=missing,
        unexpected=unexpected,
        tied=tuple(name for name, first in shared.items() if first in state),
        buffers=(),
        loaded_bytes=0 if sender is None else sender.bytes_read,
    )
    return install(model, state, report, tied_groups(model))


def _gather_boxes(own: Mapping[str, Box]) -> list[Mapping[str, Box]]:
    """Return every rank's boxes by name.

    Raises:
        UsageError: Two ranks have other names.
    """
    if world_size() == 1:
        return [own]
    boxes: list[Mapping[str, Box]] = [{}] * world_size()
    dist.all_gather_object(boxes, dict(own))
    for rank, theirs in enumerate(boxes):
        if list(theirs) != list(boxes[0]):
            only = sorted(set(theirs) ^ set(boxes[0]))
            raise UsageError(
                f"the models of rank 0 and rank {rank} differ: {first_few(only, 4) or 'another order of names'}",
                where="rank0_load",
                hint="build the same model on every rank",
            )
    return boxes


def _exchange(whole: torch.Tensor | None, dtype: torch.dtype, boxes: list[Box], place: torch.device) -> torch.Tensor:
    """Send every rank its box of rank 0's tensor; return this rank's, on `place`."""
    wire = place if dist.is_initialized() and dist.get_backend() == "nccl" else torch.device("cpu")
    if whole is not None:
        parts = [whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] for box in boxes]
        for rank, part in enumerate(parts):
            if rank and part.numel():
                dist.send(_as_bytes(part.to(wire)), dst=rank)
        return parts[0].clone(memory_format=torch.contiguous_format).to(place)
    own = torch.empty(boxes[this_rank()].sizes, dtype=dtype, device=wire)
    if own.numel():
        dist.recv(_as_bytes(own), src=0)
    return own.to(place)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes: not every backend moves every dtype."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class _Sender:
    """What rank 0 has: tensors in memory, or an open checkpoint."""

    def __init__(
        self,
        model: nn.Module,
        targets: Mapping[str, torch.Tensor],
        shared: Mapping[str, str],
        source: Source | None,
    ) -> None:
        self._model = model
        self._targets = targets
        self._shared = shared
        self._source = source
        self._opened: Opened | None = None
        self._reader: BoxReader | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._wholes: dict[str, Whole] = {}
        self._unexpected: tuple[str, ...] = ()
        self._available: dict[str, tuple[int, ...]] = {}

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read if self._reader is not None else 0

    def open(self, *, strict: bool) -> None:
        """Match names and check shapes, before anything is sent."""
        if self._source is None:
            raise UsageError("rank 0 has nothing to load", where="rank0_load", hint="pass the state dict or the path")
        available: dict[str, tuple[int, ...]]
        if isinstance(self._source, Mapping):
            self._tensors = dict(self._source)
            available = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
            self._unexpected = tuple(name for name in available if name not in self._targets)
        else:
            self._opened = open_path(os.fspath(self._source))
            self._reader = BoxReader(self._opened)
            self._wholes, self._unexpected = match_names(
                self._opened.checkpoint, self._model, tuple(self._targets), "auto"
            )
            available = {name: whole.shape for name, whole in self._wholes.items()}
        for name, first in self._shared.items():  # under whichever name the shared parameter is there
            if name in available and first not in available:
                available[first] = available[name]
                if name in self._tensors:
                    self._tensors[first] = self._tensors[name]
                if name in self._wholes:
                    self._wholes[first] = self._wholes[name]
        self._available = available
        for name in self._found():
            if available[name] != tuple(self._targets[name].shape):
                raise UsageError(
                    f"{name!r} is {list(available[name])}, and {list(self._targets[name].shape)} in the model",
                    where="rank0_load",
                )
        missing = self._missing()
        if strict and (missing or self._unexpected):
            raise UnreadableError(
                f"the source does not fit the model: {describe_misfit(missing, self._unexpected)}",
                where="rank0_load",
                hint="pass strict=False if that is meant",
            )

    def _found(self) -> list[str]:
        return [name for name in self._targets if name not in self._shared and name in self._available]

    def _missing(self) -> tuple[str, ...]:
        return tuple(name for name in self._targets if self._shared.get(name, name) not in self._available)

    def facts(self) -> tuple[list[str], tuple[str, ...], tuple[str, ...]]:
        """Return names that will be sent, missing and unexpected ones."""
        return self._found(), self._missing(), self._unexpected

    def read(self, name: str) -> torch.Tensor:
        """Return the whole tensor, in the model's dtype, on the CPU."""
        like = self._targets[name]
        if self._reader is not None:
            whole = self._wholes[name]
            return self._reader.read(whole, Box((0,) * len(whole.shape), whole.shape), like.dtype)
        tensor = self._tensors[name].detach()
        if tensor.dtype != like.dtype and not (tensor.is_floating_point() and like.is_floating_point()):
            raise UsageError(f"{name!r} is {tensor.dtype}, and {like.dtype} in the model", where="rank0_load")
        return tensor.to(device="cpu", dtype=like.dtype)

    def close(self) -> None:
        """Close the checkpoint."""
        if self._opened is not None:
            self._opened.source.close()
