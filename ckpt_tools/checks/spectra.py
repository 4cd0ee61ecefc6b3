"""How many directions a matrix uses, to judge by a sample of its rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ckpt_tools.description.checkpoint import TensorEntry
from ckpt_tools.description.layout import Box
from ckpt_tools.moving.plan import chunk_index
from ckpt_tools.moving.read import Buffers, read_block
from ckpt_tools.storage.source import Source

_MAX_ROWS = 256
_MAX_COLUMNS = 1 << 14
"""A sample is this large at most: 32 MiB in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spectrum:
    """What the singular values of a sample are like; no rank exceeds the smaller of its two sizes."""

    rows: int
    """Rows of the sample, evenly spaced."""
    columns: int
    """Its columns, from the first."""
    effective_rank: float
    """exp of the entropy of the singular values over their sum (Roy and Vetterli, 2007)."""
    stable_rank: float
    """Sum of the squares over the largest square."""


def measure_spectrum(entry: TensorEntry, source: Source) -> Spectrum | None:
    """Measure a matrix; None for what is none, is zero, or has elements that are not finite in the sample.

    The chunks of `entry` are raw, and its type has figures (`moments.measures`).
    """
    import numpy as np

    from ckpt_tools.moving.arrays import array_of

    if len(entry.shape) != 2 or min(entry.shape) < 2 or (entry.dtype.name[0] in "BIU" and entry.dtype.name != "BF16"):
        return None
    height, width = entry.shape
    rows, columns = min(height, _MAX_ROWS), min(width, _MAX_COLUMNS)
    sample = np.empty((rows, columns), np.float64)
    chunks, buffers = chunk_index(entry), Buffers()
    for i in range(rows):
        box = Box((i * height // rows, 0), (1, columns))
        content, _, _ = read_block(entry, chunks, entry.dtype, box, source, buffers)
        sample[i] = array_of(content, entry.dtype, (-1,))
    most = float(np.abs(sample).max())
    if not 0 < most < math.inf:
        return None
    sample /= most
    short = sample if rows <= columns else sample.T
    values = np.sqrt(np.clip(np.linalg.eigvalsh(short @ short.T), 0, None))
    shares = values[values > values.max() * 1e-7] / values.sum()  # below, there is only rounding of the squares
    entropy = -float(np.sum(shares * np.log(shares)))
    stable = float(np.square(values).sum() / np.square(values.max()))
    return Spectrum(rows=rows, columns=columns, effective_rank=math.exp(entropy), stable_rank=stable)
