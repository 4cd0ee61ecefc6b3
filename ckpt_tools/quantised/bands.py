"""Matrices whose columns are wanted, as quantisers of [out, in] weights store them in [in, out]."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from ckpt_tools.description.checkpoint import TensorEntry
from ckpt_tools.description.layout import Box

if TYPE_CHECKING:
    from ckpt_tools.quantised.scheme import Bytes

_BAND_BYTES = 16 << 20
"""Columns that are read at once: runs of some kilobytes, of a matrix of any size."""
_MAX_KEPT_BYTES = 6 * _BAND_BYTES
"""Workers decode neighbouring rows, which lie in one band or two, beside their scales."""


class Bands:
    """Reads columns in bands and keeps the last ones, so that every byte is read once; for any thread."""

    def __init__(self, read: Callable[[TensorEntry, Box], Bytes]) -> None:
        self._read = read
        self._kept: OrderedDict[tuple[str, int], Bytes] = OrderedDict()
        self._lock = threading.Lock()

    def columns(self, entry: TensorEntry, low: int, high: int) -> Bytes:
        """Return the bytes of columns [low, high) of a matrix, [columns, bytes of one]: shared, not to be changed."""
        import numpy as np

        width = max(1, _BAND_BYTES // max(1, entry.dtype.num_bytes(entry.shape[0])))
        numbers = range(low // width, -(-high // width))
        parts = [self._band(entry, n, width)[max(0, low - n * width) : high - n * width] for n in numbers]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _band(self, entry: TensorEntry, number: int, width: int) -> Bytes:
        import numpy as np

        with self._lock:
            key = entry.fqn, number
            found = self._kept.get(key)
            if found is None:
                (rows, columns), first = entry.shape, number * width
                width = min(width, columns - first)
                stored = self._read(entry, Box((0, first), (rows, width))).reshape(rows, width, -1)
                kind = np.dtype(f"V{stored.shape[2]}")  # elements are moved whole
                found = np.ascontiguousarray(stored.view(kind)[..., 0].T).view(np.uint8).reshape(width, -1)
                self._kept[key] = found
                while sum(band.nbytes for band in self._kept.values()) > _MAX_KEPT_BYTES and len(self._kept) > 1:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return found
