"""Run a job: plan, move the bytes, prove the result, publish it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ckpt_tools.conversions.finish import (
    carry_assets,
    conversion,
    finish,
    kept_or_discarded,
    notes_of_parts,
    read_apart,
    to_digest,
)
from ckpt_tools.conversions.inert import make_inert
from ckpt_tools.conversions.job import (
    Conversion,
    Job,
    check_claims,
    check_replaceable,
    check_separate,
    fingerprint,
    rewrite_assets,
)
from ckpt_tools.conversions.parts import can_adopt
from ckpt_tools.conversions.record import planned_files
from ckpt_tools.conversions.share import check_can_be_cut, elsewhere, find_place, run_share
from ckpt_tools.errors import UsageError
from ckpt_tools.floors import refuse_older
from ckpt_tools.formats.table import format_of
from ckpt_tools.moving.execute import execute, scan
from ckpt_tools.moving.plan import Plan, group_by_tensor
from ckpt_tools.moving.split import Part
from ckpt_tools.moving.task import Task
from ckpt_tools.remote.places import is_remote, open_shared_sink, open_sink
from ckpt_tools.storage.staging import Staging, check_destination, check_space
from ckpt_tools.units import format_duration, format_size

_BASE_BYTES = 64 << 20
"""Of the interpreter and the modules, in estimates."""


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
            "a store cannot replace a checkpoint at once: the old one would be gone while the new one is written",
            where=job.destination,
            hint="write to a new prefix, and remove the old one when the new one is there",
        )
    if job.use_dtensor:
        raise UsageError("--engine dtensor writes to this machine's disks", hint="use --engine stream")
    if job.parts:
        what = f"a step of several checkpoints ({', '.join(job.parts)}) is written to this machine's disks"
        raise UsageError(what, where=job.destination, hint=f"convert each by itself, or {whole}")
    if job.edits or job.prepare is not None:
        what = "a conversion that computes new values writes to this machine's disks"
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
            job.notes.append("removed what an interrupted run with other arguments or of another source had left")
        sink.check_space(needed)
        parts = _write_parts(job, plans, sink) if isinstance(sink, Staging) else {}
        assets = carry_assets(job, sink)
        progress = job.progress(plan.read_bytes) if job.progress is not None and plan.read_bytes else None
        outcome = execute(
            plan.files,
            job.opened.source,
            sink,
            num_workers=job.num_workers,
            progress=progress,
            resumable=True,
            edits=job.edits,
            counting=True,
            stored=to_digest(job),
        )
        if job.accept is not None:
            job.accept()
        read_apart(job, outcome)
        if outcome.bytes_kept:
            kept, total = format_size(outcome.bytes_kept), format_size(plan.read_bytes)
            job.notes.append(f"continued an interrupted run: {kept} of {total} were there and are right")
        return finish(job, start, sink, outcome, assets, marker, parts)


def _write_parts(job: Job, plans: Mapping[str, Plan], staging: Staging) -> dict[str, Conversion]:
    """Write the parts of a job, each published inside of the staging directory; return what came of them."""
    done = {}
    for name, part in job.parts.items():
        start = time.monotonic()
        part.destination = staging.begin_part(name)
        part.num_workers, part.progress = job.num_workers, job.progress
        if can_adopt(part.destination, num_workers=job.num_workers):
            part.notes.append("already written by an interrupted run, and verified")
            part.not_checked = (*part.not_checked, f"whether the values of {name} are finite: nothing was read anew")
            done[name] = conversion(part, start, planned_files(part), read=0)
        else:
            done[name] = _write(part, {"": plans[name]}, start, 0, is_part=True)
    job.notes += notes_of_parts(job)
    return done


def _run_with_dtensor(job: Job, start: float) -> Conversion:
    """Let PyTorch write the data files; everything around them is as usual. Under torchrun rank 0 does that part."""
    refuse_older("torch", "--engine dtensor")
    from ckpt_tools.conversions.dtensor import join_ranks, save_with_dtensor

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

_BYTES_PER_S = 5e8
"""Of one machine and a store in its region; where nothing was measured."""
_MAX_ITEMS = 1 << 17
"""Of a plan that is gone through block by block: a second or two."""


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
