"""The safetensors files of DCP's HF writer, where every rank saved its own chunks.

Source: torch `distributed/checkpoint/_hf_utils.py` and `hf_storage.py` (2.13).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpt_tools.checkpoint.entries import (
    MAX_ELEMS,
    Asset,
    BlobEntry,
    ByteSpan,
    Checkpoint,
    Chunk,
    TensorEntry,
    is_possible_shape,
)
from ckpt_tools.checkpoint.formats._json import parse_json
from ckpt_tools.checkpoint.formats.dcp_placing import Cells
from ckpt_tools.checkpoint.formats.digest import digest_bytes
from ckpt_tools.checkpoint.formats.file_names import is_hf_asset, is_weights
from ckpt_tools.checkpoint.formats.format import Format, Opened
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME, Manifest
from ckpt_tools.checkpoint.formats.safetensors import LENGTH_BYTES, HeaderFile, build_header, data_order, read_file
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.storage.source import Source
from ckpt_tools.text import first_few

SHARDING_KEY = "DCP_SHARDING_INFO"  # Header metadata of a file that holds chunks instead of whole tensors
OFFSETS_KEY = "saved_offsets"  # In it, the key of a chunk's offsets
SHARDED_FILE = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")  # Of DCP's HF writer: rank, number, count
ITEMS_FILE = re.compile(r"__\d+_\d+\.distcp", re.ASCII)
"""What `FileSystemWriter` calls the same with SerializationFormat.SAFETENSORS: read where `--from` asks for it."""


def describe_sharded(root: str, files: Sequence[HeaderFile]) -> Checkpoint:
    """Describe the files of `HuggingFaceStorageWriter(save_distributed=True)`."""
    # They record where each chunk lies but not the global shape, which is taken as the hull of the chunks: the
    # exact-tiling check finds a hole, but not a file that was lost from the very end of every tensor.
    chunks: dict[str, list[tuple[TensorEntry, tuple[int, ...]]]] = {}
    for file in files:
        offsets_of = _parse_sharding(file)
        for entry in file.header.tensors:
            chunks.setdefault(entry.fqn, []).append((entry, offsets_of[entry.fqn]))
    tensors = []
    for fqn, parts in chunks.items():
        first = parts[0][0]
        for entry, offsets in parts:
            if entry.dtype != first.dtype or len(offsets) != len(first.shape) or len(entry.shape) != len(offsets):
                what = f"tensor {fqn!r} differs in dtype or number of dims between files"
                raise UnreadableError(what, where=entry.chunks[0].span.file)
        dims = range(len(first.shape))
        shape = tuple(max(offsets[d] + entry.shape[d] for entry, offsets in parts) for d in dims)
        if not is_possible_shape(shape):
            what = f"tensor {fqn!r} of shape {list(shape)} is too large to exist"
            raise UnreadableError(what, where=first.chunks[0].span.file)
        boxes: dict[Box, Chunk] = {}
        for entry, offsets in parts:
            chunk = replace(entry.chunks[0], box=Box(offsets, entry.shape))
            other = boxes.setdefault(chunk.box, chunk)
            if other is not chunk and chunk.span.nbytes:  # its writer stores a part once, whoever else has it
                what = f"tensor {fqn!r}: the part at {list(offsets)} is in two files of different saves"
                hint = "remove the files of the older save; compare their dates with `ls -l`"
                raise UnreadableError(what, where=f"{other.span.file}, {chunk.span.file}", hint=hint)
        tensors.append(replace(first, shape=shape, chunks=tuple(boxes.values())))
    return Checkpoint(
        root=root,
        format=HfSharded.name,
        tensors=tuple(tensors),
        files={file.name: file.header.nbytes for file in files},
    )


def _parse_sharding(file: HeaderFile) -> dict[str, tuple[int, ...]]:
    # Surrogates that the outer JSON let through are no UTF-8; the inner text then is none either.
    text = file.header.metadata.get(SHARDING_KEY, "").encode("utf-8", "surrogatepass")
    table = parse_json(text, what=f"the header's {SHARDING_KEY}", where=file.name)
    if not isinstance(table, dict):
        raise UnreadableError(f"the header's {SHARDING_KEY} is not a JSON object", where=file.name)
    parsed = {}
    for entry in file.header.tensors:
        fields = table.get(entry.fqn)
        offsets = fields.get(OFFSETS_KEY) if isinstance(fields, dict) else None
        if not isinstance(offsets, list) or not all(type(n) is int and 0 <= n <= MAX_ELEMS for n in offsets):
            raise UnreadableError(f"{SHARDING_KEY} has no valid offsets for tensor {entry.fqn!r}", where=file.name)
        parsed[entry.fqn] = tuple(offsets)
    return parsed


class HfSharded(Format):
    """What `HuggingFaceStorageWriter(save_distributed=True)` writes, and `shard` and `reshard` in safetensors."""

    name = "hf-sharded"
    found_by = "`shard-…-model-….safetensors`"
    about = (
        "as `HuggingFaceStorageWriter(save_distributed=True)` writes, and `--serialization safetensors`; "
        "named by `--from`, also the `.distcp` files of `SerializationFormat.SAFETENSORS`, which DCP itself "
        "cannot load. `verify` does not see the global shapes without ckpt's manifest"
    )
    written_by = "`shard`, `reshard` with `--serialization safetensors`"
    whole_by = "the manifest; without it not known, for global shapes are not recorded"
    suffix = ".safetensors"
    is_sharded = True
    is_training = True
    unchecked: tuple[str, ...] = ("the global shapes, which this format does not record (taken from the chunks)",)
    caveats: tuple[str, ...] = (
        (
            "this format does not record how many ranks saved it: if the files of the last ones are missing, "
            "tensors are shorter than they were"
        ),
    )

    def detects(self, files: Mapping[str, int]) -> bool:
        """By the names that DCP's HF writer gives."""
        return any(SHARDED_FILE.fullmatch(name) for name in files)

    def open(self, source: Source, files: Mapping[str, int], *, path: str, manifest: Manifest | None) -> Opened:
        """Read the header of every file: together with a manifest, if there is one, they are all that is known."""
        names = [name for name in files if SHARDED_FILE.fullmatch(name)]
        names = names or [name for name in files if ITEMS_FILE.fullmatch(name)]
        if not names:
            raise UnreadableError("there are no files of DCP's HF writer here", where=path)
        read = [read_file(source, name) for name in names]
        checkpoint = describe_sharded(source.root, read)
        if manifest is None:
            assets = tuple(Asset(file=name, nbytes=size) for name, size in files.items() if is_hf_asset(name))
            return Opened(format=self, checkpoint=replace(checkpoint, assets=assets), source=source)
        missing = sorted(manifest.files.keys() - files.keys())
        if missing:
            what = f"{len(missing)} of {len(manifest.files)} files of the manifest are missing: {first_few(missing)}"
            hint = f"restore them; if a trainer has saved over the directory on purpose, remove {MANIFEST_NAME}"
            raise UnreadableError(what, where=path, hint=hint)
        recorded = tuple(Asset(file=name, nbytes=record.nbytes) for name, record in manifest.assets.items())
        companions = tuple(asset for asset in recorded if is_weights(asset.file))
        mesh = manifest.mesh if all(_is_recorded(file, manifest) for file in read) else None
        checkpoint = replace(
            checkpoint,
            assets=tuple(asset for asset in recorded if asset not in companions),
            mesh=mesh,
            placements=None if mesh is None else manifest.placements,
        )
        return Opened(
            format=_RECORDED,
            checkpoint=checkpoint,
            source=source,
            manifest=manifest,
            origin=manifest.origin,
            companions=companions,
        )


class _Recorded(HfSharded):
    """The same with a manifest, which has the names of all files and every shape."""

    unchecked = ()
    caveats = ()


def _is_recorded(file: HeaderFile, manifest: Manifest) -> bool:
    """Is this file's header the one that was written with the manifest?"""
    record = manifest.documents.get(file.name)
    head = len(file.header_text).to_bytes(LENGTH_BYTES, "little") + file.header_text
    return record is not None and record.nbytes == len(head) and record.digest == digest_bytes(head)


FORMAT = HfSharded()
_RECORDED = _Recorded()


_NOT_READ = ("F4", "F8_E8M0")  # torch's reader loads nothing of such a file: safetensors (0.8) has no torch dtype
_NOT_FLOAT = ("I", "U", "C", "BOOL")  # Beginnings of the names of dtypes that torch's consolidator cannot take


def data_file(rank: int) -> str:
    """Return the name of `rank`'s file."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def place_sharded(
    tensors: Sequence[TensorEntry], cells: Mapping[str, Cells], blobs: Sequence[BlobEntry] = ()
) -> tuple[Checkpoint, dict[str, bytes]]:
    """Describe the files that hold `tensors` cut into `cells`: one per rank that holds something."""
    # Also return, per file, the bytes in front of its data. Cells are in logical elements, at most one of each rank for
    # a tensor. Blobs are refused: these files cannot hold them.
    if names := [blob.fqn for blob in blobs]:
        what = f"safetensors holds only tensors; the source has {len(blobs)} other items: {first_few(names)}"
        raise UsageError(what, hint="keep them with --serialization torch, or write only the model with --for plain")
    parts: dict[int, list[tuple[Box, TensorEntry]]] = {}  # what each rank's file holds, as tensors of their own
    for entry in tensors:
        if entry.dtype.torch_name is None or entry.dtype.name in _NOT_READ:
            instead = "" if entry.dtype.torch_name is None else "use --serialization torch, or "
            what = f"torch's reader of safetensors does not load {entry.dtype.name}"
            hint = f"{instead}leave the tensor out: --exclude {shlex.quote(entry.fqn)}"
            raise UsageError(what, where=entry.fqn, hint=hint)
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
