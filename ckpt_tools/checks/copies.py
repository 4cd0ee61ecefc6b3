"""Find files that stand in for one another: without a manifest nothing records whose bytes a file holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from isal import isal_zlib

from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.entries import Chunk, Finding, TensorEntry
from ckpt_tools.storage.source import Source
from ckpt_tools.text import first_few

_STACK_DIMS = 3  # Tensors of so many dims may be stacks of equal slices

_Place = tuple[int, int]  # First byte of a chunk in its file, and how many
_Print = tuple[int, int, int]  # The same, and the CRC-32 that its writer recorded


def check_copies(tensors: Iterable[TensorEntry], source: Source) -> Iterator[Finding]:
    """Find files whose chunks are, place by place, those of another file: one may have been copied over the other.

    Chunks are compared by the CRC-32s that are recorded for them; a file with a chunk that has none is not compared.
    A single equal chunk is no sign (copied experts, rotary frequencies, masks), and neither are chunks of one value
    (zeros, ones): all of a file must be in the other one, and something of it must vary.

    It is an error when different parts of one matrix or vector are equal. Different tensors may be meant to be (tied
    weights, the experts of an upcycled model), and so may the slices of a stack of 3 dims or more: those are a warning.
    """
    prints: dict[str, dict[_Print, tuple[TensorEntry, Chunk]]] = defaultdict(dict)
    without: set[str] = set()
    for entry in tensors:
        for chunk in entry.chunks:
            if chunk.crc32 is None:
                without.add(chunk.span.file)
            else:
                prints[chunk.span.file][chunk.span.offset, chunk.span.nbytes, chunk.crc32] = (entry, chunk)
    holders: dict[_Print, set[str]] = defaultdict(set)
    for file, found in prints.items():
        for key in found:
            holders[key].add(file)
    said: set[str] = set()
    for file in sorted(prints.keys() - without):
        others = set.intersection(*(holders[key] for key in prints[file])) - {file}
        if not others or file in said:
            continue
        varied = [key for key, (entry, chunk) in prints[file].items() if not _is_constant(entry.dtype, chunk, source)]
        if not varied:
            continue
        said |= {other for other in others if prints[other].keys() == prints[file].keys()}
        shown = first_few(sorted(others), limit=4)
        what = f"all of its {len(prints[file])} chunks are equal, place by place, to those of {shown}"
        if any(_are_parts(prints[file][key], prints[other][key]) for key in varied for other in others):
            hint = (
                "one file was copied over the other: restore it. If they are meant to be equal, `ckpt reshard` writes "
                "a checkpoint with a manifest that says so"
            )
            yield Finding.error("copied-file", file, what, hint, file=file)
        else:
            hint = (
                "tied weights and the experts of an upcycled model are equal; anything else means that one file was "
                "copied over the other: --against another copy shows which"
            )
            yield Finding.warning("copied-file", file, what, hint)


def _are_parts(one: tuple[TensorEntry, Chunk], other: tuple[TensorEntry, Chunk]) -> bool:
    """Are these different parts of the same matrix or vector?"""
    entry = one[0]
    return entry.fqn == other[0].fqn and one[1].box != other[1].box and len(entry.shape) < _STACK_DIMS


def _is_constant(dtype: DType, chunk: Chunk, source: Source) -> bool:
    """Are all elements the same? Told by the CRC-32 that they would have then; reads one of them."""
    width = min(chunk.span.nbytes, max(1, dtype.bits // 8))
    element = source.read(chunk.span.file, chunk.span.offset, width)
    return _repeated(element, chunk.span.nbytes) == chunk.crc32


def _repeated(element: bytes, nbytes: int) -> int:
    """Return the CRC-32 of `element` repeated to `nbytes` bytes, in a logarithm of steps."""
    total = 0
    part, length = isal_zlib.crc32(element), len(element)
    count = nbytes // max(1, len(element))
    while count:
        if count & 1:
            total = isal_zlib.crc32_combine(total, part, length)
        part, length, count = isal_zlib.crc32_combine(part, part, length), 2 * length, count >> 1
    return total


def equal_layouts(tensors: Sequence[TensorEntry]) -> list[str]:
    """Return the files with the same chunks at the same places as another one: they could have changed places."""
    layouts: dict[str, list[tuple[_Place, str, tuple[int, ...]]]] = defaultdict(list)
    for entry in tensors:
        for chunk in entry.chunks:
            place = (chunk.span.offset, chunk.span.nbytes)
            layouts[chunk.span.file].append((place, entry.dtype.name, chunk.box.sizes))
    files: dict[tuple[tuple[_Place, str, tuple[int, ...]], ...], list[str]] = defaultdict(list)
    for file, layout in layouts.items():
        files[tuple(sorted(layout))].append(file)
    return sorted(name for names in files.values() if len(names) > 1 for name in names)
