"""What was seen of one tensor while its blocks were moved, by one process or by several, and what follows from it."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import xxhash
from isal import isal_zlib

from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.entries import Chunk, TensorEntry
from ckpt_tools.checkpoint.formats.digest import digest_tensor
from ckpt_tools.checkpoint.layout import Blocks, Box, BoxIndex, flat_boxes
from ckpt_tools.errors import CkptError
from ckpt_tools.storage.source import Source
from ckpt_tools.transfer.box_bytes import start_of
from ckpt_tools.transfer.plan import blocks_of
from ckpt_tools.transfer.read import Buffers, Checksums, Parts, Read, combine_crcs, read_block
from ckpt_tools.transfer.share_record import Run, TensorPart
from ckpt_tools.transfer.split import has_whole_rows
from ckpt_tools.transfer.value_counts import Counts, count_values

_AGAIN_ELEMS = 1 << 16  # Read at once, of what is read again


class DisagreementError(CkptError):
    """Shares have read different bytes of one tensor."""

    shares: tuple[str, ...] = ()  # Those that may be wrong, by the names that `merge` was given


class AsStored:
    """The digest of a tensor as it is stored, from boxes that are those of what is made of it; from any thread.

    Blocks are bounded in bytes, so a cast has others than its source: one that a thread leaves is read to its end.
    """

    def __init__(self, entry: TensorEntry, chunks: BoxIndex[Chunk], source: Source) -> None:
        self._read_from = (entry, chunks, source)
        self._whole = Box((0,) * len(entry.shape), entry.shape)
        starts = (start_of(block, self._whole) for block in blocks_of(entry, entry.dtype))
        self._ends = [*filter(None, starts), entry.num_elems]
        self._streams: dict[int, tuple[xxhash.xxh3_128 | None, int]] = {}
        """Thread → what has seen the block that has begun, as far as an element."""
        self._digests: dict[int, bytes] = {}

    def add(self, box: Box, content: memoryview) -> None:
        """Take the row-major bytes of a box that is one run of the tensor."""
        first, size = start_of(box, self._whole), len(content) // max(1, box.num_elems)
        at, end, thread = first, first + box.num_elems, threading.get_ident()
        hasher, before = self._streams.get(thread, (None, at))
        if before != at:
            self._complete(hasher, before)
            hasher = None
        while at < end:
            index = bisect_right(self._ends, at)
            to, stop = min(end, self._ends[index]), self._ends[index]
            hasher = xxhash.xxh3_128() if at in (0, self._ends[index - 1]) else hasher
            if hasher is not None:
                hasher.update(content[(at - first) * size : (to - first) * size])
                if to == stop:
                    self._digests[index], hasher = hasher.digest(), None
            at = to
        self._streams[thread] = hasher, end

    def digests(self) -> dict[int, bytes]:
        """Return those of all blocks that begin in what was added, once nothing more will be."""
        while self._streams:
            self._complete(*self._streams.popitem()[1])
        return self._digests

    def digest(self) -> str | None:
        """Return the tensor's; None when not all of it was added."""
        found, count = self.digests(), len(self._ends) if self._whole.num_elems else 0
        return digest_tensor(b"".join(found[i] for i in range(count))) if len(found) == count else None

    def _complete(self, hasher: xxhash.xxh3_128 | None, start: int) -> None:
        if hasher is None:
            return
        (entry, chunks, source), buffers = self._read_from, Buffers()
        index = bisect_right(self._ends, start - 1)
        for at in range(start, self._ends[index], _AGAIN_ELEMS):
            for box in flat_boxes(entry.shape, at, min(at + _AGAIN_ELEMS, self._ends[index])):
                hasher.update(read_block(entry, chunks, entry.dtype, box, source, buffers)[0])
        self._digests[index] = hasher.digest()


class Seen:
    """What was seen of one tensor; its methods may be called from any thread, for blocks in any order."""

    def __init__(self, entry: TensorEntry, dtype: DType, blocks: Blocks, *, counting: bool) -> None:
        self._entry = entry
        self._dtype = dtype
        self._blocks = blocks
        self._counting = counting
        self._digests: dict[int, bytes] = {}
        self._checksums = Checksums()
        self._counts: list[Counts] = []
        self._runs: dict[int, set[Run]] = {}

    def add(self, index: int, block: Box, digest: bytes, content: memoryview, reads: Iterable[Read]) -> None:
        """Remember a block as it was written: its digest, what was read for it, and what its values are like."""
        if self._counting:
            start = start_of(block, Box((0,) * len(self._entry.shape), self._entry.shape))
            if (counts := count_values(content, self._dtype, start=start)) is not None:
                self._counts.append(counts)
        self._digests[index] = digest
        self._checksums.add(reads)

    def add_parts(self, index: int, block: Box, targets: Iterable[Box], held: Box, content: memoryview) -> None:
        """Remember what was written of a block of which other shares write parts, so that all can be compared together.

        `targets` was written of it; `held` was read of it: the block, or one run of it.
        """
        runs = self._runs.setdefault(index, set())
        if held == block:
            runs.add((0, len(content), isal_zlib.crc32(content)))
        origin = self._dtype.num_bytes(start_of(held, block))
        for part in targets:
            if has_whole_rows(part, block):
                start, nbytes = self._dtype.num_bytes(start_of(part, block)), self._dtype.num_bytes(part.num_elems)
                run = content[start - origin : start - origin + nbytes]
                runs.add((start, nbytes, isal_zlib.crc32(run)))

    def check_sources(self, chunks: BoxIndex[Chunk], source: Source) -> int:
        """Compare what was read of every source chunk with the CRC-32 of its writer; return how many were compared."""
        every = Box((0,) * len(self._entry.shape), self._entry.shape)
        return sum(self._checksums.check(self._entry, chunk, source) for chunk, _ in chunks.overlaps(every))

    def digest(self) -> str:
        """Return the tensor's digest; every block must have been seen."""
        return digest_tensor(b"".join(self._digests[index] for index in range(len(self._blocks))))

    @property
    def counts(self) -> Counts | None:
        """What the values are like; None where none were counted."""
        return sum(self._counts, Counts()) if self._counts else None

    # Of several shares

    def part(self, chunks: BoxIndex[Chunk], stored: AsStored | None) -> TensorPart:
        """Return what this share saw; `stored` has what it read of a tensor that it casts."""
        every = Box((0,) * len(self._entry.shape), self._entry.shape)
        read = ((chunk.box.offsets, self._checksums.runs(chunk)) for chunk, _ in chunks.overlaps(every))
        whole, digests = {} if stored is None else stored.digests(), self._digests
        runs = {index: tuple(sorted(runs)) for index, runs in self._runs.items()}
        sources = tuple(sorted((offsets, join_runs(runs)) for offsets, runs in read if runs))
        blocks, as_stored = ({index: each.hex() for index, each in some.items()} for some in (digests, whole))
        return TensorPart(digests=blocks, runs=runs, sources=sources, stored=as_stored, counts=self.counts)

    def merge(self, parts: Sequence[tuple[str, TensorPart]], chunks: BoxIndex[Chunk]) -> int:
        """Take over what shares saw, each with its name for messages; the order makes no difference.

        Return the number of blocks of which several shares wrote parts that could not be compared with the digest.
        """
        every = Box((0,) * len(self._entry.shape), self._entry.shape)
        by_offsets = {chunk.box.offsets: chunk for chunk, _ in chunks.overlaps(every)}
        owners: dict[int, str] = {}
        writers: dict[int, list[str]] = {}
        told: set[int] = set()  # by their owners
        for name, part in parts:
            for index, digest in part.digests.items():
                if self._digests.setdefault(index, bytes.fromhex(digest)).hex() != digest:
                    raise self._disagree(index, owners[index], name)
                owners[index] = name
            self._counts += [] if part.counts is None else [part.counts]
            for offsets, runs in part.sources:
                chunk = by_offsets.get(offsets)
                if chunk is not None:
                    self._checksums.add(Read(chunk, *run) for run in runs)
            for index, runs in part.runs.items():
                self._runs.setdefault(index, set()).update(runs)
                writers.setdefault(index, []).append(name)
            told |= part.digests.keys() & part.runs.keys()
        if missing := [index for index in range(len(self._blocks)) if index not in self._digests]:
            raise CkptError(f"tensor {self._entry.fqn!r}: no part has read its blocks {missing[:4]}")
        fits = {index: self._fits(index, runs, (owners[index], *writers[index])) for index, runs in self._runs.items()}
        return sum(not (fit and index in told) for index, fit in fits.items())

    def _fits(self, index: int, runs: set[Run], shares: Sequence[str]) -> bool:
        """Do the runs of a block, which its owner has read whole, agree? False where what was written is not all of it.

        What was not written in runs of whole rows was read whole by everybody.
        """
        by_place: dict[tuple[int, int], int] = {}
        for start, nbytes, crc32 in runs:
            if by_place.setdefault((start, nbytes), crc32) != crc32:
                raise self._disagree(index, *shares)
        nbytes = self._dtype.num_bytes(self._blocks[index].num_elems)
        whole = by_place.pop((0, nbytes), None)
        crc32, total = combine_crcs([(*place, crc32) for place, crc32 in by_place.items()])
        if total == nbytes and whole not in (None, crc32):
            raise self._disagree(index, *shares)
        return total in (0, nbytes)

    def _disagree(self, index: int, *shares: str) -> DisagreementError:
        what = f"parts of this conversion have read different bytes of tensor {self._entry.fqn!r}, block {index}"
        where = ", ".join(sorted({chunk.span.file for chunk in self._entry.chunks})[:4])
        hint = "nothing is published: a machine has read the source wrongly; run the parts again"
        error = DisagreementError(what, where=where, hint=hint)
        error.shares = tuple(dict.fromkeys(shares))
        return error


def join_runs(runs: Parts) -> tuple[Run, ...]:
    """Join runs that follow each other."""
    joined: list[Run] = []
    for run in sorted(runs):
        if joined and sum(joined[-1][:2]) == run[0]:
            first, before, crc32 = joined.pop()
            joined.append((first, before + run[1], isal_zlib.crc32_combine(crc32, run[2], run[1])))
        else:
            joined.append(run)
    return tuple(joined)
