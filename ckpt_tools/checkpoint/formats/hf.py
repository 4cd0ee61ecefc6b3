"""HF directories: one safetensors file, or several with an index.

Source: huggingface_hub `save_torch_state_dict` and transformers for the index.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ckpt_tools.checkpoint.entries import Asset, ByteSpan, Checkpoint, Chunk, TensorEntry
from ckpt_tools.checkpoint.formats import safetensors
from ckpt_tools.checkpoint.formats._json import MAX_JSON_BYTES, parse_json
from ckpt_tools.checkpoint.formats.file_names import INDEX_SUFFIX, explain_parts, is_weights
from ckpt_tools.checkpoint.formats.format import Format, Opened, read_document
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME, Manifest
from ckpt_tools.checkpoint.formats.repositories import find_models
from ckpt_tools.checkpoint.formats.safetensors import HeaderFile, read_file
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.errors import UnreadableError
from ckpt_tools.storage.journal import JOURNAL_NAME
from ckpt_tools.storage.source import Source
from ckpt_tools.text import first_few, is_plain_path

HEADER_METADATA = {"format": "pt"}  # What transformers asks of a header


def parse_index(text: bytes, *, where: str) -> dict[str, str]:
    """Return the weight_map of an index: FQN → file."""
    document = parse_json(text, what="the index", where=where)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise UnreadableError("the index has no weight_map of strings", where=where)
    for name in set(weight_map.values()):
        if not is_plain_path(name):
            raise UnreadableError(f"the index names the file {name!r} outside of its directory", where=where)
    return weight_map


def indexed_files(index: Mapping[str, str], files: Mapping[str, int], where: str) -> list[str]:
    """Return the files that an index names, all of which must be there."""
    names = sorted(set(index.values()))
    if missing := [name for name in names if name not in files]:
        what = f"{len(missing)} of {len(names)} files of the index are missing: {first_few(missing)}"
        raise UnreadableError(what, where=where, hint="download or copy the rest of the model")
    return names


def build_index(files: Mapping[str, Sequence[TensorEntry]]) -> bytes:
    """Build an index as transformers writes it."""
    weight_map = {entry.fqn: name for name, entries in files.items() for entry in entries}
    total = sum(entry.nbytes for entries in files.values() for entry in entries)
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(document, indent=2) + "\n").encode()


def documents(files: Mapping[str, Sequence[TensorEntry]], name: str = "model" + INDEX_SUFFIX) -> dict[str, bytes]:
    """Return what there must be beside these files: the index of several, called `name`."""
    return {name: build_index(files)} if len(files) > 1 else {}


def describe(root: str, files: Sequence[HeaderFile], index: Mapping[str, str] | None) -> Checkpoint:
    """Describe whole-tensor files; an index must agree with their headers."""
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        for entry in file.header.tensors:
            if entry.fqn in tensors:
                what = f"tensor {entry.fqn!r} is in two files"
                raise UnreadableError(what, where=f"{tensors[entry.fqn].chunks[0].span.file}, {file.name}")
            tensors[entry.fqn] = entry
    if index is not None:
        _check_index(tensors, index)
    return Checkpoint(
        root=root,
        format=HfDirectory.name,
        tensors=tuple(tensors.values()),
        files={file.name: file.header.nbytes for file in files},
    )


def _check_index(tensors: Mapping[str, TensorEntry], index: Mapping[str, str]) -> None:
    for fqn, name in index.items():
        entry = tensors.get(fqn)
        if entry is None or entry.chunks[0].span.file != name:
            found = "no file contains it" if entry is None else f"it is in {entry.chunks[0].span.file}"
            what = f"the index puts tensor {fqn!r} into {name}, but {found}"
            raise UnreadableError(what, where=name, hint="restore the file that belongs to this index")
    for fqn, entry in tensors.items():
        if fqn not in index:
            hint = "the file and the index are of different versions: restore both"
            raise UnreadableError(f"tensor {fqn!r} is not in the index", where=entry.chunks[0].span.file, hint=hint)


def arrange(
    tensors: Sequence[TensorEntry], *, max_file_nbytes: int, stem: str = "model", suffix: str = ".safetensors"
) -> dict[str, Sequence[TensorEntry]]:
    """Share `tensors` out over files of at most `max_file_nbytes`, in order, as huggingface_hub does."""
    groups: list[list[TensorEntry]] = [[]]
    size = 0
    for entry in tensors:
        if groups[-1] and size + entry.nbytes > max_file_nbytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.nbytes
    if len(groups) == 1:
        return {stem + suffix: groups[0]}
    return {f"{stem}-{i:05d}-of-{len(groups):05d}{suffix}": group for i, group in enumerate(groups, 1)}


def place(files: Mapping[str, Sequence[TensorEntry]]) -> tuple[Checkpoint, dict[str, bytes]]:
    """Describe the files that hold `files`' tensors, each whole; with it, per file, the bytes in front of its data."""
    placed: list[TensorEntry] = []
    headers: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    for name, given in files.items():
        entries = safetensors.data_order(given)
        headers[name], starts = safetensors.build_header(entries, metadata=HEADER_METADATA)
        sizes[name] = len(headers[name]) + sum(entry.nbytes for entry in entries)
        for entry, start in zip(entries, starts, strict=True):
            span = ByteSpan(file=name, offset=start, nbytes=entry.nbytes)
            box = Box((0,) * len(entry.shape), entry.shape)
            placed.append(replace(entry, chunks=(Chunk(box=box, span=span),)))
    return Checkpoint(root="", format=HfDirectory.name, tensors=tuple(placed), files=sizes), headers


class HfDirectory(Format):
    """A directory as transformers, diffusers and sentence-transformers save it, its config and tokenizer included."""

    name = "hf"
    found_by = "`model.safetensors` or `*.safetensors.index.json` in a directory"
    about = "config, tokenizer and the like are carried along"
    written_by = "`gather`"
    whole_by = "the index, config.json against names and shapes, names of files; without them not known"
    suffix = ".safetensors"
    counterpart = "safetensors"

    def detects(self, files: Mapping[str, int]) -> bool:
        """By any safetensors file or index: which of several are meant is decided when they are opened."""
        return any(name.endswith((self.suffix, INDEX_SUFFIX)) for name in files if "/" not in name)

    def open(self, source: Source, files: Mapping[str, int], *, path: str, manifest: Manifest | None) -> Opened:
        """Read the index, if there is one, and the header of every file."""
        index_name, names = _choose_files(source, files, path)
        index_text = b"" if index_name is None else read_document(source, index_name, MAX_JSON_BYTES)
        index = None
        if index_name is not None:
            index = parse_index(index_text, where=index_name)
            names = indexed_files(index, files, index_name)
        opened = source.each(partial(read_file, source), names)
        opened += _without_tensors(source, {name: size for name, size in files.items() if name not in names})
        own = {*(file.name for file in opened), index_name, MANIFEST_NAME, JOURNAL_NAME}
        companions = [name for name in files if name not in own]
        return Opened(
            format=self,
            checkpoint=replace(
                describe(source.root, opened, index),
                assets=tuple(Asset(file=name, nbytes=files[name]) for name in companions if not is_weights(name)),
            ),
            source=source,
            manifest=manifest,
            origin=safetensors.origin_of(opened, index_name, index_text),
            metadata=opened[0].header.metadata if len(opened) == 1 else {},
            left_out=tuple(name for name in companions if is_weights(name)),
            complete="" if index is None else f"all {len(index)} tensors of the index are there",
        )


def _without_tensors(source: Source, files: Mapping[str, int]) -> list[HeaderFile]:
    """Return the safetensors files that hold a header and nothing else: no index names them, yet they belong here."""
    found = []
    for name, nbytes in files.items():
        if "/" in name or not name.endswith(".safetensors"):
            continue
        head = source.read(name, 0, min(nbytes, safetensors.LENGTH_BYTES))
        if int.from_bytes(head, "little") != nbytes - safetensors.LENGTH_BYTES:
            continue
        with contextlib.suppress(UnreadableError):  # what cannot be read is left out, and said
            file = read_file(source, name)
            if not file.header.tensors:
                found.append(file)
    return found


def _choose_files(source: Source, files: Mapping[str, int], path: str) -> tuple[str | None, list[str]]:
    """Return (index, []) or (None, the only files) of an HF directory."""
    top = [name for name in files if "/" not in name]
    indexes = [name for name in top if name.endswith(INDEX_SUFFIX)]
    singles = [name for name in top if name.endswith(".safetensors")]
    for preferred in ("model", "diffusion_pytorch_model"):
        if preferred + INDEX_SUFFIX in indexes:
            return preferred + INDEX_SUFFIX, []
        if preferred + ".safetensors" in singles:
            return None, [preferred + ".safetensors"]
    if len(indexes) == 1:
        return indexes[0], []
    if len(singles) == 1 and not indexes:
        return None, singles
    if not singles and not indexes:
        raise UnreadableError("no safetensors files here", where=path)
    if not indexes and (parts := explain_parts(singles)) is not None:
        hint = f"restore the index ({parts[0].series[1]}{INDEX_SUFFIX}), which loaders look for"
        raise UnreadableError(f"{parts[1]}, and no index", where=path, hint=hint)
    if models := find_models(source, files):
        return None, models
    likeliest = max(singles or indexes, key=lambda name: files[name])
    what = f"{len(singles)} safetensors files and {len(indexes)} indexes, and no index tells which belong together"
    hint = f"pass one file: {os.path.join(path, likeliest)}, or restore the index"
    if not indexes and not _share_names(source, singles):
        hint = f"restore the index ({INDEX_SUFFIX[1:]}) that lists which files form one model"
    raise UnreadableError(f"{what}: {first_few(sorted(singles or indexes), 8)}", where=path, hint=hint)


def _share_names(source: Source, files: Iterable[str]) -> bool:
    """Is a tensor's name in two of these files? Then they are versions of one model, and else perhaps its parts."""
    seen: set[str] = set()
    for file in files:
        own = {entry.fqn for entry in read_file(source, file).header.tensors}
        if not seen.isdisjoint(own):
            return True
        seen |= own
    return False


FORMAT = HfDirectory()
