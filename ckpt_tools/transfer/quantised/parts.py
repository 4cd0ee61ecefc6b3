"""What schemes ask of the tensors that belong together, and of their settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.transfer.quantised.scheme import Quantised, ReadRun, Settings, Tensors

if TYPE_CHECKING:
    from ckpt_tools.transfer.quantised.scheme import Bytes

OTHER_CONFIG = "is config.json the one of this checkpoint?"  # A hint
_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")
"""Model types whose layers are transformers' Conv1D: their weights are [in, out]."""


def as_in_model(found: Iterable[Quantised], settings: Settings) -> tuple[Quantised, ...]:
    """Return weights that are quantised as [out, in] whatever the model has, in its order."""
    return tuple(replace(one, is_transposed=settings.get("model_type") in _CONV1D) for one in found)


def companions(tensors: Tensors, fqn: str, *, of: str) -> TensorEntry:
    """Return a tensor that another one needs."""
    found = tensors.get(fqn)
    if found is None:
        what = f"{fqn!r} is missing: {of!r} cannot be decoded without"
        raise UnreadableError(what, hint="restore the file it was in")
    return found


def check_shape(entry: TensorEntry, shape: tuple[int, ...], *, of: TensorEntry) -> None:
    """Refuse a tensor of another shape than the one it belongs to needs."""
    if entry.shape != shape:
        what = f"{entry.fqn!r} is {list(entry.shape)}, {of.fqn!r} of {list(of.shape)} needs {list(shape)}"
        raise UnreadableError(what, hint=OTHER_CONFIG)


def refuse(settings: Settings, key: str, *known: object) -> None:
    """Refuse a setting that is not known to decode."""
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
