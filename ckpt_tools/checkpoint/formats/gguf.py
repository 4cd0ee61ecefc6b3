"""GGUF files of adapters: the header to tensors and back.

Numbers are little-endian, dims stand in the opposite order, tensors begin at multiples of the alignment after the
header. Source: ggml/docs/gguf.md (version 3), ggml/src/gguf.cpp of llama.cpp, November 2026.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from ckpt_tools.checkpoint.dtypes import BY_NAME, DType
from ckpt_tools.checkpoint.entries import ByteSpan, Checkpoint, Chunk, TensorEntry, fqn_problem, is_possible_shape
from ckpt_tools.checkpoint.formats.format import Format, Opened
from ckpt_tools.checkpoint.formats.manifest import Manifest
from ckpt_tools.checkpoint.identity import Identity
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.errors import UnreadableError, UnsupportedError, UsageError
from ckpt_tools.storage.source import Source
from ckpt_tools.storage.virtual import VirtualFile, VirtualSource

ALPHA = "adapter.lora.alpha"  # The only number among what is written
_MAGIC, _VERSIONS, _ALIGNMENT = b"GGUF", (2, 3), 32
_MAX_HEADER_BYTES, _MAX_DEPTH = 16 << 20, 4
_FLOAT, _STRING, _ARRAY = 6, 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DTYPES: Mapping[int, DType] = {0: BY_NAME["F32"], 1: BY_NAME["F16"], 30: BY_NAME["BF16"]}
_Q8_0, _BLOCK, _BLOCK_BYTES = 8, 32, 34  # A float16 scale and 32 signed bytes
_QUANTISED = {2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K"}


class _Header:
    """Reads a header from the first bytes of a file, and never beyond them."""

    def __init__(self, content: bytes, where: str) -> None:
        self.content, self.where, self.position = content, where, 0

    def damage(self, what: str) -> UnreadableError:
        hint = "copy or download the file again, or convert the adapter again"
        return UnreadableError(what, where=self.where, hint=hint)

    def take(self, nbytes: int) -> bytes:
        start, self.position = self.position, self.position + nbytes
        if self.position > len(self.content):
            raise self.damage(f"the header does not end within {len(self.content)} bytes: truncated, or no adapter")
        return self.content[start : self.position]

    def number(self, code: str) -> int:
        value: int = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]
        return value

    def text(self) -> str:
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError as error:
            raise self.damage("a string in the header is not UTF-8") from error

    def value(self, kind: int, depth: int = 0) -> object:
        """Return a string or number; None for an array, which is passed over."""
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY or depth == _MAX_DEPTH:
            raise self.damage(f"the header has a value of type {kind} at depth {depth}, which GGUF does not have")
        inner, count = self.number("I"), self.number("Q")
        if inner in _SCALARS:
            self.take(count * struct.calcsize(f"<{_SCALARS[inner]}"))
            return None
        for _ in range(count):  # of 8 bytes at least: `take` ends it
            self.value(inner, depth + 1)
        return None


class _Info(NamedTuple):
    """What the header says of a tensor."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int  # After the header

    @property
    def nbytes(self) -> int:
        elems = math.prod(self.shape)
        return elems // _BLOCK * _BLOCK_BYTES if self.kind == _Q8_0 else _DTYPES[self.kind].num_bytes(elems)


def _read_info(header: _Header) -> _Info:
    name, dims = header.text(), header.number("I")
    if (problem := fqn_problem(name)) is not None:
        raise header.damage(f"tensor {name[:99]!r} {problem}")
    shape = tuple(header.number("Q") for _ in range(dims))[::-1]
    info = _Info(name, shape, header.number("I"), header.number("Q"))
    if not is_possible_shape(shape) or (info.kind == _Q8_0 and (not shape or shape[-1] % _BLOCK)):
        raise header.damage(f"tensor {name!r} has an impossible shape")
    if info.kind not in (*_DTYPES, _Q8_0):
        kind = _QUANTISED.get(info.kind, f"of type {info.kind}")
        what = f"tensor {name!r} is {kind}; ckpt reads adapters in F32, F16, BF16 and Q8_0"
        raise UnsupportedError(what, where=header.where, hint="convert the adapter again, as F16")
    return info


def _check_spans(infos: Sequence[_Info], alignment: int, nbytes: int, header: _Header) -> None:
    """Refuse tensors of one name, in one another, or beyond the end of the file."""
    if len({info.name for info in infos}) < len(infos):
        raise header.damage("two tensors have the same name")
    end = 0
    for info in sorted(infos, key=lambda info: (info.offset, info.nbytes)):
        if info.offset % alignment or info.offset < end:
            raise header.damage(f"tensor {info.name!r} begins at {info.offset}, where none can begin")
        end = info.offset + info.nbytes
        if end > nbytes:
            raise header.damage(f"the file is truncated: tensor {info.name!r} ends {end - nbytes} bytes behind it")


def _entry(info: _Info, source: Source, span: ByteSpan, made: dict[str, VirtualFile]) -> TensorEntry:
    """Return a tensor; one that is quantised lies, as float32, in a file that is made while it is read."""
    box, dtype = Box((0,) * len(info.shape), info.shape), _DTYPES.get(info.kind, BY_NAME["F32"])
    if info.kind == _Q8_0:
        whole = ByteSpan(file=f"{span.file}/{info.name}", offset=0, nbytes=dtype.num_bytes(box.num_elems))
        made[whole.file] = VirtualFile(whole.nbytes, partial(_dequantise, source, span))
        span = whole
    return TensorEntry(fqn=info.name, dtype=dtype, shape=info.shape, chunks=(Chunk(box=box, span=span),))


def _dequantise(source: Source, span: ByteSpan, offset: int, buffer: memoryview) -> None:
    """Fill a buffer with Q8_0 blocks as float32, from a byte of the result on."""
    import numpy as np

    first, last = offset // (4 * _BLOCK), -(-(offset + len(buffer)) // (4 * _BLOCK))
    content = source.read(span.file, span.offset + first * _BLOCK_BYTES, (last - first) * _BLOCK_BYTES)
    blocks = np.frombuffer(content, [("scale", "<f2"), ("values", "i1", _BLOCK)])
    result = blocks["scale"].astype(np.float32)[:, None] * blocks["values"]
    at = offset - first * 4 * _BLOCK
    buffer[:] = result.reshape(-1).view(np.uint8).data[at : at + len(buffer)]


def build_gguf(tensors: Sequence[TensorEntry], metadata: Mapping[str, str]) -> tuple[bytes, tuple[int, ...], int]:
    """Return the header of a file, where in it each tensor begins, and its size."""
    kinds = {dtype.name: kind for kind, dtype in _DTYPES.items()}
    head = [_MAGIC, struct.pack("<IQQ", _VERSIONS[-1], len(tensors), len(metadata))]
    for key, value in metadata.items():
        content = (
            struct.pack("<If", _FLOAT, float(value)) if key == ALPHA else struct.pack("<I", _STRING) + _text(value)
        )
        head += [_text(key), content]
    position, offsets = 0, []
    for entry in tensors:
        if entry.dtype.name not in kinds:
            raise UsageError(f"llama.cpp reads no adapters of {entry.dtype.name}", where=entry.fqn, hint="--dtype f32")
        dims = entry.shape[::-1]
        head += [
            _text(entry.fqn),
            struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kinds[entry.dtype.name], position),
        ]
        offsets.append(position)
        position = _aligned(position + entry.nbytes)
    content = b"".join(head)
    start = _aligned(len(content))
    return content.ljust(start, b"\0"), tuple(start + each for each in offsets), start + position


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _aligned(position: int, alignment: int = _ALIGNMENT) -> int:
    return -(-position // alignment) * alignment


class Gguf(Format):
    """One GGUF file that holds an adapter: commands for adapters alone read it."""

    name = "gguf"
    found_by = "a single file"
    about = "adapters of llama.cpp"
    suffix = ".gguf"
    is_file = True

    def detects(self, files: Mapping[str, int]) -> bool:
        """By the end of its name."""
        return all(name.endswith(self.suffix) for name in files)

    def open(self, source: Source, files: Mapping[str, int], *, path: str, manifest: Manifest | None = None) -> Opened:  # noqa: ARG002
        """Read its header: scalars and strings become `metadata`. Raise UnsupportedError for a model."""
        name, nbytes = next(iter(files.items()), ("", 0))
        header = _Header(source.read(name, 0, min(nbytes, _MAX_HEADER_BYTES)) if name else b"", path)
        if header.take(4) != _MAGIC:
            raise header.damage("this is not a GGUF file")
        if (version := header.number("I")) not in _VERSIONS:
            raise UnsupportedError(f"GGUF of version {version}; ckpt reads 2 and 3", where=path)
        num_tensors, num_values = header.number("Q"), header.number("Q")
        values: dict[str, object] = {}
        for _ in range(num_values):
            key = header.text()
            if key in values:
                raise header.damage(f"the header has {key[:99]!r} twice")
            values[key] = header.value(header.number("I"))
            if key == "general.type" and values[key] != "adapter":
                what = f"a GGUF file of a {values[key]!s:.40}, not of an adapter"
                raise UnsupportedError(what, where=path, hint="use the checkpoint that it was converted from")
        alignment = values.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment not in (1 << bit for bit in range(3, 17)):
            raise header.damage(f"general.alignment must be a power of two from 8 to 65536, got {alignment!s:.40}")
        infos = [_read_info(header) for _ in range(num_tensors)]
        start = _aligned(header.position, alignment)
        _check_spans(infos, alignment, nbytes - start, header)
        made: dict[str, VirtualFile] = {}
        spans = [ByteSpan(file=name, offset=start + info.offset, nbytes=info.nbytes) for info in infos]
        tensors = tuple(_entry(info, source, span, made) for info, span in zip(infos, spans, strict=True))
        return Opened(
            format=self,
            checkpoint=Checkpoint(root=source.root, format=self.name, tensors=tensors, files={name: nbytes}),
            source=VirtualSource(source, made) if made else source,
            metadata={key: str(value) for key, value in values.items() if value is not None},
            identity=Identity(
                format=self.name, names=self.name, num_parameters=sum(each.num_elems for each in tensors)
            ),
        )


FORMAT = Gguf()
