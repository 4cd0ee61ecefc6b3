"""What of every file was read, and what was not and why: no file of a checkpoint goes without a word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckpt_tools.checkpoint.entries import BlobEntry, TensorEntry
from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.checks.data import firsts
from ckpt_tools.checks.structure import Lost, is_inside
from ckpt_tools.text import first_few
from ckpt_tools.units import format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Bytes of a file that were read, or were not."""

    file: str
    nbytes: int
    why: str = ""  # They were not


def account(
    opened: Opened,
    readable: Iterable[TensorEntry],
    scanned: Sequence[TensorEntry],
    blobs: Sequence[BlobEntry],
    lost: Lost,
    proven: Collection[str] = (),
) -> tuple[tuple[Extent, ...], tuple[Extent, ...]]:
    """Return what was read beside the headers of data files, and what was not.

    `scanned` has the first of each set of replicas, and nothing at level structure; `proven` are files whose own sums
    hold.
    """
    done = {chunk.span for entry in scanned for chunk in firsts(entry)}
    read, left = Counter[str](), lost.copy()
    unread = "a copy of it was read, or another part reads it (--part)" if scanned else "only headers were read"
    for span in {chunk.span for entry in readable for chunk in entry.chunks if chunk.span.nbytes}:
        if span in done:
            read[span.file] += span.nbytes
        else:
            left[span.file, unread] += span.nbytes
    for blob in blobs:
        read[blob.span.file] += blob.span.nbytes if is_inside(opened, blob.span) else 0
    if not opened.format.is_file:
        data = {name.partition("#")[0] for name in opened.checkpoint.files}
        assets = {} if opened.manifest is None else opened.manifest.assets
        held = assets.keys() if scanned or blobs else set()
        unsure = ({each.file for each in opened.companions} | assets.keys()) - held - set(proven)  # perhaps looked into
        used = opened.source.identities().keys() - unsure
        for file, nbytes in opened.source.list_files(max_depth=0 if opened.format.has_parts else 3).items():
            if file in opened.left_out:
                left[file, "weights beside those that were checked"] = nbytes
            elif file not in data and file in used:
                read[file] = nbytes
            elif file not in data:
                left[file, unread if file in assets else "nothing records what it should hold"] = nbytes
    return (
        tuple(Extent(file=file, nbytes=nbytes) for file, nbytes in sorted(read.items())),
        tuple(Extent(file=file, nbytes=nbytes, why=why) for (file, why), nbytes in sorted(left.items())),
    )


def describe(extents: Iterable[Extent], most: int) -> Iterator[str]:
    """Yield a line for the files of each reason, with the names of at most so many."""
    groups: dict[str, dict[str, int]] = {}
    for each in extents:
        groups.setdefault(each.why, {})[each.file] = each.nbytes
    for why, files in groups.items():
        number = f"{len(files)} file" + "s" * (len(files) != 1)
        yield f"{number}, {format_size(sum(files.values()))}: {why} ({first_few(files, most)})"
