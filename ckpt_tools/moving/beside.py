"""A tensor of another checkpoint, read beside that of the first: the same elements, block by block."""

from __future__ import annotations

import threading

from ckpt_tools.description.checkpoint import TensorEntry
from ckpt_tools.description.layout import Box
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats.digest import digest_block, digest_tensor
from ckpt_tools.formats.manifest import MANIFEST_NAME
from ckpt_tools.formats.opening import Opened
from ckpt_tools.moving.plan import blocks_of, check_complete, chunk_index
from ckpt_tools.moving.read import Buffers, Checksums, read_block
from ckpt_tools.moving.strides import start_of


class Reading(threading.local):
    """The memory of every thread that reads beside: one for all tensors and checkpoints."""

    def __init__(self) -> None:
        self.buffers = Buffers()
        self.room = Buffers()
        """For results."""


class Beside:
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
        self._digests: dict[int, bytes] = {}
        record = None if opened.manifest is None else opened.manifest.tensors.get(recorded)
        is_as_recorded = record is not None and (record.dtype, record.shape) == (entry.dtype, entry.shape)
        self._recorded = record.digest if record is not None and is_as_recorded else None

    @property
    def root(self) -> str:
        """Where its checkpoint lies."""
        return self._opened.source.root

    def read(self, block: Box) -> memoryview:
        """Return the row-major bytes of a block, in the tensor's own dtype; valid until this thread's next read."""
        entry, opened = self.entry, self._opened
        content, reads, _ = read_block(entry, self._chunks, entry.dtype, block, opened.source, self._reading.buffers)
        digest = b"" if self._recorded is None else digest_block(content)
        with self._lock:
            self._checksums.add(reads)
            if digest:
                self._digests[start_of(block, Box((0,) * len(entry.shape), entry.shape))] = digest
        return content

    def finish(self) -> None:
        """Compare what was read with CRC-32s and digests, where there are any and all was read."""
        entry = self.entry
        for chunk, _ in self._chunks.overlaps(Box((0,) * len(entry.shape), entry.shape)):
            self._checksums.check(entry, chunk, self._opened.source)
        if self._recorded is None or len(self._digests) != len(blocks_of(entry, entry.dtype)):
            return
        found = digest_tensor(b"".join(self._digests[start] for start in sorted(self._digests)))
        if found != self._recorded:
            raise UnreadableError(
                f"tensor {entry.fqn!r} is not what was written: its digest is {found}, {MANIFEST_NAME} says "
                f"{self._recorded}",
                where=self._opened.source.root,
                hint="`ckpt verify` lists everything that is wrong; restore the checkpoint",
            )
