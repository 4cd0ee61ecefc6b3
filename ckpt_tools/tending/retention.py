"""Which checkpoints of a run stay: a function of what is known of them, and of nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["verified", "unfit", "bad", "unsupported", "complete", "incomplete", "changing"]
"""verified: it was, and is unchanged. unfit: verified, and not fit to stand for the earlier ones. bad: verified, with
errors. unsupported: in part not read. complete: by its headers; nobody has verified it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What is known of a checkpoint."""

    name: str
    series: str
    step: int | None
    state: State
    why: str = ""
    """Why it is in this state."""
    metric: float | None = None
    pinned: str = ""
    """Why it stays, whatever the rules say: who names or uses it."""
    nbytes: int = 0
    order: int = 0
    """When it was verified, counted and not by a clock."""
    unfit: tuple[str, ...] = ()
    """Why it must not succeed earlier ones, reason by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What is to be kept; nothing goes without one of them, or by its name."""

    last: int | None = None
    """So many of the latest."""
    every: int | None = None
    """Those whose step is a multiple."""
    best: int | None = None
    """So many with the best metric."""
    metric: str = "eval_loss"
    greater_is_better: bool = False
    unverified: tuple[str, ...] = ()
    """Names of checkpoints that go although they are not verified."""

    @property
    def removes(self) -> bool:
        """Is anything to be removed?"""
        return any(rule is not None for rule in (self.last, self.every, self.best)) or bool(self.unverified)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What becomes of a checkpoint."""

    candidate: Candidate
    stays: bool
    reason: str


def plan_retention(candidates: Sequence[Candidate], rules: Rules) -> tuple[Decision, ...]:
    """Decide about every checkpoint.

    The last verified one of a series stays, and so does everything after it, everything that is not verified and
    everything that is pinned; `Rules` tells of the others.
    """
    verified: dict[str, list[Candidate]] = {}
    for each in sorted(candidates, key=lambda each: each.step or 0):
        if each.state == "verified" and each.step is not None:
            verified.setdefault(each.series, []).append(each)
    kept = {series: _kept(found, rules) for series, found in verified.items()}
    decisions = []
    for one in candidates:
        stays = _reason(one, verified.get(one.series, []), kept.get(one.series, {}), rules)
        reason = stays or ("named by --unverified" if one.name in rules.unverified else "superseded")
        decisions.append(Decision(candidate=one, stays=stays is not None, reason=reason))
    return tuple(decisions)


def _kept(verified: Sequence[Candidate], rules: Rules) -> dict[str, str]:
    """Return the verified checkpoints of a series that a rule keeps: name → which."""
    found: dict[str, str] = {}
    for one in _best(verified, rules) if rules.best is not None and any(map(_is_measured, verified)) else ():
        found[one.name] = f"--keep-best {rules.best}: {rules.metric} {one.metric:g}"
    if rules.every is not None:
        found |= {one.name: f"--keep-every {rules.every}" for one in verified if (one.step or 0) % rules.every == 0}
    if rules.last is not None:
        found |= {one.name: f"--keep-last {rules.last}" for one in verified[-rules.last :]}
    return found


def _reason(one: Candidate, verified: Sequence[Candidate], kept: Mapping[str, str], rules: Rules) -> str | None:
    """Return why a checkpoint stays; None where it goes."""
    if one.pinned:
        return one.pinned
    if not rules.removes:
        return "no rule removes anything"
    if one.step is None:
        return "no step in its name"
    if one.state == "unfit" and one.name not in rules.unverified:
        return f"not fit: {one.why}"
    if not verified:
        return f"nothing is verified ({one.why})" if one.why else "nothing is verified"
    last = verified[-1]
    if one.step >= (last.step or 0):
        return "the last verified one" if one.name == last.name else f"not before the last verified one ({last.name})"
    if one.name in rules.unverified:
        return None
    if one.state != "verified":
        return f"not verified: {one.why or one.state}"
    if one.order > last.order:
        return f"verified later than {last.name}: the run may have gone back to an earlier step"
    if rules.last is None and rules.every is None and rules.best is None:
        return "no rule removes it"
    if one.name in kept:
        return kept[one.name]
    if rules.best is not None and not _is_measured(one):
        there = any(map(_is_measured, verified))
        return f"it has no finite {rules.metric}" if there else f"nothing here has a {rules.metric}"
    return None


def _is_measured(one: Candidate) -> bool:
    return one.metric is not None and math.isfinite(one.metric)


def _best(verified: Sequence[Candidate], rules: Rules) -> Sequence[Candidate]:
    """Return the best ones, and those that are as good as the last of them."""
    sign = -1 if rules.greater_is_better else 1
    ranks = sorted(sign * (each.metric or 0.0) for each in verified if _is_measured(each))
    worst = ranks[: rules.best][-1]
    return [each for each in verified if _is_measured(each) and sign * (each.metric or 0.0) <= worst]
