"""Recipes: each does one deliberate damage to a checkpoint, and nothing else."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import xxhash

from ckpt_tools import api
from ckpt_tools.checkpoint.entries import ByteSpan, Chunk, TensorEntry
from ckpt_tools.checkpoint.formats.dcp_metadata import build_metadata, parse_metadata
from ckpt_tools.checkpoint.formats.torch_zip import item_frame

MANIFEST = "ckpt_manifest.json"


def flip(path: Path, offset: int, mask: int = 1) -> None:
    """Flip bits of one byte; negative offsets count from the end."""
    raw = bytearray(path.read_bytes())
    raw[offset] ^= mask
    path.write_bytes(raw)


def truncate(path: Path, nbytes: int) -> None:
    """Cut `nbytes` off the end."""
    os.truncate(path, path.stat().st_size - nbytes)


def swap(one: Path, other: Path) -> None:
    """Exchange two files."""
    raw = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(raw)


def forget_manifest(run: Path) -> None:
    """Leave a DCP directory as a trainer would write it."""
    (run / MANIFEST).unlink()


def edit_metadata(run: Path, edit: Callable[[TensorEntry], TensorEntry]) -> None:
    """Rewrite `.metadata` with every tensor passed through `edit`."""
    parsed = parse_metadata((run / ".metadata").read_bytes())
    (run / ".metadata").write_bytes(build_metadata(tuple(map(edit, parsed.tensors)), parsed.blobs))


def edit_chunks(run: Path, fqn: str, edit: Callable[[tuple[Chunk, ...]], tuple[Chunk, ...]]) -> None:
    """Rewrite `.metadata` with other chunks for one tensor."""
    edit_metadata(run, lambda e: replace(e, chunks=edit(tuple(e.chunks))) if e.fqn == fqn else e)


def edit_manifest(run: Path, edit: Callable[[dict], None]) -> None:
    """Change the manifest and give it the checksum that belongs to it: a lie, not an accident."""
    text = (run / MANIFEST).read_bytes()
    document = json.loads(text)
    del document["checksum"]
    edit(document)
    body = ("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in document.items())).encode()
    (run / MANIFEST).write_bytes(body + f',\n"checksum": "{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode())


def item_span(run: Path, fqn: str, index: int = 0) -> ByteSpan:
    """Where an item lies."""
    entry = next(e for e in api.open_checkpoint(run).tensors if e.fqn == fqn)
    return entry.chunks[index].span


def payload_offset(run: Path, fqn: str, index: int = 0) -> tuple[Path, int]:
    """File and first byte of an item's payload."""
    entry = next(e for e in api.open_checkpoint(run).tensors if e.fqn == fqn)
    chunk = entry.chunks[index]
    return run / chunk.span.file, chunk.span.offset + item_frame(entry.dtype, chunk.box.sizes).payload_offset


def replace_item(run: Path, fqn: str, item: bytes, index: int = 0) -> None:
    """Put another item at the end of the file and let `.metadata` point there."""
    span = item_span(run, fqn, index)
    path = run / span.file
    offset = path.stat().st_size
    with path.open("ab") as file:
        file.write(item)

    def moved(chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
        new = replace(chunks[index], span=replace(span, offset=offset, nbytes=len(item)))
        return (*chunks[:index], new, *chunks[index + 1 :])

    edit_chunks(run, fqn, moved)


def read_item(run: Path, fqn: str, index: int = 0) -> bytes:
    """The bytes of an item."""
    span = item_span(run, fqn, index)
    return (run / span.file).read_bytes()[span.offset : span.offset + span.nbytes]


def rezip(item: bytes, edit: Callable[[list[tuple[str, bytes]]], list[tuple[str, bytes]]], **options) -> bytes:
    """Write the entries of an item again, as Python's own zipfile writes them."""
    with zipfile.ZipFile(BytesIO(item)) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    out = BytesIO()
    with zipfile.ZipFile(out, "w", **options) as archive:
        for name, content in edit(entries):
            archive.writestr(name, content)
    return out.getvalue()
