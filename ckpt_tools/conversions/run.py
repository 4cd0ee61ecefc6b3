"""Run a job: plan, move the bytes, prove the result, publish it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from ckpt_tools.checks.values import check_values
from ckpt_tools.checks.verify import verify
from ckpt_tools.conversions.job import (
    Conversion,
    Job,
    check_claims,
    check_replaceable,
    check_separate,
    fingerprint,
    rewrite_assets,
)
from ckpt_tools.conversions.parts import can_adopt, check_step, record_parts
from ckpt_tools.conversions.record import manifest_of, planned_files, record_of, tensor_records, written_files
from ckpt_tools.description.checkpoint import Asset, Checkpoint
from ckpt_tools.errors import CkptError, StorageError, UnreadableError, UsageError
from ckpt_tools.floors import refuse_older
from ckpt_tools.formats.manifest import (
    MANIFEST_NAME,
    FileRecord,
    build_manifest,
)
from ckpt_tools.formats.opening import open_from
from ckpt_tools.formats.table import format_of
from ckpt_tools.memory import peak_rss_bytes
from ckpt_tools.moving.execute import Outcome, execute, scan
from ckpt_tools.moving.plan import Plan, asset_name, plan_assets
from ckpt_tools.remote.places import is_remote, open_sink
from ckpt_tools.storage.sink import Sink
from ckpt_tools.storage.source import Source
from ckpt_tools.storage.staging import Staging, check_destination, check_space
from ckpt_tools.text import escape_name
from ckpt_tools.units import format_size

_APART = "\0apart\0"
"""Before the name of a tensor that was read for its records alone; no FQN contains a NUL."""
_BASE_BYTES = 64 << 20
"""Of the interpreter and the modules, in estimates."""


def run(job: Job, *, dry_run: bool) -> Conversion:
    """Plan, and unless `dry_run` execute, check and publish.

    Raises:
        CkptError: Anything that went wrong; the destination is then as it was.
    """
    start = time.monotonic()
    check_separate(job.opened, job.destination)
    if is_remote(job.destination):
        _check_remote(job)
    else:
        check_destination(job.destination, overwrite=job.overwrite)
    if job.overwrite:
        check_replaceable(job.destination)
    jobs = {"": job, **job.parts}
    for each in jobs.values():
        check_claims(each)
        rewrite_assets(each)
    plans = {name: Plan(each.source, each.target, each.heads, each.seals) for name, each in jobs.items()}
    planned = [(os.path.join(name, file), n) for name, each in jobs.items() for file, n in planned_files(each)]
    needed = sum(nbytes for _, nbytes in planned)
    if dry_run:
        job.notes += _notes_of_parts(job)
        peak = _BASE_BYTES + job.edit_bytes + max(plan.peak_bytes(job.num_workers) for plan in plans.values())
        read = sum(plan.read_bytes for plan in plans.values())
        return _conversion(job, start, planned, read=read, peak=peak, dry_run=True, published=False)
    if job.use_dtensor:
        check_space(needed, job.destination)
        return _run_with_dtensor(job, start)
    return _write(job, plans, start, needed)


def _check_remote(job: Job) -> None:
    """Refuse what needs a directory of this machine to be built in."""
    whole = f"write it to a disk, then copy it to {job.destination}"
    if job.use_dtensor:
        raise UsageError("--engine dtensor writes to this machine's disks", hint="use --engine stream")
    if job.parts:
        what = f"a step of several checkpoints ({', '.join(job.parts)}) is written to this machine's disks"
        raise UsageError(what, where=job.destination, hint=f"convert each by itself, or {whole}")
    if job.edits:
        what = "what computes new values is written to this machine's disks"
        raise UsageError(what, where=job.destination, hint=whole)


def _write(job: Job, plans: Mapping[str, Plan], start: float, needed: int, *, is_part: bool = False) -> Conversion:
    """Write the job and, inside of its staging directory, its parts; `plans` has those of the parts by name."""
    plan = plans[""]
    if job.prepare is not None:
        job.prepare()
    marker = format_of(job.target).build_marker(job.named)
    sink = open_sink(job.destination, overwrite=job.overwrite)
    with _kept_or_discarded(sink, is_part=is_part):
        sink.begin(fingerprint(job, marker))
        if sink.found_other:
            job.notes.append("removed what an interrupted run with other arguments or of another source had left")
        sink.check_space(needed)
        parts = _write_parts(job, plans, sink) if isinstance(sink, Staging) else {}
        assets = _carry_assets(job, sink)
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
        )
        if job.accept is not None:
            job.accept()
        _check_apart(job, outcome)
        if outcome.bytes_kept:
            kept, total = format_size(outcome.bytes_kept), format_size(plan.read_bytes)
            job.notes.append(f"continued an interrupted run: {kept} of {total} were there and are right")
        return _finish(job, start, sink, outcome, assets, marker, parts)


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
            done[name] = _conversion(part, start, planned_files(part), read=0)
        else:
            done[name] = _write(part, {"": plans[name]}, start, 0, is_part=True)
    job.notes += _notes_of_parts(job)
    return done


def _value_warnings(job: Job) -> Iterator[str]:
    """Say what is strange about the values that were written; they are those of the source, unless it was cast."""
    cast = "" if job.dtype == "keep" else f" (after the cast to {job.dtype})"
    for finding in check_values(job.opened, job.source, job.counts):
        yield f"{finding.code}: {finding.where}: {finding.what}{cast}"


def _notes_of_parts(job: Job) -> list[str]:
    return [f"{name}: {note}" for name, part in job.parts.items() for note in part.notes]


@contextmanager
def _kept_or_discarded(sink: Sink, *, is_part: bool = False) -> Iterator[None]:
    """Keep the work of a run that was interrupted or met a system error; discard it on any other failure.

    What to tell of that, the job says that a part belongs to.
    """
    try:
        yield
    except (KeyboardInterrupt, StorageError, MemoryError) as error:
        if isinstance(error, KeyboardInterrupt) and not is_part:
            destination = escape_name(sink.destination)
            error.add_note(f"{destination} is complete" if sink.is_published else "nothing was published")
        if sink.num_kept:
            sink.keep()
            kept = f"what was written is kept in {escape_name(sink.kept_in)}"
            if not is_part:
                error.add_note(f"{kept}: the same command continues from there")
        raise
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else sink.destination
        raise StorageError(error.strerror or str(error), where=where) from error
    finally:
        sink.discard()


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
                return _conversion(job, start, [], read=0, published=False)
            job.target = replace(job.target, files=staging.adopt())
            marker = staging.take(format_of(job.target).marker)
            progress = job.progress(job.source.total_bytes) if job.progress is not None else None
            outcome = scan(
                job.source.tensors, job.opened.source, num_workers=job.num_workers, progress=progress, counting=True
            )
            return _finish(job, start, staging, outcome, _carry_assets(job, staging), marker)
        finally:
            if staging is not None:
                staging.discard()


def _finish(
    job: Job,
    start: float,
    sink: Sink,
    outcome: Outcome,
    assets: Mapping[str, FileRecord],
    marker: bytes,
    parts: Mapping[str, Conversion] | None = None,
) -> Conversion:
    """Write the documents, the commit marker last; check what was written; publish."""
    parts = parts or {}
    num_digests = _check_digests(job, outcome)
    job.counts = outcome.counts
    job.warnings = (*job.warnings, *_value_warnings(job))
    marked = record_of(marker) if marker else None
    tensors = dict(tensor_records(job, outcome.digests))
    if job.use_dtensor:  # framed as torch does it
        with sink.reader() as written:
            outcome.frames = format_of(job.target).digest_frames(job.target, written, marker=marker)
    held = dict(record_parts(sink, parts))
    manifest = build_manifest(manifest_of(job, tensors, outcome.digests, assets, marked, outcome.frames, held))
    documents = {**job.documents, MANIFEST_NAME: manifest}
    for name, content in documents.items():
        sink.write_document(name, content)
    if marker:
        sink.write_marker(format_of(job.target).marker, marker)
    files = written_files(job, assets, {name: len(content) for name, content in documents.items()}, marked)
    if parts and isinstance(sink, Staging):
        check_step(sink.directory, parts)
    else:
        _check_result(sink, job.named)
    for each in (job, *job.parts.values()):
        each.opened.source.check_unchanged()
    sink.publish()
    job.notes += sink.notes
    if sink.left_behind is not None:
        job.notes.append(
            f"the old checkpoint could not be removed: {escape_name(sink.left_behind)}; "
            "the next ckpt that writes to this destination removes it, or you do"
        )
    checked = {"digests": num_digests, "crcs": outcome.chunks_checked}
    checked = {key: count + sum(part.checked.get(key, 0) for part in parts.values()) for key, count in checked.items()}
    files += [(os.path.join(name, file), nbytes) for name, part in parts.items() for file, nbytes in part.files]
    read = outcome.bytes_read + sum(part.bytes_read for part in parts.values())
    return _conversion(job, start, files, read=read, checked=checked)


def _carry_assets(job: Job, sink: Sink) -> dict[str, FileRecord]:
    """Copy the assets, or write what takes their place; return what the manifest says of them."""
    records = {}
    for name, content in job.rewritten.items():
        sink.write_document(name, content)
        records[name] = record_of(content)
    by_source: dict[int, tuple[Source, list[Asset]]] = {}
    for source, asset in job.assets:
        if asset.file not in job.rewritten:
            by_source.setdefault(id(source), (source, []))[1].append(asset)
    for source, assets in by_source.values():
        outcome = execute(plan_assets(assets), source, sink, num_workers=job.num_workers)
        for asset in assets:
            digest = outcome.digests[asset_name(asset)]
            records[asset.file] = FileRecord(nbytes=asset.nbytes, digest=digest)
    return records


def _conversion(
    job: Job,
    start: float,
    files: list[tuple[str, int]],
    *,
    read: int,
    peak: int | None = None,
    checked: Mapping[str, int] | None = None,
    dry_run: bool = False,
    published: bool = True,
) -> Conversion:
    return Conversion(
        source=job.opened.source.root,
        destination=job.destination,
        num_tensors=sum(len(each.target.tensors) for each in (job, *job.parts.values())),
        bytes_read=read,
        bytes_written=sum(nbytes for _, nbytes in files),
        seconds=time.monotonic() - start,
        peak_rss_bytes=peak_rss_bytes() if peak is None else peak,
        files=tuple(files),
        verified=published,
        checked=checked or {},
        notes=tuple(job.notes),
        counts={
            **job.counts,
            **{f"{name}/{fqn}": seen for name, part in job.parts.items() for fqn, seen in part.counts.items()},
        },
        warnings=tuple(text for each in (job, *job.parts.values()) for text in each.warnings),
        not_checked=tuple(text for each in (job, *job.parts.values()) for text in each.not_checked),
        architecture=job.architecture,
        dry_run=dry_run,
        published=published,
    )


def _check_apart(job: Job, outcome: Outcome) -> None:
    """Read what was written in parts once more as it lies in the source, for what is recorded of it as a whole."""
    manifest = job.opened.manifest
    apart = [
        entry
        for entry in job.apart
        if (manifest is not None and entry.fqn in manifest.tensors) or any(c.crc32 is not None for c in entry.chunks)
    ]
    if not apart:
        return
    whole = scan(apart, job.opened.source, num_workers=job.num_workers)
    outcome.chunks_checked += whole.chunks_checked
    outcome.source_digests |= {_APART + fqn: digest for fqn, digest in whole.digests.items()}


def _check_digests(job: Job, outcome: Outcome) -> int:
    """Hold what was read against the digests that the source's manifest records; return how many."""
    manifest = job.opened.manifest
    if manifest is None:
        return 0
    count = 0
    dtypes = {entry.fqn: entry.dtype for entry in job.target.tensors}
    read = [
        (
            entry,
            job.names.get(entry.fqn, entry.fqn),
            outcome.source_digests if entry.fqn in job.edits else outcome.digests,
        )
        for entry in job.source.tensors
        if dtypes[entry.fqn] == entry.dtype
    ]
    found_apart = {entry.fqn: outcome.source_digests.get(_APART + entry.fqn) for entry in job.apart}
    read += [(entry, entry.fqn, {entry.fqn: digest}) for entry in job.apart if (digest := found_apart[entry.fqn])]
    for entry, fqn, digests in read:
        record = manifest.tensors.get(fqn)
        found = digests.get(entry.fqn)
        if record is None or found is None:
            continue
        if (record.dtype, record.shape) != (entry.dtype, entry.shape) or record.digest != found:
            raise UnreadableError(
                f"tensor {fqn!r} is not what the manifest recorded: its digest is {found}, "
                f"recorded was {record.digest}",
                where=job.opened.source.root,
                hint="`ckpt verify` lists everything that is wrong; restore the checkpoint, or if a trainer "
                f"has saved over it on purpose, remove {MANIFEST_NAME}",
            )
        count += 1
    return count


def _check_result(sink: Sink, target: Checkpoint) -> None:
    """Open what was written as a user would, and hold it against the plan."""
    with sink.reader() as source:
        written = open_from(source, path=sink.destination, format=target.format)
        result = verify(written, level="structure", num_workers=1)
        found = {(entry.fqn, entry.dtype.name, entry.shape) for entry in written.checkpoint.tensors}
    expected = {(entry.fqn, entry.dtype.name, entry.shape) for entry in target.tensors}
    if not result.ok or found != expected:
        what = "its tensors are not those of the plan" if result.ok else result.errors[0].what
        raise CkptError(
            f"what was written does not pass its own check: {what}",
            where=None if result.ok else result.errors[0].where,
            hint="nothing was published; please report this with the output of `ckpt env`",
        )
