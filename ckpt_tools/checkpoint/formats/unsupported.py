"""Checkpoints that ckpt does not read: whose they are, and what to do with them.

A directory is told by the names in it, a file by its first bytes. Nothing is opened but those.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from ckpt_tools.checkpoint.formats._torch_file import is_torch_file
from ckpt_tools.checkpoint.formats.file_names import (
    CONFIG_NAME,
    INDEX_SUFFIX,
    METADATA_NAME,
    PICKLES,
    explain_parts,
    files_below,
    is_side_file,
    is_weights,
    parts_of,
)
from ckpt_tools.checkpoint.formats.table import detect_format
from ckpt_tools.errors import ForeignLayoutError, UnreadableError
from ckpt_tools.tables import read_rows
from ckpt_tools.text import first_few

_PICKLED = (*PICKLES, ".pkl", ".tar")
HEAD_BYTES = 512  # How much of a file tells what it is

_READABLE = "pass a safetensors or torch.save file, a model directory or a DCP checkpoint directory"
_CONVERT = "if you trust them, save only the weights: torch.save(model.state_dict(), NEW), or model.save_pretrained"
_ZERO = re.compile(r"(bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+_?(model|optim)_states\.pt")
_MEGATRON_PART = re.compile(r"([^/]+/)?mp_rank_\d+(_\d+)*/(model_optim_rng|distrib_optim|model_rng)\.pt")
_RANK_FILE = re.compile(
    r"(model|optim|extra_state)_world_size_\d+_rank_\d+\.pt|(pytorch_model_fsdp|optimizer)(_\d+)?_rank\d+\.bin"
)


def explain(files: Mapping[str, int], path: str) -> UnreadableError:
    """Return the error for a directory that is nothing that ckpt reads; `files` are relative name → size."""
    top = [name for name in files if "/" not in name]
    path = path.rstrip("/") or path
    if (known := _layout(files, top, path)) is not None:
        return known
    saved = [name for name in files if name.endswith(_PICKLED) and not is_side_file(os.path.basename(name))]
    if (parts := explain_parts(saved)) is not None:
        return ForeignLayoutError(f"{parts[1]}, which ckpt does not join", where=path, hint=parts[0].kind.whole)
    weights = [name for name in top if name.endswith(_PICKLED) and not is_side_file(name)]
    if weights:
        return _pickled(weights, path)
    below = files_below(files)
    found = sorted((child for child in below if _is_readable(below[child])), key=_step)
    if found:
        inside = below[found[-1]]
        for named, what in parts_of([name for name in inside if is_weights(name) and "/" not in name], inside):
            return UnreadableError(f"a part of a model in {found[-1]}: {what}", where=path, hint=named.kind.whole)
        shown = ", ".join(found[-4:])
        what = f"a directory of checkpoints, not a checkpoint (it holds {shown})"
        return UnreadableError(what, where=path, hint=f"use {path}/{found[-1]}")
    for row in _known():
        if _is_inside(row, files):
            return ForeignLayoutError(f"{row['what']}, which ckpt does not read", where=path, hint=row["way_on"])
    for child in sorted(below, key=lambda child: (-_step(child)[0], child)):  # the latest; an actor before its critic
        error = explain({name: below[child][name] for name in below[child] if name != CONFIG_NAME}, f"{path}/{child}")
        if error.hint != _READABLE:
            return error
    pickles = [name for name in top if name.endswith(_PICKLED)]
    if pickles:
        return _pickled(pickles, path)
    if CONFIG_NAME in files:
        hint = f"ckpt estimate {shlex.quote(path)} --mesh dp_shard=8 says what such a model needs"
        return UnreadableError(f"no tensors here: a {CONFIG_NAME} without weights", where=path, hint=hint)
    return UnreadableError("no tensors here: neither .metadata nor safetensors files", where=path, hint=_READABLE)


_known = partial(read_rows, __package__, "unsupported.tsv")


def _is_inside(row: Mapping[str, str], files: Iterable[str]) -> bool:
    """Does a file in a directory show that it is of the row's format?"""
    if row["told_by"] == "ending":
        return any("/" not in name and name.endswith(row["sign"]) for name in files)
    return row["told_by"] == "inside" and any(map(re.compile(row["sign"]).fullmatch, files))


def _is_file(row: Mapping[str, str], name: str, head: bytes) -> bool:
    """Is a file of this name and these first bytes of the row's format?"""
    if row["told_by"] == "ending":
        return name.endswith(row["sign"])
    word, _, at = row["told_by"].partition(" ")
    return word == "byte" and head[int(at) :].startswith(
        row["sign"].encode().decode("unicode_escape").encode("latin-1")
    )


def explain_file(path: str, head: bytes, *, otherwise: UnreadableError | None = None) -> UnreadableError:
    """Return the error for a single file that is no safetensors file, from its first bytes."""
    # There are `HEAD_BYTES` of them where it is that long. The error is `otherwise` for a file whose bytes say nothing.
    name = os.path.basename(path)
    directory = os.path.dirname(path) or "."
    if is_torch_file(head):
        hint = f"rename it, or pass --from torch: {shlex.quote(path)}"
        return UnreadableError("a torch.save file with the name of another kind", where=path, hint=hint)
    for row in _known():
        if _is_file(row, name, head):
            return UnreadableError(f"{row['what']}, which ckpt does not read", where=path, hint=row["way_on"])
    if len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5:
        return ForeignLayoutError("a bare pickle, which ckpt does not execute", where=path, hint=_CONVERT)
    if otherwise is not None:
        return otherwise
    if name == METADATA_NAME or name.endswith((".distcp", INDEX_SUFFIX)):
        return UnreadableError("a part of a checkpoint", where=path, hint=f"pass the directory: {directory}")
    what = "not a safetensors file"
    if name.endswith(PICKLES):
        what += ", and not one that torch.save wrote whole"
    return UnreadableError(what, where=path, hint=_READABLE)


def _pickled(names: Sequence[str], path: str) -> UnreadableError:
    """Return the error for pickles of which none is taken: objects, or several files of weights and no index."""
    saved = [name for name in names if name.endswith(PICKLES)]
    if not saved:
        return ForeignLayoutError("only pickled objects, which ckpt does not execute", where=path, hint=_CONVERT)
    what = f"several torch.save files, and it is not clear which to read: {first_few(saved)}"
    return ForeignLayoutError(what, where=path, hint=f"pass one file: {os.path.join(path, saved[0])}")


def explain_part(name: str, path: str) -> UnreadableError | None:
    """Return the error for a file at `path` that by its name is one rank's part of a checkpoint; None for any other."""
    if _RANK_FILE.fullmatch(name) or _ZERO.fullmatch(name):
        hint = f"pass the directory: {os.path.dirname(path) or '.'}"
        return UnreadableError("one rank's part of a checkpoint", where=path, hint=hint)
    return None


def _layout(files: Mapping[str, int], top: Iterable[str], path: str) -> UnreadableError | None:
    """Return the error for a layout that is known by its names, these directly in `path` or one directory below."""
    top = list(top)
    if any(name.endswith(".distcp") for name in top):
        hint = "use the checkpoint before it, or save it again"
        if any(re.fullmatch(r"__\d+\.metadata", name) for name in top):
            hint = "use_collectives=False writes one metadata file per rank and no .metadata: save without it"
        what = "a DCP checkpoint without .metadata: the save was killed before it finished"
        return UnreadableError(what, where=path, hint=hint)
    if any(map(_RANK_FILE.fullmatch, top)):
        what = "rank files without a model: optimizer or other state"
        return ForeignLayoutError(what, where=path, hint=_verl_hint(files, path))
    if sum(map(bool, map(_MEGATRON_PART.fullmatch, files))) > 1:
        return ForeignLayoutError(
            "Megatron's format before torch_dist, with a file for every part of the model, which ckpt does not read",
            where=path,
            hint="load it with Megatron-LM and --ckpt-convert-format torch_dist --ckpt-convert-save NEW, and use NEW",
        )
    if "metadata.pkl" in top:
        hint = "load it with its CheckpointManager, and save the result with torch.distributed.checkpoint.save"
        what = "a torch_checkpointing checkpoint (metadata.pkl), which ckpt does not read"
        return ForeignLayoutError(what, where=path, hint=hint)
    return None


def _verl_hint(files: Mapping[str, int], path: str) -> str:
    """Point at the weights that verl may have put beside its own files."""
    if any(name.startswith("huggingface/") and name.endswith(".safetensors") for name in files):
        return f"use {path}/huggingface, which holds the model's weights"
    return "restore the model's files (model_world_size_N_rank_R.pt, pytorch_model_fsdp_0_rankR.bin)"


def _is_readable(files: Mapping[str, int]) -> bool:
    """Is there a checkpoint in these files, or in those of a directory below?"""
    return detect_format(files, is_file=False) is not None or any(map(_is_readable, files_below(files).values()))


def _step(name: str) -> tuple[int, str]:
    """Order checkpoint directories by the last number in their name."""
    numbers = re.findall(r"\d{1,18}", name)
    return (int(numbers[-1]) if numbers else -1, name)
