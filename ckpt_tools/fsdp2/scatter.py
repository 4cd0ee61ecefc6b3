"""Load what only rank 0 has: it sends every rank its own boxes, and nobody else needs the whole model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.checkpoint.names.match_architecture import NameContract
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.fsdp2.collective import gather, share, this_rank, together
from ckpt_tools.fsdp2.load import LoadReport, device_of, install, sources_of, targets_of
from ckpt_tools.fsdp2.local import assemble, bytes_of, local_box
from ckpt_tools.fsdp2.names import Match, describe_misfit, match_names, settle_names, shapes_of
from ckpt_tools.fsdp2.read import BoxReader
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
    with ExitStack() as stack:

        def begin() -> _Sender | None:
            if this_rank():
                return None
            return stack.enter_context(_opened(model, targets, shared, source, strict=strict))

        sender = together(begin)
        found, contract = share(([], NameContract()) if sender is None else (list(sender.reads), sender.contract))
        place = device_of(model)
        state: dict[str, torch.Tensor] = {}
        for name in found:
            like = targets[name]
            whole = together(lambda name=name: None if sender is None else sender.reads[name]())  # type: ignore[misc]
            local = _exchange(whole, like.dtype, [by_name[name] for by_name in boxes], place)
            state[name] = assemble(local, like)
    report = LoadReport(
        missing=contract.missing,
        unexpected=contract.unexpected,
        tied=tuple(name for name, first in shared.items() if first in state),
        buffers=(),
        computed=(*contract.computed, *contract.anew),
        ignored=contract.ignored,
        notes=contract.notes,
        loaded_bytes=0 if sender is None or sender.reader is None else sender.reader.bytes_read,
    )
    return install(model, state, report)


def _gather_boxes(own: dict[str, Box]) -> list[dict[str, Box]]:
    """Return every rank's boxes by name; raise UsageError if two ranks have other names."""
    boxes = gather(own)
    for rank, theirs in enumerate(boxes):
        if list(theirs) != list(boxes[0]):
            only = sorted(set(theirs) ^ set(boxes[0]))
            raise UsageError(
                f"the models of rank 0 and rank {rank} differ: {first_few(only, 4) or 'names in another order'}",
                where="rank0_load",
                hint="build the same model on every rank",
            )
    return boxes


def _exchange(whole: torch.Tensor | None, dtype: torch.dtype, boxes: list[Box], place: torch.device) -> torch.Tensor:
    """Send every rank its box of rank 0's tensor; return this rank's, on `place`."""
    # Bytes: not every backend moves every dtype.
    wire = place if dist.is_initialized() and dist.get_backend() == "nccl" else torch.device("cpu")
    if whole is not None:
        parts = [whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] for box in boxes]
        for rank, part in enumerate(parts):
            if rank and part.numel():
                dist.send(bytes_of(part.to(wire)), dst=rank)
        return parts[0].clone(memory_format=torch.contiguous_format).to(place)
    own = torch.empty(boxes[this_rank()].sizes, dtype=dtype, device=wire)
    if own.numel():
        dist.recv(bytes_of(own), src=0)
    return own.to(place)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sender:
    """What rank 0 has for the model."""

    reads: Mapping[str, Callable[[], torch.Tensor]]
    """Name → what returns the whole tensor, in the model's dtype, on the CPU."""
    contract: NameContract
    reader: BoxReader | None


@contextmanager
def _opened(
    model: nn.Module,
    targets: Mapping[str, torch.Tensor],
    shared: Mapping[str, str],
    source: Source | None,
    *,
    strict: bool,
) -> Iterator[_Sender]:
    """Match names and check shapes, before anything is sent; a checkpoint stays open meanwhile."""
    if source is None:
        raise UsageError("rank 0 has nothing to load", where="rank0_load", hint="pass the state dict or the path")
    with ExitStack() as stack:
        reader: BoxReader | None = None
        reads: dict[str, Callable[[], torch.Tensor]]
        if isinstance(source, Mapping):
            match, architecture = Match(left=tuple(name for name in source if name not in targets)), ""
            tensors = sources_of(targets, shared, source)
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            reads = {name: partial(_cast, name, tensor, targets[name].dtype) for name, tensor in tensors.items()}
        else:
            opened = stack.enter_context(open_path(os.fspath(source)))
            reader = BoxReader(opened)
            match = match_names(opened.checkpoint, model, shapes_of(targets), "auto")
            architecture = opened.identity.architecture
            wholes = sources_of(targets, shared, match.found)
            shapes = {name: whole.shape for name, whole in wholes.items()}
            reads = {name: partial(reader.read_whole, whole, targets[name].dtype) for name, whole in wholes.items()}
        for name, like in targets.items():
            if name in shapes and shapes[name] != tuple(like.shape):
                raise UsageError(
                    f"{name!r} is {list(shapes[name])}, and {list(like.shape)} in the model", where="rank0_load"
                )
        missing = [name for name in targets if shared.get(name, name) not in reads]
        contract = settle_names(model, architecture, match, missing, targets, strict=strict)
        if strict and (contract.missing or contract.unexpected):
            raise UnreadableError(
                f"the source does not match the model: {describe_misfit(contract.missing, contract.unexpected)}",
                where="rank0_load",
                hint="pass strict=False if that is intended",
            )
        yield _Sender(reads=reads, contract=contract, reader=reader)


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype != dtype and not (tensor.is_floating_point() and dtype.is_floating_point):
        raise UsageError(f"{name!r} is {tensor.dtype}, and {dtype} in the model", where="rank0_load")
    return tensor.detach().to(device="cpu", dtype=dtype)
