"""What lies around the tensors' bytes in a data file: the frames of items, and the padding between them.

The digests of tensors cover every payload, those of blobs every blob. One digest per file over all the rest leaves
no byte out. A frame holds the CRC-32 of its payload, so two files of equal layout that changed places differ in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

import xxhash

from ckpt_tools.checkpoint.entries import BlobEntry, ByteSpan, TensorEntry
from ckpt_tools.checkpoint.formats.format import AHEAD, Reader
from ckpt_tools.checkpoint.formats.torch_zip import item_frame

_PIECE_BYTES = 1 << 20
_DENSE_BYTES = 16 << 10  # Where items are smaller on average, reading all takes less than reading around payloads


def planned_payloads(tensors: Iterable[TensorEntry]) -> Iterator[ByteSpan]:
    """Yield where ckpt itself puts the payload of every item of `tensors`."""
    for entry in tensors:
        for chunk in entry.chunks:
            frame = item_frame(entry.dtype, chunk.box.sizes)
            start = chunk.span.offset + frame.payload_offset
            yield ByteSpan(file=chunk.span.file, offset=start, nbytes=frame.payload_nbytes)


def digest_frames(
    files: Mapping[str, int], payloads: Iterable[ByteSpan], blobs: Iterable[BlobEntry], reader: Reader
) -> dict[str, str]:
    """Return per file the digest of the bytes that belong to no payload and to no blob."""
    # `files` has the sizes in bytes of those to look at; payloads in other files are skipped.
    # Two arrays per file: a large checkpoint has millions of items.
    spans = {name: (array("Q"), array("Q")) for name in files}
    for span in chain((blob.span for blob in blobs), payloads):
        arrays = spans.get(span.file)
        if arrays is not None and span.nbytes:
            arrays[0].append(span.offset)
            arrays[1].append(span.offset + span.nbytes)
    return {name: _digest(name, size, sorted(zip(*spans[name], strict=True)), reader) for name, size in files.items()}


def _digest(name: str, size: int, covered: Sequence[tuple[int, int]], reader: Reader) -> str:
    state = xxhash.xxh3_128()
    ahead = _PIECE_BYTES if size < len(covered) * _DENSE_BYTES else 0
    piece, piece_end = memoryview(b""), 0  # what has been read last, and where it ends in the file
    position = 0
    if not ahead:
        _announce(name, size, covered, reader)
    for start, end in (*covered, (size, size)):
        while position < start:
            if position >= piece_end:
                nbytes = min(max(ahead, min(_PIECE_BYTES, start - position)), size - position)
                piece, piece_end = memoryview(reader.read(name, position, nbytes)), position + nbytes
            first, nbytes = len(piece) - (piece_end - position), min(piece_end, start) - position
            state.update(piece[first : first + nbytes])
            position += nbytes
        position = max(position, end)
    return state.hexdigest()


def _announce(name: str, size: int, covered: Sequence[tuple[int, int]], reader: Reader) -> None:
    """Tell the reader of the gaps between payloads, as many as it may keep."""
    gaps = []
    position = 0
    for start, end in (*covered, (size, size)):
        if 0 < start - position <= _DENSE_BYTES:
            gaps.append((name, position, start - position))
        position = max(position, end)
    reader.prefetch(gaps[:AHEAD])
