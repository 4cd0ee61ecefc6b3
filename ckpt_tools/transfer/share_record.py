"""The record of a share: what one of several processes saw and wrote, for whoever puts the whole together.

Inert JSON, and the same bytes for the same content. It detects accidents, not attackers, as the manifest does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import xxhash

from ckpt_tools.checkpoint.formats._json import parse_json
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.sandbox import wire
from ckpt_tools.text import is_plain_path
from ckpt_tools.transfer.split import Part
from ckpt_tools.transfer.value_counts import Counts

# Which one of several processes this is, as whoever started it says: no process asks another

_STARTERS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "torchrun": (("RANK", "WORLD_SIZE"),),
    "slurm": (("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"), ("SLURM_PROCID", "SLURM_NTASKS")),
    "k8s": (("JOB_COMPLETION_INDEX", "CKPT_PARTS"),),
    "mpi": (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"), ("PMIX_RANK", "PMI_SIZE")),
}
"""Variables with index and count; the first pair that is set counts."""
_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"
_FIRST = {"SLURM_ARRAY_TASK_ID": "SLURM_ARRAY_TASK_MIN"}  # Index → variable with the smallest one


def parse_part(text: str) -> Part:
    """Parse "3/16": an index from 0 on, and how many parts there are."""
    index, slash, count = text.partition("/")
    if not (slash and _is_number(index) and _is_number(count)) or not int(index) < int(count) <= MAX_PARTS:
        what = f"--part must be I/N with 0 ≤ I < N ≤ {MAX_PARTS}, got {text!r}"
        raise UsageError(what, hint="the first of 16 is --part 0/16")
    return Part(index=int(index), count=int(count))


def find_part(environ: Mapping[str, str], parts: str) -> Part | None:
    """Return which part the process is by the variables of what started it; None for one process alone.

    `auto` asks torchrun alone, and only where it has started this very process: a command that a rank starts inherits
    its variables, as one in an interactive shell has those of a scheduler, and nobody starts the other parts.
    """
    if parts == "none" or (parts == "auto" and not (_OF_TORCHRUN in environ and _is_started_by_torchrun())):
        return None
    starter = "torchrun" if parts == "auto" else parts
    pairs = _STARTERS[starter]
    pair = next((pair for pair in pairs if all(name in environ for name in pair)), None)
    if pair is None:
        wanted = " or ".join(" and ".join(pair) for pair in pairs)
        what = f"--parts {starter} needs {wanted} in the environment"
        raise UsageError(what, hint="start it that way, or set the part: --part I/N")
    index, count = (environ[name] for name in pair)
    first = environ.get(_FIRST.get(pair[0], ""), "0")
    if not all(map(_is_number, (index, count, first))) or not 0 <= int(index) - int(first) < int(count) <= MAX_PARTS:
        hint = "number the array from 0 or 1 in steps of 1" if first != "0" else "set the part: --part I/N"
        raise UsageError(f"{pair[0]}={index} and {pair[1]}={count} are not an index and a count", hint=hint)
    found = Part(index=int(index) - int(first), count=int(count))
    return found if found.count > 1 else None


def _is_started_by_torchrun() -> bool:
    """Is the parent torchrun's agent, which does not have the variable that it sets for its children?"""
    try:
        with open(f"/proc/{os.getppid()}/environ", "rb") as file:
            return _OF_TORCHRUN.encode() + b"=" not in file.read()
    except OSError:  # of another user, or no /proc: nobody else says more
        return True


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


SCHEMA_VERSION = 2
MAX_RECORD_BYTES = 256 << 20
MAX_PARTS = 1 << 20  # Processes that may share a conversion
_MAX_CONTAINERS = 8_000_000
_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)
_CHECKSUM_BYTES = len('"checksum": "", ') + 32
_WHAT = "the record of a part"

Run = tuple[int, int, int]  # (first byte, bytes, CRC-32)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """What a share saw of a tensor of which others have parts too."""

    digests: Mapping[int, str] = field(default_factory=dict)  # Block that the share owns → its digest
    runs: Mapping[int, tuple[Run, ...]] = field(default_factory=dict)
    """Block of which several shares have parts → itself, where this one read it whole, and what it wrote of it."""
    sources: tuple[tuple[tuple[int, ...], tuple[Run, ...]], ...] = ()
    """(offsets of a source chunk with a recorded CRC-32, what was read of it for blocks that the share owns)."""
    stored: Mapping[int, str] = field(default_factory=dict)
    """Block as the source stores it, of a tensor that is cast, that begins in an owned block → its digest."""
    counts: Counts | None = None  # What the values of the owned blocks are like, where they can be counted


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFile:
    """A file that a share wrote."""

    identity: Mapping[str, object]  # What tells it from any other of its name; see `SharedSink.identity`
    frames: str | None = None  # Digest of what lies around its payloads; None when there is nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareRecord:
    """What one pass of one share did."""

    fingerprint: str
    index: int
    count: int
    number: int = 0  # Of the pass
    files: Mapping[str, PartFile] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)  # Tensor that the share has whole → digest
    counts: Mapping[str, Counts] = field(default_factory=dict)  # Of those
    parts: Mapping[str, TensorPart] = field(default_factory=dict)
    stored: Mapping[str, str] = field(default_factory=dict)
    """Tensor that the share read whole, and that is cast or written in parts → digest of what was read."""
    chunks_checked: int = 0  # Source chunks whose CRC-32 was compared with their writer's
    schema_version: int = SCHEMA_VERSION


def record_name(index: int, count: int, number: int) -> str:
    """Return the name of a record."""
    return f"share-{index:05d}-of-{count:05d}-pass-{number:03d}.json"


def build_record(record: ShareRecord) -> bytes:
    """Return the record's JSON, its checksum first."""
    body = wire.dumps(record, sort_keys=True).encode().removeprefix(b"{")
    return b'{"checksum": "%s", ' % xxhash.xxh3_128_hexdigest(body).encode() + body


def parse_record(text: bytes, *, where: str) -> ShareRecord:
    """Parse a record."""
    body = text[1 + _CHECKSUM_BYTES :]
    if text != b'{"checksum": "%s", ' % xxhash.xxh3_128_hexdigest(body).encode() + body:
        raise UnreadableError(f"{_WHAT} is damaged: its checksum differs", where=where)
    document = parse_json(
        b"{" + body, what=_WHAT, where=where, max_bytes=MAX_RECORD_BYTES, max_containers=_MAX_CONTAINERS
    )
    try:
        record: ShareRecord = wire.build(ShareRecord, document)
    except (ValueError, TypeError) as error:
        raise UnreadableError(f"{_WHAT} is malformed, or of another version of ckpt", where=where) from error
    is_sound = all(map(is_plain_path, record.files)) and all(map(_DIGEST.fullmatch, _digests(record)))
    if not is_sound or record.schema_version != SCHEMA_VERSION or not 0 <= record.index < record.count <= MAX_PARTS:
        raise UnreadableError(f"{_WHAT} is malformed, or of another version of ckpt", where=where)
    return record


def _digests(record: ShareRecord) -> Iterator[str]:
    yield from (record.fingerprint, *record.digests.values(), *record.stored.values())
    yield from (file.frames for file in record.files.values() if file.frames is not None)
    for part in record.parts.values():
        yield from (*part.digests.values(), *part.stored.values())
