"""Move the bytes of a plan's files: bounded buffers, worker threads, checksums and digests on the way.

The unit of work is one canonical block of one tensor. Its part of any row-major chunk is one contiguous run,
so every read and every write is one contiguous range, whatever the two layouts are. CRC-32s of parts are
combined into those of whole items; digests of blocks into those of whole tensors, and counts of values as well.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import xxhash
from isal import isal_zlib

from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.formats.digest import digest_block
from ckpt_tools.checkpoint.formats.torch_zip import item_frame
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.errors import CkptError, UnreachableError
from ckpt_tools.storage.journal import BlockRecord
from ckpt_tools.storage.sink import Sink
from ckpt_tools.storage.source import Source
from ckpt_tools.transfer.box_bytes import byte_box, is_contiguous, move, start_of
from ckpt_tools.transfer.plan import TILE_BLOCKS, Copy, FilePlan, Seal, blocks_at_once, group_by_tensor, is_plain
from ckpt_tools.transfer.read import ALIGNMENT, Buffers, Edit, Parts, Read, combine_crcs, edit_block, read_block
from ckpt_tools.transfer.share_record import TensorPart
from ckpt_tools.transfer.split import hull
from ckpt_tools.transfer.task import Look, Task
from ckpt_tools.transfer.tensor_digest import AsStored
from ckpt_tools.transfer.threads import Crew
from ckpt_tools.transfer.value_counts import Counts

Progress = Callable[[int], None]
"""Called with the number of logical bytes that have been moved since the last call; from any thread.

Where it has a method `count`, that is called with "tensor", how many are done, and of how many."""
OnDamage = Callable[[TensorEntry, CkptError], None]
"""Called with what is wrong with a tensor's bytes; returning means: go on with the next block."""


@dataclass(slots=True)
class Outcome:
    """What `execute` did."""

    digests: dict[str, str] = field(default_factory=dict)
    """Digest of every tensor that was read whole, over the bytes as they were written."""
    source_digests: dict[str, str] = field(default_factory=dict)
    """Digest of tensors as they were read, of those where that was asked for (`stored`)."""
    counts: dict[str, Counts] = field(default_factory=dict)
    """What the values of every tensor are like, as they were written; where they were counted, and can be."""
    parts: dict[str, TensorPart] = field(default_factory=dict)
    """What was seen of tensors of which other shares have parts; everything above has no word of them."""
    frames: dict[str, str] = field(default_factory=dict)
    """File → digest of what was written around its payloads (`framing`); of those that hold such things."""
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_kept: int = 0  # Logical bytes that an interrupted run had written, and that were read back and found right
    chunks_checked: int = 0  # Source chunks whose CRC-32 was compared with their writer's


class _Execution:
    """One execution: the queue of blocks, and what the workers share."""

    def __init__(
        self,
        tasks: Sequence[Task],
        source: Source,
        sink: Sink | None,
        progress: Progress | None,
        on_damage: OnDamage | None,
        *,
        resumable: bool = False,
        files: Sequence[FilePlan] = (),
    ) -> None:
        self.source = source
        self.sink = sink
        self.outcome = Outcome()
        self._resumable = resumable
        self._progress = progress
        self._on_damage = on_damage
        self._tasks, self._num_done = tasks, 0
        self._lock = threading.Lock()
        self._open_copies: dict[str, int] = {}
        self._framed = {file.file: file for file in files if has_frames(file)}
        """Files with something around their payloads that says what they are."""
        self._crcs: dict[str, dict[int, int]] = {file: {} for file in self._framed}
        """Of these: where a payload begins → its CRC-32."""
        self._sealing = {file: Sealing(plan, plan.seal) for file, plan in self._framed.items() if plan.seal is not None}
        for task in tasks:
            for file, _ in task.copies:
                self._open_copies[file] = self._open_copies.get(file, 0) + 1

    def run(self, num_workers: int) -> None:
        """Work until nothing is left; raise the first error of any worker."""
        Crew(self._queue(self._tasks), self._begin).run(num_workers)

    @staticmethod
    def _queue(tasks: Sequence[Task]) -> Iterator[tuple[Task, range]]:
        for task in tasks:
            at_once = blocks_at_once(task.entry) if task.stored is None else TILE_BLOCKS
            for row in task.blocks.rows() if len(task.blocks) else (range(1),):
                yield from ((task, row[start : start + at_once]) for start in range(0, len(row), at_once))

    def _begin(self) -> Callable[[tuple[Task, range]], None]:
        buffers = Buffers()

        def work(unit: tuple[Task, range]) -> None:
            task, indices = unit
            ahead = task.blocks.span(indices) if len(indices) > 1 and blocks_at_once(task.entry) > 1 else None
            for index in indices:
                self._do(task, index, ahead, buffers)

        return work

    def _do(self, task: Task, index: int, ahead: Box | None, buffers: Buffers) -> None:
        nbytes = read = written = 0
        try:
            if index < len(task.blocks):
                block = task.blocks[index]
                targets = list(task.targets.overlaps(block))
                has_whole = task.has_whole(index, block, targets)
                kept = self._reuse(task, index, block, targets, buffers) if has_whole else None
                if kept is not None:
                    nbytes = kept
                elif targets or task.owns(index):
                    held = block if task.owns(index) else hull(block, [part for _, part in targets])
                    content, reads, read = self._content(task, index, held, ahead if held is block else None, buffers)
                    nbytes = len(content)
                    if task.owns(index):
                        digest = digest_block(content)
                        task.seen.add(index, block, digest, content, reads)
                        for look in task.looks:
                            look.see(block, content)
                    if not has_whole or task.is_elsewhere:
                        task.seen.add_parts(index, block, (part for _, part in targets), held, content)
                    written = self._write_block(task, held, targets, content, buffers)
                    if self.sink is not None and self._resumable and has_whole:
                        numbered = tuple(
                            (i, p.start, p.nbytes, p.crc32) for i, p in enumerate(reads) if p.crc32 is not None
                        )
                        self.sink.record(task.number, index, BlockRecord(digest.hex(), numbered))
        except CkptError as error:
            self._report(task, error)
        with self._lock:
            self.outcome.bytes_read += read
            self.outcome.bytes_written += written
            task.remaining -= 1
            last = task.remaining == 0
            self._num_done += last
            if last and (count := getattr(self._progress, "count", None)) is not None:
                count("tensor", self._num_done, len(self._tasks))
            if self._progress is not None and nbytes:
                self._progress(nbytes)
        if last:
            self._finish(task)

    def _content(
        self, task: Task, index: int, block: Box, ahead: Box | None, buffers: Buffers
    ) -> tuple[memoryview, list[Read], int]:
        """Read a block, and edit it."""
        entry, dtype = task.entry, task.dtype if task.edit is None else task.entry.dtype
        see = task.stored.add if task.stored is not None and task.owns(index) else None
        content, reads, read = read_block(entry, task.chunks, dtype, block, self.source, buffers, ahead=ahead, see=see)
        if task.edit is not None:
            content = edit_block(task.edit, block, content, task.dtype, buffers)
        return content, reads, read

    def _report(self, task: Task, error: CkptError) -> None:
        if self._on_damage is None or isinstance(error, UnreachableError):
            raise error
        with self._lock:
            task.damaged = True
            self._on_damage(task.entry, error)

    # Writing

    def _write_block(
        self, task: Task, block: Box, targets: Sequence[tuple[int, Box]], content: memoryview, buffers: Buffers
    ) -> int:
        written = 0
        dtype = task.dtype
        for i, part in targets:
            file, copy = task.copies[i]
            start, nbytes = dtype.num_bytes(start_of(part, copy.box)), dtype.num_bytes(part.num_elems)
            offset = copy.offset + start
            if is_contiguous(part, block):
                at = dtype.num_bytes(start_of(part, block))
                run = buffers.align(content[at : at + nbytes], at, offset)
            else:
                run = buffers.get(1, nbytes, shift=offset % ALIGNMENT)
                piece = byte_box(part, dtype)
                move(piece, content, byte_box(block, dtype), run, piece)
            written += self._write_part(task, i, file, copy, start, run)
        return written

    def _write_part(self, task: Task, i: int, file: str, copy: Copy, start: int, run: memoryview) -> int:
        sink = self._sink()
        if copy.encoding == "raw":
            if file in self._framed and not is_plain(task.entry):
                task.written_parts[i].append((start, len(run), isal_zlib.crc32(run)))
            return sink.write(file, copy.offset + start, [run])
        crc32 = isal_zlib.crc32(run)
        if len(run) == copy.nbytes:  # the whole item at once
            self._remember(file, copy, crc32)
            frame = item_frame(copy.dtype, copy.box.sizes)
            return sink.write(file, copy.offset - frame.payload_offset, [frame.before, run, frame.after(crc32)])
        task.written_parts[i].append((start, len(run), crc32))
        return self._open_item(file, copy, start) + sink.write(file, copy.offset + start, [run])

    def _open_item(self, file: str, copy: Copy, start: int) -> int:
        """Write what stands before an item's payload, with the first bytes of that: a store waits for it."""
        if start:
            return 0
        frame = item_frame(copy.dtype, copy.box.sizes)
        return self._sink().write(file, copy.offset - frame.payload_offset, [frame.before])

    def _remember(self, file: str, copy: Copy, crc32: int) -> None:
        with self._lock:
            self._crcs[file][copy.offset] = crc32

    def _sink(self) -> Sink:
        if self.sink is None:
            raise CkptError("a plan with copies needs a place to write to")
        return self.sink

    # Continuing an interrupted run

    def _reuse(
        self, task: Task, index: int, block: Box, targets: Sequence[tuple[int, Box]], buffers: Buffers
    ) -> int | None:
        """Read back what an interrupted run wrote of a block; None when it must be written (again)."""
        sink = self.sink
        if sink is None or not self._resumable:
            return None
        if task.edit is not None and not task.edit.is_settled:
            return None
        record = sink.records.get((task.number, index))
        if record is None:
            return None
        dtype = task.dtype
        content = buffers.get(0, dtype.num_bytes(block.num_elems))
        parts: list[tuple[int, int, int, int]] = []
        for i, part in targets:
            file, copy = task.copies[i]
            start, nbytes = dtype.num_bytes(start_of(part, copy.box)), dtype.num_bytes(part.num_elems)
            direct = is_contiguous(part, block)
            at = dtype.num_bytes(start_of(part, block))
            run = content[at : at + nbytes] if direct else buffers.get(1, nbytes)
            if not sink.read_into(file, copy.offset + start, run):
                return None
            parts.append((i, start, isal_zlib.crc32(run), len(run)))
            if copy.encoding != "raw":
                self._open_item(file, copy, start)  # nothing says that it was written before
            if not direct:
                piece = byte_box(part, dtype)
                move(piece, run, piece, content, byte_box(block, dtype))
        digest = digest_block(content)
        if digest.hex() != record.digest:
            return None
        chunks = [chunk for chunk, _ in task.chunks.overlaps(block)]
        reads = (Read(chunks[i], start, nbytes, crc) for i, start, nbytes, crc in record.reads if i < len(chunks))
        task.seen.add(index, block, digest, content, reads)
        for i, start, crc32, nbytes in parts:
            task.written_parts[i].append((start, nbytes, crc32))
        with self._lock:
            self.outcome.bytes_kept += len(content)
        if task.stored is not None:  # of what was read then, only the result is here
            read_block(task.entry, task.chunks, task.entry.dtype, block, self.source, buffers, see=task.stored.add)
        return len(content)

    # Finishing

    def _finish(self, task: Task) -> None:
        if task.owned is not None:
            with self._lock:
                self.outcome.parts[task.entry.fqn] = task.seen.part(task.chunks, task.stored)
        else:
            self._settle(task)
            if task.stored is not None and (digest := task.stored.digest()) is not None:
                self.outcome.source_digests[task.entry.fqn] = digest
        if task.edit is not None:
            task.edit.finish()
        for look in task.looks:
            look.finish()
        for (file, copy), parts in zip(task.copies, task.written_parts, strict=True):
            self._seal(file, copy, parts)
            with self._lock:
                self._open_copies[file] -= 1
                done = self._open_copies[file] == 0
            if done:
                self.close(file)

    def close(self, file: str) -> None:
        """Write what closes a file, and make it durable."""
        written = 0
        plan, crcs = self._framed.get(file), self._crcs.pop(file, {})
        if file in self._sealing and not crcs:
            written = self._write_seal(file)
        self._sink().sync(file)
        frames = None if plan is None else digest_planned_frames(plan, crcs)
        with self._lock:
            self.outcome.bytes_written += written
            if frames is not None:
                self.outcome.frames[file] = frames

    def _seal(self, file: str, copy: Copy, parts: Parts) -> None:
        is_raw = copy.encoding == "raw"
        if (file not in self._framed or is_plain(copy.source)) if is_raw else copy.nbytes and not parts:
            return
        crc32, total = combine_crcs(parts)
        if total != copy.nbytes:
            raise CkptError(f"wrote {total} of {copy.nbytes} bytes", where=file)
        self._remember(file, copy, crc32)
        if is_raw:
            written = self._write_seal(file, copy.offset, crc32) if file in self._sealing else 0
            with self._lock:
                self.outcome.bytes_written += written
            return
        frame = item_frame(copy.dtype, copy.box.sizes)
        written = 0 if parts else self._open_item(file, copy, 0)
        written += self._sink().write(file, copy.offset + copy.nbytes, [frame.after(crc32)])
        with self._lock:
            self.outcome.bytes_written += written

    def _write_seal(self, file: str, *payload: int) -> int:
        with self._lock:
            pieces = self._sealing[file].add(*payload)
        return sum(self._sink().write(file, offset, [content]) for offset, content in pieces)

    def _settle(self, task: Task) -> None:
        try:
            num_checked = task.seen.check_sources(task.chunks, self.source)
        except CkptError as error:
            self._report(task, error)
            num_checked = 0
        digest = None if task.damaged else task.seen.digest()
        with self._lock:
            self.outcome.chunks_checked += num_checked
            if digest is not None:
                self.outcome.digests[task.entry.fqn] = digest
            if (counts := task.seen.counts) is not None:
                self.outcome.counts[task.entry.fqn] = counts


def execute(
    files: Sequence[FilePlan],
    source: Source,
    sink: Sink,
    *,
    num_workers: int,
    progress: Progress | None = None,
    resumable: bool = False,
    edits: Mapping[str, Edit] | None = None,
    counting: bool = False,
    before: Mapping[str, Sequence[Box]] | None = None,
    stored: Collection[str] = (),
) -> Outcome:
    """Write `files` into `sink`, durably.

    They may be a share of a plan: of a tensor that others have parts of, blocks that begin in these files are read
    whole, and of others no more than is written. `before` names the tensors that have elements in several files, with
    the boxes of them that earlier shares have.

    With `resumable`, blocks that the sink's records name are read back and kept when they are right,
    and blocks that are written are recorded. `edits` (FQN in the source → what to do) change tensors on their way.
    With `counting`, values are counted as they are written. Of tensors in `stored` that are cast or edited, the digest
    of what is read is computed too.

    Memory: two buffers of one block for every worker, a tile where tensors are stored in another order
    (`Plan.peak_bytes`), and the plan itself.
    """
    head_bytes = 0
    for file in files:
        sink.create(file.file, file.nbytes, gaps_of(file))
        if file.head:
            head_bytes += sink.write(file.file, 0, [file.head])
    edits = edits or {}
    tasks = [
        Task(i, entry, copies, edits.get(entry.fqn), counting=counting, before=(before or {}).get(entry.fqn))
        for i, (entry, copies) in enumerate(group_by_tensor(files))
    ]
    for task in tasks:
        if task.entry.fqn in stored and (task.dtype is not task.entry.dtype or task.edit is not None):
            task.stored = AsStored(task.entry, task.chunks, source)
    if sink.goes_front_to_back:
        tasks = [tasks[i] for i in front_to_back([task.copies for task in tasks])]
    else:
        tasks.sort(key=lambda task: task.edit is not None)  # what edits need is prepared while other bytes are moved
    run = _Execution(tasks, source, sink, progress, None, resumable=resumable, files=files)
    run.run(num_workers)
    for file in files:
        if not file.copies:
            run.close(file.file)
    source.check_unchanged()
    run.outcome.bytes_written += head_bytes
    return run.outcome


def scan(
    entries: Sequence[TensorEntry],
    source: Source,
    *,
    num_workers: int,
    progress: Progress | None = None,
    on_damage: OnDamage | None = None,
    counting: bool = False,
    looks: Mapping[str, Sequence[Look]] | None = None,
) -> Outcome:
    """Read tensors (raw chunks) whole: digests, CRC-32s compared with their writer's, with `counting` the values.

    `looks` (FQN → who) are shown the blocks of a tensor.
    """
    tasks = [Task(i, entry, (), None, counting=counting) for i, entry in enumerate(entries)]
    for task in tasks:
        task.looks = (looks or {}).get(task.entry.fqn, ())
    run = _Execution(tasks, source, None, progress, on_damage)
    if tasks:
        run.run(num_workers)
    return run.outcome


# In which order to write tensors into files that are sent front to back

Copies = Sequence[tuple[str, Copy]]


def front_to_back(groups: Sequence[Copies]) -> list[int]:
    """Return the order in which every file is written from its beginning, as near to the given one as that allows.

    Files that have two tensors in opposite orders cannot both have theirs: the first tensor that waits goes ahead.
    """
    files: dict[str, list[tuple[int, int]]] = {}
    for number, copies in enumerate(groups):
        for file, copy in copies:
            files.setdefault(file, []).append((copy.offset, number))
    after: list[list[int]] = [[] for _ in groups]
    waits_for = [0] * len(groups)
    for placed in files.values():
        placed.sort()
        for (_, first), (_, second) in pairwise(placed):
            if first != second:
                after[first].append(second)
                waits_for[second] += 1
    ready = [number for number, count in enumerate(waits_for) if not count]
    order: list[int] = []
    done = [False] * len(groups)
    oldest = 0
    while len(order) < len(groups):
        if not ready:
            while done[oldest]:
                oldest += 1
            ready.append(oldest)
        number = heapq.heappop(ready)
        if done[number]:
            continue
        done[number] = True
        order.append(number)
        for each in after[number]:
            waits_for[each] -= 1
            if waits_for[each] == 0:
                heapq.heappush(ready, each)
    return order


# What lies around the payloads of a file that a plan writes: known from the plan and the CRC-32s, never read back
# The digest is that of `formats.frames`, which reads the same bytes from a file.

_ZEROS = bytes(1 << 16)


def has_frames(plan: FilePlan) -> bool:
    """Does the file hold anything around its payloads that says what they are?"""
    return plan.seal is not None or any(copy.encoding != "raw" for copy in plan.copies)


def digest_planned_frames(plan: FilePlan, crcs: Mapping[int, int]) -> str:
    """Return the digest of every byte of a file that belongs to no payload; `crcs` are by where a payload begins."""
    state = xxhash.xxh3_128()
    position = 0
    for start, piece, nbytes in sorted(_pieces(plan, crcs), key=lambda each: each[:1] + each[2:]):
        _skip(state, start - position)
        state.update(piece)
        position = start + (nbytes or len(piece))
    _skip(state, plan.nbytes - position)
    return state.hexdigest()


class Sealing:
    """What closes the payloads of an archive: each piece as soon as it is known. One thread at a time."""

    def __init__(self, plan: FilePlan, seal: Seal) -> None:
        self._starts = sorted({copy.offset for copy in plan.copies if not is_plain(copy.source)})
        self._crcs: dict[int, int] = {}
        self._num_told = 0
        self._pieces = iter(seal(self._crcs[start] for start in self._starts))

    def add(self, start: int | None = None, crc32: int = 0) -> list[tuple[int, bytes]]:
        """Take the CRC-32 of the payload at `start`, if there is any; return what can be written now."""
        if start is None:
            return list(self._pieces)
        self._crcs[start] = crc32
        told = self._num_told
        while self._num_told < len(self._starts) and self._starts[self._num_told] in self._crcs:
            self._num_told += 1
        return [next(self._pieces) for _ in range(self._num_told - told)]


def gaps_of(plan: FilePlan) -> Iterator[tuple[int, int]]:
    """Yield (offset, bytes) of what lies between the pieces of a file, and is zeros, in order."""
    if plan.seal is not None:  # an archive has none
        return
    position = len(plan.head)
    for start, end in sorted(map(_extent, plan.copies)):
        if start > position:
            yield position, start - position
        position = max(position, end)
    if position < plan.nbytes:
        yield position, plan.nbytes - position


def _extent(copy: Copy) -> tuple[int, int]:
    if copy.encoding == "raw":
        return copy.offset, copy.offset + copy.nbytes
    frame = item_frame(copy.dtype, copy.box.sizes)
    start = copy.offset - frame.payload_offset
    return start, start + frame.nbytes


def _pieces(plan: FilePlan, crcs: Mapping[int, int]) -> Iterator[tuple[int, bytes, int]]:
    """Yield (offset, bytes, 0) of what lies around payloads, and (offset, b"", bytes) of those."""
    if plan.head:
        yield 0, plan.head, 0
    for copy in plan.copies:
        if copy.nbytes:
            yield copy.offset, b"", copy.nbytes
        if copy.encoding != "raw":
            frame = item_frame(copy.dtype, copy.box.sizes)
            yield copy.offset - frame.payload_offset, frame.before, 0
            yield copy.offset + copy.nbytes, frame.after(crcs[copy.offset]), 0
    if plan.seal is not None:
        for offset, content in plan.seal([crcs[start] for start in sorted(crcs)]):
            yield offset, content, 0


def _skip(state: xxhash.xxh3_128, nbytes: int) -> None:
    """Add the zeros that lie between two pieces."""
    while nbytes > 0:
        state.update(_ZEROS[:nbytes])
        nbytes -= len(_ZEROS)
