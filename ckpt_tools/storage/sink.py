"""What conversions need of the place that they write to: files appear whole and together, or not at all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Self

from ckpt_tools.storage.claim import BuildClaim
from ckpt_tools.storage.journal import BlockRecord, Records
from ckpt_tools.storage.source import Source


class Sink(ABC):
    """A directory under construction; see `Staging`, which is one on this machine."""

    destination: str  # What `publish` makes appear, for messages
    records: Records  # What an interrupted run of the same fingerprint had written, after `begin`
    found_other: bool = False  # `begin` has removed the work of another run
    is_published: bool = False  # The destination is complete
    left_behind: str | None = None  # The old checkpoint, when it is replaced and could not be removed
    goes_front_to_back: bool = False  # Files are sent in the order of their bytes: what comes early is held in memory
    not_checked: tuple[str, ...] = ()  # What of the result was not compared with what was sent
    notes: tuple[str, ...] = ()  # What to tell people of how it was written

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    @property
    @abstractmethod
    def kept_in(self) -> str:
        """Where the work of an interrupted run is kept, for messages."""

    @property
    @abstractmethod
    def num_kept(self) -> int:
        """What the next run of the same command could continue from; 0 for nothing."""

    @abstractmethod
    def begin(self, fingerprint: str | None = None) -> None:
        """Look at what is there: continue it when it is of this `fingerprint`, else remove it."""

    @abstractmethod
    def check_space(self, needed_bytes: int) -> None:
        """Raise StorageError when there is not enough room for what is not there yet of `needed_bytes`."""

    @abstractmethod
    def create(self, file: str, nbytes: int, gaps: Iterable[tuple[int, int]] = ()) -> None:
        """Make `file` with `nbytes`, to be filled by `write`.

        `gaps` are (offset, bytes) of what is never written, in order: zeros. They are drawn from only where files are
        sent front to back, which cannot wait until `sync` to learn of them.
        """

    @abstractmethod
    def write(self, file: str, offset: int, buffers: list[memoryview | bytes]) -> int:
        """Write `buffers`, one after the other, from `offset` on; return the number of bytes.

        From any thread. They are the caller's again when this returns.
        """

    @abstractmethod
    def sync(self, file: str) -> None:
        """Every byte of `file` is written, but for gaps, which are zeros: make it durable."""

    @abstractmethod
    def read_into(self, file: str, offset: int, buffer: memoryview) -> bool:
        """Fill `buffer` with what an interrupted run wrote of `file`; False when it cannot be read."""

    @abstractmethod
    def record(self, tensor: int, block: int, record: BlockRecord) -> None:
        """Remember that a block is written, for the next run."""

    @abstractmethod
    def write_document(self, file: str, content: bytes) -> None:
        """Write a small file whole, durably."""

    def write_marker(self, file: str, content: bytes) -> None:
        """Write the document that makes the destination what it is; nobody sees it before `publish`."""
        self.write_document(file, content)

    @abstractmethod
    def reader(self) -> Source:
        """Return the directory as a reader would find it once it is published; the caller closes it."""

    @abstractmethod
    def publish(self) -> None:
        """Make the destination appear, whole and durable."""

    @abstractmethod
    def keep(self) -> None:
        """Leave what is written for the next run of the same command."""

    @abstractmethod
    def discard(self) -> None:
        """Remove what was written. Does nothing after `publish` or `keep`."""


class SharedSink(Sink):
    """A directory that several processes build together, on one machine or many, each with files of its own.

    After `join`, a process calls `begin` with the name of a record, writes the files of that, and calls `put_record`;
    and so on for every pass. `discard` and `keep` touch nothing that others have written.

    What is known of a part once its files are whole is one record: a small document with a name of its own, which
    nobody takes for a part of the checkpoint. Nothing else passes between processes, and any of them may be the last.
    """

    command: str = ""  # What builds it, for the claim; see `storage.joined`

    @abstractmethod
    def find_claim(self) -> BuildClaim | None:
        """Return what is being built here; None when nothing is."""

    @abstractmethod
    def join(self, fingerprint: str, num_parts: int) -> None:
        """Take part in building what has this `fingerprint`, in so many parts; make the place when nobody has.

        Another conversion under way here, or the same one in another number of parts, is a `DestinationExistsError`.
        """

    @abstractmethod
    def passes(self, sizes: Sequence[int]) -> Sequence[range]:
        """Cut files of these sizes, in their order, into runs that are written one after the other.

        Each run has a record of its own: it is what a killed process costs, and what is held in memory at once.
        """

    def preview(self, sizes: Sequence[int]) -> tuple[int, Sequence[str]]:
        """Return the memory that writing files of these sizes takes beside buffers, and what else it would take.

        Nothing is written.
        """
        del sizes
        return 0, ()

    @abstractmethod
    def identity(self, file: str) -> Mapping[str, object] | None:
        """Return what tells a finished file from any other of its name, `nbytes` first; None when there is none."""

    @abstractmethod
    def put_record(self, name: str, content: bytes) -> None:
        """Write a record, or replace it, durably and at once."""

    @abstractmethod
    def records_there(self) -> Mapping[str, bytes]:
        """Return the records of every part, by name."""

    @abstractmethod
    def alone(self) -> AbstractContextManager[bool]:
        """Let one process at a time publish, where that can be had: False when another one is at it, or has done it."""
