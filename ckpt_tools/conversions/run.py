"""Run a job: plan, move the bytes, prove the result, publish it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from ckpt_tools._version import __version__
from ckpt_tools.checks.verify import verify
from ckpt_tools.conversions.job import (
    Conversion,
    Job,
    check_claims,
    check_replaceable,
    check_separate,
    check_space,
    fingerprint,
    rewrite_assets,
)
from ckpt_tools.description.checkpoint import Asset, Checkpoint
from ckpt_tools.errors import CkptError, StorageError, UnreadableError, UsageError
from ckpt_tools.floors import refuse_older
from ckpt_tools.formats.digest import digest_bytes
from ckpt_tools.formats.manifest import (
    MANIFEST_NAME,
    UNKNOWN_DIGEST,
    FileRecord,
    Manifest,
    TensorRecord,
    build_manifest,
    manifest_bytes,
)
from ckpt_tools.formats.opening import open_path
from ckpt_tools.formats.table import format_of
from ckpt_tools.memory import peak_rss_bytes
from ckpt_tools.moving.execute import Outcome, execute, scan
from ckpt_tools.moving.plan import Plan, asset_name, blob_name, plan_assets
from ckpt_tools.storage.source import Source
from ckpt_tools.storage.staging import Staging, check_destination
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
    check_destination(job.destination, overwrite=job.overwrite)
    if job.overwrite:
        check_replaceable(job.destination)
    check_claims(job)
    rewrite_assets(job)
    plan = Plan(job.source, job.target, job.heads)
    planned = _planned_files(job)
    needed = sum(nbytes for _, nbytes in planned)
    if dry_run:
        peak = _BASE_BYTES + job.edit_bytes + plan.peak_bytes(job.num_workers)
        return _conversion(job, start, planned, read=plan.read_bytes, peak=peak, dry_run=True, published=False)
    if job.use_dtensor:
        check_space(needed, job.destination)
        return _run_with_dtensor(job, start)
    if job.prepare is not None:
        job.prepare()
    marker = format_of(job.target).build_marker(job.named)
    staging = Staging(job.destination, overwrite=job.overwrite)
    with _kept_or_discarded(staging):
        staging.begin(fingerprint(job, marker))
        if staging.found_other:
            job.notes.append("removed what an interrupted run with other arguments or of another source had left")
        check_space(needed - staging.allocated_bytes(), job.destination)
        assets = _carry_assets(job, staging)
        progress = job.progress(plan.read_bytes) if job.progress is not None else None
        outcome = execute(
            plan.files,
            job.opened.source,
            staging,
            num_workers=job.num_workers,
            progress=progress,
            resumable=True,
            edits=job.edits,
        )
        if job.accept is not None:
            job.accept()
        _check_apart(job, outcome)
        if outcome.bytes_kept:
            kept, total = format_size(outcome.bytes_kept), format_size(plan.read_bytes)
            job.notes.append(f"continued an interrupted run: {kept} of {total} were there and are right")
        return _finish(job, start, staging, outcome, assets, marker)


class _NoDigests(dict[str, str]):
    """The digests of what nobody has read yet; none is kept."""

    def __missing__(self, name: str) -> str:
        return UNKNOWN_DIGEST


def _planned_files(job: Job) -> list[tuple[str, int]]:
    """Return (name, bytes) of every file that the job writes."""
    # Those of `.metadata` are an estimate, and so are those of the manifest beside it, which says them; with torch's
    # own writer those of the data files are.
    assets = {asset.file: FileRecord(nbytes=job.asset_bytes(asset), digest=UNKNOWN_DIGEST) for _, asset in job.assets}
    kind = format_of(job.target)
    marker = None
    if kind.marker:
        marker = FileRecord(nbytes=kind.estimate_marker_bytes(job.named), digest=UNKNOWN_DIGEST)
    for file in job.opened.checkpoint.files:
        job.opened.source.size(file)  # the manifest names the sources as they were opened
    digests = _NoDigests()
    frames = dict.fromkeys(job.target.files, UNKNOWN_DIGEST) if kind.in_items else {}
    manifest = manifest_bytes(_manifest_of(job, {}, digests, assets, marker, frames), _tensor_records(job, digests))
    documents = {name: len(content) for name, content in job.documents.items()}
    return _written_files(job, assets, documents | {MANIFEST_NAME: manifest}, marker)


def _written_files(
    job: Job, assets: Mapping[str, FileRecord], documents: Mapping[str, int], marker: FileRecord | None
) -> list[tuple[str, int]]:
    return [
        *job.target.files.items(),
        *((name, record.nbytes) for name, record in assets.items()),
        *documents.items(),
        *([(format_of(job.target).marker, marker.nbytes)] if marker is not None else []),
    ]


def _tensor_records(job: Job, digests: Mapping[str, str]) -> Iterator[tuple[str, TensorRecord]]:
    for entry in job.named.tensors:
        own = job.aliases.get(entry.fqn, entry.fqn)
        placements = job.placements.get(own, {})
        yield (
            entry.fqn,
            TensorRecord(dtype=entry.dtype, shape=entry.shape, digest=digests[own], placements=placements),
        )


def _manifest_of(
    job: Job,
    tensors: Mapping[str, TensorRecord],
    digests: Mapping[str, str],
    assets: Mapping[str, FileRecord],
    marker: FileRecord | None,
    frames: Mapping[str, str],
) -> Manifest:
    """Return what the manifest says of the job's destination."""
    documents = {name: _record_of(content) for name, content in (*job.heads.items(), *job.documents.items())}
    if marker is not None:
        documents[format_of(job.target).marker] = marker
    checkpoint = job.opened.checkpoint
    return Manifest(
        writer=f"ckpt {__version__}",
        format=job.target.format,
        mesh=job.mesh,
        tensors=tensors,
        blobs={
            blob.fqn: FileRecord(nbytes=blob.span.nbytes, digest=digests[blob_name(blob)]) for blob in job.target.blobs
        },
        assets=assets,
        documents=documents,
        files=job.target.files,
        frames=frames,
        source={
            "name": os.path.basename(os.path.realpath(checkpoint.root)),
            "format": checkpoint.format,
            "files": job.opened.source.identities(),
        },
        origin=job.origin,
    )


def _record_of(content: bytes) -> FileRecord:
    return FileRecord(nbytes=len(content), digest=digest_bytes(content))


@contextmanager
def _kept_or_discarded(staging: Staging) -> Iterator[None]:
    """Keep the work of a run that was interrupted or met a system error; discard it on any other failure."""
    try:
        yield
    except (KeyboardInterrupt, StorageError, MemoryError) as error:
        if isinstance(error, KeyboardInterrupt):
            destination = escape_name(staging.destination)
            error.add_note(f"{destination} is complete" if staging.is_published else "nothing was published")
        if staging.num_kept:
            staging.keep()
            error.add_note(
                f"what was written is kept in {escape_name(staging.directory)}: the same command continues from there"
            )
        raise
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else staging.destination
        raise StorageError(error.strerror or str(error), where=where) from error
    finally:
        staging.discard()


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
            outcome = scan(job.source.tensors, job.opened.source, num_workers=job.num_workers, progress=progress)
            return _finish(job, start, staging, outcome, _carry_assets(job, staging), marker)
        finally:
            if staging is not None:
                staging.discard()


def _finish(
    job: Job, start: float, staging: Staging, outcome: Outcome, assets: Mapping[str, FileRecord], marker: bytes
) -> Conversion:
    """Write the documents, the commit marker last; check what was written; publish."""
    num_digests = _check_digests(job, outcome)
    marked = _record_of(marker) if marker else None
    tensors = dict(_tensor_records(job, outcome.digests))
    with Source(staging.directory) as written:  # what lies around the payloads is little, and is read back
        framed = marker if job.use_dtensor else None
        frames = format_of(job.target).digest_frames(job.target, written, marker=framed)
    manifest = build_manifest(_manifest_of(job, tensors, outcome.digests, assets, marked, frames))
    documents = {**job.documents, MANIFEST_NAME: manifest}
    for name, content in documents.items():
        staging.write_document(name, content)
    if marker:
        staging.write_document(format_of(job.target).marker, marker)
    files = _written_files(job, assets, {name: len(content) for name, content in documents.items()}, marked)
    _check_result(staging.directory, job.named)
    job.opened.source.check_unchanged()
    staging.publish()
    if staging.left_behind is not None:
        job.notes.append(
            f"the old checkpoint could not be removed: {escape_name(staging.left_behind)}; "
            "the next ckpt that writes to this destination removes it, or you do"
        )
    checked = {"digests": num_digests, "crcs": outcome.chunks_checked}
    return _conversion(job, start, files, read=outcome.bytes_read, checked=checked)


def _carry_assets(job: Job, staging: Staging) -> dict[str, FileRecord]:
    """Copy the assets, or write what takes their place; return what the manifest says of them."""
    records = {}
    for name, content in job.rewritten.items():
        staging.write_document(name, content)
        records[name] = _record_of(content)
    by_source: dict[int, tuple[Source, list[Asset]]] = {}
    for source, asset in job.assets:
        if asset.file not in job.rewritten:
            by_source.setdefault(id(source), (source, []))[1].append(asset)
    for source, assets in by_source.values():
        outcome = execute(plan_assets(assets), source, staging, num_workers=job.num_workers)
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
        num_tensors=len(job.target.tensors),
        bytes_read=read,
        bytes_written=sum(nbytes for _, nbytes in files),
        seconds=time.monotonic() - start,
        peak_rss_bytes=peak_rss_bytes() if peak is None else peak,
        files=tuple(files),
        verified=published,
        checked=checked or {},
        notes=tuple(job.notes),
        warnings=tuple(job.warnings),
        not_checked=tuple(job.not_checked),
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


def _check_result(directory: str, target: Checkpoint) -> None:
    """Open what was written as a user would, and hold it against the plan."""
    with open_path(directory, format=target.format) as written:
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
