"""Tensors that are the same weight of different layers: told together, and compared with each other."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator, Mapping
from statistics import median
from typing import TypeVar

from ckpt_tools.checkpoint.entries import Finding, Severity
from ckpt_tools.text import first_few

T = TypeVar("T", bound=Hashable)

_MOST = 8  # Findings of a code; a run that diverged has hundreds of such tensors
_MIN_ALIKE = 4
_SPREAD = 5.0  # Standard deviations of the logarithms, to judge by their median, within which a figure is one of them
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def kind_of(fqn: str) -> str:
    """Return a name without the numbers of layers and experts."""
    return _NUMBER.sub("*", fqn)


def layer_of(fqn: str) -> int | None:
    """Return the first number in a name; None without one."""
    found = _NUMBER.search(fqn)
    return None if found is None else int(found[0])


def gathered(
    found: Mapping[str, str], severity: Severity, code: str, hint: str, *, where: Mapping[str, str] | None = None
) -> Iterator[Finding]:
    """Yield one finding for all tensors of a kind, of FQN → what is the matter, and not too many in all.

    `where` has the places that are not the tensors themselves.
    """
    kinds: dict[str, list[str]] = {}
    for fqn in found:
        kinds.setdefault(kind_of(fqn), []).append(fqn)
    groups = list(kinds.values())
    told = [
        (fqn, f"tensor {fqn!r}: {found[fqn]}" + (f"; and {len(o):,} more like it: {first_few(o, 2)}" if o else ""))
        for fqn, *o in groups[:_MOST]
    ]
    if left := [fqn for group in groups[_MOST:] for fqn in group]:
        told.append((left[0], f"{len(left):,} more tensors: {first_few(left, 2)}"))
    for fqn, what in told:
        yield Finding(code=code, severity=severity, where=(where or {}).get(fqn, fqn), what=what, hint=hint)


def outliers(figures: Mapping[str, float], groups: Mapping[str, T], fewest_bits: float) -> Iterator[tuple[str, float]]:
    """Yield the tensors whose figure is far from that of the others in their group, with the others' median.

    Figures that are not positive are skipped. Within `fewest_bits` powers of two of the median nothing is strange.
    """
    members: dict[T, dict[str, float]] = {}
    for fqn, figure in figures.items():
        if 0 < figure < math.inf:
            members.setdefault(groups[fqn], {})[fqn] = math.log2(figure)
    for logs in members.values():
        if len(logs) < _MIN_ALIKE:
            continue
        middle = median(logs.values())
        usual = _SPREAD * 1.4826 * median(abs(log - middle) for log in logs.values())
        for fqn, log in logs.items():
            if abs(log - middle) > max(usual, fewest_bits):
                yield fqn, 2.0**middle
