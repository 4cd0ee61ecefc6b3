"""What lies inside of blobs: torch keeps tuples, and state dicts that nobody flattens, as objects of `torch.save`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from ckpt_tools.description.checkpoint import BlobEntry, TensorEntry
from ckpt_tools.description.transform import find_model, is_beside, strip_wrappers
from ckpt_tools.errors import CkptError
from ckpt_tools.formats._torch_file import read_torch_file
from ckpt_tools.formats._torch_state import describe_state
from ckpt_tools.formats.format import Opened
from ckpt_tools.formats.torch_save import whole_tensor
from ckpt_tools.storage.source import Source
from ckpt_tools.storage.virtual import VirtualFile, VirtualSource
from ckpt_tools.units import format_size

_SMALL_BYTES = 1 << 14
"""Blobs that are read at once; most of these are one of a few settings."""


class Inside(NamedTuple):
    """What a blob holds, as its pickle says without being run."""

    holds: str  # in words
    sealed: Mapping[str, str]  # as `Checkpoint.sealed`
    tensors: tuple[TensorEntry, ...] = ()  # that keys and indices lead to
    count: int = 0  # of all tensors and arrays


def look_into(blobs: Iterable[BlobEntry], source: Source) -> dict[str, Inside]:
    """Return what blobs hold, by their names; of tensors only the places are read."""
    chosen = list(blobs)
    source.prefetch((b.span.file, b.span.offset, min(b.span.nbytes, _SMALL_BYTES)) for b in chosen)
    seen: dict[bytes, Inside] = {}
    return {blob.fqn: _look(blob, source, seen) for blob in chosen}


def _look(blob: BlobEntry, source: Source, seen: dict[bytes, Inside]) -> Inside:
    start, name = blob.span.offset, blob.span.file
    whole = VirtualFile(blob.span.nbytes, lambda offset, buffer: source.read_into(name, start + offset, buffer))
    try:
        content = source.read(name, start, blob.span.nbytes) if blob.span.nbytes <= _SMALL_BYTES else b""
        if content in seen:
            return seen[content]
        file = read_torch_file(VirtualSource(source, {name: whole}), name)
        storages = {key: record._replace(start=start + record.start) for key, record in file.storages.items()}
        state = describe_state(replace(file, storages=storages), blob.path or (blob.fqn,))
    except CkptError as error:
        return Inside(f"not known: {error.what}", {blob.fqn: f"an object that is not read: {error.what}"})
    for piece in state.pieces:
        if sum(chunk.box.num_elems for chunk in piece.chunks) != math.prod(piece.shape):
            state.sealed[piece.fqn] = "one rank's part of a tensor"
    tensors = tuple(whole_tensor(piece, where=name) for piece in state.pieces if piece.fqn not in state.sealed)
    count = len(state.pieces) + sum(state.counts.values())
    stored = format_size(sum(record.nbytes for record in storages.values()))
    holds = "; ".join((f"{count} tensors, {stored}" if count else "no tensor", *sorted(set(state.objects.values()))))
    found = Inside(holds, state.sealed, tensors, count)
    if content and not count:
        seen[content] = found
    return found


def list_sealed(opened: Opened, prefix: str | None = None) -> tuple[str, ...]:
    """Say what of the model is not read although it is, or holds, tensors."""
    prefix = find_model(opened.checkpoint)[1] if prefix is None else prefix
    return tuple(f"{name}: {what}" for name, what in opened.checkpoint.sealed.items() if _in_model(name, prefix))


def _in_model(name: str, prefix: str) -> bool:
    """May something be a part of the model whose names begin so? What trainers keep may lie beside it at the root."""
    return f"{strip_wrappers(name)}.".startswith(prefix) and not (prefix == "" and is_beside(name))


def revealed(opened: Opened, strip: str = "auto") -> Opened:
    """Return a checkpoint with the model's tensors that lie inside of blobs; `strip` is what `--strip-prefix` says."""
    checkpoint = opened.checkpoint
    prefix = find_model(checkpoint)[1] if strip == "auto" else "" if strip == "none" else f"{strip.rstrip('.')}."
    found = look_into((blob for blob in checkpoint.blobs if _in_model(blob.fqn, prefix)), opened.source)
    tensors = (*checkpoint.tensors, *(entry for each in found.values() for entry in each.tensors))
    blobs = tuple(b for b in checkpoint.blobs if b.fqn not in found or found[b.fqn].sealed or not found[b.fqn].tensors)
    sealed = {name: what for each in (checkpoint, *found.values()) for name, what in each.sealed.items()}
    return replace(opened, checkpoint=replace(checkpoint, tensors=tensors, blobs=blobs, sealed=sealed))
