"""What a format is to the rest of ckpt: how it is told, opened, read, and written where ckpt writes it.

A format is one module of this room that ends in `FORMAT = …`, an instance of a class that derives from `Format`, and
one line of `table.FORMATS`. Everything else asks `Opened.format`, or `table.find_format(checkpoint.format)`, and never
compares names. Only `name`, `suffix`, `detects` and `open` must be given; the rest says what most formats are: whole
tensors as raw bytes, under a model's plain names, read and not written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from ckpt_tools.checkpoint.entries import Asset, ByteSpan, Checkpoint, TensorEntry
from ckpt_tools.checkpoint.formats.manifest import Manifest, Origin
from ckpt_tools.checkpoint.formats.step_layouts import Step
from ckpt_tools.checkpoint.identity import Candidate, Identity
from ckpt_tools.checkpoint.transform import plain_names
from ckpt_tools.errors import LimitError, UnreadableError, UsageError
from ckpt_tools.storage.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What another checkpoint of the same model says of its tensors."""

    title: str  # Its path, for messages
    shapes: Mapping[str, tuple[int, ...]]  # Plain name → shape; of tied ones that are known to be tied the first
    is_ordered: bool  # The order is that of the model

    @classmethod
    def of(cls, checkpoint: Checkpoint, title: str, *, is_ordered: bool) -> Shapes:
        """Return those of an open checkpoint."""
        once: dict[object, tuple[str, tuple[int, ...]]] = {}
        for name, entry in plain_names(checkpoint).items():
            places = tuple((chunk.span, chunk.box) for chunk in entry.chunks) if is_ordered else name
            once.setdefault(places, (name, entry.shape))
        return cls(title=title, shapes=dict(once.values()), is_ordered=is_ordered)


AHEAD = 8192  # Small ranges that are announced to a source at once: of 1 KiB each, it keeps them


class Reader(Protocol):
    """What formats need of storage, once a checkpoint is open."""

    def prefetch(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Be told of (file, offset, bytes) that will be read soon."""

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """Return exactly these bytes."""


class Format(Protocol):
    """One way to store a checkpoint."""

    name: str  # Value of `--from`, and what `inspect` and manifests call it
    found_by: str  # What a directory or file of it is told by; this and the next two are the reference's, in Markdown
    about: str  # What is read of it, and what is not
    written_by: str = ""  # Commands that write it
    suffix: str  # End of the names of its data files: `verify` names those that nothing refers to
    is_file: bool = False  # A path of it is one file, not a directory
    counterpart: str | None = None  # What `--from` means for a path of the other kind: of a directory, or of a file
    is_sharded: bool = False  # Ranks saved it, each its own parts
    is_training: bool = False  # Holds a trainer's state: names with roots and wrappers, perhaps an optimizer's
    in_items: bool = False  # Every chunk is an item whose head says dtype, sizes and CRC-32, but not whose it is
    loads_by_dcp: bool = False  # PyTorch's `dcp.load` reads it, whole items at a time; `shard` and `reshard` write it
    keeps_order: bool = False  # Matrices that lie side by side in one tensor lie there whole, however ranks cut them
    has_parts: bool = False  # Its data lie in directories that are checkpoints of their own (`formats.step`)
    has_views: bool = False  # Tensors may lie in one another, and bytes between them may be nobody's
    unchecked: tuple[str, ...] = ()  # What no level of `verify` can check in it, in words
    caveats: tuple[str, ...] = ()  # What whoever converts from it should know, in words
    whole_by: str = ""  # How it is known that nothing lacks, in Markdown; "" where the files do not say it
    marker: str = ""  # The document, written last, that makes a directory one of this format; "" when it has none

    def detects(self, files: Mapping[str, int]) -> bool:
        """Is this what a directory with these files (relative name → size) holds? For `is_file`: what this file is?"""

    def open(self, source: Source, files: Mapping[str, int], *, path: str, manifest: Manifest | None) -> Opened:
        """Read the headers and describe what is there; `path` is as the user named it, for messages.

        `files` has the size of every file of the directory `source` by its relative name; for a format with `is_file`,
        of the one file. Whether the manifest in the directory is still of this checkpoint is not known.
        """

    def shaped(self, shapes: Shapes) -> Format:  # noqa: ARG002
        """Return the format for files that need another checkpoint's shapes; others raise `UsageError`."""
        raise UsageError(f"--shapes-from needs rank files, but this is {self.name}", hint="leave it out")

    def resolve(self, entry: TensorEntry, reader: Reader) -> TensorEntry:  # noqa: ARG002
        """Return `entry` with every chunk's span on its raw bytes; reads the headers of items, where there are any."""
        return entry

    def heads(self, entry: TensorEntry) -> Iterable[tuple[str, int, int]]:  # noqa: ARG002
        """Return (file, offset, bytes) of what `resolve` reads, as far as it is known before."""
        return ()

    def build_marker(self, target: Checkpoint) -> bytes:  # noqa: ARG002
        """Return the content of `marker` for a destination; b"" when there is none."""
        return b""

    def estimate_marker_bytes(self, target: Checkpoint) -> int:  # noqa: ARG002
        """Return about how long `build_marker` would be, without building it."""
        return 0

    def digest_frames(self, target: Checkpoint, reader: Reader, *, marker: bytes | None = None) -> dict[str, str]:  # noqa: ARG002
        """Return per data file the digest of what lies around the payloads in it; {} when the format has no frames."""
        # `marker` is given when somebody else wrote the files and framed the payloads in their own way.
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An open checkpoint: its description, and the way to its bytes."""

    format: Format
    checkpoint: Checkpoint
    source: Source
    manifest: Manifest | None = None  # Its manifest, when ckpt wrote it
    origin: Origin | None = None  # The exact headers and index of an HF source
    root: str = ""  # Prefix that `shard` put before the names, as it is recorded, where `origin` does not hold any more
    metadata: Mapping[str, str] = field(default_factory=dict)  # What its one file's header says beside the tensors
    left_out: tuple[str, ...] = ()  # Files beside it that hold weights in other formats, and are not carried along
    companions: tuple[Asset, ...] = ()
    """Files of a training step beside its DCP files (Lightning's meta.pt, RNG states, …): `reshard` carries them along
    as they are, unopened; a model does not need them."""
    notes: tuple[str, ...] = ()  # What was done to what the files hold, and what else a converter should know
    step: Step | None = None  # The step whose model this is, where the path named the step
    unread: tuple[str, ...] = ()  # What lies in its files beside tensors and is not read, in words
    broken: tuple[UnreadableError, ...] = ()  # Why files that should be parts of it are not read (an optimizer's)
    asset_source: Source | None = None  # Where the assets lie that belong to its model; None for beside its files
    stored: Mapping[str, Sequence[TensorEntry]] = field(default_factory=dict)
    """File that is made while it is read → the tensors that it is made of; the manifest has these."""
    sums: tuple[tuple[ByteSpan, int], ...] = ()
    """Parts of its files with their recorded CRC-32s, beside those of chunks: whole storages, of which a tensor may be
    a part."""
    flattened: frozenset[str] = frozenset()  # Tensors of another shape than what they are parts of: of use here alone
    settings: Mapping[str, object] = field(default_factory=dict)
    """What the trainer notes of the model, by its own names for it; empty where it is not known."""
    missing: tuple[tuple[str, str], ...] = ()  # What its trainer would look for in vain: (name, what is wrong)
    single_names: int = 0  # Names that nothing in the checkpoint repeats: a changed one would not be noticed
    partial: tuple[str, ...] = ()  # Why its own files say that it is a part of a model, in words
    complete: str = ""  # Why its own files say that nothing lacks, in words; "" where they do not
    lost: tuple[str, ...] = ()  # Files that its description names and that are not here: damage, told tensor by tensor
    excuse: str = ""  # Why names that config.json asks for may lack on purpose
    candidates: tuple[Candidate, ...] = ()  # Sets of weights that lie together, this one among them
    identity: Identity = field(default_factory=lambda: Identity(format=""))  # What it is; set by `opening`

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()
        if self.asset_source is not None:
            self.asset_source.close()

    @property
    def own_assets(self) -> list[tuple[Source, Asset]]:
        """Files that belong to the model and hold no weights, and where from."""
        return [(self.asset_source or self.source, asset) for asset in self.checkpoint.assets]

    @property
    def assets(self) -> list[tuple[Source, Asset]]:
        """Files that hold no weights, of the checkpoint and beside it, and where from."""
        return [*self.own_assets, *((self.source, asset) for asset in self.companions)]

    def resolved(self) -> Checkpoint:
        """Return the description with every chunk's span on its raw bytes; reads the items' headers."""
        return replace(self.checkpoint, tensors=tuple(map(self.resolve, self.ahead(self.checkpoint.tensors))))

    def ahead(self, entries: Iterable[TensorEntry]) -> Iterator[TensorEntry]:
        """Yield `entries` when what `resolve` reads of each is at hand; only remote sources take time over it."""
        batch: list[TensorEntry] = []
        heads: list[tuple[str, int, int]] = []
        for entry in entries:
            batch.append(entry)
            heads += self.format.heads(entry)
            if len(heads) >= AHEAD:
                self.source.prefetch(heads)
                yield from batch
                batch, heads = [], []
        self.source.prefetch(heads)
        yield from batch

    def resolve(self, entry: TensorEntry) -> TensorEntry:
        """Return `entry` with every chunk's span on its raw bytes; reads its items' headers."""
        return self.format.resolve(entry, self.source)


def read_document(source: Source, name: str, limit: int) -> bytes:
    """Read a small file whole; raise `LimitError` when it has more than `limit` bytes."""
    nbytes = source.size(name)
    if nbytes > limit:
        raise LimitError(f"{nbytes} bytes, the limit is {limit}", where=name)
    return source.read(name, 0, nbytes)
