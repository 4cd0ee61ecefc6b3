"""Open a checkpoint: find its format, read its headers, describe it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from ckpt_tools.formats._torch_file import is_torch_file
from ckpt_tools.formats.flat_shapes import Shapes
from ckpt_tools.formats.format import Format, Opened, read_document
from ckpt_tools.formats.layouts import HEAD_BYTES, explain, explain_file
from ckpt_tools.formats.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, parse_manifest
from ckpt_tools.formats.safetensors import read_file
from ckpt_tools.formats.table import detect_format, find_format
from ckpt_tools.remote.places import open_place
from ckpt_tools.storage.source import Source

__all__ = ["Opened", "detect", "open_from", "open_path", "read_document", "read_file"]


def open_path(
    path: str,
    *,
    format: str | None = None,  # noqa: A002 - the option's name
    shapes_from: str | os.PathLike[str] | None = None,
) -> Opened:
    """Open the checkpoint at `path`, a file or a directory; `format` overrides what would be detected.

    What needs shapes that its own files lack (FSDP1's local state dicts) takes those of the checkpoint `shapes_from`.

    Raises:
        UnreadableError: Not a complete, readable checkpoint.
        UsageError: There is no format of this name.
    """
    source, file = open_place(path)
    try:
        return open_from(source, path=path, file=file, format=format, shapes_from=shapes_from)
    except BaseException:
        source.close()
        raise


def open_from(
    source: Source,
    *,
    path: str,
    file: str | None = None,
    format: str | None = None,  # noqa: A002 - the option's name
    shapes_from: str | os.PathLike[str] | None = None,
) -> Opened:
    """Open the checkpoint in an open directory, or the `file` there that is one; the rest is as for `open_path`.

    The directory stays the caller's to close when this fails.
    """
    wanted = None if format is None else find_format(format)
    files = source.list_files() if file is None else {file: source.size(file)}
    found = _choose(source, files, path, wanted, is_file=file is not None)
    if shapes_from is not None:
        with open_path(os.fspath(shapes_from)) as like:
            shapes = Shapes.of(like.checkpoint, os.fspath(shapes_from), is_ordered=like.format.has_views)
        found = found.shaped(shapes)
    manifest = None
    if MANIFEST_NAME in files and file is None:
        manifest = parse_manifest(read_document(source, MANIFEST_NAME, MAX_MANIFEST_BYTES))
    opened = found.open(source, files, path=path, manifest=manifest)
    return replace(opened, notes=(*source.notes, *opened.notes)) if source.notes else opened


def _choose(source: Source, files: Mapping[str, int], path: str, wanted: Format | None, *, is_file: bool) -> Format:
    """Return the format that was asked for (or its counterpart), else the one that is found."""
    found = wanted
    if found is None:
        found = detect_format(files, is_file=is_file)
    elif found.is_file != is_file:
        found = None if found.counterpart is None else find_format(found.counterpart)
    if found is not None and found.loads_by_dcp and not found.detects(files):
        whole = detect_format(files, is_file=is_file)  # a step in parts, each of this format
        return found if whole is None or not whole.has_parts else whole
    if found is not None:
        return found
    if not is_file:
        raise explain(files, path)
    (name,) = files
    head = source.read(name, 0, min(files[name], HEAD_BYTES))
    if is_torch_file(head):
        return find_format("torch")
    raise explain_file(path, head)


def detect(files: Mapping[str, int], *, path: str) -> Format:
    """Return the format of a directory with these files (relative name → size).

    Raises:
        UnreadableError: Nothing that ckpt reads; the message names the layout when it is known.
    """
    found = detect_format(files, is_file=False)
    if found is None:
        raise explain(files, path)
    return found
