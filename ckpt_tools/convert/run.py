"""Run a job: plan, move the bytes, prove the result, publish it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from ckpt_tools.checkpoint.formats.digest import digest_bytes, digest_tensor
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, parse_manifest
from ckpt_tools.checkpoint.formats.opening import read_document
from ckpt_tools.checkpoint.formats.scan import describe_executable, scan_files, why_not_inert
from ckpt_tools.checkpoint.formats.step import judge
from ckpt_tools.checkpoint.formats.table import check_replaceable, format_of
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.convert.finish import (
    APART,
    can_adopt,
    carry_assets,
    conversion,
    finish,
    kept_or_discarded,
    notes_of_parts,
    planned_files,
    read_apart,
    recorded_apart,
    to_digest,
)
from ckpt_tools.convert.job import Conversion, Job, check_claims, check_separate, fingerprint, rewrite_assets
from ckpt_tools.errors import CkptError, DestinationExistsError, StorageError, UnreadableError, UsageError
from ckpt_tools.floors import refuse_older
from ckpt_tools.storage.locations import is_remote, local, open_shared_sink, open_sink, open_source
from ckpt_tools.storage.shared_staging import tidy
from ckpt_tools.storage.sink import SharedSink, Sink
from ckpt_tools.storage.staging import Staging, check_destination, check_space
from ckpt_tools.text import escape_name, first_few
from ckpt_tools.transfer.execute import Outcome, Progress, execute, scan
from ckpt_tools.transfer.plan import (
    FilePlan,
    Plan,
    blob_name,
    blocks_of,
    chunk_index,
    copy_span,
    group_by_tensor,
    is_plain,
)
from ckpt_tools.transfer.share_record import PartFile, ShareRecord, build_record, parse_record, record_name
from ckpt_tools.transfer.split import Part, boxes_before, split
from ckpt_tools.transfer.task import Task
from ckpt_tools.transfer.tensor_digest import DisagreementError, Seen
from ckpt_tools.units import format_duration, format_size

_BASE_BYTES = 64 << 20  # Of the interpreter and the modules, in estimates


def run(job: Job, *, dry_run: bool) -> Conversion:
    """Plan, and unless `dry_run` execute, check and publish; after an error the destination is as it was."""
    start = time.monotonic()
    check_separate(job.opened, job.destination)
    if is_remote(job.destination):
        _check_remote(job)
        job.part = job.part or Part(index=0, count=1)
    if job.part is not None and not dry_run:
        return run_share(job, job.part, start)
    if not is_remote(job.destination):
        check_destination(job.destination, overwrite=job.overwrite)
    if job.overwrite:
        check_replaceable(job.destination)
    jobs = {"": job, **job.parts}
    for each in jobs.values():
        each.ledger = job.ledger
        check_claims(each)
        make_inert(each, keep=job.keep_pickles)
        rewrite_assets(each)
    plans = {name: Plan(each.source, each.target, each.heads, each.seals) for name, each in jobs.items()}
    planned = [(os.path.join(name, file), n) for name, each in jobs.items() for file, n in planned_files(each)]
    needed = sum(nbytes for _, nbytes in planned)
    if dry_run:
        job.notes += notes_of_parts(job)
        on_its_way, notes = preview(job, plans[""])
        job.notes += notes
        peak = (
            _BASE_BYTES + on_its_way + job.edit_bytes + max(plan.peak_bytes(job.num_workers) for plan in plans.values())
        )
        read = sum(plan.read_bytes for plan in plans.values())
        return conversion(job, start, planned, read=read, peak=peak, dry_run=True, published=False)
    if job.use_dtensor:
        check_space(needed, job.destination)
        return _run_with_dtensor(job, start)
    return _write(job, plans, start, needed)


def _check_remote(job: Job) -> None:
    """Refuse what needs a directory of this machine to be built in."""
    whole = f"write it to a disk, then copy it to {job.destination}"
    if job.overwrite:
        raise UsageError(
            "a store cannot replace a checkpoint atomically: the old one would be gone while the new one is written",
            where=job.destination,
            hint="write to a new prefix, and remove the old one when the new one is complete",
        )
    if job.use_dtensor:
        raise UsageError("--engine dtensor only writes to this machine's disks", hint="use --engine stream")
    if job.parts:
        what = f"a step of several checkpoints ({', '.join(job.parts)}) can only be written to this machine's disks"
        raise UsageError(what, where=job.destination, hint=f"convert each by itself, or {whole}")
    if job.edits or job.prepare is not None:
        what = "a conversion that computes new values can only write to this machine's disks"
        raise UsageError(what, where=job.destination, hint=whole)


def _write(job: Job, plans: Mapping[str, Plan], start: float, needed: int, *, is_part: bool = False) -> Conversion:
    """Write the job and, inside of its staging directory, its parts; `plans` has those of the parts by name."""
    plan = plans[""]
    if job.prepare is not None:
        job.prepare()
    marker = format_of(job.target).build_marker(job.named)
    sink = open_sink(job.destination, overwrite=job.overwrite)
    with kept_or_discarded(sink, is_part=is_part):
        sink.begin(fingerprint(job, marker))
        if sink.found_other:
            job.notes.append("removed the remains of an interrupted run with other arguments or another source")
        sink.check_space(needed)
        parts = _write_parts(job, plans, sink) if isinstance(sink, Staging) else {}
        assets = carry_assets(job, sink)
        progress = job.progress(plan.read_bytes) if job.progress is not None and plan.read_bytes else None
        outcome = _move(job, plan.files, sink, progress, edits=job.edits)
        if job.accept is not None:
            job.accept()
        read_apart(job, outcome)
        if outcome.bytes_kept:
            kept, total = format_size(outcome.bytes_kept), format_size(plan.read_bytes)
            job.notes.append(f"continued an interrupted run: {kept} of {total} were already written and are intact")
        return finish(job, start, sink, outcome, assets, marker, parts)


def _move(job: Job, files: Sequence[FilePlan], sink: Sink, progress: Progress | None, **more: Any) -> Outcome:  # noqa: ANN401 - as `execute` has it
    how = {"resumable": True, "counting": True, "stored": to_digest(job), "num_workers": job.num_workers, **more}
    return execute(files, job.opened.source, sink, progress=progress, **how)


def _write_parts(job: Job, plans: Mapping[str, Plan], staging: Staging) -> dict[str, Conversion]:
    """Write the parts of a job, each published inside of the staging directory; return what came of them."""
    done = {}
    for name, part in job.parts.items():
        start = time.monotonic()
        part.destination = staging.begin_part(name)
        part.num_workers, part.progress = job.num_workers, job.progress
        if can_adopt(part.destination, num_workers=job.num_workers):
            part.notes.append("already written by an interrupted run, and verified")
            part.not_checked = (*part.not_checked, f"whether the values of {name} are finite: nothing was read again")
            done[name] = conversion(part, start, planned_files(part), read=0)
        else:
            done[name] = _write(part, {"": plans[name]}, start, 0, is_part=True)
    job.notes += notes_of_parts(job)
    return done


def _run_with_dtensor(job: Job, start: float) -> Conversion:
    """Let PyTorch write the data files; everything around them is as usual. Under torchrun rank 0 does that part."""
    refuse_older("torch", "--engine dtensor")
    from ckpt_tools.convert.dtensor import join_ranks, save_with_dtensor

    if job.mesh is None or any(t.dtype != s.dtype for t, s in zip(job.target.tensors, job.source.tensors, strict=True)):
        raise UsageError("--engine dtensor does not cast", hint="use --engine stream, or leave out --dtype")
    with join_ranks(job.mesh) as ranks:
        staging = Staging(job.destination, overwrite=job.overwrite) if ranks.rank == 0 else None
        try:
            if staging is not None:
                staging.begin()
            directory = ranks.share(staging.directory if staging is not None else "")
            save_with_dtensor(job.source, directory, job.mesh, job.placements)
            if staging is None:
                return conversion(job, start, [], read=0, published=False)
            job.target = replace(job.target, files=staging.adopt())
            marker = staging.take(format_of(job.target).marker)
            progress = job.progress(job.source.total_bytes) if job.progress is not None else None
            outcome = scan(
                job.source.tensors, job.opened.source, num_workers=job.num_workers, progress=progress, counting=True
            )
            return finish(job, start, staging, outcome, carry_assets(job, staging), marker)
        finally:
            if staging is not None:
                staging.discard()


# What a run in parts, or to a store, would take: for the notes of a dry run

_BYTES_PER_S = 5e8  # Of one machine and a store in its region; where nothing was measured
_MAX_ITEMS = 1 << 17  # Of a plan that is gone through block by block: a second or two


def preview(job: Job, plan: Plan) -> tuple[int, list[str]]:
    """Return the memory that it takes beside buffers, and what else, in words; nothing for one process and a disk."""
    part = job.part or Part(index=0, count=1)
    if part.count == 1 and not is_remote(job.destination):
        return 0, []
    check_can_be_cut(job)
    place = find_place(job, part)
    files = [place.files[i] for i in place.shares[part.index]]
    sizes = [job.target.files[file] for file in files]
    memory, passes = 0, [range(len(files))]
    notes: list[str] = []
    if is_remote(job.destination):
        with open_shared_sink(job.destination) as sink:
            memory, said = sink.preview(sizes)
            notes += said
            passes = list(sink.passes(sizes))
    if part.count > 1:
        notes.append(f"part {part} of that is {len(files)} data files, {format_size(sum(sizes))}")
    runs = [[files[i] for i in span] for span in passes]
    return memory, [*notes, _describe_reading(job, plan, place.files, runs, sum(sizes))]


def _describe_reading(job: Job, plan: Plan, every: Sequence[str], passes: Iterable[Sequence[str]], written: int) -> str:
    read = num_items = 0
    for files in filter(None, passes):
        before = elsewhere(job, set(every[: every.index(files[0])]))
        planned = plan.files_of(frozenset(files))
        num_items += sum(len(file.copies) for file in planned)
        if num_items > _MAX_ITEMS:
            return "how often source bytes are read was not computed; at most twice where all is cut along dim 0"
        for entry, copies in group_by_tensor(planned):
            read += Task(0, entry, copies, None, counting=False, before=before.get(entry.fqn)).read_bytes()
    factor = f", {read / written:.2f} × what is written" if written else ""
    seconds = format_duration((read + written) / _BYTES_PER_S)
    return f"reads {format_size(read)}{factor}; reading and writing at 0.5 GB/s takes {seconds}"


# Run one part of a job: its files, and a record of them. Whoever finds all records publishes the whole.

_THREADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Allotment:
    """A part among the others: which files each has. Every part computes the same."""

    part: Part
    shares: Sequence[range]  # Per part the positions of its files
    files: Sequence[str]
    fingerprint: str

    @property
    def num_busy(self) -> int:
        """How many parts have files."""
        return sum(map(bool, self.shares))

    @property
    def turn(self) -> int:
        """How many of the parts before this one have files."""
        return sum(map(bool, self.shares[: self.part.index]))

    def parse(self, records: Mapping[str, bytes]) -> list[ShareRecord]:
        """Return the records of this conversion; a damaged one, or one of another conversion, counts for nothing."""
        found = []
        for name, content in records.items():
            try:
                record = parse_record(content, where=name)
            except UnreadableError:
                continue  # the part that it is of is run again
            if (record.fingerprint, record.count) == (self.fingerprint, self.part.count):
                found.append(record)
        return found

    def missing(self, records: Iterable[ShareRecord]) -> tuple[int, ...]:
        """Return the parts that have a file of which none of these records tells."""
        there = {file for record in records for file in record.files}
        return tuple(i for i, share in enumerate(self.shares) if any(self.files[at] not in there for at in share))

    def is_published(self, destination: str) -> bool:
        """Is the destination what this very conversion makes?"""
        try:
            with open_source(destination) as source:
                manifest = parse_manifest(read_document(source, MANIFEST_NAME, MAX_MANIFEST_BYTES))
        except CkptError:
            return False
        if manifest.source.get("run") != self.fingerprint:
            return False
        if not is_remote(destination):
            tidy(local(destination))
        return True


def is_right(record: ShareRecord, sink: SharedSink) -> bool:
    """Are the files of a record there, as it tells them?"""
    return all(sink.identity(name) == file.identity for name, file in record.files.items())


def _right(records: Sequence[ShareRecord], sink: SharedSink) -> list[ShareRecord]:
    with ThreadPoolExecutor(_THREADS) as threads:  # a store is asked for every file
        found = list(threads.map(lambda record: is_right(record, sink), records))
    return [record for record, right in zip(records, found, strict=True) if right]


def commit(job: Job, place: Allotment, sink: SharedSink, start: float, *, read: int) -> Conversion:
    """Publish when every part is there; else say which are missing, and leave."""
    waiting = place.missing(place.parse(sink.records_there()))
    if waiting and place.is_published(job.destination):  # by the same command, run twice at once
        job.notes.append("another run of this command has published it")
        return conversion(job, start, [], read=read, part=place.part)
    if waiting:
        return _leave(job, place, sink, start, waiting, read=read)
    try:
        with sink.alone() as alone:
            if alone:
                records = _right(place.parse(sink.records_there()), sink)
                if waiting := place.missing(records):
                    return _leave(job, place, sink, start, waiting, read=read)
                outcome = _merge_or_withdraw(job, records, sink)
                outcome.bytes_read = read
                assets = carry_assets(job, sink)
                kind = format_of(job.target)
                return finish(job, start, sink, outcome, assets, kind.build_marker(job.named), part=place.part)
    except StorageError as error:  # where there are no locks, another part may have been quicker
        if not place.is_published(job.destination):
            raise
        job.notes.append(f"another part has published it while this one tried ({error.what})")
    if not place.is_published(job.destination):
        raise DestinationExistsError("the destination changed while this part waited", where=job.destination)
    return conversion(job, start, [], read=read, part=place.part)


def _leave(
    job: Job, place: Allotment, sink: SharedSink, start: float, waiting: tuple[int, ...], *, read: int
) -> Conversion:
    sink.keep()
    own = [(place.files[i], job.target.files[place.files[i]]) for i in place.shares[place.part.index]]
    return conversion(job, start, own, read=read, published=False, part=place.part, waiting_for=waiting)


def _merge_or_withdraw(job: Job, records: Sequence[ShareRecord], sink: SharedSink) -> Outcome:
    """Merge; records that do not fit together are withdrawn, so that their parts are done again."""
    try:
        return merge(job, records)
    except DisagreementError as error:
        for name in error.shares:
            sink.put_record(name, b"")
        raise


def merge(job: Job, records: Sequence[ShareRecord]) -> Outcome:
    """Return what one process would have found; the order of the records makes no difference."""
    outcome = Outcome()
    names = [record_name(record.index, record.count, record.number) for record in records]
    for record in records:
        for fqn, digest in record.digests.items():
            if outcome.digests.setdefault(fqn, digest) != digest:
                raise CkptError(f"two parts have read different bytes of {fqn!r}", hint="nothing is published")
        outcome.source_digests |= record.stored
        outcome.counts |= record.counts
        outcome.frames |= {name: file.frames for name, file in record.files.items() if file.frames is not None}
        outcome.chunks_checked += record.chunks_checked
    unmatched = 0
    dtypes = {entry.fqn: entry.dtype for entry in job.target.tensors}
    blobs = {blob.fqn: blob for blob in job.source.blobs}
    spans = (copy_span(blob_name(blob), blobs[blob.fqn].span, 0).source for blob in job.target.blobs)
    for entry in (*(entry for entry in job.source.tensors if entry.fqn in dtypes), *spans):
        if entry.fqn in outcome.digests:
            continue
        dtype = dtypes.get(entry.fqn, entry.dtype)
        seen, chunks = Seen(entry, dtype, blocks_of(entry, dtype), counting=not is_plain(entry)), chunk_index(entry)
        parts = [(name, r.parts[entry.fqn]) for name, r in zip(names, records, strict=True) if entry.fqn in r.parts]
        unmatched += seen.merge(parts, chunks)
        outcome.chunks_checked += seen.check_sources(chunks, job.opened.source)
        outcome.digests[entry.fqn] = seen.digest()
        stored = {index: digest for _, part in parts for index, digest in part.stored.items()}
        if entry.dtype != dtype and len(stored) == len(blocks_of(entry, entry.dtype)):
            outcome.source_digests[entry.fqn] = digest_tensor(bytes.fromhex("".join(stored[i] for i in sorted(stored))))
        if (counts := seen.counts) is not None:
            outcome.counts[entry.fqn] = counts
    if unmatched:
        text = f"whether parts have read the same bytes of {unmatched} blocks; `ckpt verify` reads them again"
        job.not_checked = (*job.not_checked, text)
    if missing := [entry.fqn for entry in recorded_apart(job) if APART + entry.fqn not in outcome.source_digests]:
        raise CkptError(f"no part has read {missing[0]!r} completely")
    return outcome


_MAX_ITEMS_IN_KEY = 1 << 20
"""With more items the layout, and not the metadata made of it, identifies a conversion: every part computes that."""


def run_share(job: Job, part: Part, start: float) -> Conversion:
    """Write a part, and publish when it was the last one; after an error, what other parts have done is as it was."""
    check_can_be_cut(job)
    check_claims(job)
    make_inert(job, keep=job.keep_pickles)
    rewrite_assets(job)
    plan = Plan(job.source, job.target, job.heads, job.seals)
    place = find_place(job, part)
    job.made = {**job.made, "run": place.fingerprint}
    try:
        sink = open_shared_sink(job.destination)
        sink.command = job.command
        with kept_or_discarded(sink):
            sink.join(place.fingerprint, part.count)
            if sink.found_other:
                job.notes.append("removed the remains of an interrupted run of one process")
            if job.only_commit:
                return commit(job, place, sink, start, read=0)
            if sink.goes_front_to_back and len(place.files) == 1 and place.shares[part.index]:
                carry_assets(job, sink)  # the one file makes a checkpoint of them as soon as it is there
            read = _write_passes(job, plan, place, sink)
            return commit(job, place, sink, start, read=read)
    except DestinationExistsError:
        if not place.is_published(job.destination):
            raise
        job.notes.append("this conversion is complete: nothing was left to do")
        return conversion(job, start, [], read=0)


def check_can_be_cut(job: Job) -> None:
    """Refuse what several processes cannot share."""
    problem = None
    if job.parts:
        problem = "several models, or a training step,", "leave out --part, or convert one model, without --for"
    elif job.edits or job.prepare is not None or job.accept is not None:
        problem = "a conversion that computes new values", "leave out --part; shard the result afterwards"
    elif job.use_dtensor:
        problem = "--engine dtensor", "use --engine stream"
    elif job.overwrite:
        problem = "--overwrite", "write to a new destination"
    if problem is not None:
        raise UsageError(f"{problem[0]} cannot be shared by several processes", hint=problem[1])


def find_place(job: Job, part: Part) -> Allotment:
    """Return which files every part of a job has."""
    files = tuple(job.target.files)
    # Ranks that hold other columns of the same rows read the same blocks.
    align = job.mesh.axes[-1][1] if job.mesh is not None and job.mesh.axes[-1][0] == "tp" else 1
    is_per_rank = job.mesh is not None and len(files) == job.mesh.world_size
    shares = split(list(job.target.files.values()), part.count, align=align if is_per_rank else 1)
    idle = sum(not share for share in shares)
    if idle:
        hint = "; add --max-shard-size" if job.mesh is None else ""
        job.notes.append(f"{len(files)} files, {part.count} parts: {idle} have nothing to do{hint}")
    return Allotment(part=part, shares=shares, files=files, fingerprint=_fingerprint(job))


def elsewhere(job: Job, earlier: Collection[str]) -> dict[str, tuple[Box, ...]]:
    """Return FQN → boxes in `earlier` files, of tensors that have elements in more than one file."""
    return {e.fqn: boxes for e in job.target.tensors if (boxes := boxes_before(e, earlier)) is not None}


def _fingerprint(job: Job) -> str:
    if sum(len(entry.chunks) for entry in job.target.tensors) <= _MAX_ITEMS_IN_KEY:
        return fingerprint(job, format_of(job.target).build_marker(job.named))
    layout = [str(job.mesh), {fqn: {a: str(p) for a, p in axes.items()} for fqn, axes in job.placements.items()}]
    return fingerprint(job, digest_bytes(json.dumps(layout).encode()).encode())


def _write_passes(job: Job, plan: Plan, place: Allotment, sink: SharedSink) -> int:
    """Write the files of a part that are not there yet; return the bytes that were read."""
    own = place.shares[place.part.index]
    sizes = [job.target.files[place.files[i]] for i in own]
    passes = [tuple(place.files[own[i]] for i in span) for span in sink.passes(sizes)]
    records = place.parse(sink.records_there())
    todo = {
        number: files
        for number, files in enumerate(passes)
        if not any(set(files) <= record.files.keys() and is_right(record, sink) for record in records)
    }
    if passes and not todo:
        job.notes.append(f"part {place.part} is already complete: nothing was read")
    needed = [(file, job.target.files[file]) for files in todo.values() for file in files]
    sink.check_space(sum(nbytes for file, nbytes in needed if (sink.identity(file) or {}).get("nbytes") != nbytes))
    progress = job.progress(sum(nbytes for _, nbytes in needed)) if job.progress is not None and needed else None
    read = 0
    for number, files in todo.items():
        name = record_name(place.part.index, place.part.count, number)
        sink.begin(name)
        earlier = set(place.files[: place.files.index(files[0])])
        outcome = _move(job, plan.files_of(frozenset(files)), sink, progress, before=elsewhere(job, earlier))
        read += outcome.bytes_read
        if number == 0:
            read += read_apart(job, outcome, slice(place.turn, None, place.num_busy))
        if outcome.bytes_kept:
            kept = format_size(outcome.bytes_kept)
            job.notes.append(f"continued an interrupted run: {kept} were already written and are intact")
        there = {f: PartFile(identity=sink.identity(f) or {}, frames=outcome.frames.get(f)) for f in files}
        record = ShareRecord(
            fingerprint=place.fingerprint,
            index=place.part.index,
            count=place.part.count,
            number=number,
            files=there,
            digests=outcome.digests,
            counts=outcome.counts,
            parts=outcome.parts,
            stored=outcome.source_digests,
            chunks_checked=outcome.chunks_checked,
        )
        sink.put_record(name, build_record(record))
    return read


# What a conversion copies is inert: pickles and code that came along stay behind, unless they are asked for.


def make_inert(job: Job, *, keep: bool) -> None:
    """Take out of a job's assets what could run more than torch needs; with `keep`, only say so.

    An item that calls something dangerous, and a file that the trainer does not resume without, are refused.
    """
    found = {asset.file: why_not_inert(source, asset.source_file, asset.nbytes) for source, asset in job.assets}
    told = [f"{file} ({why})" for file, why in found.items() if why]
    if job.target.blobs:
        opened = job.opened
        items = scan_files(opened.source, opened.checkpoint.files, job.source.blobs, chosen=()).executables
        for each in items:
            name = each.file.split("!")[1]
            if each.verdict == "dangerous" and not keep:
                what = f"loading the item {name!r} would run {describe_executable(each)}"
                hint = f"--exclude {escape_name(name)!r} leaves it out; --keep-pickles copies it"
                raise UnreadableError(what, where=each.file, hint=hint)
            told += [f"{name} ({describe_executable(each)})"] * (each.verdict == "dangerous")
    if told and keep:
        job.notes.append(f"copied pickles and code, which run when they are loaded: {first_few(told, 6)}")
    elif told:
        left = {asset.source_file: found[asset.file] for _, asset in job.assets if found[asset.file]}
        target = format_of(job.target)
        if (target.loads_by_dcp or target.has_parts) and (needed := sorted(left.keys() & judge(job.opened).needed)):
            what = f"loading {needed[0]} could run {left[needed[0]]}, and the trainer does not resume without it"
            hint = "--keep-pickles copies it; `ckpt gather`, or --for plain, writes only the model"
            raise UnreadableError(what, where=job.opened.source.root, hint=hint)
        job.notes.append(f"left out pickles and code: {first_few(told, 6)}; --keep-pickles copies them")
        job.assets = [(source, asset) for source, asset in job.assets if not found[asset.file]]
