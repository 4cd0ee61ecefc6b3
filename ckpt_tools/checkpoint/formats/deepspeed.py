"""DeepSpeed's checkpoints: the model that the trainer computes with.

In stages 1 and 2 of ZeRO one file has it whole, and every rank has a part of the fp32 weights and of the optimizer's
state. In stage 3 there are only the parts. A Trainer's or accelerate's step has such a directory inside.

Source: deepspeed 0.19.8 `runtime/engine.py` (`save_checkpoint`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckpt_tools.checkpoint.formats import deepspeed_fp32
from ckpt_tools.checkpoint.formats._zero_files import (
    FROZEN,
    MERGE,
    check_number,
    content_of,
    find_save,
    integer_of,
    list_saves,
    open_save,
    plain_entry,
    read_files,
    read_pieces,
)
from ckpt_tools.checkpoint.formats._zero_flat import read_shapes
from ckpt_tools.checkpoint.formats.format import Format, Opened
from ckpt_tools.checkpoint.formats.manifest import Manifest
from ckpt_tools.errors import UnreadableError
from ckpt_tools.storage.source import Source
from ckpt_tools.text import first_few

_WHOLE = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""The model itself beside the save: there it is read."""


class DeepSpeed(Format):
    """A save of DeepSpeed's, as the trainer computes with it; where only fp32 weights are, `deepspeed-fp32`."""

    name = "deepspeed"
    found_by = (
        "`mp_rank_00_model_states.pt`, `zero_pp_rank_N_…` in a directory, or in the one below that `latest` names"
    )
    about = (
        "the model as the trainer computes with it; ZeRO-3 and the universal form, which have no such "
        "model, are read as `deepspeed-fp32`. `verify` reads the model's file alone and names the others"
    )
    whole_by = "`param_shapes`, which lists what is trained; frozen weights may be left out on purpose"
    suffix = ".pt"
    is_training = True
    has_views = True

    def detects(self, files: Mapping[str, int]) -> bool:
        """By the names of its files, in the directory or in one below."""
        return not any(name in files for name in _WHOLE) and ("zero_to_fp32.py" in files or bool(list_saves(files)))

    def open(self, source: Source, files: Mapping[str, int], *, path: str, manifest: Manifest | None) -> Opened:
        """Read the pickle with the model, without running it."""
        save = find_save(source, files, path)
        if save.models or save.universal:
            return deepspeed_fp32.FORMAT.open(source, files, path=path, manifest=manifest)
        (file,) = read_files(source, {0: save.model})
        check_number(file, "mp_world_size", 1, MERGE)
        tensors = [plain_entry(piece, (name,)) for name, piece in read_pieces(file, "module").items()]
        if not tensors:
            raise UnreadableError("a save without the model's weights", where=save.model)
        buffers = content_of(file).get("buffer_names")
        known = buffers if isinstance(buffers, list) else []
        dtypes = dict.fromkeys(entry.dtype.name for entry in tensors if entry.fqn not in known)
        notes = [f"reads the weights that the trainer computes with ({first_few(list(dtypes))})"]
        unread = []
        if save.optimizers:
            found, ranks = len(save.optimizers), integer_of(file, "dp_world_size", len(save.optimizers))
            notes[0] += f"; --from {deepspeed_fp32.FORMAT.name} reads the fp32 weights and the optimizer's state"
            unread.append(
                f"the fp32 weights and the optimizer's state, in files of {found}{f' of {ranks}' * (found != ranks)} "
                f"ranks (--from {deepspeed_fp32.FORMAT.name})"
            )
        opened = open_save(self, source, files, save, tensors, [file], notes, unread)
        trained = {
            name for group in read_shapes(content_of(file).get("param_shapes") or [], file.name) for name in group
        }
        lacking = trained - {entry.fqn for entry in tensors}
        partial = (f"{len(lacking)} of {len(trained)} parameters are not here: {first_few(sorted(lacking))}",)
        return replace(opened, partial=partial if lacking else (), excuse=FROZEN)


FORMAT = DeepSpeed()
