"""What a checkpoint is: tensors, where their bytes lie, and nothing else.

Whatever holds tensors is read, from its headers alone, into one immutable `Checkpoint`. Shapes, offsets and
sizes count elements of the global tensor; spans count bytes and are half-open.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.layout import Box, Mesh, Placement
from ckpt_tools.results import Result
from ckpt_tools.text import escape_message, first_few
from ckpt_tools.units import format_size

Encoding = Literal["raw", "torch_zip"]
Severity = Literal["error", "warning", "info"]
KeyPath = tuple[str | int, ...]  # Keys that lead to an entry in a nested state dict; an int is an index into a list

MAX_DIMS = 64  # Dims of a tensor: PyTorch's own limit
MAX_ELEMS = 1 << 62  # Elements of a tensor, or bytes of a span: beyond it other readers' 64 bits overflow
MAX_FQN_CHARS = 4096  # Characters of an FQN. Real ones have some hundred; names are split, joined and shown many times.


def is_possible_shape(shape: Sequence[int]) -> bool:
    """Can a tensor have this shape? An empty one counts by its other dims, whose strides must fit as well."""
    return len(shape) <= MAX_DIMS and math.prod(length for length in shape if length) <= MAX_ELEMS


def fqn_problem(fqn: str) -> str | None:
    """Say why `fqn` cannot name a tensor or blob, or return None."""
    if len(fqn) > MAX_FQN_CHARS:
        return f"is a name of {len(fqn)} characters, the limit is {MAX_FQN_CHARS}"
    if "\0" in fqn:
        return "has a NUL in its name"
    try:
        fqn.encode()
    except UnicodeEncodeError:
        return "has a name that is not Unicode text (a lone surrogate)"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteSpan:
    """Bytes [offset, offset + nbytes) of one file."""

    file: str
    """Path relative to the checkpoint's root, with forward slashes."""
    offset: int
    """First byte."""
    nbytes: int
    """Number of bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One stored box of a tensor."""

    box: Box
    """Which elements of the global tensor."""
    span: ByteSpan
    """Where the bytes lie: the elements themselves ("raw") or the item around them ("torch_zip")."""
    encoding: Encoding = "raw"
    """How `span` holds the elements; `Format.resolve` turns "torch_zip" into "raw"."""
    strides: tuple[int, ...] | None = None
    """Strides of the stored elements, in elements; None means row-major."""
    crc32: int | None = None
    """CRC-32 of the raw bytes as their writer recorded it; None when unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor and its chunks."""

    fqn: str
    """Fully qualified name, the key in the state dict."""
    dtype: DType
    """Element type."""
    shape: tuple[int, ...]
    """Global shape in logical elements."""
    chunks: Sequence[Chunk]
    """Stored boxes; the distinct ones tile the shape exactly in a sound checkpoint."""
    path: KeyPath = ()
    """Keys that lead to the tensor in the nested state dict it was saved from; () when unknown."""

    @property
    def num_elems(self) -> int:
        """Number of logical elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of logical bytes: every element once, no replicas."""
        return self.dtype.num_bytes(self.num_elems)

    def num_parts(self, dim: int) -> int:
        """Return into how many parts a dim is cut."""
        return len({chunk.box.offsets[dim] for chunk in self.chunks})


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobEntry:
    """A stored object that is not a tensor: listed and copied, never unpickled."""

    fqn: str
    """Its key in the state dict."""
    span: ByteSpan
    """The whole item."""
    path: KeyPath = ()
    """As `TensorEntry.path`."""


Census = Counter[str]
"""What lies in objects that nobody runs: how many "tensors", the "bytes" of their storages, and how many objects of
each class or function, whose names have a dot; "not known: …" counts what could not be looked through."""


def say_census(census: Census) -> str:
    """Return a census as a line for people."""
    count, others = census["tensors"], sorted(census.keys() - {"tensors", "bytes"})
    known = [f"{census[name]} × {name}" for name in others if not name.startswith("not known")]
    unknown = [name for name in others if name.startswith("not known")]
    size = f", {format_size(census['bytes'])}" if census["bytes"] else ""
    tensors = f"{count} tensor{'s' * (count > 1)}{size}" if count else "" if unknown else "no tensor"
    return "; ".join(filter(None, (tensors, first_few(known, 6), first_few(unknown))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """A file that belongs to the model but holds no weights (config, tokenizer, …)."""

    file: str
    nbytes: int
    stored_as: str = ""  # What it is called where it is copied from; "" when the same

    @property
    def source_file(self) -> str:
        """Its name where it is copied from."""
        return self.stored_as or self.file


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Checkpoint(Result):
    """The description of a checkpoint, from its headers alone."""

    root: str
    """Directory that every span's file is relative to."""
    format: str
    """How it is stored: a name of `formats.table`."""
    tensors: tuple[TensorEntry, ...]
    """Tensors in the order of their source."""
    blobs: tuple[BlobEntry, ...] = ()
    """Non-tensor items."""
    sealed: Mapping[str, str] = field(default_factory=dict)
    """What is or holds tensors or arrays, and is not read: keys → what it is."""
    objects: Census = field(default_factory=Counter)
    """What lies beside the tensors in files that are objects themselves; `blobs` are others."""
    assets: tuple[Asset, ...] = ()
    """Files to copy with the weights."""
    mesh: Mesh | None = None
    """The mesh it was sharded for, when recorded."""
    placements: Mapping[str, Mapping[str, Placement]] | None = None
    """FQN → axis → placement, when recorded."""
    files: Mapping[str, int] = field(default_factory=dict)
    """Size in bytes of every file that a span names; a missing file is absent."""

    @property
    def total_bytes(self) -> int:
        """Logical bytes of all tensors, replicas counted once."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def to_json(self) -> dict[str, object]:
        """Return it as `ckpt inspect --tensors --json` does, without what needs more than headers."""
        from ckpt_tools.checkpoint.summarise import summarise

        return summarise(self, path=self.root).to_json(tensors=self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that a check noticed. Returned, not raised. Names from files are made safe to show here."""

    code: str
    """Stable kebab-case identifier."""
    severity: Severity
    """An error makes the check fail; a warning or an info does not."""
    where: str
    """Tensor, file or span concerned."""
    what: str
    """What is wrong, with the expected and the found value."""
    hint: str | None = None
    """What to do about it."""
    tensor: str | None = field(default=None, compare=False)
    """The tensor that it is about, where it is about one: its name as it is stored."""
    file: str | None = field(default=None, compare=False)
    """The file of tensors that it is about, where it is about one: its name as it is stored."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "where", escape_message(self.where))
        object.__setattr__(self, "what", escape_message(self.what))
        if self.hint is not None:
            object.__setattr__(self, "hint", escape_message(self.hint))

    @classmethod
    def error(cls, code: str, where: str, what: str, hint: str | None = None, *, file: str | None = None) -> Self:
        """Make one that fails the check."""
        return cls(code=code, severity="error", where=where, what=what, hint=hint, file=file)

    @classmethod
    def warning(cls, code: str, where: str, what: str, hint: str | None = None) -> Self:
        """Make one that does not."""
        return cls(code=code, severity="warning", where=where, what=what, hint=hint)

    @classmethod
    def info(cls, code: str, where: str, what: str, hint: str | None = None) -> Self:
        """Make one that only tells."""
        return cls(code=code, severity="info", where=where, what=what, hint=hint)
