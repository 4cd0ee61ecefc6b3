"""The bytes of a checkpoint against what was recorded of them: CRC-32s, a manifest's digests, replicas."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ckpt_tools.checkpoint.entries import BlobEntry, ByteSpan, Checkpoint, Chunk, Finding, TensorEntry
from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.checks.manifest import changed_asset, size_of
from ckpt_tools.checks.structure import check_blob, files_of, is_inside
from ckpt_tools.errors import CkptError, UnreadableError
from ckpt_tools.transfer.execute import Outcome, Progress, scan
from ckpt_tools.transfer.plan import asset_name, blob_name, copy_span
from ckpt_tools.transfer.task import Look


def check_data(
    opened: Opened,
    checkpoint: Checkpoint,
    sound: Sequence[TensorEntry],
    partial: Sequence[TensorEntry],
    findings: list[Finding],
    damaged_fqns: set[str],
    *,
    counting: bool,
    num_workers: int,
    progress: Progress | None,
    looks: Mapping[str, Sequence[Look]] | None = None,
) -> Outcome:
    """Read the tensors, what there is of `partial` ones, and the files and items that a manifest knows.

    `damaged_fqns` gets those that are damaged.
    """
    files = _byte_entries(opened, checkpoint.blobs)
    own_fqns = {entry.fqn for entry in (*sound, *partial)}

    def damaged(entry: TensorEntry, error: CkptError) -> None:
        where = error.where or files_of(entry)
        damaged_fqns.add(entry.fqn)
        finding = Finding.error("damaged-data", where, error.what, error.hint, file=error.file or _only_file(entry))
        is_tensor = entry.fqn in own_fqns
        findings.append(replace(finding, tensor=entry.fqn) if is_tensor else finding)

    entries = [*sound, *(entry for entry, *_ in files)]
    read = functools.partial(scan, source=opened.source, num_workers=num_workers, progress=progress, on_damage=damaged)
    outcome = read(entries, counting=counting, looks=looks)
    pieces = [_as_bytes(entry.fqn, chunk.span, chunk.crc32) for entry in partial for chunk in firsts(entry)]
    seen = read(pieces)
    outcome.chunks_checked += seen.chunks_checked
    own = {chunk.span for entry in (*sound, *partial) for chunk in firsts(entry) if chunk.crc32 is not None}
    parts = [
        _as_bytes(f"bytes {span.offset}..{span.offset + span.nbytes} of {span.file}", span, crc32)
        for span, crc32 in opened.sums
        if span not in own
    ]
    scan(parts, opened.source, num_workers=num_workers, on_damage=damaged)
    for entry in sound:
        if len(entry.chunks) > len({chunk.box for chunk in entry.chunks}):
            try:
                opened.resolve(entry)
            except UnreadableError as error:
                differing = Finding.error("replicas-differ", error.where or "", error.what, error.hint)
                findings.append(replace(differing, tensor=entry.fqn))
    if opened.manifest is not None:
        for entry in sound:
            record = opened.manifest.tensors.get(entry.fqn)
            found = outcome.digests.get(entry.fqn)
            if record is not None and found is not None and found != record.digest:
                expected = record.digest
                what = f"tensor {entry.fqn!r} is not what was written: digest {found}, the manifest says {expected}"
                hint = "restore its files, or write the checkpoint again"
                mismatch = Finding.error("digest-mismatch", files_of(entry), what, hint, file=_only_file(entry))
                findings.append(replace(mismatch, tensor=entry.fqn))
    for entry, label, expected, is_asset in files:
        found = outcome.digests.get(entry.fqn)
        if found is not None and found != expected:
            what = "its bytes are not those that were written"
            changed = changed_asset(opened, label, what) if is_asset else Finding.error("", label, what)
            findings.append(replace(changed, code="digest-mismatch"))
    return outcome


def _as_bytes(name: str, span: ByteSpan, crc32: int | None) -> TensorEntry:
    """Return a part of a file with its recorded CRC-32 as a tensor of bytes."""
    entry = copy_span(name, span, 0).source
    return replace(entry, chunks=(replace(entry.chunks[0], crc32=crc32),))


def _byte_entries(opened: Opened, blobs: Sequence[BlobEntry]) -> list[tuple[TensorEntry, str, str, bool]]:
    """(bytes as a tensor, label, expected digest, is it an asset) of every asset and blob that the manifest knows."""
    if opened.manifest is None:
        return []
    found = []
    for blob in blobs:
        record = opened.manifest.blobs.get(blob.fqn)
        if record is not None and is_inside(opened, blob.span):
            entry = copy_span(blob_name(blob), blob.span, 0).source
            found.append((entry, f"item {blob.fqn!r}", record.digest, False))
    for asset in (*opened.checkpoint.assets, *opened.companions):
        record = opened.manifest.assets.get(asset.file)
        if record is not None and size_of(opened, asset.file) == record.nbytes:
            span = ByteSpan(file=asset.file, offset=0, nbytes=record.nbytes)
            found.append((copy_span(asset_name(asset), span, 0).source, asset.file, record.digest, True))
    return found


def check_blobs(opened: Opened, findings: list[Finding]) -> int:
    """Check the blobs that no manifest knows by the CRC-32s in their zips; return how many have none."""
    known = {} if opened.manifest is None else opened.manifest.blobs
    blobs = [b for b in opened.checkpoint.blobs if b.fqn not in known and is_inside(opened, b.span)]
    return sum(not check_blob(opened, blob, findings, content=True) for blob in blobs)


def _only_file(entry: TensorEntry) -> str | None:
    files = {chunk.span.file for chunk in entry.chunks}
    return files.pop() if len(files) == 1 else None


def firsts(entry: TensorEntry) -> Iterable[Chunk]:
    """Return the chunks that are read of a tensor: the first of each set of replicas."""
    return {chunk.box: chunk for chunk in reversed(entry.chunks)}.values()
