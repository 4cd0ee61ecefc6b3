"""Everything about a checkpoint but its tensors' bytes: chunks, spans, items' headers, files that nothing refers to."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from isal import isal_zlib

from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.entries import Asset, BlobEntry, ByteSpan, Checkpoint, Chunk, Finding, TensorEntry
from ckpt_tools.checkpoint.formats import dcp
from ckpt_tools.checkpoint.formats._json import MAX_JSON_BYTES, MAX_JSON_CONTAINERS
from ckpt_tools.checkpoint.formats.dcp_placing import ITEM_ALIGNMENT
from ckpt_tools.checkpoint.formats.file_names import is_hf_asset, is_side_file, is_weights
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME
from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.checkpoint.tiling import check_tiling
from ckpt_tools.checks.manifest import check_frames, check_manifest
from ckpt_tools.errors import CkptError, StorageError, UnreadableError
from ckpt_tools.storage.source import Source
from ckpt_tools.text import first_few, natural_key

# Find files that stand in for one another: without a manifest nothing records whose bytes a file holds

_STACK_DIMS = 3  # Tensors of so many dims may be stacks of equal slices

_Place = tuple[int, int]  # First byte of a chunk in its file, and how many
_Print = tuple[int, int, int]  # The same, and the CRC-32 that its writer recorded


def check_copies(tensors: Iterable[TensorEntry], source: Source) -> Iterator[Finding]:
    """Find files whose chunks are, place by place, those of another file: one may have been copied over the other.

    Chunks are compared by the CRC-32s that are recorded for them; a file with a chunk that has none is not compared.
    A single equal chunk is no sign (copied experts, rotary frequencies, masks), and neither are chunks of one value
    (zeros, ones): all of a file must be in the other one, and something of it must vary.

    It is an error when different parts of one matrix or vector are equal. Different tensors may be meant to be (tied
    weights, the experts of an upcycled model), and so may the slices of a stack of 3 dims or more: those are a warning.
    """
    prints: dict[str, dict[_Print, tuple[TensorEntry, Chunk]]] = defaultdict(dict)
    without: set[str] = set()
    for entry in tensors:
        for chunk in entry.chunks:
            if chunk.crc32 is None:
                without.add(chunk.span.file)
            else:
                prints[chunk.span.file][chunk.span.offset, chunk.span.nbytes, chunk.crc32] = (entry, chunk)
    holders: dict[_Print, set[str]] = defaultdict(set)
    for file, found in prints.items():
        for key in found:
            holders[key].add(file)
    said: set[str] = set()
    for file in sorted(prints.keys() - without, key=natural_key):
        others = set.intersection(*(holders[key] for key in prints[file])) - {file}
        if not others or file in said:
            continue
        varied = [key for key, (entry, chunk) in prints[file].items() if not _is_constant(entry.dtype, chunk, source)]
        if not varied:
            continue
        said |= {other for other in others if prints[other].keys() == prints[file].keys()}
        shown = first_few(sorted(others, key=natural_key), limit=4)
        what = f"all of its {len(prints[file]):,} chunks are equal, place by place, to those of {shown}"
        if any(_are_parts(prints[file][key], prints[other][key]) for key in varied for other in others):
            hint = (
                "one file was copied over the other: restore it. If they are meant to be equal, `ckpt reshard` writes "
                "a checkpoint with a manifest that says so"
            )
            yield Finding.error("copied-file", file, what, hint, file=file)
        else:
            hint = (
                "tied weights and the experts of an upcycled model are equal; anything else means that one file was "
                "copied over the other: --against another copy shows which"
            )
            yield Finding.warning("copied-file", file, what, hint)


def _are_parts(one: tuple[TensorEntry, Chunk], other: tuple[TensorEntry, Chunk]) -> bool:
    """Are these different parts of the same matrix or vector?"""
    entry = one[0]
    return entry.fqn == other[0].fqn and one[1].box != other[1].box and len(entry.shape) < _STACK_DIMS


def _is_constant(dtype: DType, chunk: Chunk, source: Source) -> bool:
    """Are all elements the same? Told by the CRC-32 that they would have then; reads one of them."""
    width = min(chunk.span.nbytes, max(1, dtype.bits // 8))
    element = source.read(chunk.span.file, chunk.span.offset, width)
    return _repeated(element, chunk.span.nbytes) == chunk.crc32


def _repeated(element: bytes, nbytes: int) -> int:
    """Return the CRC-32 of `element` repeated to `nbytes` bytes, in a logarithm of steps."""
    total = 0
    part, length = isal_zlib.crc32(element), len(element)
    count = nbytes // max(1, len(element))
    while count:
        if count & 1:
            total = isal_zlib.crc32_combine(total, part, length)
        part, length, count = isal_zlib.crc32_combine(part, part, length), 2 * length, count >> 1
    return total


def equal_layouts(tensors: Sequence[TensorEntry]) -> list[str]:
    """Return the files with the same chunks at the same places as another one: they could have changed places."""
    layouts: dict[str, list[tuple[_Place, str, tuple[int, ...]]]] = defaultdict(list)
    for entry in tensors:
        for chunk in entry.chunks:
            place = (chunk.span.offset, chunk.span.nbytes)
            layouts[chunk.span.file].append((place, entry.dtype.name, chunk.box.sizes))
    files: dict[tuple[tuple[_Place, str, tuple[int, ...]], ...], list[str]] = defaultdict(list)
    for file, layout in layouts.items():
        files[tuple(sorted(layout))].append(file)
    return sorted((name for names in files.values() if len(names) > 1 for name in names), key=natural_key)


Lost = Counter[tuple[str, str]]  # (file, why) → bytes of chunks and items that were not read; a finding's code says why
_LEFTOVER = re.compile(r"__\d+_\d+\.distcp|(model|pytorch_model|diffusion_pytorch_model)-\d+-of-\d+\.(safetensors|bin)")
"""Data files that no loader finds without the index or the metadata of their save."""


def check_structure(
    opened: Opened, findings: list[Finding]
) -> tuple[Checkpoint, list[TensorEntry], list[TensorEntry], Lost]:
    """Check everything but the tensors' bytes.

    Return the description with raw spans, the tensors whose bytes can be read, of the others the chunks that can be,
    and what cannot.
    """
    checkpoint = opened.checkpoint
    resolved: list[TensorEntry] = []
    sound: list[TensorEntry] = []
    partial: list[TensorEntry] = []
    lost = Lost()
    for entry in opened.ahead(checkpoint.tensors):
        raw, is_sound = _check_tensor(opened, entry, findings, lost)
        resolved.append(raw if is_sound else entry)
        (sound if is_sound else partial).append(raw)
    for blob in checkpoint.blobs:
        problem = _span_problem(opened, blob.span, f"item {blob.fqn!r}")
        if problem is not None:
            findings.append(problem)
            lost[blob.span.file, problem.code] += blob.span.nbytes
        else:
            check_blob(opened, blob, findings, content=False)
    broken = [(asset.file, json_problem(source, asset)) for source, asset in opened.own_assets]
    findings += [Finding.error("damaged-asset", file, what, "restore the file") for file, what in broken if what]
    findings += [*check_candidates(opened), *_check_foreign(opened)]
    for error in opened.broken:
        code, where = error.finding or "unreadable-part", error.where or opened.source.root
        findings.append(Finding.error(code, where, error.what, error.hint))
    if not opened.format.has_views:
        findings += check_spans(opened, tuple(findings))
    if opened.manifest is not None:
        findings += check_manifest(opened, opened.manifest)
        findings += check_frames(opened, opened.manifest, [*sound, *partial])
    elif opened.format.in_items:
        findings += check_copies([*sound, *partial], opened.source)
    return replace(checkpoint, tensors=tuple(resolved)), sound, partial, lost


def _check_tensor(opened: Opened, entry: TensorEntry, findings: list[Finding], lost: Lost) -> tuple[TensorEntry, bool]:
    """Return the tensor with the chunks that can be read, their spans raw, and whether that is all of it."""
    if len(entry.chunks) == 1 and entry.chunks[0].encoding == "raw" and _is_whole(opened, entry, entry.chunks[0]):
        return entry, True
    name = f"tensor {entry.fqn!r}"
    before = len(findings)
    problem = check_tiling(entry.shape, (chunk.box for chunk in entry.chunks))
    if problem is not None:
        codes = {"missing": "incomplete-tensor", "overlap": "overlapping-chunks"}
        code, where = codes.get(problem.kind, "chunk-outside-tensor"), files_of(entry) or opened.format.marker
        findings.append(Finding.error(code, where, f"{name}: {problem.describe(entry.shape)}"))
    chunks = []
    for chunk in entry.chunks:
        outside = _span_problem(opened, chunk.span, name)
        if outside is not None:
            findings.append(outside)
        elif (raw := _check_item(opened, entry, chunk, name, findings)) is not None:
            chunks.append(raw)
            continue
        lost[chunk.span.file, findings[-1].code] += -(-chunk.box.num_elems * entry.dtype.bits // 8)
    findings[before:] = [replace(finding, tensor=entry.fqn) for finding in findings[before:]]
    return replace(entry, chunks=tuple(chunks)), len(findings) == before


def files_of(entry: TensorEntry) -> str:
    """Return the files of a tensor, for people."""
    return first_few(sorted({chunk.span.file for chunk in entry.chunks}, key=natural_key), limit=4)


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
    except StorageError:
        raise
    except CkptError as error:
        where = f"{span.file}, bytes {span.offset}..{span.offset + span.nbytes}"
        code, what = error.finding or "bad-item", f"{name}: {error.what}"
        findings.append(Finding.error(code, where, what, error.hint, file=span.file))
        return None
    problem = dcp.item_mismatch(entry.dtype, chunk.box.sizes, head)
    if problem is not None:
        where = f"{span.file}, bytes {span.offset}..{span.offset + span.nbytes}"
        findings.append(Finding.error("item-mismatch", where, f"{name}: {problem}", file=span.file))
        return None
    return dcp.raw_chunk(chunk, head)


def check_candidates(opened: Opened) -> Iterator[Finding]:
    """Yield the sets of weights that lie beside the one that was opened."""
    for each in opened.candidates:
        if each.differs == "yes":
            hint = "choose one by its path, or by --from; converting refuses both"
            has_own = opened.identity.resumable == "yes" and not each.why.startswith("cannot be read")
            tell = Finding.warning if has_own else Finding.error  # its trainer has its own
            yield tell("several-weights", each.name, f"other weights lie beside it: {each.why}", hint)
        elif not each.is_taken:
            yield Finding.info("several-weights", each.name, f"not what a loader takes here: {each.why}")


def _check_foreign(opened: Opened) -> Iterator[Finding]:
    """Data files that nothing refers to: stale ones of an earlier save, or a lost part of this one."""
    manifest = opened.manifest
    if opened.format.is_file:  # its neighbours are files of their own
        return
    known = {*opened.checkpoint.files, *(asset.file for asset in opened.checkpoint.assets)}
    known |= {name for each in opened.candidates for name in (each.name, *each.files)}
    parts: set[str] = set()
    if manifest is not None:
        known |= {MANIFEST_NAME, *manifest.files, *manifest.assets, *manifest.documents}
        parts = {name.partition("/")[0] for name in manifest.documents if name.endswith(f"/{MANIFEST_NAME}")}
    max_depth = 0 if manifest is None or opened.format.has_parts else 3
    for name, size in opened.source.list_files(max_depth=max_depth).items():
        # A manifest names every file: all others that hold weights in any tool's format are strange then.
        strange = is_weights(name) if manifest is not None else name.endswith(opened.format.suffix) and size > 0
        strange = strange and not (opened.format.has_views and is_side_file(name))
        if strange and name not in known and name.partition("/")[0] not in parts:
            what = f"{size} bytes that nothing refers to"
            if manifest is None and not _LEFTOVER.fullmatch(name):
                yield Finding.info("unreferenced-file", name, f"{what}: of another model, variant or loader")
                continue
            hint = "a leftover of an earlier save: remove it if you do not need it"
            yield Finding.warning("unreferenced-file", name, what, hint)


def json_problem(source: Source, asset: Asset) -> str | None:
    """Say what is wrong with a file that a loader or a tokenizer parses as JSON; None for every other one."""
    name = asset.source_file
    if not (name.endswith(".json") and is_hf_asset(name) and asset.nbytes <= MAX_JSON_BYTES):
        return None
    try:
        text = source.read(name, 0, asset.nbytes)
        if text.count(b"{") + text.count(b"[") <= MAX_JSON_CONTAINERS:
            json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        return f"it is not valid JSON: {error}"
    except UnreadableError:  # it is shorter, or missing: the manifest's check says so
        return None
    return None


def check_blob(opened: Opened, blob: BlobEntry, findings: list[Finding], *, content: bool) -> bool:
    """Check an item as far as its zip tells; return whether that was all of it, or what is wrong has been said."""
    try:
        return dcp.check_blob(blob.span, opened.source, content=content)
    except StorageError:
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


# Hold the items' places in their files against one another: none is shared, and none is left over

_ZIP = b"PK\3\4"
_LEFT_OVER = frozenset({"unreferenced-file", "unreferenced-item", "long-file"})
"""Findings that say that something is there and nothing refers to it."""

_Owner = tuple[str, Chunk | None]  # FQN and, of a tensor, which of its chunks


def check_spans(opened: Opened, found: Iterable[Finding]) -> Iterator[Finding]:
    """Different items must not share bytes, and every byte must be part of one.

    Two tensors may be one item: they are tied. Two chunks of one tensor may not, and neither may two tensors while
    another item has no owner, as what was found so far tells: then one of them has lost its own to a damaged
    `.metadata`.
    """
    is_left_over = any(finding.code in _LEFT_OVER for finding in found)
    spans: dict[str, dict[tuple[int, int], list[_Owner]]] = defaultdict(lambda: defaultdict(list))
    for entry in opened.checkpoint.tensors:
        for chunk in entry.chunks:
            spans[chunk.span.file][chunk.span.offset, chunk.span.offset + chunk.span.nbytes].append((entry.fqn, chunk))
    for blob in opened.checkpoint.blobs:
        spans[blob.span.file][blob.span.offset, blob.span.offset + blob.span.nbytes].append((blob.fqn, None))
    for file, owners in spans.items():
        for finding in _check_file(opened, file, {span: owners[span][0][0] for span in sorted(owners)}):
            is_left_over = is_left_over or finding.code in _LEFT_OVER
            yield finding
    for file, owners in spans.items():
        for (start, end), sharing in owners.items():
            if len(sharing) > 1 and end > start and (what := _problem(sharing, is_left_over=is_left_over)) is not None:
                yield Finding.error("shared-item", f"{file}, bytes {start}..{end}", what, file=file)


def _check_file(opened: Opened, file: str, owners: dict[tuple[int, int], str]) -> Iterator[Finding]:
    """Check the items of one file, which are given in order."""
    recorded = {} if opened.manifest is None else opened.manifest.files
    reach, holder = 0, ""
    for (start, end), fqn in owners.items():
        if start < reach and end > start:
            where = f"{file}, bytes {start}..{min(end, reach)}"
            yield Finding.error("overlapping-spans", where, f"{holder!r} and {fqn!r} share bytes", file=file)
        elif start - reach >= ITEM_ALIGNMENT and _is_item(opened, file, reach):
            where, what = f"{file}, bytes {reach}..{start}", "an item that nothing refers to"
            hint = "a tensor is missing from .metadata, or has the place of another one in it"
            yield Finding.warning("unreferenced-item", where, what, hint)
        if end > reach:
            reach, holder = end, fqn
    extra = opened.checkpoint.files.get(file, 0) - reach
    if extra > 0 and file not in recorded:  # with a known size, the manifest's check says it
        what = f"{extra} bytes after its last item, which nothing refers to"
        yield Finding.warning("long-file", file, what, "a leftover of an earlier save, or a file of another checkpoint")


def _is_item(opened: Opened, file: str, position: int) -> bool:
    """Does an item begin where the one before it ends, or at the next place where ckpt would put one?"""
    if opened.checkpoint.files.get(file, 0) < position + ITEM_ALIGNMENT + len(_ZIP):
        return False
    aligned = -(-position // ITEM_ALIGNMENT) * ITEM_ALIGNMENT
    return any(opened.source.read(file, start, len(_ZIP)) == _ZIP for start in (position, aligned))


def _problem(sharing: list[_Owner], *, is_left_over: bool) -> str | None:
    """Say what is wrong with several owners of one item, if anything is."""
    (first, chunk), *others = sharing
    for fqn, other in others:
        if fqn == first and chunk is not None and other is not None and chunk.box != other.box:
            return f"two different chunks of tensor {fqn!r} are recorded here"
        if is_left_over:
            return f"{first!r} and {fqn!r} are both recorded here, and other data nowhere"
    return None
