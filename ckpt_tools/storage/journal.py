"""The journal of a run: which blocks are written, so that the same command can continue after an interruption.

It is a hint, never proof: whoever continues reads the staged bytes back and holds them against the digest here.
So nothing needs to be flushed, and a torn last line is simply not there. The first line is the fingerprint of
the run (source identity, plan and arguments); a journal of another fingerprint counts for nothing.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

JOURNAL_NAME = ".ckpt-journal"
"""Its name in the staging directory."""
MAX_JOURNAL_BYTES = 1 << 30
"""A larger one is not read."""


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """A block that was written."""

    digest: str
    """Hexadecimal digest of its bytes."""
    reads: tuple[tuple[int, int, int, int], ...]
    """(chunk, offset, bytes, CRC-32) of every part that was read of a source chunk with a recorded CRC-32."""


Records = dict[tuple[int, int], BlockRecord]
"""(tensor, block) → record; both count in the order of the plan."""


def read_journal(directory: str, fingerprint: str) -> Records | None:
    """Return the records of a journal, or None when there is none of this `fingerprint`."""
    try:
        descriptor = os.open(os.path.join(directory, JOURNAL_NAME), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        lines = file.read(MAX_JOURNAL_BYTES).split(b"\n")
    if lines[0] != fingerprint.encode():
        return None
    records: Records = {}
    for line in lines[1:]:
        try:
            tensor, block, digest, reads = json.loads(line)
            records[int(tensor), int(block)] = BlockRecord(
                str(digest), tuple((int(a), int(b), int(c), int(d)) for a, b, c, d in reads)
            )
        except (ValueError, TypeError):
            continue  # torn, or not ours: the block is done again
    return records


class JournalWriter:
    """Appends records; one `write` per record, so that a kill tears at most the last one.

    Args:
        directory: The staging directory.
        fingerprint: Of the run.
        continues: Whether the journal is there already, with this fingerprint.
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
        line = json.dumps([tensor, block, record.digest, record.reads], separators=(",", ":"))
        os.write(self._descriptor, line.encode() + b"\n")
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
