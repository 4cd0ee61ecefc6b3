"""Put together what the parts of a job have recorded, and publish it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckpt_tools.conversions.finish import APART, carry_assets, conversion, finish, recorded_apart
from ckpt_tools.conversions.job import Conversion, Job
from ckpt_tools.errors import CkptError, DestinationExistsError, StorageError, UnreadableError
from ckpt_tools.formats.digest import digest_tensor
from ckpt_tools.formats.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, parse_manifest
from ckpt_tools.formats.opening import read_document
from ckpt_tools.formats.table import format_of
from ckpt_tools.moving.execute import Outcome
from ckpt_tools.moving.plan import blob_name, blocks_of, chunk_index, copy_span, is_plain
from ckpt_tools.moving.seen import DisagreementError, Seen
from ckpt_tools.moving.share_record import ShareRecord, parse_record, record_name
from ckpt_tools.moving.split import Part
from ckpt_tools.remote.places import is_remote, local, open_source
from ckpt_tools.storage.shared_staging import tidy
from ckpt_tools.storage.sink import SharedSink
from ckpt_tools.units import format_size

_THREADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A part among the others: which files each has. Every part computes the same."""

    part: Part
    shares: Sequence[range]
    """Per part the positions of its files."""
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


def add_progress(job: Job, bytes_kept: int) -> None:
    """Say what an interrupted run of this part had done."""
    if bytes_kept:
        job.notes.append(f"continued an interrupted run: {format_size(bytes_kept)} were there and are right")


def commit(job: Job, place: Place, sink: SharedSink, start: float, *, read: int) -> Conversion:
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
    job: Job, place: Place, sink: SharedSink, start: float, waiting: tuple[int, ...], *, read: int
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
        raise CkptError(f"no part has read {missing[0]!r} as a whole")
    return outcome
