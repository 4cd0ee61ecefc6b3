"""Open a checkpoint: find its format, read its headers, describe it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from ckpt_tools.description.checkpoint import Asset, Checkpoint, Format, TensorEntry
from ckpt_tools.errors import CkptError, LimitError, UnreadableError
from ckpt_tools.formats import dcp, hf, safetensors
from ckpt_tools.formats._json import MAX_JSON_BYTES
from ckpt_tools.formats.dcp_metadata import parse_metadata
from ckpt_tools.formats.detect import detect, is_hf_asset, is_step_file, is_weights
from ckpt_tools.formats.digest import digest_bytes
from ckpt_tools.formats.inert_pickle import DEFAULT_LIMITS
from ckpt_tools.formats.layouts import HEAD_BYTES, explain_file
from ckpt_tools.formats.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, Origin, parse_manifest
from ckpt_tools.storage.journal import JOURNAL_NAME
from ckpt_tools.storage.source import Source
from ckpt_tools.text import escape_name, first_few

_OWN = (MANIFEST_NAME, JOURNAL_NAME)
METADATA_LIMITS = DEFAULT_LIMITS
"""How much a `.metadata` may ask for; looked up whenever one is opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An open checkpoint: its description, and the way to its bytes."""

    checkpoint: Checkpoint
    source: Source
    manifest: Manifest | None
    """Its manifest, when ckpt wrote it."""
    origin: Origin | None
    """The exact headers and index of an HF source."""
    left_out: tuple[str, ...] = ()
    """Files beside it that hold weights in other formats, and are not carried along."""
    beside: tuple[Asset, ...] = ()
    """Files of a training step beside its DCP files (Lightning's meta.pt, RNG states, …): `reshard` carries them along
    as they are, unopened; a model does not need them."""
    single_names: int = 0
    """Names that nothing in the checkpoint repeats: a changed one would not be noticed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.source.close()

    def resolved(self) -> Checkpoint:
        """Return the description with every chunk's span on its raw bytes; reads the items' headers."""
        return replace(self.checkpoint, tensors=tuple(map(self.resolve, self.checkpoint.tensors)))

    def resolve(self, entry: TensorEntry) -> TensorEntry:
        """Return `entry` with every chunk's span on its raw bytes; reads its items' headers."""
        return entry if self.checkpoint.format != "dcp" else dcp.resolve(entry, self.source)


def open_path(path: str, *, format: Format | None = None) -> Opened:  # noqa: A002 - the option's name
    """Open the checkpoint at `path`.

    Args:
        path: A safetensors file, an HF directory, or a DCP directory.
        format: Overrides what would be detected.

    Raises:
        UnreadableError: Not a complete, readable checkpoint.
    """
    if not os.path.lexists(path):
        raise UnreadableError("no such file or directory", where=path)
    is_file = not os.path.isdir(path)
    source = Source(os.path.dirname(os.path.abspath(path)) if is_file else path)
    try:
        if is_file:
            return _open_file(path, source, format)
        try:
            files = source.list_files()
        except OSError as error:
            raise CkptError(f"cannot list: {error.strerror}", where=path) from error
        found = format or detect(files, path=path)
        manifest = _read_manifest(source, files)
        if found == "dcp":
            return _open_dcp(source, files, manifest)
        if found == "hf-sharded":
            return _open_sharded(source, files)
        return _open_hf(source, files, manifest, path)
    except BaseException:
        source.close()
        raise


def _open_file(path: str, source: Source, format: Format | None) -> Opened:  # noqa: A002
    name = os.path.basename(path)
    if format in ("dcp", "hf-sharded") or (format is None and not name.endswith(".safetensors")):
        raise explain_file(path, _head(source, name))
    file = read_file(source, name)
    checkpoint = replace(hf.describe(source.root, [file], None), format="safetensors")
    return Opened(checkpoint=checkpoint, source=source, manifest=None, origin=_origin([file], None, b""))


def read_file(source: Source, name: str) -> hf.File:
    """Read and parse the header of one safetensors file."""
    where = os.path.join(source.root, name)
    nbytes = source.size(name)
    try:
        length = _header_length(source, name, nbytes, where)
    except UnreadableError as error:
        raise explain_file(where, _head(source, name), otherwise=error) from error
    text = source.read(name, safetensors.LENGTH_BYTES, length)
    header = safetensors.parse_header(text, file=name, file_nbytes=nbytes)
    return hf.File(name=name, header_text=text, header=header)


def _header_length(source: Source, name: str, nbytes: int, where: str) -> int:
    length = safetensors.parse_length(source.read(name, 0, min(nbytes, safetensors.LENGTH_BYTES)), where=where)
    if safetensors.LENGTH_BYTES + length > nbytes:
        raise UnreadableError(
            f"the header claims {length} bytes, the file has {nbytes}",
            where=where,
            hint="the file is truncated or not a safetensors file",
        )
    return length


def _head(source: Source, name: str) -> bytes:
    return source.read(name, 0, min(source.size(name), HEAD_BYTES))


def _read_manifest(source: Source, files: Mapping[str, int]) -> Manifest | None:
    if MANIFEST_NAME not in files:
        return None
    return parse_manifest(read_document(source, MANIFEST_NAME, MAX_MANIFEST_BYTES))


def read_document(source: Source, name: str, limit: int) -> bytes:
    """Read a small file whole."""
    nbytes = source.size(name)
    if nbytes > limit:
        raise LimitError(f"{nbytes} bytes, the limit is {limit}", where=name)
    return source.read(name, 0, nbytes)


def _open_dcp(source: Source, files: Mapping[str, int], manifest: Manifest | None) -> Opened:
    content = read_document(source, dcp.METADATA_NAME, METADATA_LIMITS.max_bytes)
    try:
        parsed = parse_metadata(content, limits=METADATA_LIMITS)
    except UnreadableError as error:
        if error.where is None:
            error.where = escape_name(os.path.join(source.root, dcp.METADATA_NAME))
        raise
    used = {chunk.span.file for entry in parsed.tensors for chunk in entry.chunks}
    used |= {blob.span.file for blob in parsed.blobs}
    others = {name: size for name, size in files.items() if name not in (*used, dcp.METADATA_NAME, *_OWN)}
    left_out: tuple[str, ...] = ()
    if manifest is not None:
        recorded = tuple(Asset(file=name, nbytes=record.nbytes) for name, record in manifest.assets.items())
        own = {*used, dcp.METADATA_NAME, *_OWN}  # never carried along: conversions refuse a manifest that lists them
        beside = tuple(asset for asset in recorded if is_weights(asset.file) and asset.file not in own)
        assets = tuple(asset for asset in recorded if asset not in beside)
    else:
        assets = tuple(Asset(file=name, nbytes=size) for name, size in others.items() if is_hf_asset(name))
        rest = {name: size for name, size in others.items() if not is_hf_asset(name)}
        beside = tuple(Asset(file=name, nbytes=size) for name, size in rest.items() if is_step_file(name))
        left_out = tuple(name for name in rest if not is_step_file(name))
    # A trainer that saved over the directory has left our manifest behind; its mesh is not this one's.
    is_current = manifest is not None and _is_recorded(manifest, content)
    checkpoint = Checkpoint(
        root=source.root,
        format="dcp",
        tensors=parsed.tensors,
        blobs=parsed.blobs,
        assets=assets,
        mesh=manifest.mesh if manifest is not None and is_current else None,
        placements=manifest.placements if manifest is not None and is_current and manifest.mesh is not None else None,
        files={name: files[name] for name in sorted(used) if name in files},
    )
    return Opened(
        checkpoint=checkpoint,
        source=source,
        manifest=manifest,
        origin=None if manifest is None else manifest.origin,
        left_out=left_out,
        beside=beside,
        single_names=parsed.single_names if manifest is None else 0,
    )


def _is_recorded(manifest: Manifest, metadata: bytes) -> bool:
    record = manifest.documents.get(dcp.METADATA_NAME)
    return record is not None and record.nbytes == len(metadata) and record.digest == digest_bytes(metadata)


def _open_sharded(source: Source, files: Mapping[str, int]) -> Opened:
    names = [name for name in files if hf.SHARDED_FILE.fullmatch(name)]
    checkpoint = hf.describe_sharded(source.root, [read_file(source, name) for name in names])
    assets = tuple(Asset(file=name, nbytes=size) for name, size in files.items() if is_hf_asset(name))
    return Opened(checkpoint=replace(checkpoint, assets=assets), source=source, manifest=None, origin=None)


def _open_hf(source: Source, files: Mapping[str, int], manifest: Manifest | None, path: str) -> Opened:
    index_name, names = _choose_files(files, path)
    index_text = b"" if index_name is None else read_document(source, index_name, MAX_JSON_BYTES)
    index = None
    if index_name is not None:
        index = hf.parse_index(index_text, where=index_name)
        names = sorted(set(index.values()))
        missing = [name for name in names if name not in files]
        if missing:
            raise UnreadableError(
                f"{len(missing)} of {len(names)} files of the index are missing: {first_few(missing, 4)}",
                where=index_name,
                hint="download or copy the rest of the model",
            )
    opened = [read_file(source, name) for name in names]
    opened += _without_tensors(source, {name: size for name, size in files.items() if name not in names})
    names = [file.name for file in opened]
    checkpoint = hf.describe(source.root, opened, index)
    own = {*names, index_name, *_OWN}
    beside = [name for name in files if name not in own]
    return Opened(
        checkpoint=replace(
            checkpoint,
            assets=tuple(Asset(file=name, nbytes=files[name]) for name in beside if not is_weights(name)),
        ),
        source=source,
        manifest=manifest,
        origin=_origin(opened, index_name, index_text),
        left_out=tuple(name for name in beside if is_weights(name)),
    )


def _without_tensors(source: Source, files: Mapping[str, int]) -> list[hf.File]:
    """Return the safetensors files that hold a header and nothing else: no index names them, yet they belong here."""
    found = []
    for name, nbytes in files.items():
        if "/" in name or not name.endswith(".safetensors"):
            continue
        head = source.read(name, 0, min(nbytes, safetensors.LENGTH_BYTES))
        if int.from_bytes(head, "little") != nbytes - safetensors.LENGTH_BYTES:
            continue
        with contextlib.suppress(UnreadableError):  # what cannot be read is left out, and said
            file = read_file(source, name)
            if not file.header.tensors:
                found.append(file)
    return found


def _choose_files(files: Mapping[str, int], path: str) -> tuple[str | None, list[str]]:
    """Return (index, []) or (None, the only files) of an HF directory."""
    top = [name for name in files if "/" not in name]
    indexes = [name for name in top if name.endswith(hf.INDEX_SUFFIX)]
    singles = [name for name in top if name.endswith(".safetensors")]
    for preferred in ("model", "diffusion_pytorch_model"):
        if preferred + hf.INDEX_SUFFIX in indexes:
            return preferred + hf.INDEX_SUFFIX, []
        if preferred + ".safetensors" in singles:
            return None, [preferred + ".safetensors"]
    if len(indexes) == 1:
        return indexes[0], []
    if len(singles) == 1 and not indexes:
        return None, singles
    if not singles and not indexes:
        raise UnreadableError("no safetensors files here", where=path)
    raise UnreadableError(
        f"{len(singles)} safetensors files and {len(indexes)} indexes, and nothing says which belong together",
        where=path,
        hint=f"pass one file: {os.path.join(path, (singles or indexes)[0])}, or restore the index",
    )


def _origin(files: list[hf.File], index_name: str | None, index_text: bytes) -> Origin | None:
    try:
        return Origin(
            headers={file.name: file.header_text.decode() for file in files},
            index_name=index_name,
            index_text=None if index_name is None else index_text.decode(),
        )
    except UnicodeDecodeError:  # an index in another encoding cannot be given back exactly
        return None
