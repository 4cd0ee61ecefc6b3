"""In which order to write tensors into files that are sent front to back."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

from ckpt_tools.moving.plan import Copy

Copies = Sequence[tuple[str, Copy]]


def front_to_back(groups: Sequence[Copies]) -> list[int]:
    """Return the order in which every file is written from its beginning, as near to the given one as that allows.

    Files that have two tensors in opposite orders cannot both have theirs: the first tensor that waits goes ahead.
    """
    files: dict[str, list[tuple[int, int]]] = {}
    for number, copies in enumerate(groups):
        for file, copy in copies:
            files.setdefault(file, []).append((copy.offset, number))
    after: list[list[int]] = [[] for _ in groups]
    waits_for = [0] * len(groups)
    for placed in files.values():
        placed.sort()
        for (_, first), (_, second) in pairwise(placed):
            if first != second:
                after[first].append(second)
                waits_for[second] += 1
    ready = [number for number, count in enumerate(waits_for) if not count]
    order: list[int] = []
    done = [False] * len(groups)
    oldest = 0
    while len(order) < len(groups):
        if not ready:
            while done[oldest]:
                oldest += 1
            ready.append(oldest)
        number = heapq.heappop(ready)
        if done[number]:
            continue
        done[number] = True
        order.append(number)
        for each in after[number]:
            waits_for[each] -= 1
            if waits_for[each] == 0:
                heapq.heappush(ready, each)
    return order
