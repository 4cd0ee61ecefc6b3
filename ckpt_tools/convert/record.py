"""What is recorded of a job's destination: its files, and its manifest."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from ckpt_tools._version import __version__
from ckpt_tools.checkpoint.formats.digest import digest_bytes
from ckpt_tools.checkpoint.formats.manifest import (
    MANIFEST_NAME,
    UNKNOWN_DIGEST,
    FileRecord,
    Manifest,
    TensorRecord,
    manifest_bytes,
)
from ckpt_tools.checkpoint.formats.table import format_of
from ckpt_tools.convert.job import Job
from ckpt_tools.transfer.plan import blob_name


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
