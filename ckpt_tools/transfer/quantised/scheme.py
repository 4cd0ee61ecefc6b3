"""What a scheme of quantisation is to the rest of ckpt: which tensors belong together, and what they decode to.

A scheme is one module of this room that ends in `SCHEME = …`, and one line of `decoded.SCHEMES`. It decodes runs of
elements, in row-major order, of the tensor that was quantised; everything else treats that tensor as bytes in a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ckpt_tools.checkpoint.entries import TensorEntry

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    F32 = NDArray[np.float32]
    Bytes = NDArray[np.uint8]

Settings = Mapping[str, object]  # `quantization_config` of config.json, and the `model_type` beside it
Tensors = Mapping[str, TensorEntry]


class ReadRun(Protocol):
    """Reads stored elements."""

    def __call__(self, entry: TensorEntry, first: int, count: int) -> Bytes:
        """Return the bytes of elements [first, first + count) of a tensor, in row-major order."""

    def columns(self, entry: TensorEntry, low: int, high: int) -> Bytes:
        """Return columns [low, high) of a matrix, as [columns, bytes of one]: shared, not to be changed."""


class Decode(Protocol):
    """Decodes elements of one tensor."""

    def __call__(self, read: ReadRun, first: int, count: int) -> F32:
        """Return elements [first, first + count), in row-major order: exact products in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """One tensor that is stored quantised."""

    fqn: str  # Name of what it stands for
    shape: tuple[int, ...]  # Of what `decode` gives
    stored: tuple[TensorEntry, ...]
    decode: Decode
    is_transposed: bool = False  # Does the model have the last two dims in each other's place?


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a scheme makes of a checkpoint."""

    what: str  # The scheme, for people
    tensors: tuple[Quantised, ...]
    dropped: tuple[str, ...] = ()  # Tensors that only a quantised model has (scales of activations)


Find = Callable[[Tensors, Settings, ReadRun], Found]
"""Returns the tensors that are stored in a way.

Args: all of the checkpoint, by name; what config.json says of the scheme; a reader, for small ones that say how another
is stored. Raises UnreadableError where a part of one is missing or has not the shape that it must have, and UsageError
for settings that ckpt does not decode.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One way to quantise."""

    method: str  # Value of `quant_method` in config.json
    find: Find
