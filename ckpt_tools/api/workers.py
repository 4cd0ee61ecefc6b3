"""How much of the machine a command takes, and whom it tells."""

from __future__ import annotations

import os
from collections.abc import Callable

from ckpt_tools.execute import Progress

ProgressFactory = Callable[[int], Progress]
"""Given the number of bytes to move, returns what reports them."""


def default_num_workers() -> int:
    """Return how many threads move bytes by default: two per core, at most eight."""
    return min(8, 2 * (len(os.sched_getaffinity(0)) or 1))
