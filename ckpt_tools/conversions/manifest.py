"""What the manifest says of a job's destination."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from ckpt_tools._version import __version__
from ckpt_tools.conversions.job import Job
from ckpt_tools.formats.digest import digest_bytes
from ckpt_tools.formats.manifest import UNKNOWN_DIGEST, FileRecord, Manifest, TensorRecord
from ckpt_tools.formats.table import format_of
from ckpt_tools.moving.plan import blob_name
from ckpt_tools.storage.source import Source
from ckpt_tools.storage.staging import Staging


class NoDigests(dict[str, str]):
    """The digests of what nobody has read yet."""

    def __missing__(self, name: str) -> str:
        return UNKNOWN_DIGEST


def digest_of_frames(job: Job, staging: Staging, marker: bytes) -> dict[str, str]:
    """Return the digests of what lies around the payloads of the written files; it is little, and is read back."""
    with Source(staging.directory) as written:
        return format_of(job.target).digest_frames(job.target, written, marker=marker if job.use_dtensor else None)


def tensor_records(job: Job, digests: Mapping[str, str]) -> Iterator[tuple[str, TensorRecord]]:
    """Yield (FQN, record) of every tensor that the job writes."""
    for entry in job.target.tensors:
        placements = job.placements.get(entry.fqn, {})
        yield (
            entry.fqn,
            TensorRecord(dtype=entry.dtype, shape=entry.shape, digest=digests[entry.fqn], placements=placements),
        )


def manifest_of(
    job: Job,
    tensors: Mapping[str, TensorRecord],
    digests: Mapping[str, str],
    assets: Mapping[str, FileRecord],
    marker: FileRecord | None,
    frames: Mapping[str, str],
) -> Manifest:
    """Return what the manifest says of the job's destination."""
    documents = {name: record_of(content) for name, content in (*job.heads.items(), *job.documents.items())}
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


def record_of(content: bytes) -> FileRecord:
    """Return what the manifest says of a small file."""
    return FileRecord(nbytes=len(content), digest=digest_bytes(content))
