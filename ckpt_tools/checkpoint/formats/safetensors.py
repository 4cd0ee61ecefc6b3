"""The safetensors format: header bytes to tensors and back, and a path that is one such file.

Source: https://huggingface.co/docs/safetensors/index#format and `tensor.rs` (0.8): 8 bytes of little-endian
header length N, N bytes of JSON, then the data without holes. Offsets count from the end of the header.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import ByteSpan, Checkpoint, Chunk, TensorEntry, fqn_problem, is_possible_shape
from ckpt_tools.checkpoint.formats._json import MAX_JSON_BYTES, parse_json
from ckpt_tools.checkpoint.formats.format import Format, Opened
from ckpt_tools.checkpoint.formats.manifest import Manifest, Origin
from ckpt_tools.checkpoint.formats.unsupported import HEAD_BYTES, explain_file
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.errors import LimitError, UnreadableError, UsageError
from ckpt_tools.storage.source import Source

MAX_HEADER_BYTES = MAX_JSON_BYTES  # As in the reference implementation
LENGTH_BYTES = 8  # Size of the length field in front of the header
METADATA_KEY = "__metadata__"  # The one key of a header that is not a tensor
_FIELDS = {"dtype", "shape", "data_offsets"}
_INT = frozenset({int})  # not bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A parsed header."""

    tensors: tuple[TensorEntry, ...]  # Tensors in the order of their data, each with one raw chunk in the named file
    metadata: Mapping[str, str]
    nbytes: int  # Bytes of the whole file


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderFile:
    """One safetensors file of a directory and its exact header, for giving the same bytes back."""

    name: str
    header_text: bytes  # The header's JSON, padding included
    header: Header


def parse_length(first: bytes, *, where: str, file_nbytes: int | None = None) -> int:
    """Return the header's length from the first 8 bytes of a file, of that size where it is known."""
    if len(first) < LENGTH_BYTES:
        what = f"a safetensors file has at least 8 bytes, this has {len(first)}"
        raise UnreadableError(what, where=where, hint="copy or download it again")
    length = int.from_bytes(first, "little")
    if length > MAX_HEADER_BYTES:
        what = f"the header claims {length} bytes, the limit is {MAX_HEADER_BYTES}"
        raise LimitError(what, where=where, hint="this is not a safetensors file, or its first bytes are damaged")
    if file_nbytes is not None and LENGTH_BYTES + length > file_nbytes:
        what = f"the header claims {length} bytes, the file has {file_nbytes}"
        raise UnreadableError(what, where=where, hint="the file is truncated or not a safetensors file")
    return length


def parse_header(text: bytes, *, file: str, file_nbytes: int | None) -> Header:
    """Parse a header, for spans in `file`; its data must fill the file, when there is a file yet."""
    document = parse_json(text, what="the header", where=file, max_bytes=MAX_HEADER_BYTES)
    if not isinstance(document, dict):
        raise UnreadableError("the header is not a JSON object", where=file)
    metadata = document.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UnreadableError("the header's __metadata__ is not a table of strings", where=file)
    try:  # half a surrogate pair, which no text can hold
        "".join((*metadata, *metadata.values())).encode()
    except UnicodeEncodeError as error:
        raise UnreadableError("the header's __metadata__ is not Unicode text", where=file) from error
    data_start = LENGTH_BYTES + len(text)
    boxes: dict[tuple[int, ...], Box] = {}
    entries = [_parse_entry(fqn, fields, file, data_start, boxes) for fqn, fields in document.items()]
    entries.sort(key=lambda entry: (entry.chunks[0].span.offset, entry.chunks[0].span.nbytes))
    position = data_start
    for entry in entries:
        span = entry.chunks[0].span
        if span.offset != position:
            problem = "overlaps its predecessor" if span.offset < position else "leaves a hole before it"
            raise UnreadableError(f"tensor {entry.fqn!r} {problem}", where=file)
        position += span.nbytes
    if file_nbytes is not None and position != file_nbytes:
        state = "truncated" if position > file_nbytes else "followed by unknown bytes"
        what = f"the file is {state}: the header describes {position} bytes, the file has {file_nbytes}"
        raise UnreadableError(what, where=file, hint="restore the file or copy it again")
    return Header(tensors=tuple(entries), metadata=metadata, nbytes=position)


def _parse_entry(
    fqn: str, fields: object, file: str, data_start: int, boxes: dict[tuple[int, ...], Box]
) -> TensorEntry:
    """Return one tensor; `boxes` has those of the shapes seen so far."""

    def refusal(problem: str) -> UnreadableError:
        return UnreadableError(f"tensor {fqn!r} {problem}", where=file)

    if (problem := fqn_problem(fqn)) is not None:
        raise refusal(problem)
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        raise refusal("does not have exactly dtype, shape and data_offsets")
    named = fields["dtype"]
    dtype = BY_NAME.get(named) if isinstance(named, str) else None
    if dtype is None or not dtype.in_safetensors:
        shown = repr(named) if isinstance(named, str) else f"of type {type(named).__name__}"
        raise refusal(f"has the unknown dtype {shown}")
    sizes, offsets = fields["shape"], fields["data_offsets"]
    if not _is_sizes(sizes) or not is_possible_shape(sizes):
        raise refusal("has an impossible shape")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refusal("has impossible data_offsets")
    shape = tuple(sizes)
    box = boxes.get(shape)
    if box is None:
        box = boxes[shape] = Box((0,) * len(shape), shape)
    nbytes = offsets[1] - offsets[0]
    if box.num_elems * dtype.bits != nbytes * 8:
        raise refusal(f"has {nbytes} bytes, its dtype and shape need {box.num_elems * dtype.bits / 8:g}")
    span = ByteSpan(file=file, offset=data_start + offsets[0], nbytes=nbytes)
    return TensorEntry(fqn=fqn, dtype=dtype, shape=box.sizes, chunks=(Chunk(box=box, span=span),))


def _is_sizes(value: object) -> bool:
    if not isinstance(value, list):
        return False
    return not value or (_INT.issuperset(map(type, value)) and min(value) >= 0 and max(value) < 1 << 63)


def build_header(
    tensors: Iterable[TensorEntry], *, metadata: Mapping[str, str] | None = None
) -> tuple[bytes, tuple[int, ...]]:
    """Return length field and header of a file that holds `tensors` in a row, and where in it each of them begins."""
    document: dict[str, object] = {METADATA_KEY: dict(metadata)} if metadata else {}
    starts = []
    position = 0
    for entry in tensors:
        if not entry.dtype.in_safetensors:
            what = f"safetensors cannot hold {entry.dtype.name} ({entry.dtype.torch_name})"
            raise UsageError(what, where=entry.fqn, hint=f"leave the tensor out: --exclude {shlex.quote(entry.fqn)}")
        if entry.fqn == METADATA_KEY:
            what = f"safetensors reserves the name {METADATA_KEY}, so no tensor can have it"
            raise UsageError(what, where=entry.fqn, hint=f"leave the tensor out: --exclude {METADATA_KEY}")
        starts.append(position)
        document[entry.fqn] = {
            "dtype": entry.dtype.name,
            "shape": list(entry.shape),
            "data_offsets": [position, position + entry.nbytes],
        }
        position += entry.nbytes
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    prefix = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return prefix, tuple(len(prefix) + start for start in starts)


def data_order(tensors: Sequence[TensorEntry]) -> list[TensorEntry]:
    """Return `tensors` as the reference implementation lays them out: widest dtype first, then by name."""
    return sorted(tensors, key=lambda entry: (-entry.dtype.bits, entry.fqn))


def read_file(source: Source, name: str) -> HeaderFile:
    """Read and parse the header of one safetensors file."""
    path = os.path.join(source.root, name)
    nbytes = source.size(name)
    try:
        length = parse_length(source.read(name, 0, min(nbytes, LENGTH_BYTES)), where=path, file_nbytes=nbytes)
    except UnreadableError as error:
        raise explain_file(path, source.read(name, 0, min(nbytes, HEAD_BYTES)), otherwise=error) from error
    text = source.read(name, LENGTH_BYTES, length)
    return HeaderFile(name=name, header_text=text, header=parse_header(text, file=name, file_nbytes=nbytes))


def origin_of(files: Sequence[HeaderFile], index_name: str | None = None, index_text: bytes = b"") -> Origin | None:
    """Return what gives these files back byte for byte; None for an index that is not UTF-8."""
    try:
        return Origin(
            headers={file.name: file.header_text.decode() for file in files},
            index_name=index_name,
            index_text=None if index_name is None else index_text.decode(),
        )
    except UnicodeDecodeError:
        return None


class Safetensors(Format):
    """One safetensors file by itself; nothing beside it belongs to it."""

    name = "safetensors"
    found_by = "a single file"
    about = "one file: a model, an adapter or a part of one"
    written_by = "`export-lora`"
    whole_by = "its name (`-0000I-of-0000N` is a part); else not known"
    suffix = ".safetensors"
    is_file = True
    counterpart = "hf"

    def detects(self, files: Mapping[str, int]) -> bool:
        """By the end of its name."""
        return all(name.endswith(self.suffix) for name in files)

    def open(self, source: Source, files: Mapping[str, int], *, path: str, manifest: Manifest | None) -> Opened:  # noqa: ARG002
        """Read its header."""
        (name,) = files
        file = read_file(source, name)
        return Opened(
            format=self,
            checkpoint=Checkpoint(
                root=source.root, format=self.name, tensors=file.header.tensors, files={name: file.header.nbytes}
            ),
            source=source,
            origin=origin_of([file]),
            metadata=file.header.metadata,
        )


FORMAT = Safetensors()
