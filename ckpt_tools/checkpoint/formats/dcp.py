"""DCP directories: `.metadata` plus `.distcp` files of `torch.save` items.

Source: torch `distributed/checkpoint/{metadata,filesystem}.py` (2.13).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.entries import Asset, ByteSpan, Checkpoint, Chunk, TensorEntry
from ckpt_tools.checkpoint.formats._pickle_values import DEFAULT_LIMITS
from ckpt_tools.checkpoint.formats._torch_tensor import ItemHead
from ckpt_tools.checkpoint.formats.dcp_metadata import build_metadata, estimate_metadata_bytes, parse_metadata
from ckpt_tools.checkpoint.formats.digest import digest_bytes
from ckpt_tools.checkpoint.formats.file_names import METADATA_NAME, is_hf_asset, is_step_file, is_weights
from ckpt_tools.checkpoint.formats.format import Format, Opened, Reader, read_document
from ckpt_tools.checkpoint.formats.item_frames import digest_frames, planned_payloads
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME, Manifest
from ckpt_tools.checkpoint.formats.torch_zip import check_archive, item_ends, parse_item, parse_own_item
from ckpt_tools.errors import UnreadableError, UnsupportedError
from ckpt_tools.storage.journal import JOURNAL_NAME
from ckpt_tools.storage.source import Source
from ckpt_tools.text import escape_name, natural_key

METADATA_LIMITS = DEFAULT_LIMITS  # How much a `.metadata` may ask for; looked up whenever one is opened


def read_item(
    span: ByteSpan, dtype: DType, sizes: tuple[int, ...], reader: Reader, *, thorough: bool = False
) -> ItemHead:
    """Read what an item says of itself; of one that holds what it should, as ckpt writes it, nothing need be parsed."""
    read = _reads(span, reader)
    try:
        return parse_own_item(span.nbytes, dtype, sizes, read) or parse_item(span.nbytes, read, thorough=thorough)
    except UnreadableError as error:
        _locate(error, span)
        raise


def check_blob(span: ByteSpan, reader: Reader, *, content: bool = True) -> bool:
    """Check a non-tensor item as `check_archive` does."""
    try:
        return check_archive(span.nbytes, _reads(span, reader), content=content)
    except UnreadableError as error:
        _locate(error, span)
        raise


def _reads(span: ByteSpan, reader: Reader) -> Callable[[int, int], bytes]:
    def read(offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes < 0 or offset + nbytes > span.nbytes:
            raise UnreadableError("the item points outside of itself")
        return reader.read(span.file, span.offset + offset, nbytes)

    return read


def _locate(error: UnreadableError, span: ByteSpan) -> None:
    """Say of an error where its item lies."""
    if error.where is None:
        error.where = escape_name(f"{span.file}, bytes {span.offset}..{span.offset + span.nbytes}")


def _is_other(span: ByteSpan, reader: Reader, seen: list[bool]) -> bool:
    """Is an item of a kind that ckpt does not read? The first one tells for all, by `seen`."""
    if not seen:
        try:
            parse_item(span.nbytes, _reads(span, reader))
        except UnreadableError as error:
            seen.append(isinstance(error, UnsupportedError))
    return bool(seen and seen[0])


def item_mismatch(dtype: DType, sizes: tuple[int, ...], head: ItemHead) -> str | None:
    """Return how an item disagrees with the metadata's dtype and chunk sizes, or None."""
    if head.dtype != dtype:
        return f"the metadata has dtype {dtype.name}, but the item has {head.dtype.name}"
    if head.shape != sizes:
        return f"the metadata has sizes {list(sizes)}, but the item has {list(head.shape)}"
    return None


def _resolve_chunk(entry: TensorEntry, chunk: Chunk, reader: Reader) -> Chunk:
    if chunk.encoding == "raw":
        return chunk
    try:
        head = read_item(chunk.span, entry.dtype, chunk.box.sizes, reader)
    except UnsupportedError as error:
        raise UnsupportedError(f"tensor {entry.fqn!r}: {error.what}", where=error.where, hint=error.hint) from error
    if (problem := item_mismatch(entry.dtype, chunk.box.sizes, head)) is not None:
        raise UnreadableError(
            f"tensor {entry.fqn!r}: {problem}",
            where=f"{chunk.span.file}, bytes {chunk.span.offset}..",
            hint="the checkpoint is damaged, or was saved by FSDP on top of an uneven tensor-parallel cut of "
            "the same dim, which PyTorch cannot load either",
        )
    return raw_chunk(chunk, head)


def raw_chunk(chunk: Chunk, head: ItemHead) -> Chunk:
    """Return the chunk with its span on the payload of its item."""
    span = ByteSpan(file=chunk.span.file, offset=chunk.span.offset + head.payload_offset, nbytes=head.payload_nbytes)
    return Chunk(box=chunk.box, span=span, strides=head.strides, crc32=head.crc32)


class Dcp(Format):
    """What `torch.distributed.checkpoint.save` writes, and `shard` and `reshard`."""

    name = "dcp"
    found_by = "`.metadata` in a directory"
    about = "of any number of ranks and files; strided and tied items, blobs"
    written_by = "`shard`, `reshard`"
    whole_by = "`.metadata`, which names every file and chunk; with a config.json beside it, its names and shapes"
    suffix = ".distcp"
    is_sharded = True
    is_training = True
    in_items = True
    loads_by_dcp = True
    marker = METADATA_NAME

    def detects(self, files: Mapping[str, int]) -> bool:
        """By `.metadata`, without which `dcp.load` finds nothing."""
        return METADATA_NAME in files

    def open(self, source: Source, files: Mapping[str, int], *, path: str, manifest: Manifest | None) -> Opened:  # noqa: ARG002
        """Read `.metadata`: the items' own heads are read when somebody asks for their bytes (`resolve`)."""
        content = read_document(source, METADATA_NAME, METADATA_LIMITS.max_bytes)
        try:
            parsed = parse_metadata(
                content, limits=METADATA_LIMITS, is_other=partial(_is_other, reader=source, seen=[])
            )
        except UnreadableError as error:
            if error.where is None:
                error.where = escape_name(os.path.join(source.root, METADATA_NAME))
            raise
        used = {chunk.span.file for entry in parsed.tensors for chunk in entry.chunks}
        used |= {blob.span.file for blob in parsed.blobs}
        own = {*used, METADATA_NAME, MANIFEST_NAME, JOURNAL_NAME}
        left_out: tuple[str, ...] = ()
        if manifest is not None:
            recorded = tuple(Asset(file=name, nbytes=record.nbytes) for name, record in manifest.assets.items())
            # The format's own files are never carried along: conversions refuse a manifest that lists them.
            companions = tuple(asset for asset in recorded if is_weights(asset.file) and asset.file not in own)
            assets = tuple(asset for asset in recorded if asset not in companions)
        else:
            others = [Asset(file=name, nbytes=size) for name, size in files.items() if name not in own]
            assets = tuple(asset for asset in others if is_hf_asset(asset.file))
            rest = [asset for asset in others if not is_hf_asset(asset.file)]
            companions = tuple(asset for asset in rest if is_step_file(asset.file))
            left_out = tuple(asset.file for asset in rest if not is_step_file(asset.file))
        # A trainer that saved over the directory has left our manifest behind; its mesh is not this one's.
        mesh = manifest.mesh if manifest is not None and _is_recorded(manifest, content) else None
        return Opened(
            format=self,
            checkpoint=Checkpoint(
                root=source.root,
                format=self.name,
                tensors=parsed.tensors,
                blobs=parsed.blobs,
                assets=assets,
                mesh=mesh,
                placements=manifest.placements if manifest is not None and mesh is not None else None,
                files={name: files[name] for name in sorted(used) if name in files},
            ),
            source=source,
            manifest=manifest,
            origin=None if manifest is None else manifest.origin,
            left_out=left_out,
            companions=companions,
            single_names=parsed.single_names if manifest is None else 0,
            flattened=parsed.flattened,
            lost=tuple(sorted(used - files.keys(), key=natural_key)),
            complete="" if used - files.keys() else f"every file that {METADATA_NAME} names is there",
        )

    def heads(self, entry: TensorEntry) -> Iterable[tuple[str, int, int]]:
        """Return both ends of the tensor's items."""
        for chunk in entry.chunks:
            if chunk.encoding != "raw":
                yield from ((chunk.span.file, chunk.span.offset + at, n) for at, n in item_ends(chunk.span.nbytes))

    def resolve(self, entry: TensorEntry, reader: Reader) -> TensorEntry:
        """Read the heads of the tensor's items."""
        if len(entry.chunks) > 1:
            reader.prefetch(self.heads(entry))
        return replace(entry, chunks=tuple(_resolve_chunk(entry, chunk, reader) for chunk in entry.chunks))

    def build_marker(self, target: Checkpoint) -> bytes:
        """Build `.metadata`."""
        return build_metadata(target.tensors, target.blobs)

    def estimate_marker_bytes(self, target: Checkpoint) -> int:
        """Estimate the length of `.metadata`."""
        return estimate_metadata_bytes(target.tensors, target.blobs)

    def digest_frames(self, target: Checkpoint, reader: Reader, *, marker: bytes | None = None) -> dict[str, str]:
        """Digest items' heads and directories, and the padding between items."""
        payloads = planned_payloads(target.tensors)
        if marker is not None:
            tensors = (self.resolve(entry, reader) for entry in parse_metadata(marker).tensors)
            payloads = (chunk.span for entry in tensors for chunk in entry.chunks)
        return digest_frames(target.files, payloads, target.blobs, reader)


def _is_recorded(manifest: Manifest, metadata: bytes) -> bool:
    record = manifest.documents.get(METADATA_NAME)
    return record is not None and record.nbytes == len(metadata) and record.digest == digest_bytes(metadata)


FORMAT = Dcp()
