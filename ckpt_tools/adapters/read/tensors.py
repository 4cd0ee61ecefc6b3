"""The bytes of an adapter: whole tensors, the numbers that some of them are, and all of it, at once or when needed.

Adapters are small; a tensor at a time is in memory until they are loaded.
"""

from __future__ import annotations

import struct
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ckpt_tools.adapters.adapter import Adapter, AdapterModule
from ckpt_tools.description.checkpoint import TensorEntry
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats.opening import Opened
from ckpt_tools.moving.boxes import BytesReader

if TYPE_CHECKING:
    from ckpt_tools.moving.arrays import Array

_SCALARS = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i", "I16": "<h", "U8": "<B", "I8": "<b"}


class TensorReader(BytesReader):
    """Reads tensors of one open checkpoint, and scalars as numbers."""

    def read_scalar(self, entry: TensorEntry) -> float | None:
        """Return the number that a tensor of one element holds; None when it holds none, or of no known type."""
        if entry.num_elems != 1:
            return None
        name, content = entry.dtype.name, self.read(entry)
        if name == "BF16":
            return float(struct.unpack("<f", b"\0\0" + bytes(content))[0])
        code = _SCALARS.get(name)
        return None if code is None else float(struct.unpack(code, content)[0])


def load(adapter: Adapter[TensorEntry], opened: Opened, reader: TensorReader | None = None) -> Adapter[Array]:
    """Read the adapter's tensors, and no other byte.

    Memory: the adapter. CRC-32s and digests are checked where the source records them.
    """
    reader = reader or TensorReader(opened)
    read: dict[str, Array] = {}  # what several modules share is read once

    def array(module: AdapterModule[TensorEntry], role: str) -> Array:
        entry = module.factors[role]
        if entry.fqn not in read:
            read[entry.fqn] = to_array(reader, entry)
        return read[entry.fqn]

    return adapter.with_factors(array)


def to_array(reader: TensorReader, entry: TensorEntry) -> Array:
    """Read one tensor; raise UnreadableError if it is damaged, or of a type that is no array's."""
    from ckpt_tools.moving.arrays import array_of, numpy_dtype

    if numpy_dtype(entry.dtype) is None:
        raise UnreadableError(f"an adapter of {entry.dtype.name} elements", where=entry.fqn)
    return array_of(reader.read(entry), entry.dtype, entry.shape)


def entry_of(name: str, array: Array) -> TensorEntry:
    """Return what a header would say of an array."""
    from ckpt_tools.moving.arrays import dtype_of

    return TensorEntry(fqn=name, dtype=dtype_of(array), shape=tuple(array.shape), chunks=())


class LazyAdapter:
    """An adapter's tensors, read once."""

    def __init__(self, adapter: Adapter[TensorEntry], opened: Opened) -> None:
        self._adapter = adapter
        self._opened = opened
        self.reader = TensorReader(opened)
        self._lock = threading.Lock()
        self._loaded: Adapter[Array] | None = None
        self._settings = ExitStack()

    def get(self) -> Adapter[Array]:
        """Return the loaded adapter."""
        with self._lock:
            if self._loaded is None:
                self._loaded = load(self._adapter, self._opened, self.reader)
                self._leave_threads_to_workers()
            return self._loaded

    def replace(self, adapter: Adapter[Array]) -> None:
        """Give another adapter from now on: the same change under other names."""
        self._loaded = adapter

    def close(self) -> None:
        """Give numpy its threads back."""
        self._settings.close()

    def _leave_threads_to_workers(self) -> None:
        """The executor's workers compute side by side: threads of each one's own would wait for each other."""
        from threadpoolctl import threadpool_limits

        self._settings.enter_context(threadpool_limits(1, user_api="blas"))
