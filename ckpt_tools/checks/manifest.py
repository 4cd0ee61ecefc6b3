"""Hold a checkpoint against its manifest; of the tensors' own bytes nothing is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckpt_tools.checkpoint.entries import Finding, TensorEntry
from ckpt_tools.checkpoint.formats.digest import digest_bytes
from ckpt_tools.checkpoint.formats.file_names import is_for_people
from ckpt_tools.checkpoint.formats.item_frames import digest_frames
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME, FileRecord, Manifest
from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.errors import CkptError, UnreachableError


def check_manifest(opened: Opened, manifest: Manifest) -> Iterator[Finding]:
    """Hold tensors, files, documents and assets against what the manifest says of them."""
    tensors = {entry.fqn: entry for entry in opened.checkpoint.tensors}
    for fqn, record in manifest.tensors.items():
        entry = tensors.get(fqn)
        label = f"tensor {fqn!r}"
        if entry is None:
            yield _mismatch(fqn, f"{label} is in the manifest only")
        elif (entry.dtype, entry.shape) != (record.dtype, record.shape):
            there = f"{record.dtype.name} {list(record.shape)} in the manifest"
            yield _mismatch(fqn, f"{label}: {entry.dtype.name} {list(entry.shape)} here, {there}")
    for fqn in tensors.keys() - manifest.tensors.keys():
        yield _mismatch(fqn, f"tensor {fqn!r} is not in the manifest")
    for name, size in manifest.files.items():
        found = size_of(opened, name)
        if found is None:
            yield Finding.error("missing-file", name, "the manifest names a file that is missing", file=name)
        elif found != size:
            code = "short-file" if found < size else "long-file"
            what = f"the manifest says {size} bytes, the file has {found}"
            yield Finding.error(code, name, what, file=name)
    for name, document in manifest.documents.items():
        yield from _check_document(opened, name, document)
    for name, asset in manifest.assets.items():
        found = size_of(opened, name)
        if found is None:
            yield Finding.error("missing-file", name, "the manifest names an asset that is missing")
        elif found != asset.nbytes:
            yield changed_asset(opened, name, f"the manifest says {asset.nbytes} bytes, the file has {found}")
        elif name in manifest.accepted:
            yield Finding.info("accepted-file", MANIFEST_NAME, f"accepted on {manifest.accepted[name]['date']}: {name}")


def _mismatch(fqn: str, what: str) -> Finding:
    return replace(Finding.error("manifest-mismatch", MANIFEST_NAME, what), tensor=fqn)


def changed_asset(opened: Opened, name: str, what: str) -> Finding:
    """Return the finding for a file that is not what the manifest recorded: an error, but for what no program reads."""
    if is_for_people(name):
        return Finding.warning("changed-asset", name, what)
    hint = f"restore it; if you changed it on purpose: ckpt verify {opened.source.root} --accept {name}"
    return Finding.error("changed-asset", name, what, hint)


def check_frames(opened: Opened, manifest: Manifest, readable: Sequence[TensorEntry]) -> Iterator[Finding]:
    """Hold what lies around the payloads against the manifest, in the files of which all items can be read."""
    here = Counter(chunk.span.file for entry in readable for chunk in entry.chunks)
    all_of = Counter(chunk.span.file for entry in opened.checkpoint.tensors for chunk in entry.chunks)
    files = {
        name: size
        for name, size in manifest.files.items()
        if name in manifest.frames and here[name] == all_of[name] and opened.checkpoint.files.get(name) == size
    }
    payloads = (chunk.span for entry in readable for chunk in entry.chunks)
    for name, found in digest_frames(files, payloads, opened.checkpoint.blobs, opened.source).items():
        if found != manifest.frames[name]:
            what = "what lies around the tensors' bytes (item headers, padding) is not what was written"
            hint = "restore the file, or save the checkpoint again"
            yield Finding.error("changed-frames", name, what, hint, file=name)


def size_of(opened: Opened, name: str) -> int | None:
    """Return the size of a file in bytes, None when it is missing or cannot be read."""
    try:
        return opened.source.size(name)
    except CkptError:
        return None


def _check_document(opened: Opened, name: str, record: FileRecord) -> Iterator[Finding]:
    """A document is the first `nbytes` of a file: all of `.metadata` or an index, a safetensors header."""
    try:
        content = opened.source.read(name, 0, record.nbytes)
    except UnreachableError:
        raise
    except CkptError as error:
        yield Finding.error("missing-file", name, error.what)
        return
    if digest_bytes(content) != record.digest:
        what = f"its first {record.nbytes} bytes are not those that were written"
        hint = "restore it; if the directory was saved over by a trainer, remove the manifest"
        yield Finding.error("changed-document", name, what, hint)
