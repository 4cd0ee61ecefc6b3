"""Check a checkpoint and say everything that is wrong, and what was not looked at."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from ckpt_tools.checks.copies import check_copies, equal_layouts
from ckpt_tools.checks.manifest import check_frames, check_manifest, size_of
from ckpt_tools.checks.spans import check_spans
from ckpt_tools.checks.trainer import check_trainer
from ckpt_tools.checks.values import check_values, unseen_values
from ckpt_tools.description.checkpoint import MAX_ELEMS, BlobEntry, ByteSpan, Checkpoint, Chunk, Finding, TensorEntry
from ckpt_tools.description.layout import Mesh
from ckpt_tools.description.tiling import check_tiling
from ckpt_tools.errors import CkptError, UnreachableError, UnreadableError
from ckpt_tools.formats import dcp
from ckpt_tools.formats.file_names import is_side_file, is_weights
from ckpt_tools.formats.manifest import MANIFEST_NAME
from ckpt_tools.formats.opening import Opened
from ckpt_tools.formats.steps import note_reading
from ckpt_tools.moving.counts import Counts, counts_to_json
from ckpt_tools.moving.execute import Outcome, Progress, scan
from ckpt_tools.moving.plan import asset_name, blob_name, copy_span
from ckpt_tools.moving.split import Part, own_tensors
from ckpt_tools.text import first_few

Level = Literal["structure", "data", "values"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unchecked:
    """What a level or a checkpoint leaves unchecked."""

    what: str
    copy_tells: bool = False
    """Comparing another copy bit for bit checks it."""
    part: str = ""
    """The part of a step that it is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What `verify` found."""

    level: Level
    tensors: int
    """Tensors looked at."""
    chunks: int
    """Chunks looked at."""
    nbytes: int
    """Bytes of tensor data whose content was checked."""
    unchecked: tuple[Unchecked, ...]
    findings: tuple[Finding, ...]
    counts: Mapping[str, Counts] = field(default_factory=dict)
    """FQN → what the values are like, at level values; in a step with its part's directory before it."""
    files: tuple[str, ...] = ()
    """The files that its tensors lie in, or should; in a step with their part's directory before them."""
    mesh: Mesh | None = None
    """The ranks that wrote them, where a manifest says; of a step none."""
    share: Part | None = None
    """Whose tensors' bytes were read, where several processes check one checkpoint: what is right is no more than these
    and the structure."""

    @property
    def not_checked(self) -> tuple[str, ...]:
        """What this level or this checkpoint leaves unchecked, in words."""
        return tuple(each.what for each in self.unchecked)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that fail the check."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def ok(self) -> bool:
        """True without a finding of severity error."""
        return not self.errors


def verify(
    opened: Opened, *, level: Level, num_workers: int, progress: Progress | None = None, share: Part | None = None
) -> Verification:
    """Check `opened` at `level`; with a `share`, the bytes of its tensors (and the first one those of other files).

    Structure: every element in exactly one chunk, every span inside its file, the items' headers and the
    manifest as the metadata says, no unknown data files. Data: also every byte, against the CRC-32s and
    digests that were recorded. Values: also what the numbers are like, finite or not.
    """
    findings: list[Finding] = []
    checkpoint, sound = check_structure(opened, findings)
    unchecked: list[Unchecked] = []
    counts: Mapping[str, Counts] = {}
    nbytes = 0
    if level == "structure":
        unchecked.append(Unchecked(what="the bytes of the tensors (use --level data)"))
        if checkpoint.blobs:
            unchecked.append(Unchecked(what=f"what {len(checkpoint.blobs)} non-tensor items hold (use --level data)"))
    else:
        damaged: set[str] = set()
        is_first = share is None or share.index == 0
        if share is not None:
            own = own_tensors(sound, share)
            other = "" if is_first else ", and other files and items"
            text = f"the bytes of {len(sound) - len(own)} of {len(sound)} tensors{other}: the other parts' (--part)"
            unchecked.append(Unchecked(what=text))
            sound = list(own)
            names = {entry.fqn for entry in sound}
            chosen = tuple(entry for entry in checkpoint.tensors if entry.fqn in names)
            checkpoint = replace(checkpoint, tensors=chosen, blobs=checkpoint.blobs if is_first else ())
        extra = opened if is_first else _without_files(opened)
        outcome = _check_data(extra, checkpoint, sound, findings, damaged, level, num_workers, progress)
        nbytes = sum(entry.nbytes for entry in sound)
        unchecked += _unchecked_chunks(opened, checkpoint, outcome, damaged)
        unchecked += _check_blobs(opened, findings) if is_first else []
        counts = outcome.counts
        if level == "values":
            findings += check_values(opened, replace(checkpoint, tensors=tuple(sound)), counts)
        unchecked += _unseen_values(checkpoint, level)
    if opened.single_names:
        total = len(checkpoint.tensors) + len(checkpoint.blobs)
        unchecked.append(Unchecked(what=f"{opened.single_names} of {total} names, which .metadata has only once"))
    unchecked += _unknown_places(opened)
    if opened.step is not None:
        unchecked.append(Unchecked(what=note_reading(opened.step)))
    if opened.manifest is None and opened.beside:
        files = first_few([asset.file for asset in opened.beside], 6)
        unchecked.append(Unchecked(what=f"other files, which have no recorded checksum: {files}"))
    unchecked += [Unchecked(what=what) for what in (*opened.format.unchecked, *opened.unread)]
    return Verification(
        level=level,
        tensors=len(checkpoint.tensors),
        chunks=sum(len(entry.chunks) for entry in checkpoint.tensors),
        nbytes=nbytes,
        unchecked=tuple(unchecked),
        findings=tuple(findings),
        counts=counts,
        files=tuple(dict.fromkeys(chunk.span.file for entry in checkpoint.tensors for chunk in entry.chunks)),
        mesh=checkpoint.mesh,
        share=share,
    )


def _without_files(opened: Opened) -> Opened:
    """Return a checkpoint of which nothing but tensors is read: the rest is another part's."""
    manifest = opened.manifest
    return replace(opened, sums=(), manifest=None if manifest is None else replace(manifest, assets={}))


def _unseen_values(checkpoint: Checkpoint, level: Level) -> Iterator[Unchecked]:
    if level == "data" and checkpoint.tensors:
        yield Unchecked(what="whether the values are finite (use --level values)")
    elif unseen := unseen_values(checkpoint):
        yield Unchecked(what=f"the values of {len(unseen)} tensors of packed or complex numbers: {first_few(unseen)}")


def _unchecked_chunks(
    opened: Opened, checkpoint: Checkpoint, outcome: Outcome, damaged: Collection[str]
) -> Iterator[Unchecked]:
    full = [(entry, chunk) for entry in checkpoint.tensors for chunk in entry.chunks if 0 not in chunk.box.sizes]
    chunks = len(full)
    told = sum(entry.fqn in damaged and chunk.crc32 is not None for entry, chunk in full)
    firsts = {id(chunk) for entry in checkpoint.tensors for chunk in _firsts(entry)}
    summed = _Summed(opened)
    rest = (chunk for _, chunk in full if chunk.crc32 is None or id(chunk) not in firsts)
    covered = sum(summed.covers(chunk.span) for chunk in rest)
    missing = chunks - told - outcome.chunks_checked - covered
    if opened.manifest is None and missing > 0:
        what = f"the content of {missing} of {chunks} chunks, which have no recorded checksum"
        yield Unchecked(what=f"{what} (--against compares copies)", copy_tells=True)


def _firsts(entry: TensorEntry) -> Iterable[Chunk]:
    """Return the chunks that are read of a tensor: the first of each set of replicas."""
    return {chunk.box: chunk for chunk in reversed(entry.chunks)}.values()


class _Summed:
    """Parts of files whose CRC-32 is recorded and was checked."""

    def __init__(self, opened: Opened) -> None:
        self._parts: dict[str, list[tuple[int, int]]] = {}
        for span, _ in opened.sums:
            self._parts.setdefault(span.file, []).append((span.offset, span.offset + span.nbytes))
        for parts in self._parts.values():
            parts.sort()

    def covers(self, span: ByteSpan) -> bool:
        """Is a span inside of one of them?"""
        parts = self._parts.get(span.file, [])
        at = bisect_right(parts, (span.offset, MAX_ELEMS)) - 1
        return at >= 0 and span.offset + span.nbytes <= parts[at][1]


def _unknown_places(opened: Opened) -> Iterator[Unchecked]:
    is_bare = opened.manifest is None and opened.format.in_items
    if files := equal_layouts(opened.checkpoint.tensors) if is_bare else []:
        shown = f"{len(files)}: {first_few(files, 2)}"
        what = f"whether files of equal layout were swapped ({shown}); a manifest or --against shows it"
        yield Unchecked(what=what, copy_tells=True)


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
            _check_blob(opened, blob, findings, content=False)
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
            Finding.error(code, _files_of(entry) or opened.format.marker, f"{name}: {problem.describe(entry.shape)}")
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


def _files_of(entry: TensorEntry) -> str:
    return first_few(sorted({chunk.span.file for chunk in entry.chunks}), limit=4)


def _only_file(entry: TensorEntry) -> str | None:
    files = {chunk.span.file for chunk in entry.chunks}
    return files.pop() if len(files) == 1 else None


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


def _check_data(
    opened: Opened,
    checkpoint: Checkpoint,
    sound: Sequence[TensorEntry],
    findings: list[Finding],
    damaged_fqns: set[str],
    level: Level,
    num_workers: int,
    progress: Progress | None,
) -> Outcome:
    files = _byte_entries(opened, checkpoint.blobs)
    own_fqns = {entry.fqn for entry in sound}

    def damaged(entry: TensorEntry, error: CkptError) -> None:
        where = error.where or _files_of(entry)
        damaged_fqns.add(entry.fqn)
        finding = Finding.error("damaged-data", where, error.what, error.hint, file=error.file or _only_file(entry))
        is_tensor = entry.fqn in own_fqns
        findings.append(replace(finding, tensor=entry.fqn) if is_tensor else finding)

    entries = [*sound, *(entry for entry, *_ in files)]
    outcome = scan(
        entries,
        opened.source,
        num_workers=num_workers,
        progress=progress,
        on_damage=damaged,
        counting=level == "values",
    )
    own = {chunk.span for entry in sound for chunk in _firsts(entry) if chunk.crc32 is not None}
    parts = [_summed_entry(span, crc32) for span, crc32 in opened.sums if span not in own]
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
                mismatch = Finding.error("digest-mismatch", _files_of(entry), what, hint, file=_only_file(entry))
                findings.append(replace(mismatch, tensor=entry.fqn))
    for entry, label, expected, is_asset in files:
        found = outcome.digests.get(entry.fqn)
        if found is not None and found != expected:
            make = Finding.warning if is_asset else Finding.error
            findings.append(make("digest-mismatch", label, "its bytes are not those that were written"))
    return outcome


def _summed_entry(span: ByteSpan, crc32: int) -> TensorEntry:
    """Return a part of a file with its recorded CRC-32 as a tensor of bytes."""
    entry = copy_span(f"bytes {span.offset}..{span.offset + span.nbytes} of {span.file}", span, 0).source
    return replace(entry, chunks=(replace(entry.chunks[0], crc32=crc32),))


def _byte_entries(opened: Opened, blobs: Sequence[BlobEntry]) -> list[tuple[TensorEntry, str, str, bool]]:
    """(bytes as a tensor, label, expected digest, is it an asset) of every asset and blob that the manifest knows."""
    if opened.manifest is None:
        return []
    found = []
    for blob in blobs:
        record = opened.manifest.blobs.get(blob.fqn)
        if record is not None and _inside(opened, blob.span):
            entry = copy_span(blob_name(blob), blob.span, 0).source
            found.append((entry, f"item {blob.fqn!r}", record.digest, False))
    for asset in (*opened.checkpoint.assets, *opened.beside):
        record = opened.manifest.assets.get(asset.file)
        if record is not None and size_of(opened, asset.file) == record.nbytes:
            span = ByteSpan(file=asset.file, offset=0, nbytes=record.nbytes)
            found.append((copy_span(asset_name(asset), span, 0).source, asset.file, record.digest, True))
    return found


def _check_blobs(opened: Opened, findings: list[Finding]) -> list[Unchecked]:
    """Check the blobs that no manifest knows by the CRC-32s in their zips; return what could not be checked."""
    known = {} if opened.manifest is None else opened.manifest.blobs
    blobs = [b for b in opened.checkpoint.blobs if b.fqn not in known and _inside(opened, b.span)]
    unchecked = sum(not _check_blob(opened, blob, findings, content=True) for blob in blobs)
    if not unchecked:
        return []
    what = f"what {unchecked} of {len(opened.checkpoint.blobs)} non-tensor items hold, which have no checksum"
    return [Unchecked(what=what)]


def _check_blob(opened: Opened, blob: BlobEntry, findings: list[Finding], *, content: bool) -> bool:
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


def _inside(opened: Opened, span: ByteSpan) -> bool:
    size = opened.checkpoint.files.get(span.file)
    return size is not None and span.offset + span.nbytes <= size


def with_findings(
    result: Verification,
    findings: Sequence[Finding],
    *,
    parts: Collection[str] = ("",),
    not_compared: Iterable[str] = (),
) -> Verification:
    """Return `result` with more findings; what was compared bit for bit no longer counts as unchecked.

    Of a step these are only some `parts`. What was `not_compared` stays unchecked.
    """
    unchecked = tuple(each for each in result.unchecked if not (each.copy_tells and each.part in parts))
    unchecked += tuple(Unchecked(what=f"against the reference: {what}") for what in dict.fromkeys(not_compared))
    return replace(result, findings=(*result.findings, *findings), unchecked=unchecked)


def to_json(result: Verification) -> dict[str, object]:
    """Return the document of `ckpt verify --json`."""
    return {
        "ok": result.ok,
        "level": result.level,
        **({} if result.share is None else {"part": asdict(result.share)}),
        "checked": {
            "tensors": result.tensors,
            "chunks": result.chunks,
            "bytes": result.nbytes,
            "values": counts_to_json(result.counts) if result.level == "values" else None,
        },
        "not_checked": list(result.not_checked),
        "findings": [asdict(finding) for finding in result.findings],
    }
