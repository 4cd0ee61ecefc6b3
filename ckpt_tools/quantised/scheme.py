"""What a scheme of quantisation is to the rest of ckpt: which tensors belong together, and what they decode to.

A scheme is one module of this room that ends in `SCHEME = …`, and one line of `table.SCHEMES`. It decodes runs of
elements, in row-major order, of the tensor that was quantised; everything else treats that tensor as bytes in a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ckpt_tools.description.checkpoint import TensorEntry
from ckpt_tools.errors import UnreadableError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    F32 = NDArray[np.float32]
    Bytes = NDArray[np.uint8]

Settings = Mapping[str, object]
"""`quantization_config` of config.json, and the `model_type` beside it."""
Tensors = Mapping[str, TensorEntry]
OTHER_CONFIG = "is config.json the one of this checkpoint?"
"""A hint."""


class ReadRun(Protocol):
    """Reads stored elements."""

    def __call__(self, entry: TensorEntry, first: int, count: int) -> Bytes:
        """Return the bytes of elements [first, first + count) of a tensor, in row-major order."""

    def columns(self, entry: TensorEntry, first: int, count: int) -> Bytes:
        """Return columns [first, first + count) of a matrix, as [columns, bytes of one]: shared, not to be changed."""


class Decode(Protocol):
    """Decodes elements of one tensor."""

    def __call__(self, read: ReadRun, first: int, count: int) -> F32:
        """Return elements [first, first + count), in row-major order: exact products in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """One tensor that is stored quantised."""

    fqn: str
    """Name of what it stands for."""
    shape: tuple[int, ...]
    """Of what `decode` gives."""
    stored: tuple[TensorEntry, ...]
    """The tensors that it is stored in."""
    decode: Decode
    is_turned: bool = False
    """Does the model have the last two dims in each other's place?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a scheme makes of a checkpoint."""

    what: str
    """The scheme, for people."""
    tensors: tuple[Quantised, ...]
    dropped: tuple[str, ...] = ()
    """Tensors that only a quantised model has (scales of activations)."""


class Scheme(Protocol):
    """One way to quantise."""

    method: str
    """Value of `quant_method` in config.json."""

    def find(self, tensors: Tensors, settings: Settings, read: ReadRun) -> Found:
        """Return the tensors that are stored in this way.

        Args:
            tensors: All of the checkpoint, by name.
            settings: What config.json says of the scheme.
            read: For small ones that say how another is stored.

        Raises:
            UnreadableError: A part of one is missing, or has not the shape that it must have.
            UsageError: Settings that ckpt does not decode.
        """


def beside(tensors: Tensors, fqn: str, *, of: str) -> TensorEntry:
    """Return a tensor that another one needs.

    Raises:
        UnreadableError: It is not there.
    """
    found = tensors.get(fqn)
    if found is None:
        raise UnreadableError(
            f"{fqn!r} is missing: {of!r} cannot be decoded without", hint="restore the file it was in"
        )
    return found


def check_shape(entry: TensorEntry, shape: tuple[int, ...], *, of: TensorEntry) -> None:
    """Refuse a tensor of another shape than the one it belongs to needs.

    Raises:
        UnreadableError: It is.
    """
    if entry.shape != shape:
        what = f"{entry.fqn!r} is {list(entry.shape)}, {of.fqn!r} of {list(of.shape)} needs {list(shape)}"
        raise UnreadableError(what, hint=OTHER_CONFIG)


def refuse(settings: Settings, key: str, *known: object) -> None:
    """Refuse a setting that is not known to decode.

    Raises:
        UsageError: It is another one.
    """
    value = settings.get(key)
    if value not in known:
        raise UsageError(f"quantization_config has {key} {value!r}, which ckpt does not decode")


def read_bytes(read: ReadRun, entry: TensorEntry, start: int, stop: int) -> Bytes:
    """Return bytes [start, stop) of a tensor whose dtype is only its storage."""
    size = entry.dtype.num_bytes(1)
    first = start // size
    return read(entry, first, -(-stop // size) - first)[start - first * size : stop - first * size]


def with_ending(tensors: Tensors, ending: str) -> Iterator[tuple[str, TensorEntry]]:
    """Yield (name without the ending, tensor) of all whose names have it."""
    for fqn, entry in tensors.items():
        if fqn.endswith(ending):
            yield fqn.removesuffix(ending), entry
