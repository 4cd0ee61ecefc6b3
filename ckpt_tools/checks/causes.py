"""Findings put together by what brought them about: a missing file is one cause, whatever lay in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpt_tools.checks.reading import Extent
from ckpt_tools.description.checkpoint import Finding, Severity
from ckpt_tools.text import escape_name
from ckpt_tools.units import format_size

_ORDER: Sequence[Severity] = ("error", "warning", "info")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What brought findings about."""

    code: str
    severity: Severity
    what: str
    """Where, how many tensors, and what is wrong with them, in one line."""
    hint: str | None
    findings: tuple[int, ...]
    """Their places in the list of findings."""


def find_causes(
    findings: Sequence[Finding], num_tensors: int, read: Iterable[Extent], not_read: Iterable[Extent]
) -> tuple[Cause, ...]:
    """Put findings together that have the same code and place; errors come first."""
    lost = {each.file: each.nbytes for each in not_read}
    total = sum(lost.values()) + sum(each.nbytes for each in read)
    groups: dict[tuple[Severity, str, str], list[int]] = {}
    for number, each in enumerate(findings):
        groups.setdefault((each.severity, each.code, each.file or each.where), []).append(number)
    causes = []
    for (severity, code, place), numbers in sorted(groups.items(), key=lambda item: _ORDER.index(item[0][0])):
        group = [findings[number] for number in numbers]
        what = f"{group[0].where}: {group[0].what}"
        if len(group) > 1:
            named = [each for each in group if each.tensor is not None]
            names = {each.tensor for each in named}
            facts = [
                escape_name(place),
                f"{len(names)} of {num_tensors} tensors" if names else f"{len(group)} findings",
            ]
            if code in ("missing-file", "short-file") and place in lost:
                facts.append(f"{format_size(lost[place])} of {format_size(total)}")
            tails = {each.what.removeprefix(f"tensor {each.tensor!r}").lstrip(": ") for each in named or group}
            what = f"{', '.join(facts)}: {tails.pop() if len(tails) == 1 else f'the first: {group[0].what}'}"
        causes.append(Cause(code=code, severity=severity, what=what, hint=group[0].hint, findings=tuple(numbers)))
    return tuple(causes)
