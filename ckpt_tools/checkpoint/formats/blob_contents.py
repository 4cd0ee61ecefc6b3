"""What lies inside of blobs: torch keeps tuples, and state dicts that nobody flattens, as objects of `torch.save`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from ckpt_tools.checkpoint.entries import BlobEntry, Census, TensorEntry
from ckpt_tools.checkpoint.formats._torch_file import read_torch_file
from ckpt_tools.checkpoint.formats._torch_pieces import describe_state
from ckpt_tools.checkpoint.formats.format import Opened
from ckpt_tools.checkpoint.formats.torch_save import whole_tensor
from ckpt_tools.checkpoint.transform import find_model, in_model
from ckpt_tools.errors import CkptError, UnreadableError
from ckpt_tools.storage.source import Source
from ckpt_tools.storage.virtual import VirtualFile, VirtualSource
from ckpt_tools.text import first_few

Missed = list[str] | None
_SMALL_BYTES = 1 << 14  # Blobs that are read at once; most of these are one of a few settings


class Inside(NamedTuple):
    """What a blob holds, as its pickle says without being run."""

    census: Census
    sealed: Mapping[str, str]  # as `Checkpoint.sealed`
    tensors: tuple[TensorEntry, ...] = ()  # that keys and indices lead to


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
        return Inside(Counter([f"not known: {error.what}"]), {blob.fqn: f"an object that is not read: {error.what}"})
    for piece in state.pieces:
        if sum(chunk.box.num_elems for chunk in piece.chunks) != math.prod(piece.shape):
            state.sealed[piece.fqn] = "one rank's part of a tensor"
    tensors = tuple(whole_tensor(piece, where=name) for piece in state.pieces if piece.fqn not in state.sealed)
    size = sum(record.nbytes for record in storages.values())
    found = Inside(state.census + Counter(tensors=len(state.pieces), bytes=size), state.sealed, tensors)
    return seen.setdefault(content, found) if content and not (tensors or state.sealed) else found


def check_sealed(
    opened: Opened, prefix: str | None = None, *, kept: Collection[str] | None = None, missed: Missed = None
) -> None:
    """Refuse to leave out a part of the model that is not read, of all or of the `kept` names; with `told`, tell it."""
    sealed = {name: what for name, what in opened.checkpoint.sealed.items() if kept is None or name in kept}
    prefix = find_model(opened.checkpoint)[1] if prefix is None and sealed else prefix or ""
    found = [f"{name}: {what}" for name, what in sealed.items() if in_model(name, prefix)]
    if missed is not None:
        missed += found
    elif found:
        what = f"not read, but perhaps part of the model: {first_few(found)}"
        hint = "save what belongs to the model as tensors; `ckpt extract SRC NEW --exclude GLOB` leaves the rest out"
        raise UnreadableError(what, where=opened.source.root, hint=hint)


def revealed(opened: Opened, strip: str = "auto") -> Opened:
    """Return a checkpoint with the model's tensors that lie inside of blobs; `strip` is what `--strip-prefix` says."""
    checkpoint = opened.checkpoint
    prefix = "" if strip == "none" or not checkpoint.blobs else f"{strip.rstrip('.')}."
    prefix = find_model(checkpoint)[1] if strip == "auto" and checkpoint.blobs else prefix
    found = look_into((blob for blob in checkpoint.blobs if in_model(blob.fqn, prefix)), opened.source)
    tensors = (*checkpoint.tensors, *(entry for each in found.values() for entry in each.tensors))
    blobs = tuple(b for b in checkpoint.blobs if b.fqn not in found or found[b.fqn].sealed or not found[b.fqn].tensors)
    sealed = dict(pair for each in (checkpoint.sealed, *(e.sealed for e in found.values())) for pair in each.items())
    return replace(opened, checkpoint=replace(checkpoint, tensors=tensors, blobs=blobs, sealed=sealed))
