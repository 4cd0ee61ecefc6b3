"""From two descriptions to a plan: which boxes go where. Pure; no byte is read.

A plan is a list of files to write. Every `FilePlan` stands alone, so a plan can be split over machines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ckpt_tools.checkpoint.dtypes import BY_NAME, DType
from ckpt_tools.checkpoint.entries import Asset, BlobEntry, ByteSpan, Checkpoint, Chunk, Encoding, TensorEntry
from ckpt_tools.checkpoint.formats.dcp_placing import places_of
from ckpt_tools.checkpoint.formats.manifest import BLOCK_BYTES
from ckpt_tools.checkpoint.formats.torch_zip import item_frame
from ckpt_tools.checkpoint.layout import Blocks, Box, BoxIndex, split_blocks
from ckpt_tools.checkpoint.tiling import check_tiling
from ckpt_tools.errors import CkptError, UnreadableError, UsageError
from ckpt_tools.text import first_few, is_plain_path
from ckpt_tools.transfer.box_bytes import MAX_WASTE
from ckpt_tools.transfer.split import restrict

TILE_BLOCKS = 4
"""With rows of 1.4 KiB in a block (transposed experts of gpt-oss), these take half as long as one by one.
Of a tensor that is cast, little is read again at the end of as many (`AsStored`)."""


Seal = Callable[[Iterable[int]], Iterable[tuple[int, bytes]]]
"""From the CRC-32s of a file's payloads, in the order in which they lie there, to (offset, bytes) of what follows each
of them. They are drawn one by one."""


class Copy(NamedTuple):
    """One box of one tensor, to be written at one place. A tuple: a plan has millions, and they are made faster."""

    source: TensorEntry
    dtype: DType  # Element type to write; casts when it is not the source's
    box: Box  # Elements of the global tensor
    offset: int  # First byte of the payload in the destination file
    encoding: Encoding = "raw"  # What surrounds the payload

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return self.dtype.num_bytes(self.box.num_elems)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """One file to write."""

    file: str  # Name relative to the destination
    nbytes: int
    copies: tuple[Copy, ...]
    head: bytes = b""  # Fixed bytes at the beginning (a safetensors header)
    seal: Seal | None = None  # What closes a file that holds the CRC-32s of its payloads (an archive)


@dataclass(frozen=True)
class Plan:
    """A conversion: what is there, what shall be there, and from both every file to write.

    Raises:
        UnreadableError: The source's chunks do not tile a tensor exactly.
    """

    source: Checkpoint  # Chunks are raw (see `Opened.resolve`)
    target: Checkpoint  # Tensors with the source's FQNs and shapes; dtypes may differ (casts)
    heads: Mapping[str, bytes]  # File → fixed bytes at its beginning
    seals: Mapping[str, Seal] = field(default_factory=dict)  # File → what closes it

    def __post_init__(self) -> None:
        for entry in self.source.tensors:
            check_complete(entry)

    @cached_property
    def files(self) -> tuple[FilePlan, ...]:
        """Every file to write; made when first asked for."""
        return plan_copies(self.source, self.target, heads=self.heads, seals=self.seals)

    def files_of(self, names: Collection[str]) -> tuple[FilePlan, ...]:
        """Plan some of the files, without a look at what goes into the others."""
        return plan_copies(self.source, restrict(self.target, names), heads=self.heads, seals=self.seals)

    @property
    def total_bytes(self) -> int:
        """Bytes that will be written."""
        return sum(self.target.files.values())

    @cached_property
    def read_bytes(self) -> int:
        """Logical source bytes that will be moved, each tensor once."""
        entries = {entry.fqn: entry.nbytes for entry in self.source.tensors}
        blobs = sum(blob.span.nbytes for blob in self.target.blobs)
        return sum(entries[entry.fqn] for entry in self.target.tensors) + blobs

    def peak_bytes(self, num_workers: int) -> int:
        """Upper bound of the buffers that `execute` holds at once."""
        entries = {entry.fqn: entry for entry in self.source.tensors}
        widest = (buffer_bytes(entries[target.fqn], target.dtype) for target in self.target.tensors)
        return num_workers * max(widest, default=0)


def group_by_tensor(files: Iterable[FilePlan]) -> list[tuple[TensorEntry, list[tuple[str, Copy]]]]:
    """Return (source tensor, its copies with their files), in the order of the files' copies."""
    groups: dict[str, list[tuple[str, Copy]]] = defaultdict(list)
    for file in files:
        for copy in file.copies:
            groups[copy.source.fqn].append((file.file, copy))
    return [(group[0][1].source, group) for group in groups.values()]


def blocks_of(entry: TensorEntry, dtype: DType) -> Blocks:
    """Return the canonical blocks of a tensor that is written as `dtype`: the units of work and of digests."""
    blocks = split_blocks(entry.shape, dtype.bits, block_bytes=BLOCK_BYTES, granule=dtype.granule)
    if dtype.granule > 1 and blocks.dim >= 0 and entry.shape[-1] % dtype.granule:
        raise UsageError(f"tensor {entry.fqn!r}: rows of {entry.shape[-1]} {dtype.name} elements end inside a byte")
    return blocks


def blocks_at_once(entry: TensorEntry) -> int:
    """Return how many blocks of a tensor one worker takes in a row: several where it is stored in another order.

    A block of a transposed matrix needs a short part of every row that is stored, its neighbour the next short part:
    `read_block` reads what they need together.
    """
    return TILE_BLOCKS if any(_is_across(chunk) for chunk in entry.chunks) else 1


def _is_across(chunk: Chunk) -> bool:
    if chunk.strides is None:
        return False
    seen = [stride for stride, size in zip(chunk.strides, chunk.box.sizes, strict=True) if size > 1]
    return seen != sorted(seen, reverse=True)


def buffer_bytes(entry: TensorEntry, dtype: DType) -> int:
    """Bytes that one worker needs to write `entry` as `dtype`: a block, as much to rearrange or cast it, and a tile."""
    widest = max(entry.dtype.bits, dtype.bits)
    block = min(entry.num_elems * widest // 8, BLOCK_BYTES * widest // dtype.bits)
    at_once = blocks_at_once(entry)
    if at_once > 1:
        return 2 * block + MAX_WASTE * min(entry.nbytes, at_once * block)
    is_strided = any(chunk.strides is not None for chunk in entry.chunks)
    return block + block * (MAX_WASTE if is_strided else 1)


def plan_copies(
    source: Checkpoint,
    destination: Checkpoint,
    *,
    heads: Mapping[str, bytes] | None = None,
    seals: Mapping[str, Seal] | None = None,
) -> tuple[FilePlan, ...]:
    """Plan every chunk of `destination` out of `source`, whose chunks are raw.

    FQNs and shapes are the same in both; dtypes may differ (casts). `heads` are fixed bytes at the beginning of a file.
    """
    heads, seals = heads or {}, seals or {}
    copies: dict[str, list[Copy]] = {file: [] for file in destination.files}
    by_fqn = {entry.fqn: entry for entry in source.tensors}
    for target in destination.tensors:
        entry = by_fqn[target.fqn]
        if entry.shape != target.shape:
            raise CkptError(f"{target.fqn}: shape {entry.shape} cannot become {target.shape}")
        dtype, sizes, before = target.dtype, None, 0
        for file, box, offset, encoding in places_of(target.chunks):
            if encoding != "raw" and box.sizes != sizes:
                sizes = box.sizes
                before = item_frame(dtype, sizes).payload_offset
            copies[file].append(Copy(entry, dtype, box, offset if encoding == "raw" else offset + before, encoding))
    blobs = {blob.fqn: blob for blob in source.blobs}
    for target_blob in destination.blobs:
        copies[target_blob.span.file].append(
            copy_span(blob_name(target_blob), blobs[target_blob.fqn].span, target_blob.span.offset)
        )
    return tuple(
        FilePlan(file=file, nbytes=nbytes, copies=tuple(copies[file]), head=heads.get(file, b""), seal=seals.get(file))
        for file, nbytes in destination.files.items()
    )


def plan_assets(assets: Iterable[Asset]) -> tuple[FilePlan, ...]:
    """Plan to carry files along as they are."""
    spans = ((asset, ByteSpan(file=asset.source_file, offset=0, nbytes=asset.nbytes)) for asset in assets)
    copies = ((asset, copy_span(asset_name(asset), span, 0)) for asset, span in spans)
    return tuple(FilePlan(file=asset.file, nbytes=asset.nbytes, copies=(copy,)) for asset, copy in copies)


def copy_span(name: str, span: ByteSpan, offset: int) -> Copy:
    """Copy bytes as they are: a 1-d U8 tensor like any other."""
    box = Box((0,), (span.nbytes,))
    entry = TensorEntry(fqn=name, dtype=BY_NAME["U8"], shape=(span.nbytes,), chunks=(Chunk(box=box, span=span),))
    return Copy(source=entry, dtype=entry.dtype, box=box, offset=offset)


def chunk_index(entry: TensorEntry) -> BoxIndex[Chunk]:
    """Index the chunks of `entry` by box, the first of each set of replicas."""
    distinct: dict[Box, Chunk] = {}
    for chunk in entry.chunks:
        distinct.setdefault(chunk.box, chunk)
    return BoxIndex((chunk, box) for box, chunk in distinct.items())


def asset_name(asset: Asset) -> str:
    """Return the name under which an asset's digest is reported; no FQN contains a NUL."""
    return "\0asset\0" + asset.file


def blob_name(blob: BlobEntry) -> str:
    """Return the name under which a blob's digest is reported; no FQN contains a NUL."""
    return "\0blob\0" + blob.fqn


def is_plain(entry: TensorEntry) -> bool:
    """Is this the bytes of an asset or a blob, and no tensor?"""
    return entry.fqn.startswith("\0")


def check_names(names: Iterable[str]) -> None:
    """Raise UnreadableError unless `names` can all be files of one destination.

    Most come from the source, some from what it merely claims: two may be equal, one may be the directory of another,
    and one may lead out.
    """
    seen: set[str] = set()
    for name in names:
        if not is_plain_path(name):
            raise UnreadableError("a file name leads out of the destination", where=name)
        if name in seen:
            raise UnreadableError("two files of the destination would have the same name", where=name)
        seen.add(name)
    for name in seen:
        parts = name.split("/")
        if any("/".join(parts[:i]) in seen for i in range(1, len(parts))):
            raise UnreadableError("a file of the destination would also be a directory", where=name)


def check_complete(entry: TensorEntry) -> None:
    """Raise UnreadableError unless the chunks of `entry` hold every element exactly once."""
    if len(entry.chunks) == 1 and entry.chunks[0].box.sizes == entry.shape:
        return
    problem = check_tiling(entry.shape, (chunk.box for chunk in entry.chunks))
    if problem is None:
        return
    files = sorted({chunk.span.file for chunk in entry.chunks})
    kind = "incomplete" if problem.kind == "missing" else "inconsistent"
    what = f"tensor {entry.fqn!r} is {kind}: {problem.describe(entry.shape)}"
    hint = "`ckpt verify` lists everything that is wrong; restore the checkpoint or save it again"
    raise UnreadableError(what, where=first_few(files, 4) or None, hint=hint)
