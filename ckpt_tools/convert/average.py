"""The weighted average of several checkpoints as one conversion of the first: the others are read beside it.

Arithmetic is float32 (float64 for float64), in the order of the sources, and rounds once to what is written: from the
first tensor on, `mean += (x - mean) * step` for each further x. With weights w, the step of a source is its weight over
the sum of those so far; of an exponential moving average it is 1 - decay. So equal tensors stay as they are, to the
last bit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.formats.digest import digest_bytes
from ckpt_tools.checkpoint.formats.inside import check_sealed, revealed
from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.checkpoint.names.foreign import is_factor
from ckpt_tools.checks.diff import match_names
from ckpt_tools.checks.values import packed_tensors
from ckpt_tools.convert.job import STATE, Job, check_separate, kept_by
from ckpt_tools.errors import UsageError
from ckpt_tools.text import first_few
from ckpt_tools.transfer.paired_reader import PairedReader, Reading

_PIECE_ELEMS = 1 << 16
_BLOCK_BYTES = 24 << 20  # Of a worker beside its buffers: a block of each source, and one in float32
_LIBRARIES_BYTES = 64 << 20


def steps_of(weights: Sequence[float]) -> tuple[float, ...]:
    """Return by which part of its distance every source but the first moves the mean."""
    sums = list(accumulate(weights))
    return tuple(weight / total for weight, total in zip(weights[1:], sums[1:], strict=True))


def averaging_job(job: Job, others: Sequence[Opened], steps: Sequence[float]) -> Job:
    """Return the job that writes the average of what `job` would write and of others, with one step for each."""
    odd = {fqn for fqn, why in kept_by(job.opened, job.assets).items() if why != STATE}
    odd |= {entry.fqn for entry in packed_tensors(job.source)}
    odd |= {e.fqn for e in job.source.tensors if e.dtype.name[0] == "F" and not e.dtype.is_float}
    if packed := [e.fqn for e in job.source.tensors if {e.fqn, job.names.get(e.fqn)} & odd]:
        what = f"quantised weights have no average: {first_few(packed)}"
        where = job.opened.source.root
        raise UsageError(what, where=where, hint="`ckpt gather SRC DST --dequantize` each of them first")
    reading = Reading()
    besides: dict[str, list[PairedReader]] = {entry.fqn: [] for entry in job.source.tensors}
    for other in map(revealed, others):
        check_sealed(other)
        check_separate(other, job.destination)
        own = {id(entry) for entry in other.checkpoint.tensors}
        for fqn, entry in _paired(job, other).items():
            recorded = entry.fqn if id(entry) in own else ""
            besides[fqn].append(PairedReader(entry, other, reading, recorded))
    dtypes = {entry.fqn: entry.dtype for entry in job.target.tensors}
    full = [entry for entry in job.source.tensors if entry.num_elems]
    job.edits = {e.fqn: _Averaging(e, dtypes[e.fqn], tuple(besides[e.fqn]), tuple(steps), reading) for e in full}
    sources = [job.opened, *others]
    for other in others:
        for file in other.checkpoint.files:
            other.source.size(file)  # identities are of the files as they were opened
    job.recipe = digest_bytes(json.dumps([[s.source.identities() for s in sources], list(steps)]).encode())
    job.edit_bytes = _LIBRARIES_BYTES + job.num_workers * _BLOCK_BYTES
    averaged = sum(entry.dtype.is_float for entry in full)
    job.notes.append(f"averaged {averaged} tensors of {len(sources)} checkpoints in float32")
    if counters := [entry.fqn for entry in full if entry.num_elems == 1 and not entry.dtype.is_float]:
        job.notes.append(f"numbers that are not averaged are those of the last: {first_few(counters)}")

    if factors := [entry.fqn for entry in full if is_factor(entry.fqn)]:
        text = f"the factors of an adapter were averaged one by one ({first_few(factors)}): their product is not the "
        job.warnings = (*job.warnings, f"{text}average of the adapters. Merge each into its base, and average those")

    def accept() -> None:
        for other in others:
            other.source.check_unchanged()
        for each in (one for some in besides.values() for one in some):
            job.ledger.held.update(each.ledger.held)
            job.ledger.missed.update(each.ledger.missed)

    job.accept = accept
    return job


def _paired(job: Job, other: Opened) -> dict[str, TensorEntry]:
    """Return the tensors of another checkpoint by the names of the job's source."""
    where = other.source.root
    ours, theirs = match_names(replace(job.opened, checkpoint=job.source), other, "auto")
    own = {id(entry) for entry in job.source.tensors}
    if any(id(entry) not in own for entry in ours.entries.values()):
        hint = "bring both to the same names: `ckpt gather`, or `ckpt rename`"
        raise UsageError("its names are those of another library than the first checkpoint's", where=where, hint=hint)
    found = {entry.fqn: theirs.entries[name] for name, entry in ours.entries.items() if name in theirs.entries}
    missing = [entry.fqn for entry in job.source.tensors if entry.fqn not in found]
    used = {id(entry) for entry in found.values()}
    extra = [fqn for fqn, entry in theirs.entries.items() if id(entry) not in used]
    if missing or extra:
        parts = [f"{len(missing)} tensors of the first are missing: {first_few(missing)}"] * bool(missing)
        parts += [f"{len(extra)} are not in the first: {first_few(extra)}"] * bool(extra)
        raise UsageError("; ".join(parts), where=where, hint="`ckpt diff --keys-only` lists the names")
    for one in job.source.tensors:
        entry = found[one.fqn]
        if (one.shape, one.dtype) != (entry.shape, entry.dtype):
            here, first = (f"{each.dtype.name} {list(each.shape)}" for each in (entry, one))
            what = f"tensor {one.fqn!r} is {here}, and {first} in the first"
            raise UsageError(what, where=where, hint="average checkpoints of one model and dtype")
    return found


@dataclass(frozen=True, slots=True)
class _Averaging:
    """Averages one tensor; see `moving.read.Edit`. What is no floating-point tensor must be the same in all."""

    entry: TensorEntry
    target: DType  # As what it is written
    others: tuple[PairedReader, ...]
    steps: tuple[float, ...]
    reading: Reading
    is_settled: bool = True

    def apply(self, block: Box, content: memoryview, result: memoryview) -> None:
        """Compute the new elements of a block."""
        if self.entry.dtype.is_float:
            self._average(block, content, result)
            return
        for other in self.others:
            theirs = other.read(block)
            if self.entry.num_elems == 1:
                result[:] = theirs
            elif bytes(theirs) != bytes(content):
                what = f"tensor {self.entry.fqn!r} of {self.entry.dtype.name} has no average, and differs"
                hint = "are these checkpoints of one model? Quantised weights must be decoded first "
                raise UsageError(what, where=other.root, hint=hint + "(`ckpt gather --dequantize`)")

    def _average(self, block: Box, content: memoryview, result: memoryview) -> None:
        import numpy as np

        from ckpt_tools.transfer.arrays import array_of
        from ckpt_tools.transfer.casting import cast_array

        dtype = self.entry.dtype
        kind = np.float64 if dtype.name == "F64" else np.float32
        first = array_of(content, dtype, (-1,))
        mean = np.frombuffer(self.reading.room.get(0, len(first) * np.dtype(kind).itemsize), kind)
        piece = np.empty(min(len(first), _PIECE_ELEMS), kind)
        places = [slice(at, at + _PIECE_ELEMS) for at in range(0, len(first), _PIECE_ELEMS)]
        with np.errstate(all="ignore"):
            cast_array(first, mean)
            for other, step in zip(self.others, self.steps, strict=True):
                values = array_of(other.read(block), dtype, (-1,))
                for place in places:
                    old = mean[place]
                    new = piece[: len(old)]
                    cast_array(values[place], new)
                    infinite = np.isinf(old)  # from there no number moves the mean
                    kept = old[infinite] + new[infinite] if infinite.any() else None
                    np.subtract(new, old, out=new)
                    np.multiply(new, kind(step), out=new)
                    np.add(old, new, out=old)
                    if kept is not None:
                        old[infinite] = kept
            cast_array(mean, array_of(result, self.target, (-1,)))

    def finish(self) -> None:
        """Hold what was read of the others against what is recorded of it."""
        for other in self.others:
            other.finish()
