"""How much of the machine a command takes."""

from __future__ import annotations

import os


def default_num_workers(*, computes: bool = False) -> int:
    """Return how many threads work by default, at most eight.

    Args:
        computes: They compute on what they move: one per core. Two, where one may wait for the disk.
    """
    cores = len(os.sched_getaffinity(0)) or 1
    return min(8, cores if computes else 2 * cores)
