"""What lies inside of the items that are no tensors: torch keeps tuples whole, and all of a state dict that it does not
flatten, each as an object of `torch.save`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ckpt_tools.description.checkpoint import BlobEntry, ByteSpan, ObjectContent, TensorEntry
from ckpt_tools.description.transform import find_model, is_beside, strip_wrappers
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats._torch_file import read_torch_file
from ckpt_tools.formats._torch_state import describe_state
from ckpt_tools.formats.format import Opened
from ckpt_tools.formats.torch_save import whole_tensor
from ckpt_tools.storage.source import Source
from ckpt_tools.storage.virtual import VirtualFile, VirtualSource

_MACHINERY = re.compile(
    r"torch\._(utils|tensor)\._rebuild\w*|torch\.\w+Storage|torch\.storage\.\w+|collections\.OrderedDict"
)
"""What every pickle of tensors names."""
_AHEAD_BYTES = 1 << 14
"""Of an item, read at once where requests take time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inside:
    """What one item holds."""

    content: ObjectContent
    tensors: tuple[TensorEntry, ...] = ()
    """Those that keys and indices lead to."""
    sealed: tuple[tuple[str, str], ...] = ()
    """Keys → what it is, of all else that is or holds tensors."""


def _look(blob: BlobEntry, source: Source) -> _Inside:
    """Look into an item; of tensors only the place is read."""
    span = blob.span

    def fill(offset: int, buffer: memoryview) -> None:
        source.read_into(span.file, span.offset + offset, buffer)

    try:
        file = read_torch_file(VirtualSource(source, {span.file: VirtualFile(span.nbytes, fill)}), span.file)
        state = describe_state(file, blob.path or (blob.fqn,))
    except UnreadableError as error:
        why = f"not known: {error.what}"
        return _Inside(content=ObjectContent(why=why), sealed=((blob.fqn, f"an object whose content is {why}"),))
    tensors, sealed = [], dict(state.sealed)
    for piece in state.pieces:
        try:
            entry = whole_tensor(piece, where=span.file)
            moved = (
                replace(c, span=ByteSpan(file=span.file, offset=span.offset + c.span.offset, nbytes=c.span.nbytes))
                for c in entry.chunks
            )
            tensors.append(replace(entry, chunks=tuple(moved)))
        except UnreadableError:
            sealed[piece.fqn] = "one rank's part of a tensor"
    content = ObjectContent(
        tensors=len(state.pieces) + state.num_hidden,
        nbytes=sum(record.nbytes for record in file.storages.values()),
        classes=tuple(sorted(name for name in file.names if not _MACHINERY.fullmatch(name))),
    )
    return _Inside(content=content, tensors=tuple(tensors), sealed=tuple(sealed.items()))


def _each(blobs: Iterable[BlobEntry], source: Source) -> Iterator[tuple[BlobEntry, _Inside]]:
    chosen = list(blobs)
    source.prefetch((b.span.file, b.span.offset, min(b.span.nbytes, _AHEAD_BYTES)) for b in chosen)
    return ((blob, _look(blob, source)) for blob in chosen)


def list_objects(blobs: Iterable[BlobEntry], source: Source) -> dict[str, ObjectContent]:
    """Return what items hold, by their names."""
    return {blob.fqn: inside.content for blob, inside in _each(blobs, source)}


def in_model(name: str, prefix: str) -> bool:
    """May something be a part of the model whose tensors' names begin so? Where all do, what trainers keep is not."""
    return f"{strip_wrappers(name)}.".startswith(prefix) and not (prefix == "" and is_beside(name))


def list_sealed(opened: Opened, prefix: str | None = None) -> list[str]:
    """Say what of the model is not read although it is, or holds, tensors."""
    prefix = find_model(opened.checkpoint)[1] if prefix is None else prefix
    return [f"not read: {name} ({what})" for name, what in opened.sealed.items() if in_model(name, prefix)]


def revealed(opened: Opened, strip: str = "auto") -> Opened:
    """Return a checkpoint with the tensors of the model that lie inside of items, in the place of these.

    `strip` is what `--strip-prefix` says. Those that cannot be read become `sealed`.
    """
    checkpoint = opened.checkpoint
    prefix = find_model(checkpoint)[1] if strip == "auto" else "" if strip == "none" else f"{strip.rstrip('.')}."
    found = _each((blob for blob in checkpoint.blobs if in_model(blob.fqn, prefix)), opened.source)
    holding = {blob: inside for blob, inside in found if inside.tensors or inside.sealed}
    if not holding:
        return opened
    tensors = (entry for inside in holding.values() for entry in inside.tensors)
    return replace(
        opened,
        checkpoint=replace(
            checkpoint,
            tensors=(*checkpoint.tensors, *tensors),
            blobs=tuple(blob for blob in checkpoint.blobs if blob not in holding or holding[blob].sealed),
        ),
        sealed={**opened.sealed, **{name: what for inside in holding.values() for name, what in inside.sealed}},
    )
