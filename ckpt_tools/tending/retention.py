"""Which checkpoints of a run stay: a function of what is known of them, and of nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["verified", "bad", "unsupported", "complete", "incomplete", "changing"]
"""verified: it was, and is unchanged. bad: so, with errors. unsupported: in part not read. complete: by its headers."""


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
    decisions = []
    for candidate in candidates:
        kept = _reason(candidate, [each for each in candidates if each.series == candidate.series], rules)
        reason = kept or ("named by --unverified" if candidate.name in rules.unverified else "superseded")
        decisions.append(Decision(candidate=candidate, stays=kept is not None, reason=reason))
    return tuple(decisions)


def _reason(one: Candidate, series: Sequence[Candidate], rules: Rules) -> str | None:
    """Return why a checkpoint stays; None where it goes."""
    verified = [each for each in series if each.state == "verified" and each.step is not None]
    verified.sort(key=lambda each: each.step or 0)
    if one.pinned:
        return one.pinned
    if not rules.removes:
        return "no rule removes anything"
    if one.step is None:
        return "no step in its name"
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
    if rules.best is not None and all(each.metric is None for each in verified):
        return f"nothing here has a {rules.metric}"
    if rules.last is not None and one in verified[-rules.last :]:
        return f"--keep-last {rules.last}"
    if rules.every is not None and one.step % rules.every == 0:
        return f"--keep-every {rules.every}"
    if rules.best is not None and one in _best(verified, rules):
        return f"--keep-best {rules.best}: {rules.metric} {one.metric:g}"
    return None


def _best(verified: Sequence[Candidate], rules: Rules) -> Sequence[Candidate]:
    """Return the best ones; of equals the latest."""
    measured = [each for each in reversed(verified) if each.metric is not None and each.metric == each.metric]
    sign = -1 if rules.greater_is_better else 1
    return sorted(measured, key=lambda each: sign * (each.metric or 0.0))[: rules.best]
