"""Where everything goes in the safetensors files of a mesh that ckpt writes: one per rank, as DCP's HF writer has them.

Source: torch `distributed/checkpoint/hf_storage.py`, `_hf_utils.py` and `filesystem.py` (2.13).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpt_tools.checkpoint.entries import BlobEntry, ByteSpan, Checkpoint, Chunk, TensorEntry
from ckpt_tools.checkpoint.formats.dcp_placing import Cells
from ckpt_tools.checkpoint.formats.hf_sharded import OFFSETS_KEY, SHARDING_KEY, HfSharded
from ckpt_tools.checkpoint.formats.safetensors import build_header, data_order
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.errors import UsageError
from ckpt_tools.text import first_few

_NOT_READ = ("F4", "F8_E8M0")
"""Of a file with such a tensor, torch's reader loads nothing: safetensors (0.8) has no torch dtype for them."""
_NOT_FLOAT = ("I", "U", "C", "BOOL")
"""Beginnings of the names of dtypes that torch's consolidator cannot take."""


def data_file(rank: int) -> str:
    """Return the name of `rank`'s file."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def place_sharded(
    tensors: Sequence[TensorEntry], cells: Mapping[str, Cells], blobs: Sequence[BlobEntry] = ()
) -> tuple[Checkpoint, dict[str, bytes]]:
    """Describe the files that hold `tensors` cut into `cells`: one per rank that holds something.

    Also return, per file, the bytes in front of its data. Cells are in logical elements, at most one of each rank
    for a tensor. Blobs are refused: these files cannot hold them.
    """
    if names := [blob.fqn for blob in blobs]:
        raise UsageError(
            f"safetensors holds only tensors; the source has {len(blobs)} other items: {first_few(names)}",
            hint="--serialization torch carries them; --for plain writes the model alone",
        )
    parts: dict[int, list[tuple[Box, TensorEntry]]] = {}  # what each rank's file holds, as tensors of their own
    for entry in tensors:
        if entry.dtype.torch_name is None or entry.dtype.name in _NOT_READ:
            instead = "" if entry.dtype.torch_name is None else "use --serialization torch, or "
            raise UsageError(
                f"torch's reader of safetensors does not load {entry.dtype.name}",
                where=entry.fqn,
                hint=f"{instead}leave the tensor out: --exclude {shlex.quote(entry.fqn)}",
            )
        for rank, box in cells[entry.fqn]:
            parts.setdefault(rank, []).append((box, replace(entry, shape=box.sizes, chunks=())))
    chunks: dict[str, list[Chunk]] = {entry.fqn: [] for entry in tensors}
    heads, sizes = {}, {}
    for rank, held in sorted(parts.items()):
        file = data_file(rank)
        boxes = {part.fqn: box for box, part in held}
        info = {fqn: {OFFSETS_KEY: box.offsets} for fqn, box in boxes.items()}
        ordered = data_order([part for _, part in held])
        metadata = {SHARDING_KEY: json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"}
        heads[file], starts = build_header(ordered, metadata=metadata)
        sizes[file] = len(heads[file]) + sum(part.nbytes for part in ordered)
        for part, start in zip(ordered, starts, strict=True):
            span = ByteSpan(file=file, offset=start, nbytes=part.nbytes)
            chunks[part.fqn].append(Chunk(box=boxes[part.fqn], span=span))
    placed = tuple(replace(entry, chunks=tuple(chunks[entry.fqn])) for entry in tensors)
    return Checkpoint(root="", format=HfSharded.name, tensors=placed, files=sizes), heads


def notes_on_loading(tensors: Sequence[TensorEntry], destination: str) -> list[str]:
    """Say how torch loads what is written, and what its own consolidator makes of it."""
    notes = [f"load it with dcp.load(state, storage_reader=HuggingFaceStorageReader({destination!r}))"]
    odd = [entry.fqn for entry in tensors if not entry.shape or entry.dtype.name.startswith(_NOT_FLOAT)]
    if odd:
        notes.append(
            "torch's consolidate_safetensors_files does not restore scalars, integers, booleans and complex numbers; "
            f"ckpt gather does: {first_few(odd)}"
        )
    return notes
