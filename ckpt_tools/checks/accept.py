"""Record in a manifest that files beside the weights were changed on purpose."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from ckpt_tools.checkpoint.formats.digest import digest_bytes
from ckpt_tools.checkpoint.formats.file_names import is_weights
from ckpt_tools.checkpoint.formats.format import read_document
from ckpt_tools.checkpoint.formats.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    FileRecord,
    build_manifest,
    parse_manifest,
)
from ckpt_tools.errors import UsageError
from ckpt_tools.storage.publish import replace_file
from ckpt_tools.storage.source import LocalSource


def accept(directory: str, files: Sequence[str]) -> None:
    """Record these files, which lie beside the weights, as they are now, with the date and both digests."""
    path = os.path.join(directory, MANIFEST_NAME)
    if not os.path.isfile(path):
        hint = "leave --accept out: where nothing is recorded, no file counts as changed"
        raise UsageError(f"--accept needs a {MANIFEST_NAME} on this machine", where=directory, hint=hint)
    today = datetime.now(UTC).date().isoformat()
    with LocalSource(directory) as source:
        manifest = parse_manifest(read_document(source, MANIFEST_NAME, MAX_MANIFEST_BYTES))
        assets, accepted = dict(manifest.assets), dict(manifest.accepted)
        for file in files:
            if file in (*manifest.documents, *manifest.files, MANIFEST_NAME) or is_weights(file):
                hint = "restore it, or write the checkpoint again"
                raise UsageError(f"--accept takes files beside the weights, got {file}", where=directory, hint=hint)
            content = read_document(source, file, MAX_MANIFEST_BYTES)
            before = assets[file].digest if file in assets else ""
            assets[file] = FileRecord(nbytes=len(content), digest=digest_bytes(content))
            accepted[file] = {"date": today, "recorded": before, "digest": assets[file].digest}
    content = build_manifest(replace(manifest, assets=assets, accepted=accepted))
    replace_file(path, content, f"{path}.{uuid.uuid4().hex[:8]}")
