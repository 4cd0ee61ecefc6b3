"""Read whole tensors of an adapter, and no byte more: every source layout, CRC-32s checked where they were recorded.

Adapters are small; a tensor at a time is in memory.
"""

from __future__ import annotations

import struct

from ckpt_tools.description.checkpoint import Chunk, TensorEntry
from ckpt_tools.description.dtypes import DType
from ckpt_tools.description.layout import Box
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats.opening import Opened
from ckpt_tools.moving.plan import check_complete
from ckpt_tools.moving.strides import StridedPart, byte_box, is_contiguous, move, start_of

_SCALARS = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i", "I16": "<h", "U8": "<B", "I8": "<b"}


class TensorReader:
    """Reads the tensors of one open checkpoint.

    Args:
        opened: The checkpoint.
    """

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self.bytes_read = 0
        """Payload bytes read so far."""
        self.chunks_checked = 0
        """Chunks whose CRC-32 was held against their writer's."""

    def read(self, entry: TensorEntry) -> memoryview:
        """Return the row-major bytes of a tensor.

        Raises:
            UnreadableError: Incomplete, truncated or damaged.
        """
        check_complete(entry)
        entry = self._opened.resolve(entry)
        self._check_spans(entry)
        content = memoryview(bytearray(entry.nbytes))
        distinct: dict[Box, Chunk] = {}
        for chunk in entry.chunks:
            distinct.setdefault(chunk.box, chunk)
        for chunk in distinct.values():
            if chunk.box.num_elems:
                self._read_chunk(entry, chunk, content)
        return content

    def _check_spans(self, entry: TensorEntry) -> None:
        """Hold what the headers claim against the files, before memory is taken for it."""
        for chunk in entry.chunks:
            span = chunk.span
            found = self._opened.source.size(span.file)
            if span.offset + span.nbytes > found:
                raise UnreadableError(
                    f"tensor {entry.fqn!r}: bytes {span.offset}..{span.offset + span.nbytes} are needed, "
                    f"the file has {found}",
                    where=span.file,
                    hint="the file is truncated: restore it or copy it again",
                )

    def _read_chunk(self, entry: TensorEntry, chunk: Chunk, content: memoryview) -> None:
        span, whole = chunk.span, Box((0,) * len(entry.shape), entry.shape)
        piece, target = byte_box(chunk.box, entry.dtype), byte_box(whole, entry.dtype)
        if chunk.strides is None and is_contiguous(piece, target):
            start = start_of(piece, target)
            payload = content[start : start + piece.num_elems]
            self._fill(entry, chunk, payload)
            return
        payload = memoryview(bytearray(span.nbytes))
        self._fill(entry, chunk, payload)
        if chunk.strides is None:
            move(piece, payload, piece, content, target)
            return
        itemsize = entry.dtype.num_bytes(1)
        part = StridedPart(chunk.box, chunk.box, chunk.strides, itemsize)
        runs = bytearray()
        for offset, nbytes in part.runs():
            if offset < 0 or offset + nbytes > span.nbytes:
                raise UnreadableError("strides lead out of the item", where=span.file)
            runs += payload[offset : offset + nbytes]
        part.scatter(memoryview(runs), content, whole)

    def _fill(self, entry: TensorEntry, chunk: Chunk, payload: memoryview) -> None:
        span = chunk.span
        if len(payload) != span.nbytes:
            raise UnreadableError(
                f"tensor {entry.fqn!r} has {span.nbytes} bytes where {len(payload)} are needed",
                where=f"{span.file}, bytes {span.offset}..{span.offset + span.nbytes}",
            )
        self._opened.source.read_into(span.file, span.offset, payload)
        self.bytes_read += len(payload)
        if chunk.crc32 is None:
            return
        from isal import isal_zlib

        crc32 = isal_zlib.crc32(payload)
        if crc32 != chunk.crc32:
            raise UnreadableError(
                f"tensor {entry.fqn!r} is damaged: CRC-32 of its bytes is {crc32:08x}, its writer "
                f"recorded {chunk.crc32:08x}",
                where=f"{span.file}, bytes {span.offset}..{span.offset + span.nbytes}",
                hint="restore the file from where it was copied, or save the checkpoint again",
            )
        self.chunks_checked += 1

    def read_scalar(self, entry: TensorEntry) -> float | None:
        """Return the number that a tensor of one element holds; None when it holds none, or of no known type."""
        if entry.num_elems != 1:
            return None
        return decode_scalar(self.read(entry), entry.dtype)


def decode_scalar(content: memoryview, dtype: DType) -> float | None:
    """Return the number in the bytes of one element; None for a type that is none."""
    if dtype.name == "BF16":
        return float(struct.unpack("<f", b"\0\0" + bytes(content))[0])
    code = _SCALARS.get(dtype.name)
    return None if code is None else float(struct.unpack(code, content)[0])
