"""Bring a job to its end: documents, checks of what was read and written, publication."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

from ckpt_tools._version import __version__
from ckpt_tools.checkpoint.entries import Asset, Checkpoint, TensorEntry
from ckpt_tools.checkpoint.formats.digest import digest_bytes
from ckpt_tools.checkpoint.formats.file_names import METADATA_NAME
from ckpt_tools.checkpoint.formats.manifest import (
    MANIFEST_NAME,
    UNKNOWN_DIGEST,
    FileRecord,
    Manifest,
    TensorRecord,
    build_manifest,
    manifest_bytes,
)
from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.checkpoint.formats.scan import DANGER
from ckpt_tools.checkpoint.formats.step import open_step
from ckpt_tools.checkpoint.formats.table import format_of
from ckpt_tools.checkpoint.recorded_checks import LEFT_OUT
from ckpt_tools.checks.checksums import firsts
from ckpt_tools.checks.manifest import changed_asset
from ckpt_tools.checks.step import verify_step
from ckpt_tools.checks.structure import json_problem
from ckpt_tools.checks.values import check_values
from ckpt_tools.checks.verify import Summed, verify
from ckpt_tools.convert.job import Conversion, Job
from ckpt_tools.errors import CkptError, DestinationExistsError, MissingError, StorageError, UnreadableError
from ckpt_tools.memory import peak_rss_bytes
from ckpt_tools.storage.sink import Sink
from ckpt_tools.storage.source import Source
from ckpt_tools.storage.staging import Staging
from ckpt_tools.text import escape_name
from ckpt_tools.transfer.execute import Outcome, execute, scan
from ckpt_tools.transfer.plan import asset_name, blob_name, plan_assets
from ckpt_tools.transfer.split import Part

# What is recorded of a job's destination: its files, and its manifest


class _NoDigests(dict[str, str]):
    """The digests of what nobody has read yet; none is kept."""

    def __missing__(self, name: str) -> str:
        return UNKNOWN_DIGEST


def planned_files(job: Job) -> list[tuple[str, int]]:
    """Return (name, bytes) of every file that the job writes."""
    # Those of `.metadata` are an estimate, and so are those of the manifest beside it, which says them; with torch's
    # own writer those of the data files are.
    sizes = {asset.file: asset.nbytes for _, asset in job.assets}
    sizes |= {file: len(content) for file, content in job.rewritten.items()}
    assets = {file: FileRecord(nbytes=nbytes, digest=UNKNOWN_DIGEST) for file, nbytes in sizes.items()}
    kind = format_of(job.target)
    marker = None
    if kind.marker:
        marker = FileRecord(nbytes=kind.estimate_marker_bytes(job.named), digest=UNKNOWN_DIGEST)
    for file in job.opened.checkpoint.files:
        job.opened.source.size(file)  # the manifest names the sources as they were opened
    digests = _NoDigests()
    frames = dict.fromkeys(job.target.files, UNKNOWN_DIGEST) if kind.in_items or job.seals else {}
    manifest = manifest_bytes(manifest_of(job, {}, digests, assets, marker, frames), tensor_records(job, digests))
    documents = {name: len(content) for name, content in job.documents.items()}
    return written_files(job, assets, documents | {MANIFEST_NAME: manifest}, marker)


def written_files(
    job: Job, assets: Mapping[str, FileRecord], documents: Mapping[str, int], marker: FileRecord | None
) -> list[tuple[str, int]]:
    """Return (name, bytes) of everything that the job wrote."""
    return [
        *job.target.files.items(),
        *((name, record.nbytes) for name, record in assets.items()),
        *documents.items(),
        *([(format_of(job.target).marker, marker.nbytes)] if marker is not None else []),
    ]


def tensor_records(job: Job, digests: Mapping[str, str]) -> Iterator[tuple[str, TensorRecord]]:
    """Yield what the manifest says of every tensor, tied ones by each name; `digests` are by the job's own."""
    for entry in job.named.tensors:
        own = job.aliases.get(entry.fqn, entry.fqn)
        placements = job.placements.get(own, {})
        yield (
            entry.fqn,
            TensorRecord(dtype=entry.dtype, shape=entry.shape, digest=digests[own], placements=placements),
        )


def manifest_of(
    job: Job,
    tensors: Mapping[str, TensorRecord],
    digests: Mapping[str, str],
    assets: Mapping[str, FileRecord],
    marker: FileRecord | None,
    frames: Mapping[str, str],
    parts: Mapping[str, FileRecord] | None = None,
) -> Manifest:
    """Return what the manifest says of the job's destination; `parts` are the documents of its parts."""
    documents = {name: record_of(content) for name, content in (*job.heads.items(), *job.documents.items())}
    documents |= parts or {}
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
        frames={file: frames[file] for file in job.target.files if file in frames},  # whichever was finished first
        source={
            "name": os.path.basename(job.opened.source.place),
            "format": checkpoint.format,
            "files": job.opened.source.identities(),
            **job.made,
        },
        origin=job.origin,
    )


def record_of(content: bytes) -> FileRecord:
    """Return what the manifest says of a document."""
    return FileRecord(nbytes=len(content), digest=digest_bytes(content))


# The parts of a step that a job writes: what is known of them once they are built, and that they are right

OF_SOURCE = ("part-of-a-model", "hollow", "damaged-asset", DANGER)
"""Codes of findings about what was written that its source has as well, and that was said of it."""


def can_adopt(path: str, *, num_workers: int) -> bool:
    """Had an interrupted run of the same job finished the part, every byte as it was written? Else remove it."""
    if not os.path.lexists(path):
        return False
    try:
        with open_path(path, as_part=True) as opened:
            if opened.manifest is not None and verify(opened, level="data", num_workers=num_workers).ok:
                return True
    except CkptError:
        pass
    shutil.rmtree(path)
    return False


def record_parts(sink: Sink, names: Collection[str]) -> Iterator[tuple[str, FileRecord]]:
    """Yield what the manifest of a step says of its parts: their `.metadata` and manifests, which say the rest."""
    if not names:
        return
    with sink.reader() as written:
        there = written.list_files()
        for part in names:
            for document in (METADATA_NAME, MANIFEST_NAME):
                name = f"{part}/{document}"
                if name not in there:  # files of ranks have no .metadata
                    continue
                content = written.read(name, 0, written.size(name))
                yield name, FileRecord(nbytes=len(content), digest=digest_bytes(content))


def check_step(directory: str, names: Iterable[str]) -> None:
    """Open a step as a user would, and compare it with what was to be written."""
    opened = open_step(directory)
    if opened is None:  # one of files of ranks, whose parts were looked at one by one
        with open_path(directory, as_part=True) as whole:
            if whole.step is None or sorted(part.directory for part in whole.step.parts) != sorted(names):
                raise _unlike("its parts do not match the plan", directory)
        return
    with opened as step:
        result = verify_step(step, level="structure", num_workers=1, purpose="weights")
        if errors := [error for error in result.errors if error.code not in OF_SOURCE]:
            raise _unlike(errors[0].what, errors[0].where)
        found = {part.directory for part in step.step.parts}
        if found != set(names) and not (step.step.is_repository and found.issuperset(names)):
            raise _unlike("its parts do not match the plan", directory)


def _unlike(what: str, where: str) -> CkptError:
    hint = "nothing was published; please report this with the output of `ckpt env`"
    return CkptError(f"the written checkpoint failed its own check: {what}", where=where, hint=hint)


APART = "\0apart\0"  # Before the name of a tensor that was read for its records alone; no FQN contains a NUL


@contextmanager
def kept_or_discarded(sink: Sink, *, is_part: bool = False) -> Iterator[None]:
    """Keep the work of a run that was interrupted or met a system error; discard it on any other failure.

    What to tell of that, the job says that a part belongs to.
    """
    try:
        yield
    except (DestinationExistsError, MissingError):
        raise
    except (KeyboardInterrupt, StorageError, MemoryError, OSError) as raised:
        error = raised
        if isinstance(raised, OSError):
            where = raised.filename if isinstance(raised.filename, str) else sink.destination
            error = StorageError(raised.strerror or str(raised), where=where)
        if isinstance(error, KeyboardInterrupt) and not is_part:
            destination = escape_name(sink.destination)
            error.add_note(f"{destination} is complete" if sink.is_published else "nothing was published")
        if sink.num_kept:
            sink.keep()
            kept = f"what was written is kept in {escape_name(sink.kept_in)}"
            if not is_part:
                error.add_note(f"{kept}: the same command continues from there")
        if error is raised:
            raise
        raise error from raised
    finally:
        sink.discard()


def finish(
    job: Job,
    start: float,
    sink: Sink,
    outcome: Outcome,
    assets: Mapping[str, FileRecord],
    marker: bytes,
    parts: Mapping[str, Conversion] | None = None,
    *,
    part: Part | None = None,
) -> Conversion:
    """Write the documents, the commit marker last; check what was written; publish."""
    parts = parts or {}
    _settle(job, outcome)
    job.counts = outcome.counts
    cast = "" if job.dtype == "keep" else f" (after the cast to {job.dtype})"  # of the source's values
    strange = check_values(job.opened, job.source, job.counts)
    job.warnings = (*job.warnings, *(f"{each.code}: {each.where}: {each.what}{cast}" for each in strange))
    marked = record_of(marker) if marker else None
    tensors = dict(tensor_records(job, outcome.digests))
    if job.use_dtensor:  # framed as torch does it
        with sink.reader() as written:
            outcome.frames = format_of(job.target).digest_frames(job.target, written, marker=marker)
    held = dict(record_parts(sink, parts))
    manifest = build_manifest(manifest_of(job, tensors, outcome.digests, assets, marked, outcome.frames, held))
    documents = {**job.documents, MANIFEST_NAME: manifest}
    last = None if marker else next((name for name in job.documents if name.endswith(".index.json")), None)
    for name, content in documents.items():
        if name != last:
            sink.write_document(name, content)
    if last is not None:
        sink.write_marker(last, documents[last])
    if marker:
        sink.write_marker(format_of(job.target).marker, marker)
    files = written_files(job, assets, {name: len(content) for name, content in documents.items()}, marked)
    if parts and isinstance(sink, Staging):
        check_step(sink.directory, parts)
    if not parts or job.target.tensors:
        _check_result(sink, job.named)
    for each in (job, *job.parts.values()):
        each.opened.source.check_unchanged()
    sink.publish()
    job.notes += sink.notes
    job.not_checked = (*job.not_checked, *sink.not_checked)
    if sink.left_behind is not None:
        job.notes.append(
            f"the old checkpoint could not be removed: {escape_name(sink.left_behind)}; "
            "the next ckpt that writes to this destination removes it, or remove it yourself"
        )
    files += [(os.path.join(name, file), nbytes) for name, part in parts.items() for file, nbytes in part.files]
    read = outcome.bytes_read + sum(part.bytes_read for part in parts.values())
    return conversion(job, start, files, read=read, part=part)


def carry_assets(job: Job, sink: Sink) -> dict[str, FileRecord]:
    """Copy the assets, or write what takes their place; return what the manifest says of them."""
    records = {}
    for name, content in job.rewritten.items():
        sink.write_document(name, content)
        records[name] = record_of(content)
    by_source: dict[int, tuple[Source, list[Asset]]] = {}
    for source, asset in job.assets:
        if asset.file not in job.rewritten:
            if what := json_problem(source, asset):
                hint = "restore the file, or remove it"
                raise UnreadableError(f"{asset.source_file}: {what}", where=source.root, hint=hint)
            by_source.setdefault(id(source), (source, []))[1].append(asset)
    for source, assets in by_source.values():
        outcome = execute(plan_assets(assets), source, sink, num_workers=job.num_workers)
        for asset in assets:
            digest = outcome.digests[asset_name(asset)]
            records[asset.file] = FileRecord(nbytes=asset.nbytes, digest=digest)
            if source is job.opened.source:
                job.warnings = (*job.warnings, *_asset_warnings(job, asset, digest))
    return records


def _asset_warnings(job: Job, asset: Asset, digest: str) -> Iterator[str]:
    """Warn of a file that is not what the manifest recorded; raise where programs read it and it is not accepted."""
    manifest = job.opened.manifest
    record = None if manifest is None else manifest.assets.get(asset.source_file)
    if record is None or record.digest == digest:
        return
    found = changed_asset(job.opened, asset.source_file, f"not what {MANIFEST_NAME} recorded")
    if found.severity == "error":
        raise UnreadableError(f"{found.where} is {found.what}", where=job.opened.source.root, hint=found.hint)
    yield f"{found.code}: {found.where}: {found.what}; copied unchanged"


def conversion(
    job: Job,
    start: float,
    files: list[tuple[str, int]],
    *,
    read: int,
    peak: int | None = None,
    dry_run: bool = False,
    published: bool = True,
    part: Part | None = None,
    waiting_for: tuple[int, ...] = (),
) -> Conversion:
    """Return what came of a job."""
    jobs, ledger = (job, *job.parts.values()), job.ledger
    return Conversion(
        source=job.opened.source.root,
        destination=job.destination,
        num_tensors=sum(len(each.target.tensors) for each in jobs),
        bytes_read=read,
        bytes_written=sum(nbytes for _, nbytes in files),
        seconds=time.monotonic() - start,
        peak_rss_bytes=peak_rss_bytes() if peak is None else peak,
        files=tuple(files),
        verified=published and ledger.is_whole,
        checked=ledger.checked,
        notes=tuple(job.notes),
        counts={
            **job.counts,
            **{f"{name}/{fqn}": seen for name, part in job.parts.items() for fqn, seen in part.counts.items()},
        },
        warnings=tuple(text for each in jobs for text in each.warnings),
        not_checked=(*(text for each in jobs for text in each.not_checked), *ledger.not_checked),
        architecture=job.architecture,
        identity=job.opened.identity if job.opened.identity.format else None,
        dry_run=dry_run,
        published=published,
        part=part,
        waiting_for=waiting_for,
    )


def recorded_apart(job: Job) -> list[TensorEntry]:
    """Return the tensors that are not written as they are stored, and of which something is recorded as a whole."""
    return [e for e in _apart(job) if e.fqn in _records(job) or any(c.crc32 is not None for c in e.chunks)]


def to_digest(job: Job) -> set[str]:
    """Return the names of tensors whose digest in the source is recorded."""
    return {entry.fqn for entry, name in _moved(job) if name in _records(job)}


def read_apart(job: Job, outcome: Outcome, turn: slice = slice(None)) -> int:
    """Read `recorded_apart`, those of a turn, as they lie in the source; return the bytes."""
    whole = scan(recorded_apart(job)[turn], job.opened.source, num_workers=job.num_workers)
    outcome.chunks_checked += whole.chunks_checked
    outcome.source_digests |= {APART + fqn: digest for fqn, digest in whole.digests.items()}
    return whole.bytes_read


def _records(job: Job) -> Mapping[str, TensorRecord]:
    return {} if job.opened.manifest is None else job.opened.manifest.tensors


def _is_made(entry: TensorEntry, job: Job) -> bool:
    return any(chunk.span.file in job.opened.stored for chunk in entry.chunks)


def _moved(job: Job) -> list[tuple[TensorEntry, str]]:
    """Return the tensors that are read as they are stored, with their names in the opened checkpoint."""
    named = ((entry, job.names.get(entry.fqn, entry.fqn)) for entry in job.source.tensors)
    return [(entry, name) for entry, name in named if name and not _is_made(entry, job)]


def _apart(job: Job) -> list[TensorEntry]:
    """Return the stored tensors that are written in parts, joined, encoded or decoded."""
    stored, read = job.opened.stored, (*job.source.tensors, *job.apart)
    files = sorted({chunk.span.file for entry in read for chunk in entry.chunks} & stored.keys())
    decoded = {entry.fqn: entry for file in files for entry in stored[file]}
    return [*(e for e in job.apart if not _is_made(e, job)), *map(job.opened.resolve, decoded.values())]


def _settle(job: Job, outcome: Outcome) -> None:
    """Hold what was read against everything that the source records of it, and enter that in the job's ledger."""
    ledger, opened, records, items = job.ledger, job.opened, _records(job), job.opened.format.in_items
    whole = [*((e, name, e.fqn) for e, name in _moved(job)), *((e, e.fqn, APART + e.fqn) for e in _apart(job))]
    copied = {target.fqn: target.dtype for target in job.target.tensors if target.fqn not in job.edits}
    summed, sizes = Summed(opened), {} if opened.manifest is None else opened.manifest.files
    held = set()
    for entry, name, key in whole if records else ():
        digests = outcome.digests if copied.get(key) == entry.dtype else outcome.source_digests
        shape, label, record = (entry.dtype.name, *entry.shape), f"tensor {name!r}", records.get(name)
        recorded = "no such tensor" if record is None else (record.dtype.name, *record.shape)
        ledger.compare("shapes", label, shape, recorded, opened.source.root)
        ledger.compare("digests", label, digests.get(key), record and record.digest, opened.source.root)
        held |= {name} if key in digests else set()
    for file in sorted({chunk.span.file for entry, *_ in whole for chunk in entry.chunks} & sizes.keys()):
        ledger.compare("sizes", file, opened.source.size(file), sizes[file], opened.source.root)
    chunks = (chunk for entry in (*job.source.tensors, *recorded_apart(job)) for chunk in firsts(entry))
    ledger.count_crcs(outcome.chunks_checked, sum(c.crc32 is not None and 0 not in c.box.sizes for c in chunks))
    slices = sum(chunk.crc32 is None and summed.covers(chunk.span) for entry, *_ in whole for chunk in firsts(entry))
    ledger.missed["crcs", "they cover more than one tensor (`ckpt verify` checks them)"] += slices
    known = {e.fqn for e in opened.checkpoint.tensors if items or any(c.crc32 is not None for c in e.chunks)}
    taken = {name for _, name, _ in whole} | {job.names.get(e.fqn, e.fqn) for e in job.source.tensors}
    if records.keys() - taken:  # of what is left out, that which has the bytes of something else is read
        spans = {e.fqn: tuple(chunk.span for chunk in e.chunks) for e in opened.checkpoint.tensors}
        twins = {spans[name]: name for name in held & spans.keys()}
        for name in [name for name in records.keys() & spans.keys() - taken if spans[name] in twins]:
            twin = records[twins[spans[name]]].digest
            ledger.compare("digests", f"tensor {name!r}", twin, records[name].digest, opened.source.root)
            taken.add(name)
    ledger.missed["digests" if records else "crcs", LEFT_OUT] += len((records.keys() or known) - taken)


def _check_result(sink: Sink, target: Checkpoint) -> None:
    """Open what was written as a user would, and hold it against the plan."""
    with sink.reader() as source:
        written = open_path(sink.destination, source=source, format=target.format, as_part=True)
        result = verify(written, level="structure", num_workers=1, purpose="weights")
        found = {(entry.fqn, entry.dtype.name, entry.shape) for entry in written.checkpoint.tensors}
    expected = {(entry.fqn, entry.dtype.name, entry.shape) for entry in target.tensors}
    errors = [error for error in result.errors if error.code not in OF_SOURCE]
    if errors or found != expected:
        what = errors[0].what if errors else "its tensors do not match the plan"
        where = errors[0].where if errors else None
        hint = "nothing was published; please report this with the output of `ckpt env`"
        raise CkptError(f"the written checkpoint failed its own check: {what}", where=where, hint=hint)


def notes_of_parts(job: Job) -> list[str]:
    """Return the notes of the job's parts, each with its name."""
    return [f"{name}: {note}" for name, part in job.parts.items() for note in part.notes]
