"""The record of a share: what one of several processes saw and wrote, for whoever puts the whole together.

Inert JSON, and the same bytes for the same content. It detects accidents, not attackers, as the manifest does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from ckpt_tools.description.checkpoint import is_plain_path
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats._json import parse_json

SCHEMA_VERSION = 1
MAX_RECORD_BYTES = 256 << 20
MAX_PARTS = 1 << 20
"""Processes that may share a conversion."""
_MAX_CONTAINERS = 8_000_000
_MAX_COUNT = 1 << 62
_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)
_CHECKSUM = b',\n"checksum": '
_WHAT = "the record of a part"

Run = tuple[int, int, int]
"""(first byte, bytes, CRC-32)."""
Counted = tuple[int, int, int, int, int | None]
"""The fields of `moving.counts.Counts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """What a share saw of a tensor of which others have parts too."""

    digests: Mapping[int, str] = field(default_factory=dict)
    """Block that the share owns → its digest."""
    crcs: Mapping[int, int] = field(default_factory=dict)
    """Of those, the ones that others write parts of → CRC-32."""
    seen: Mapping[int, str] = field(default_factory=dict)
    """Block that another share owns, and that had to be read whole → its digest."""
    parts: Mapping[int, tuple[Run, ...]] = field(default_factory=dict)
    """Block of which several shares write parts → the runs of its bytes that this one wrote."""
    sources: Mapping[tuple[int, ...], tuple[Run, ...]] = field(default_factory=dict)
    """Source chunk with a recorded CRC-32 (its offsets) → what was read of it, for blocks that the share owns."""
    stored: Mapping[int, str] = field(default_factory=dict)
    """Block as the source stores it, of a tensor that is cast, that begins in an owned block → its digest."""
    counts: Counted | None = None
    """What the values of the owned blocks are like, where they can be counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file that a share wrote."""

    identity: Mapping[str, object]
    """What tells it from any other of its name; see `SharedSink.identity`."""
    frames: str | None = None
    """Digest of what lies around its payloads; None when there is nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareRecord:
    """What one pass of one share did."""

    fingerprint: str
    index: int
    count: int
    number: int = 0
    """Of the pass."""
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    """Tensor that the share has whole → digest."""
    counts: Mapping[str, Counted] = field(default_factory=dict)
    """Of those."""
    parts: Mapping[str, TensorPart] = field(default_factory=dict)
    stored: Mapping[str, str] = field(default_factory=dict)
    """Tensor that the share read whole, and that is cast or written in parts → digest of what was read."""
    chunks_checked: int = 0
    """Source chunks whose CRC-32 was held against their writer's."""


def record_name(index: int, count: int, number: int) -> str:
    """Return the name of a record."""
    return f"share-{index:05d}-of-{count:05d}-pass-{number:03d}.json"


def build_record(record: ShareRecord) -> bytes:
    """Return the record's JSON."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "fingerprint": record.fingerprint,
        "part": [record.index, record.count, record.number],
        "files": {name: [dict(file.identity), file.frames] for name, file in sorted(record.files.items())},
        "digests": dict(sorted(record.digests.items())),
        "counts": dict(sorted(record.counts.items())),
        "parts": {fqn: _part_row(part) for fqn, part in sorted(record.parts.items())},
        "stored": dict(sorted(record.stored.items())),
        "chunks_checked": record.chunks_checked,
    }
    rows = (f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in document.items())
    body = ("{\n" + ",\n".join(rows)).encode()
    return body + _CHECKSUM + f'"{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode()


def _part_row(part: TensorPart) -> list[object]:
    tables: list[Mapping[Any, object]] = [part.digests, part.crcs, part.seen, part.parts, part.sources, part.stored]
    return [*(sorted(table.items()) for table in tables), part.counts]


def parse_record(text: bytes, *, where: str) -> ShareRecord:
    """Parse a record."""
    body, _, last = text.rpartition(_CHECKSUM)
    if last != f'"{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode():
        raise UnreadableError(f"{_WHAT} is damaged: its checksum differs", where=where)
    document: Any = parse_json(
        text, what=_WHAT, where=where, max_bytes=MAX_RECORD_BYTES, max_containers=_MAX_CONTAINERS
    )
    try:
        index, count, number = map(_count, document["part"])
        is_known = document["schema_version"] == SCHEMA_VERSION and index < count <= MAX_PARTS
        record = ShareRecord(
            fingerprint=_digest(document["fingerprint"]),
            index=index,
            count=count,
            number=number,
            files={_file(name): _parse_file(row) for name, row in document["files"].items()},
            digests=_digests(document["digests"]),
            counts={fqn: _counted(row) for fqn, row in document["counts"].items()},
            parts={fqn: _parse_part(row) for fqn, row in document["parts"].items()},
            stored=_digests(document["stored"]),
            chunks_checked=_count(document["chunks_checked"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnreadableError(f"{_WHAT} is malformed: {str(error) or type(error).__name__}", where=where) from error
    if not is_known:
        raise UnreadableError(f"{_WHAT} is of another version of ckpt", where=where, hint="use one version everywhere")
    return record


def _parse_file(row: Any) -> FileRecord:  # noqa: ANN401 - JSON, checked field by field
    identity, frames = row
    return FileRecord(identity=dict(identity), frames=None if frames is None else _digest(frames))


def _parse_part(row: Any) -> TensorPart:  # noqa: ANN401 - JSON, checked field by field
    digests, crcs, seen, parts, sources, stored, counts = row
    return TensorPart(
        digests={_count(block): _digest(digest) for block, digest in digests},
        crcs={_count(block): _count(crc32) for block, crc32 in crcs},
        seen={_count(block): _digest(digest) for block, digest in seen},
        parts={_count(block): _runs(runs) for block, runs in parts},
        sources={tuple(map(_count, offsets)): _runs(runs) for offsets, runs in sources},
        stored={_count(block): _digest(digest) for block, digest in stored},
        counts=None if counts is None else _counted(counts),
    )


def _runs(rows: Any) -> tuple[Run, ...]:  # noqa: ANN401 - JSON, checked field by field
    return tuple((_count(start), _count(nbytes), _count(crc32)) for start, nbytes, crc32 in rows)


def _counted(row: Any) -> Counted:  # noqa: ANN401 - JSON, checked field by field
    *seen, first = row
    num_elems, num_nan, num_inf, num_zero = map(_count, seen)
    return num_elems, num_nan, num_inf, num_zero, None if first is None else _count(first)


def _digests(table: Mapping[str, object]) -> dict[str, str]:
    return {fqn: _digest(digest) for fqn, digest in table.items()}


def _digest(value: object) -> str:
    if not isinstance(value, str) or _DIGEST.fullmatch(value) is None:
        raise ValueError("a digest is not 32 hexadecimal digits")
    return value


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise TypeError(f"expected a count between 0 and 2^62, found {type(value).__name__}")
    return value


def _file(name: str) -> str:
    if not is_plain_path(name):
        raise ValueError(f"file name {name!r}")
    return name
