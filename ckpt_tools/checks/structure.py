"""Everything about a checkpoint but its tensors' bytes: chunks, spans, items' headers, files that nothing refers to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckpt_tools.checks.copies import check_copies
from ckpt_tools.checks.manifest import check_frames, check_manifest
from ckpt_tools.checks.spans import check_spans
from ckpt_tools.checks.trainer import check_trainer
from ckpt_tools.description.checkpoint import BlobEntry, ByteSpan, Checkpoint, Chunk, Finding, TensorEntry
from ckpt_tools.description.tiling import check_tiling
from ckpt_tools.errors import CkptError, UnreachableError
from ckpt_tools.formats import dcp
from ckpt_tools.formats.file_names import is_side_file, is_weights
from ckpt_tools.formats.manifest import MANIFEST_NAME
from ckpt_tools.formats.opening import Opened
from ckpt_tools.text import first_few


def check_structure(opened: Opened, findings: list[Finding]) -> tuple[Checkpoint, list[TensorEntry]]:
    """Check everything but the tensors' bytes.

    Returns:
        The description with raw spans, and the tensors whose bytes can be read.
    """
    checkpoint = opened.checkpoint
    resolved = []
    sound = []
    for entry in opened.ahead(checkpoint.tensors):
        raw = _check_tensor(opened, entry, findings)
        resolved.append(raw or entry)
        if raw is not None:
            sound.append(raw)
    for blob in checkpoint.blobs:
        problem = _span_problem(opened, blob.span, f"item {blob.fqn!r}")
        if problem is not None:
            findings.append(problem)
        else:
            check_blob(opened, blob, findings, content=False)
    findings += _check_foreign(opened)
    findings += [Finding.error("unreadable-part", e.where or opened.source.root, e.what, e.hint) for e in opened.broken]
    findings += check_trainer(opened)
    if not opened.format.has_views:
        findings += check_spans(opened, tuple(findings))
    if opened.manifest is not None:
        findings += check_manifest(opened, opened.manifest)
        findings += check_frames(opened, opened.manifest, sound)
    elif opened.format.in_items:
        findings += check_copies(sound, opened.source)
    return replace(checkpoint, tensors=tuple(resolved)), sound


def _check_tensor(opened: Opened, entry: TensorEntry, findings: list[Finding]) -> TensorEntry | None:
    """Return the tensor with raw spans, or None when it cannot be read whole."""
    if len(entry.chunks) == 1 and entry.chunks[0].encoding == "raw" and _is_whole(opened, entry, entry.chunks[0]):
        return entry
    name = f"tensor {entry.fqn!r}"
    before = len(findings)
    problem = check_tiling(entry.shape, (chunk.box for chunk in entry.chunks))
    if problem is not None:
        code = {"missing": "incomplete-tensor", "overlap": "overlapping-chunks"}.get(
            problem.kind, "chunk-outside-tensor"
        )
        findings.append(
            Finding.error(code, files_of(entry) or opened.format.marker, f"{name}: {problem.describe(entry.shape)}")
        )
    chunks = []
    for chunk in entry.chunks:
        outside = _span_problem(opened, chunk.span, name)
        if outside is not None:
            findings.append(outside)
        elif (raw := _check_item(opened, entry, chunk, name, findings)) is not None:
            chunks.append(raw)
    if len(findings) > before:
        findings[before:] = [replace(finding, tensor=entry.fqn) for finding in findings[before:]]
        return None
    return replace(entry, chunks=tuple(chunks))


def files_of(entry: TensorEntry) -> str:
    """Return the files of a tensor, for people."""
    return first_few(sorted({chunk.span.file for chunk in entry.chunks}), limit=4)


def _is_whole(opened: Opened, entry: TensorEntry, chunk: Chunk) -> bool:
    """Is this chunk all of the tensor, and inside its file? What else may be wrong is said elsewhere."""
    span, box = chunk.span, chunk.box
    inside = span.offset + span.nbytes <= opened.checkpoint.files.get(span.file, -1)
    return inside and box.sizes == entry.shape and not any(box.offsets)


def _span_problem(opened: Opened, span: ByteSpan, name: str) -> Finding | None:
    size = opened.checkpoint.files.get(span.file)
    if size is None:
        hint = "restore the file, or save the checkpoint again"
        return Finding.error("missing-file", span.file, f"{name}: its file is missing", hint, file=span.file)
    if span.offset + span.nbytes > size:
        what = f"{name}: bytes {span.offset}..{span.offset + span.nbytes} are needed, the file has {size}"
        hint = "the file is truncated: restore it, or save the checkpoint again"
        return Finding.error("short-file", span.file, what, hint, file=span.file)
    return None


def _check_item(opened: Opened, entry: TensorEntry, chunk: Chunk, name: str, findings: list[Finding]) -> Chunk | None:
    if chunk.encoding == "raw":
        return chunk
    span = chunk.span
    try:
        head = dcp.read_item(span, entry.dtype, chunk.box.sizes, opened.source, thorough=True)
    except UnreachableError:
        raise
    except CkptError as error:
        where = f"{span.file}, bytes {span.offset}..{span.offset + span.nbytes}"
        findings.append(Finding.error("bad-item", where, f"{name}: {error.what}", error.hint, file=span.file))
        return None
    problem = dcp.item_mismatch(entry.dtype, chunk.box.sizes, head)
    if problem is not None:
        where = f"{span.file}, bytes {span.offset}..{span.offset + span.nbytes}"
        findings.append(Finding.error("item-mismatch", where, f"{name}: {problem}", file=span.file))
        return None
    return dcp.raw_chunk(chunk, head)


def _check_foreign(opened: Opened) -> Iterator[Finding]:
    """Data files that nothing refers to: stale ones of an earlier save, or a lost part of this one."""
    manifest = opened.manifest
    if opened.format.is_file:  # its neighbours are files of their own
        return
    known = {*opened.checkpoint.files, *(asset.file for asset in opened.checkpoint.assets)}
    if manifest is not None:
        known |= {MANIFEST_NAME, *manifest.files, *manifest.assets, *manifest.documents}
    max_depth = 0 if manifest is None or opened.format.has_parts else 3
    for name, size in opened.source.list_files(max_depth=max_depth).items():
        # A manifest names every file: all others that hold weights in any tool's format are strange then.
        strange = is_weights(name) if manifest is not None else name.endswith(opened.format.suffix) and size > 0
        strange = strange and not (opened.format.has_views and is_side_file(name))
        if strange and name not in known:
            hint = "a leftover of an earlier save: remove it if you do not need it"
            yield Finding.warning("unreferenced-file", name, f"{size} bytes that nothing refers to", hint)


def check_blob(opened: Opened, blob: BlobEntry, findings: list[Finding], *, content: bool) -> bool:
    """Check an item as far as its zip tells; return whether that was all of it, or what is wrong has been said."""
    try:
        return dcp.check_blob(blob.span, opened.source, content=content)
    except UnreachableError:
        raise
    except CkptError as error:
        where = error.where or blob.span.file
        what = f"item {blob.fqn!r}: {error.what}"
        finding = Finding.error("damaged-item", where, what, error.hint, file=blob.span.file)
        if finding not in findings:  # level data meets again what level structure has said
            findings.append(finding)
        return True


def is_inside(opened: Opened, span: ByteSpan) -> bool:
    """Has its file that many bytes?"""
    size = opened.checkpoint.files.get(span.file)
    return size is not None and span.offset + span.nbytes <= size
