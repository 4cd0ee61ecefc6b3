"""Hold the items' places in their files against one another: none is shared, and none is left over."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from ckpt_tools.description.checkpoint import Chunk, Finding
from ckpt_tools.formats.dcp_placing import ITEM_ALIGNMENT
from ckpt_tools.formats.opening import Opened

_ZIP = b"PK\3\4"
_LEFT_OVER = frozenset({"unreferenced-file", "unreferenced-item", "long-file"})
"""Findings that say that something is there and nothing refers to it."""

_Owner = tuple[str, Chunk | None]
"""FQN and, of a tensor, which of its chunks."""


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
            yield Finding.error(
                "overlapping-spans",
                f"{file}, bytes {start}..{min(end, reach)}",
                f"{holder!r} and {fqn!r} share bytes",
                file=file,
            )
        elif start - reach >= ITEM_ALIGNMENT and _is_item(opened, file, reach):
            yield Finding.warning(
                "unreferenced-item",
                f"{file}, bytes {reach}..{start}",
                "an item that nothing refers to",
                "a tensor is missing from .metadata, or has the place of another one in it",
            )
        if end > reach:
            reach, holder = end, fqn
    extra = opened.checkpoint.files.get(file, 0) - reach
    if extra > 0 and file not in recorded:  # with a known size, the manifest's check says it
        yield Finding.warning(
            "long-file",
            file,
            f"{extra} bytes after its last item, which nothing refers to",
            "a leftover of an earlier save, or a file of another checkpoint",
        )


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
