"""A tensor of another checkpoint, read beside that of the first: the same elements, block by block."""

from __future__ import annotations

import threading

from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.checkpoint.recorded_checks import Ledger
from ckpt_tools.transfer.plan import check_complete, chunk_index
from ckpt_tools.transfer.read import Buffers, Checksums, read_block
from ckpt_tools.transfer.tensor_digest import AsStored


class Reading(threading.local):
    """The memory of every thread that reads beside: one for all tensors and checkpoints."""

    def __init__(self) -> None:
        self.buffers = Buffers()
        self.room = Buffers()
        """For results."""


class PairedReader:
    """Reads one tensor, from any thread; what is recorded of its bytes is checked once all blocks were read."""

    def __init__(self, entry: TensorEntry, opened: Opened, reading: Reading, recorded: str = "") -> None:
        """Take a tensor of `opened`; `recorded` is its name in the manifest, where it is one tensor there."""
        check_complete(entry)
        self.entry = opened.resolve(entry)
        self._opened = opened
        self._chunks = chunk_index(self.entry)
        self._reading = reading
        self._lock = threading.Lock()
        self._checksums = Checksums()
        self.ledger = Ledger()
        """What is recorded of the tensor, once it is `finish`ed."""
        self._record = None if opened.manifest is None else opened.manifest.tensors.get(recorded)
        self._stored = None if self._record is None else AsStored(self.entry, self._chunks, opened.source)

    @property
    def root(self) -> str:
        """Where its checkpoint lies."""
        return self._opened.source.root

    def read(self, block: Box) -> memoryview:
        """Return the row-major bytes of a block, in the tensor's own dtype; valid until this thread's next read."""
        entry, source, buffers = self.entry, self._opened.source, self._reading.buffers
        see = None if self._stored is None else self._stored.add
        content, reads, _ = read_block(entry, self._chunks, entry.dtype, block, source, buffers, see=see)
        with self._lock:
            self._checksums.add(reads)
        return content

    def finish(self) -> None:
        """Compare what was read with CRC-32s and digests, where there are any and all was read."""
        entry, ledger = self.entry, self.ledger
        for chunk, _ in self._chunks.overlaps(Box((0,) * len(entry.shape), entry.shape)):
            ledger.count_crcs(self._checksums.check(entry, chunk, self._opened.source), chunk.crc32 is not None)
        if self._record is not None and self._stored is not None:
            label, shape = f"tensor {entry.fqn!r}", (self._record.dtype.name, *self._record.shape)
            ledger.compare("shapes", label, (entry.dtype.name, *entry.shape), shape, self.root)
            ledger.compare("digests", label, self._stored.digest(), self._record.digest, self.root)
