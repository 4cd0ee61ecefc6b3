"""The journal of a run: which blocks are written, so that the same command can continue after an interruption.

It is a hint, never proof: whoever continues reads the staged bytes back and holds them against the digest here.
So nothing needs to be flushed, and a torn last line is simply not there. The first line is the fingerprint of
the run (source identity, plan and arguments); a journal of another fingerprint counts for nothing.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from dataclasses import dataclass

JOURNAL_NAME = ".ckpt-journal"
MAX_JOURNAL_BYTES = 1 << 28  # A larger one is not read (2²⁸ bytes are some three million blocks, 12 TB)
MAX_LINE_BYTES = 1 << 20  # A longer line counts for nothing


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """A block that was written."""

    digest: str  # Hexadecimal digest of its bytes
    reads: tuple[tuple[int, int, int, int], ...]
    """(chunk, offset, bytes, CRC-32) of every part that was read of a source chunk with a recorded CRC-32."""


Records = dict[tuple[int, int], BlockRecord]  # (tensor, block) → record; both count in the order of the plan


def read_journal(directory: str, fingerprint: str) -> Records | None:
    """Return the records of a journal, or None when there is none of this `fingerprint`."""
    try:
        # Whatever has its name: a pipe must not block, a link is not followed.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(os.path.join(directory, JOURNAL_NAME), flags)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_size > MAX_JOURNAL_BYTES:
            return None
        with open(descriptor, "rb", closefd=False) as file:
            if file.readline(MAX_LINE_BYTES) != fingerprint.encode() + b"\n":
                return None
            return dict(filter(None, map(_parse_line, iter(lambda: file.readline(MAX_LINE_BYTES), b""))))
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _parse_line(line: bytes) -> tuple[tuple[int, int], BlockRecord] | None:
    """Return a record, or None when the line is torn, damaged or not ours: the block is then done again."""
    checksum, _, text = line.removesuffix(b"\n").partition(b" ")
    try:
        if int(checksum, 16) != zlib.crc32(text):
            return None
        tensor, block, digest, reads = json.loads(text)
        runs = tuple((int(a), int(b), int(c), int(d)) for a, b, c, d in reads)
        return (int(tensor), int(block)), BlockRecord(str(digest), runs)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None


class JournalWriter:
    """Appends records; one `write` per record, so that a kill tears at most the last one.

    It `continues` a journal that is there already, with the same fingerprint.
    """

    def __init__(self, directory: str, fingerprint: str, *, continues: bool) -> None:
        self._path = os.path.join(directory, JOURNAL_NAME)
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        flags |= 0 if continues else os.O_CREAT | os.O_EXCL
        self._descriptor = os.open(self._path, flags, 0o600)
        # After a torn line, a fresh one begins here.
        os.write(self._descriptor, b"\n" if continues else fingerprint.encode() + b"\n")
        self.num_records = 0

    def append(self, tensor: int, block: int, record: BlockRecord) -> None:
        """Add a record. Safe from any thread."""
        text = json.dumps([tensor, block, record.digest, record.reads], separators=(",", ":")).encode()
        os.write(self._descriptor, b"%08x %s\n" % (zlib.crc32(text), text))
        self.num_records += 1

    def close(self) -> None:
        """Close the file and leave it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def remove(self) -> None:
        """Close and remove the file: the work is complete."""
        self.close()
        os.remove(self._path)
