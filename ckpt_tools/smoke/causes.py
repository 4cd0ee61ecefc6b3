"""One cause, one finding: what many ranks or many tensors say alike is said once, and what only follows is left out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.text import first_few

RANK_LOST = "rank-lost"
"""Code of a rank that failed because another one was gone."""
_ECHOES = ("rank-died", "rank-skip", "hang", RANK_LOST)
"""What is also said of ranks that have lost one, or that gloo has aborted; the most telling first."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_MAX_ALIKE = 2
_MAX_OF_CODE = 5


def pattern_of(where: str) -> str:
    """Return an FQN with its numbers left open: "layers.*.mlp"."""
    return _NUMBER.sub("*", where)


def fold(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings of one rank, those about many layers or many tensors as a few."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.code, finding.severity, pattern_of(finding.where)), []).append(finding)
    folded: dict[tuple[str, str], list[list[Finding]]] = {}
    for (code, severity, pattern), group in groups.items():
        is_layer = pattern != group[0].where and len(group) > _MAX_ALIKE
        folded.setdefault((code, severity), []).extend([group] if is_layer else [[each] for each in group])
    found = []
    for parts in folded.values():
        found += [_as_one(group) for group in parts[:_MAX_OF_CODE]]
        if rest := parts[_MAX_OF_CODE:]:
            names = [pattern_of(group[0].where) for group in rest]
            what = f"{sum(map(len, rest))} more like these: {first_few(names)}"
            found.append(replace(rest[0][0], where="…", what=what))
    return found


def _as_one(group: Sequence[Finding]) -> Finding:
    first = group[0]
    if len(group) == 1:
        return first
    return replace(first, what=f"{first.what}; and {len(group) - 1} more at {pattern_of(first.where)}")


def of_ranks(reported: Iterable[Sequence[Finding]]) -> list[Finding]:
    """Return what ranks report, in their order; of what several say about one thing, what the first one says."""
    told: set[tuple[str, str]] = set()
    found: list[Finding] = []
    for findings in map(list, map(dict.fromkeys, reported)):
        keys = [(finding.code, pattern_of(finding.where)) for finding in findings]
        found += [finding for finding, key in zip(findings, keys, strict=True) if key not in told]
        told.update(keys)
    return found


def causes(findings: Sequence[Finding], *, has_lost_rank: bool) -> list[Finding]:
    """Leave out what only follows from something else; once a rank is lost, the others had nobody to talk to."""
    echoes = [code for code in _ECHOES if code != ("rank-died" if has_lost_rank else "rank-skip")]
    codes = [finding.code for finding in findings if finding.severity == "error"]
    if all(code in echoes for code in codes):
        echoes = [code for code in echoes if code in codes][1:]
    kept = [finding for finding in findings if finding.code not in echoes]
    partings = [finding for finding in kept if finding.code == "rank-skip"]
    return [finding for finding in kept if finding not in partings[1:]]  # what comes after the first is no news
