"""Run one part of a job: its files, and a record of them. Whoever finds all records publishes the whole.

No process waits for another one. What is there already is told by records, so a part that was killed is run again.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from ckpt_tools.conversions.commit import Place, add_progress, commit, is_right
from ckpt_tools.conversions.finish import carry_assets, conversion, kept_or_discarded, read_apart, to_digest
from ckpt_tools.conversions.inert import make_inert
from ckpt_tools.conversions.job import Conversion, Job, check_claims, fingerprint, rewrite_assets
from ckpt_tools.description.layout import Box
from ckpt_tools.errors import DestinationExistsError, UsageError
from ckpt_tools.formats.digest import digest_bytes
from ckpt_tools.formats.table import format_of
from ckpt_tools.moving.execute import execute
from ckpt_tools.moving.plan import Plan
from ckpt_tools.moving.share_record import FileRecord, ShareRecord, build_record, record_name
from ckpt_tools.moving.split import Part, boxes_before, split
from ckpt_tools.remote.places import open_shared_sink
from ckpt_tools.storage.sink import SharedSink

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
                job.notes.append("removed what an interrupted run of one process had left")
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
        problem = "what computes new values", "leave out --part; cut what it writes afterwards"
    elif job.use_dtensor:
        problem = "--engine dtensor", "use --engine stream"
    elif job.overwrite:
        problem = "--overwrite", "write to a new destination"
    if problem is not None:
        raise UsageError(f"{problem[0]} cannot be shared by several processes", hint=problem[1])


def find_place(job: Job, part: Part) -> Place:
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
    return Place(part=part, shares=shares, files=files, fingerprint=_fingerprint(job))


def elsewhere(job: Job, earlier: Collection[str]) -> dict[str, tuple[Box, ...]]:
    """Return FQN → boxes in `earlier` files, of tensors that have elements in more than one file."""
    return {e.fqn: boxes for e in job.target.tensors if (boxes := boxes_before(e, earlier)) is not None}


def _fingerprint(job: Job) -> str:
    if sum(len(entry.chunks) for entry in job.target.tensors) <= _MAX_ITEMS_IN_KEY:
        return fingerprint(job, format_of(job.target).build_marker(job.named))
    layout = [str(job.mesh), {fqn: {a: str(p) for a, p in axes.items()} for fqn, axes in job.placements.items()}]
    return fingerprint(job, digest_bytes(json.dumps(layout).encode()).encode())


def _write_passes(job: Job, plan: Plan, place: Place, sink: SharedSink) -> int:
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
        job.notes.append(f"part {place.part} is there already: nothing was read")
    needed = [(file, job.target.files[file]) for files in todo.values() for file in files]
    sink.check_space(sum(nbytes for file, nbytes in needed if (sink.identity(file) or {}).get("nbytes") != nbytes))
    progress = job.progress(sum(nbytes for _, nbytes in needed)) if job.progress is not None and needed else None
    read = 0
    for number, files in todo.items():
        name = record_name(place.part.index, place.part.count, number)
        sink.begin(name)
        earlier = set(place.files[: place.files.index(files[0])])
        outcome = execute(
            plan.files_of(frozenset(files)),
            job.opened.source,
            sink,
            num_workers=job.num_workers,
            progress=progress,
            resumable=True,
            counting=True,
            before=elsewhere(job, earlier),
            stored=to_digest(job),
        )
        read += outcome.bytes_read
        if number == 0:
            read += read_apart(job, outcome, slice(place.turn, None, place.num_busy))
        add_progress(job, outcome.bytes_kept)
        record = ShareRecord(
            fingerprint=place.fingerprint,
            index=place.part.index,
            count=place.part.count,
            number=number,
            files={
                file: FileRecord(identity=sink.identity(file) or {}, frames=outcome.frames.get(file)) for file in files
            },
            digests=outcome.digests,
            counts=outcome.counts,
            parts=outcome.parts,
            stored=outcome.source_digests,
            chunks_checked=outcome.chunks_checked,
        )
        sink.put_record(name, build_record(record))
    return read
