"""Fewer layers that tell as much: layers of one kind are equal, so one more of them shows what each adds. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_SHOWN = 4
"""Layers that are kept of a row of equal ones: the first, the second, the last but one, the last. Neighbours of a layer
decide what is gathered beside it, so these four stand for all."""
_LONGEST_PERIOD = 12
"""Layers of several kinds may take turns, every so many."""


@dataclass(frozen=True, slots=True)
class Slim:
    """Layers to run in place of all, and how to tell from them what all would take."""

    base: tuple[int, ...]
    """Indices of those that are kept."""
    longer: tuple[int, ...]
    """The same with one more of what repeats."""
    left_out: int
    """How many times what `longer` has more than `base` is missing in `base`."""


def slim(kinds: Sequence[Hashable]) -> Slim:
    """Choose the layers to run: the fewest that show every kind, and what one more of the most frequent adds.

    Equal `kinds` take the same memory. All layers run, and none is left out, where running fewer twice is not cheaper.
    """
    everything = tuple(range(len(kinds)))
    best, cost = Slim(everything, everything, 0), len(kinds)
    for period in range(1, min(_LONGEST_PERIOD, len(kinds) // 2) + 1):
        units = max(2, -(-_SHOWN // period))
        start = 0
        while start + period < len(kinds):
            end = start + period
            while end < len(kinds) and kinds[end] == kinds[end - period]:
                end += 1
            repeats = (end - start) // period
            left_out = repeats - units
            kept = len(kinds) - left_out * period
            if left_out > 0 and 2 * kept + period < cost:
                head = start + period * -(-units // 2)
                tail = start + period * (repeats - units // 2)
                longer = everything[: head + period] + everything[tail:]
                best, cost = Slim(everything[:head] + everything[tail:], longer, left_out), 2 * kept + period
            start = max(end - period, start) + 1
    return best
