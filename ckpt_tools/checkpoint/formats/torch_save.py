"""One file of `torch.save`: a model, or whatever a trainer keeps in it, read without unpickling.

Every tensor that keys lead to is described, under its keys joined by dots; `find_model` finds the model among them.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ckpt_tools.checkpoint.entries import Checkpoint, TensorEntry
from ckpt_tools.checkpoint.formats._torch_file import TorchFile, is_torch_file, read_torch_file
from ckpt_tools.checkpoint.formats._torch_pieces import Content, TensorPiece, describe_state, settings_of
from ckpt_tools.checkpoint.formats.file_names import PICKLES
from ckpt_tools.checkpoint.formats.format import Format, Opened
from ckpt_tools.checkpoint.formats.manifest import Manifest
from ckpt_tools.checkpoint.formats.unsupported import HEAD_BYTES, explain_file, explain_part
from ckpt_tools.errors import UnreadableError
from ckpt_tools.storage.source import Source
from ckpt_tools.text import first_few

_SHOWN = 4


def read_state(source: Source, name: str) -> tuple[TorchFile, Content]:
    """Read what a file of `torch.save` holds."""
    path = os.path.join(source.root, name)
    head = source.read(name, 0, min(source.size(name), HEAD_BYTES))
    if not is_torch_file(head):
        raise explain_file(path, head)
    file = read_torch_file(source, name)
    try:
        state = describe_state(file)
    except UnreadableError as error:
        raise type(error)(error.what, where=path, hint=error.hint) from error
    if not state.pieces and state.objects:
        shown = first_few([f"{path} ({kind})" for path, kind in state.objects.items()], _SHOWN)
        what = f"objects instead of a state dict, which ckpt does not unpickle: {shown}"
        hint = "if you trust the file, save only the weights: torch.save(model.state_dict(), NEW)"
        raise UnreadableError(what, where=path, hint=hint)
    return file, state


def whole_tensor(piece: TensorPiece, *, where: str) -> TensorEntry:
    """Return the tensor of a file that stands alone."""
    if sum(chunk.box.num_elems for chunk in piece.chunks) != math.prod(piece.shape):
        raise UnreadableError(
            f"tensor {piece.fqn!r} is one rank's part of a tensor of shape {list(piece.shape)}",
            where=where,
            hint="pass the directory with the files of all ranks; where this is the only file, it has rank 0's part "
            "alone (FULL_STATE_DICT of an adapter under FSDP2): save with SHARDED_STATE_DICT",
        )
    return TensorEntry(fqn=piece.fqn, dtype=piece.dtype, shape=piece.shape, chunks=piece.chunks, path=piece.path)


def list_unread(states: Iterable[Content]) -> tuple[str, ...]:
    """Say what of some files is not read."""
    values: dict[str, int] = {}
    objects: dict[str, str] = {}
    for state in states:
        values |= state.values
        objects |= {**state.objects, **state.sealed}
    found = (f"values that are not tensors: {first_few(list(values), _SHOWN)}",) if values else ()
    shown = first_few([f"{path} ({kind})" for path, kind in objects.items()], _SHOWN)
    return (*found, f"objects: {shown}") if objects else found


_PARALLEL = re.compile(r"(?:tensor|pipeline|expert|expert_tensor)_(?:model_)?parallel_size")


def list_parts(files: Iterable[TorchFile]) -> tuple[str, ...]:
    """Say what in some files makes them one part of several."""
    found: dict[str, None] = {}
    for file in files:
        for key, value in settings_of(file.value).items():
            if _PARALLEL.fullmatch(key) and type(value) is int and value > 1:
                found[f"its trainer ran with {key} = {value}"] = None
        if type(file.value) is dict and file.value.get("shard_metadata"):
            found["it has shard_metadata, which fairscale keeps in the shards of a model"] = None
    return tuple(found)


def list_tied(tensors: Sequence[TensorEntry]) -> tuple[str, ...]:
    """Say which tensors are one."""
    places: dict[tuple[object, ...], list[str]] = {}
    for entry in tensors:
        if entry.num_elems:
            key = (*((c.span, c.strides, c.box) for c in entry.chunks), entry.dtype.name, entry.shape)
            places.setdefault(key, []).append(entry.fqn)
    tied = [" = ".join(names) for names in places.values() if len(names) > 1]
    return (f"several names of one tensor, written under each: {first_few(tied, _SHOWN)}",) if tied else ()


class TorchSave(Format):
    """A `.pt`, `.pth`, `.bin` or `.ckpt`, as a zip or as the stream that torch before 1.6 wrote."""

    name = "torch"
    found_by = "a single file that `torch.save` wrote, zip or stream"
    about = "`.pt .pth .bin .ckpt` and others; never unpickled"
    whole_by = "its name and those beside it, the settings of its trainer (`args`), `shard_metadata`; else not known"
    suffix = ".pt"
    is_file = True
    counterpart = "torch-dir"
    is_training = True
    has_views = True

    def detects(self, files: Mapping[str, int]) -> bool:
        """By the end of its name; `opening` looks at the first bytes of files of other names."""
        return all(name.endswith(PICKLES) for name in files)

    def open(self, source: Source, files: Mapping[str, int], *, path: str, manifest: Manifest | None) -> Opened:  # noqa: ARG002
        """Read its pickle, without running it."""
        (name,) = files
        if (error := explain_part(name, path)) is not None:
            raise error
        file, state = read_state(source, name)
        tensors = tuple(whole_tensor(piece, where=path) for piece in state.pieces)
        held = Checkpoint(root=source.root, format=self.name, tensors=tensors, sealed=state.sealed, files=files)
        return Opened(
            format=self,
            checkpoint=replace(held, objects=+state.census),
            source=source,
            unread=list_unread([state]),
            notes=list_tied(tensors),
            sums=file.sums,
            partial=list_parts([file]),
        )


FORMAT = TorchSave()
