"""Hold a checkpoint against its manifest; of the tensors' own bytes nothing is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpt_tools.description.checkpoint import Finding, TensorEntry
from ckpt_tools.errors import CkptError, UnreachableError
from ckpt_tools.formats.digest import digest_bytes
from ckpt_tools.formats.frames import digest_frames
from ckpt_tools.formats.manifest import MANIFEST_NAME, FileRecord, Manifest
from ckpt_tools.formats.opening import Opened


def check_manifest(opened: Opened, manifest: Manifest) -> Iterator[Finding]:
    """Hold tensors, files, documents and assets against what the manifest says of them."""
    tensors = {entry.fqn: entry for entry in opened.checkpoint.tensors}
    for fqn, record in manifest.tensors.items():
        entry = tensors.get(fqn)
        label = f"tensor {fqn!r}"
        if entry is None:
            yield Finding.error("manifest-mismatch", MANIFEST_NAME, f"{label} is in the manifest only")
        elif (entry.dtype, entry.shape) != (record.dtype, record.shape):
            yield Finding.error(
                "manifest-mismatch",
                MANIFEST_NAME,
                f"{label}: {entry.dtype.name} {list(entry.shape)} here, "
                f"{record.dtype.name} {list(record.shape)} in the manifest",
            )
    for fqn in tensors.keys() - manifest.tensors.keys():
        yield Finding.error("manifest-mismatch", MANIFEST_NAME, f"tensor {fqn!r} is not in the manifest")
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
            yield Finding.warning(
                "changed-asset",
                name,
                f"the manifest says {asset.nbytes} bytes, the file has {found}",
            )


def check_frames(opened: Opened, manifest: Manifest, sound: Sequence[TensorEntry]) -> Iterator[Finding]:
    """Hold what lies around the payloads against the manifest, in the files of which all items are sound."""
    known = {entry.fqn for entry in sound}
    broken = {c.span.file for entry in opened.checkpoint.tensors if entry.fqn not in known for c in entry.chunks}
    files = {
        name: size
        for name, size in manifest.files.items()
        if name in manifest.frames and name not in broken and opened.checkpoint.files.get(name) == size
    }
    payloads = (chunk.span for entry in sound for chunk in entry.chunks)
    for name, found in digest_frames(files, payloads, opened.checkpoint.blobs, opened.source).items():
        if found != manifest.frames[name]:
            yield Finding.error(
                "changed-frames",
                name,
                "what lies around the tensors' bytes (item headers, padding) is not what was written",
                "restore the file, or save the checkpoint again",
                file=name,
            )


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
        yield Finding.error(
            "changed-document",
            name,
            f"its first {record.nbytes} bytes are not those that were written",
            "restore it; if the directory was saved over by a trainer, remove the manifest",
        )
