"""DeepSpeed's checkpoints: the model that the trainer computes with.

In stages 1 and 2 of ZeRO one file has it whole, and every rank has a part of the fp32 weights and of the optimizer's
state. In stage 3 there are only the parts. A Trainer's or accelerate's step has such a directory inside.

Source: deepspeed 0.19.8 `runtime/engine.py` (`save_checkpoint`).
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats import deepspeed_fp32
from ckpt_tools.formats._zero_files import (
    SCRIPT,
    find_save,
    list_saves,
    open_save,
    plain_entry,
    read_file,
    read_pieces,
)
from ckpt_tools.formats.format import Format, Opened
from ckpt_tools.formats.manifest import Manifest
from ckpt_tools.storage.source import Source
from ckpt_tools.text import first_few

_WHOLE = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""The model itself beside the save: there it is read."""


class DeepSpeed(Format):
    """A tag of DeepSpeed's, as the trainer computes with it; of stage 3, whose weights are fp32, as `DeepSpeedFp32`."""

    name = "deepspeed"
    suffix = ".pt"
    is_training = True
    has_views = True

    def detects(self, files: Mapping[str, int]) -> bool:
        """By the names of its files, in the directory or in one below."""
        return (SCRIPT in files or bool(list_saves(files))) and not any(name in files for name in _WHOLE)

    def open(self, source: Source, files: Mapping[str, int], *, path: str, manifest: Manifest | None) -> Opened:
        """Read the pickle with the model, without running it."""
        tag = find_save(source, files, path)
        if not tag.model:
            return deepspeed_fp32.FORMAT.open(source, files, path=path, manifest=manifest)
        file = read_file(source, tag.model)
        pieces = read_pieces(file, "module")
        if not pieces:
            raise UnreadableError("a checkpoint without the model's weights", where=tag.model)
        tensors = tuple(plain_entry(piece, (name,)) for name, piece in pieces.items())
        dtypes = first_few(dict.fromkeys(entry.dtype.name for entry in tensors if entry.dtype.is_float))
        notes = [f"reads the weights that the trainer computes with ({dtypes})"]
        unread = []
        if tag.optimizers:
            notes[0] += f"; --from {deepspeed_fp32.FORMAT.name} reads the fp32 weights and the optimizer's state"
            unread.append(f"the fp32 weights and the optimizer's state: files of {len(tag.optimizers)} ranks")
        return open_save(self, source, files, tag, tensors, [file], notes, unread)


FORMAT = DeepSpeed()
