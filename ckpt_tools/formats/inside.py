"""What lies inside of blobs: torch keeps tuples, and state dicts that nobody flattens, as objects of `torch.save`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ckpt_tools.description.checkpoint import BlobEntry, ByteSpan, Inside, TensorEntry
from ckpt_tools.description.transform import find_model, is_beside, strip_wrappers
from ckpt_tools.errors import CkptError, UnreadableError
from ckpt_tools.formats._torch_file import read_torch_file
from ckpt_tools.formats._torch_state import describe_state
from ckpt_tools.formats.format import Opened
from ckpt_tools.formats.torch_save import whole_tensor
from ckpt_tools.storage.source import Source
from ckpt_tools.storage.virtual import VirtualFile, VirtualSource

_AHEAD_BYTES = 1 << 14
"""Of a blob, read at once where requests take time."""


def look_into(blobs: Iterable[BlobEntry], source: Source) -> dict[str, Inside]:
    """Return what blobs hold, by their names; of tensors only the places are read."""
    chosen = list(blobs)
    source.prefetch((b.span.file, b.span.offset, min(b.span.nbytes, _AHEAD_BYTES)) for b in chosen)
    seen: dict[bytes, Inside] = {}
    return {blob.fqn: _look(blob, source, seen) for blob in chosen}


def _look(blob: BlobEntry, source: Source, seen: dict[bytes, Inside]) -> Inside:
    """Look into one; most are one of a few settings, which are `seen`."""
    start, name = blob.span.offset, blob.span.file
    whole = VirtualFile(blob.span.nbytes, lambda offset, buffer: source.read_into(name, start + offset, buffer))
    try:
        content = source.read(name, start, blob.span.nbytes) if blob.span.nbytes <= _AHEAD_BYTES else b""
        if content in seen:
            return seen[content]
        file = read_torch_file(VirtualSource(source, {name: whole}), name)
        state = describe_state(file, blob.path or (blob.fqn,))
    except CkptError as error:
        return Inside(why=error.what, sealed={blob.fqn: f"an object that is not read: {error.what}"})
    tensors: list[TensorEntry] = []
    for piece in state.pieces:
        try:
            entry = whole_tensor(piece, where=name)
        except UnreadableError:
            state.sealed[piece.fqn] = "one rank's part of a tensor"
            continue
        spans = (ByteSpan(file=name, offset=start + c.span.offset, nbytes=c.span.nbytes) for c in entry.chunks)
        chunks = tuple(replace(chunk, span=span) for chunk, span in zip(entry.chunks, spans, strict=True))
        tensors.append(replace(entry, chunks=chunks))
    found = Inside(
        tensors=tuple(tensors),
        sealed=state.sealed,
        num_tensors=len(state.pieces) + sum(state.counts.values()),
        nbytes=sum(record.nbytes for record in file.storages.values()),
        classes=tuple(sorted(set(state.objects.values()))),
    )
    if content and not found.num_tensors:
        seen[content] = found
    return found


def list_sealed(opened: Opened, prefix: str | None = None) -> list[str]:
    """Say what of the model is not read although it is, or holds, tensors."""
    prefix = find_model(opened.checkpoint)[1] if prefix is None else prefix
    return [f"not read: {name} ({what})" for name, what in opened.checkpoint.sealed.items() if _in_model(name, prefix)]


def _in_model(name: str, prefix: str) -> bool:
    """May something be a part of the model whose names begin so? What trainers keep may lie beside it at the root."""
    return f"{strip_wrappers(name)}.".startswith(prefix) and not (prefix == "" and is_beside(name))


def revealed(opened: Opened, strip: str = "auto") -> Opened:
    """Return a checkpoint with the model's tensors that lie inside of blobs; what cannot be read of them is `sealed`.

    `strip` is what `--strip-prefix` says.
    """
    checkpoint = opened.checkpoint
    prefix = find_model(checkpoint)[1] if strip == "auto" else "" if strip == "none" else f"{strip.rstrip('.')}."
    found = look_into((blob for blob in checkpoint.blobs if _in_model(blob.fqn, prefix)), opened.source)
    tensors = (*checkpoint.tensors, *(entry for each in found.values() for entry in each.tensors))
    read = {fqn for fqn, each in found.items() if each.tensors and not each.sealed}
    blobs = tuple(blob for blob in checkpoint.blobs if blob.fqn not in read)
    sealed = {name: what for each in found.values() for name, what in each.sealed.items()}
    sealed = {**checkpoint.sealed, **sealed}
    return replace(opened, checkpoint=replace(checkpoint, tensors=tensors, blobs=blobs, sealed=sealed))
