"""HF directories: one safetensors file, or several with an index; and the sharded files of DCP's HF writer.

Sources: huggingface_hub `save_torch_state_dict` and transformers for the index; torch
`distributed/checkpoint/_hf_utils.py` (2.13) for `DCP_SHARDING_INFO`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt_tools.description.checkpoint import (
    MAX_ELEMS,
    ByteSpan,
    Checkpoint,
    Chunk,
    TensorEntry,
    is_plain_path,
    is_possible_shape,
)
from ckpt_tools.description.layout import Box
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats import safetensors
from ckpt_tools.formats._json import parse_json

INDEX_SUFFIX = ".safetensors.index.json"
"""End of an index's name."""
SHARDING_KEY = "DCP_SHARDING_INFO"
"""Header metadata of a file that holds chunks instead of whole tensors."""
HEADER_METADATA = {"format": "pt"}
"""What transformers asks of a header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One safetensors file of a directory and its exact header, for giving the same bytes back."""

    name: str
    """Name relative to the root."""
    header_text: bytes
    """The header's JSON, padding included."""
    header: safetensors.Header
    """The same, parsed."""


def parse_index(text: bytes, *, where: str) -> dict[str, str]:
    """Return the weight_map of an index: FQN → file.

    Raises:
        UnreadableError: Not an index, or one that names a file outside of its directory.
        LimitError: More than an index may hold.
    """
    document = parse_json(text, what="the index", where=where)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise UnreadableError("the index has no weight_map of strings", where=where)
    for name in set(weight_map.values()):
        if not is_plain_path(name):
            raise UnreadableError(f"the index names the file {name!r} outside of its directory", where=where)
    return weight_map


def build_index(files: Mapping[str, Sequence[TensorEntry]]) -> bytes:
    """Build an index as transformers writes it."""
    weight_map = {entry.fqn: name for name, entries in files.items() for entry in entries}
    total = sum(entry.nbytes for entries in files.values() for entry in entries)
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(document, indent=2) + "\n").encode()


def describe(root: str, files: Sequence[File], index: Mapping[str, str] | None) -> Checkpoint:
    """Describe whole-tensor files; with an index, hold it against the headers.

    Raises:
        UnreadableError: A tensor in two files, or the index and the headers disagree.
    """
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        for entry in file.header.tensors:
            if entry.fqn in tensors:
                raise UnreadableError(
                    f"tensor {entry.fqn!r} is in two files",
                    where=f"{tensors[entry.fqn].chunks[0].span.file}, {file.name}",
                )
            tensors[entry.fqn] = entry
    if index is not None:
        _check_index(tensors, index)
    return Checkpoint(
        root=root,
        format="hf",
        tensors=tuple(tensors.values()),
        files={file.name: file.header.nbytes for file in files},
    )


def _check_index(tensors: Mapping[str, TensorEntry], index: Mapping[str, str]) -> None:
    for fqn, name in index.items():
        entry = tensors.get(fqn)
        if entry is None or entry.chunks[0].span.file != name:
            found = "no file has it" if entry is None else f"it is in {entry.chunks[0].span.file}"
            raise UnreadableError(
                f"the index puts tensor {fqn!r} into {name}, but {found}",
                where=name,
                hint="restore the file that belongs to this index",
            )
    for fqn, entry in tensors.items():
        if fqn not in index:
            raise UnreadableError(
                f"tensor {fqn!r} is not in the index",
                where=entry.chunks[0].span.file,
                hint="the file and the index are of different versions: restore both",
            )


def describe_sharded(root: str, files: Sequence[File]) -> Checkpoint:
    """Describe the files of `HuggingFaceStorageWriter(save_distributed=True)`.

    They record where each chunk lies but not the global shape, which is taken as the hull of the chunks: the
    exact-tiling check finds a hole, but not a file that was lost from the very end of every tensor.
    """
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
                raise UnreadableError(
                    f"tensor {fqn!r} differs in dtype or number of dims between files",
                    where=entry.chunks[0].span.file,
                )
        dims = range(len(first.shape))
        shape = tuple(max(offsets[d] + entry.shape[d] for entry, offsets in parts) for d in dims)
        if not is_possible_shape(shape):
            raise UnreadableError(
                f"tensor {fqn!r} of shape {list(shape)} is too large to exist",
                where=first.chunks[0].span.file,
            )
        boxes = tuple(replace(entry.chunks[0], box=Box(offsets, entry.shape)) for entry, offsets in parts)
        tensors.append(replace(first, shape=shape, chunks=boxes))
    return Checkpoint(
        root=root,
        format="hf-sharded",
        tensors=tuple(tensors),
        files={file.name: file.header.nbytes for file in files},
    )


def _parse_sharding(file: File) -> dict[str, tuple[int, ...]]:
    where = file.name
    # Surrogates that the outer JSON let through are no UTF-8; the inner text then is none either.
    text = file.header.metadata.get(SHARDING_KEY, "").encode("utf-8", "surrogatepass")
    table = parse_json(text, what=f"the header's {SHARDING_KEY}", where=where)
    if not isinstance(table, dict):
        raise UnreadableError(f"the header's {SHARDING_KEY} is not a JSON object", where=where)
    parsed = {}
    for entry in file.header.tensors:
        fields = table.get(entry.fqn)
        offsets = fields.get("saved_offsets") if isinstance(fields, dict) else None
        if not isinstance(offsets, list) or not all(type(n) is int and 0 <= n <= MAX_ELEMS for n in offsets):
            raise UnreadableError(f"{SHARDING_KEY} has no sound offsets for tensor {entry.fqn!r}", where=where)
        parsed[entry.fqn] = tuple(offsets)
    return parsed


def arrange(
    tensors: Sequence[TensorEntry], *, max_file_nbytes: int, stem: str = "model"
) -> dict[str, list[TensorEntry]]:
    """Share `tensors` out over files of at most `max_file_nbytes`, in order, as huggingface_hub does.

    Returns:
        File name → its tensors, in the order of the reference implementation.
    """
    groups: list[list[TensorEntry]] = [[]]
    size = 0
    for entry in tensors:
        if groups[-1] and size + entry.nbytes > max_file_nbytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.nbytes
    if len(groups) == 1:
        return {f"{stem}.safetensors": safetensors.data_order(groups[0])}
    return {
        f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors": safetensors.data_order(group)
        for i, group in enumerate(groups, 1)
    }


def place(
    files: Mapping[str, Sequence[TensorEntry]], *, metadata: Mapping[str, str] | None = None
) -> tuple[Checkpoint, dict[str, bytes]]:
    """Describe the files that hold `files`' tensors, each whole.

    Returns:
        The destination's description and per file the bytes in front of its data.
    """
    placed: list[TensorEntry] = []
    headers: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    for name, entries in files.items():
        headers[name], starts = safetensors.build_header(
            entries, metadata=HEADER_METADATA if metadata is None else metadata
        )
        sizes[name] = len(headers[name]) + sum(entry.nbytes for entry in entries)
        for entry, start in zip(entries, starts, strict=True):
            span = ByteSpan(file=name, offset=start, nbytes=entry.nbytes)
            box = Box((0,) * len(entry.shape), entry.shape)
            placed.append(replace(entry, chunks=(Chunk(box=box, span=span),)))
    return Checkpoint(root="", format="hf", tensors=tuple(placed), files=sizes), headers


SHARDED_FILE = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")
"""Name of a file of DCP's HF writer: rank, number, count."""
