"""Which checkpoints of a run stay: a function of what is known of them, and of nothing else."""

from __future__ import annotations

import math
import shlex
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

State = Literal["verified", "unfit", "bad", "unsupported", "complete", "incomplete", "changing"]
"""verified: it was, and is unchanged. unfit: verified, and not fit to stand for the earlier ones. bad: verified, with
errors. unsupported: in part not read. complete: by its headers; nobody has verified it."""
_WAITS = ("complete", "incomplete", "changing")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCheckpoint:
    """What is known of a checkpoint, and what becomes of it."""

    name: str
    series: str
    step: int | None
    state: State
    why: str = ""
    """Why it is in this state."""
    metric: float | None = None
    pinned: str = ""
    """Why it stays, whatever the rules say: who names it."""
    used_by: str = ""
    nbytes: int = 0
    order: int = 0
    """When it was verified, counted and not by a clock."""
    unfit: tuple[str, ...] = ()
    """Why it must not succeed earlier ones, reason by reason."""
    stays: bool = True
    reason: str = ""
    """Why it stays, or goes."""
    kept_by: tuple[str, ...] = ()
    """The rules that keep it."""
    goes_when: str = ""
    """What would have to come, as far as that can be said."""

    @property
    def explained(self) -> str:
        """Why it stays or goes, and why it is in its state."""
        return self.reason if not self.why or self.why in self.reason else f"{self.reason}; {self.why}"


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
    greater_is_better: bool | None = None
    """None: unless the name of the metric ends in loss."""
    unverified: tuple[str, ...] = ()
    """Names of checkpoints that go although they are not verified."""

    kept: tuple[str, ...] = ()
    """Names of checkpoints that the trainer points at."""

    @property
    def removes(self) -> bool:
        """Is anything to be removed?"""
        return self.is_given or bool(self.unverified)

    @property
    def is_given(self) -> bool:
        """Is there one that is not about names?"""
        return any(rule is not None for rule in (self.last, self.every, self.best))


def plan_retention(candidates: Sequence[RunCheckpoint], rules: Rules) -> tuple[RunCheckpoint, ...]:
    """Decide about every checkpoint.

    The last verified one of a series stays, and so does everything after it, everything that is not verified and
    everything that is pinned or in use; `Rules` tells of the others.
    """
    verified: dict[str, list[RunCheckpoint]] = {}
    waiting: dict[str, list[RunCheckpoint]] = {}
    for each in sorted(candidates, key=lambda each: each.step or 0):
        found = verified if each.state == "verified" else waiting if each.state in _WAITS else None
        if found is not None and each.step is not None:
            found.setdefault(each.series, []).append(each)
    kept = {series: _kept(found, rules) for series, found in verified.items()}
    steps = {series: [each.step or 0 for each in found] for series, found in verified.items()}
    decided = []
    for one in candidates:
        ours, kept_by = verified.get(one.series, []), kept.get(one.series, {}).get(one.name, ())
        later = len(ours) - bisect_right(steps.get(one.series, []), -1 if one.step is None else one.step)
        stays = _reason(one, ours, kept_by, rules)
        when = "" if stays is None else _when(one, ours, waiting.get(one.series, []), later, kept_by, rules)
        reason = stays or ("named by --unverified" if one.name in rules.unverified else "superseded")
        decided.append(replace(one, stays=stays is not None, reason=reason, kept_by=kept_by, goes_when=when))
    return tuple(decided)


def _kept(verified: Sequence[RunCheckpoint], rules: Rules) -> dict[str, tuple[str, ...]]:
    """Return the verified checkpoints of a series that rules keep: name → which."""
    found: dict[str, tuple[str, ...]] = {}
    for one in verified[-rules.last :] if rules.last is not None else ():
        found[one.name] = (f"--keep-last {rules.last}",)
    for one in verified if rules.every is not None else ():
        if (one.step or 0) % (rules.every or 1) == 0:
            found[one.name] = (*found.get(one.name, ()), f"--keep-every {rules.every}")
    for one in _best(verified, rules) if rules.best is not None and any(map(_is_measured, verified)) else ():
        found[one.name] = (*found.get(one.name, ()), f"--keep-best {rules.best}: {rules.metric} {one.metric:g}")
    return found


def _reason(one: RunCheckpoint, verified: Sequence[RunCheckpoint], kept_by: Sequence[str], rules: Rules) -> str | None:
    """Return why a checkpoint stays; None where it goes."""
    if one.used_by:
        return f"in use by {one.used_by}"
    if one.pinned:
        return one.pinned
    if not rules.removes:
        return "no rule removes anything"
    if one.step is None:
        return "no step in its name"
    if one.state == "unfit" and one.name not in rules.unverified:
        return f"not fit: {one.why}"
    if not verified:
        return f"nothing has been verified ({one.why})" if one.why else "nothing has been verified"
    last = verified[-1]
    if one.step >= (last.step or 0):
        return "the last verified one" if one.name == last.name else f"not before the last verified one ({last.name})"
    if one.name in rules.unverified:
        return None
    if one.state != "verified":
        return f"not verified: {one.why or one.state}"
    if one.order > last.order:
        return f"verified later than {last.name}: the run may have gone back to an earlier step"
    if not rules.is_given:
        return "no rule removes it"
    if kept_by:
        return kept_by[0]
    if rules.best is not None and not _is_measured(one):
        there = any(map(_is_measured, verified))
        return f"it has no finite {rules.metric}" if there else f"no checkpoint here has a {rules.metric}"
    return None


def _when(
    one: RunCheckpoint,
    verified: Sequence[RunCheckpoint],
    waiting: Sequence[RunCheckpoint],
    later: int,
    kept_by: Sequence[str],
    rules: Rules,
) -> str:
    """Say when a checkpoint that stays goes, of which `later` verified ones are later; "" where that is not known."""
    if one.used_by or one.pinned:
        return "when this ends"
    if one.step is None:
        return ""
    if one.state in ("complete", "changing"):
        return "when it is verified and superseded"
    if one.state != "verified":
        return f"with --unverified {shlex.quote(one.name)}" + ("" if later else ", when a later one is verified")
    is_counted = rules.is_given and all(rule.startswith("--keep-last") for rule in kept_by)
    is_counted = is_counted and (rules.best is None or _is_measured(one))
    need = (rules.last or 1) if is_counted else max(later, 1)
    after, missing = one.step, need - later
    if one.order > verified[-1].order:
        after, missing = verified[-1].step or 0, max(missing, 1)
    rule = "" if is_counted else f"with --keep-last {need}" + " alone" * rules.is_given
    coming = next((each.name for each in waiting if (each.step or 0) > after), f"a step after {after}")
    time = f"when {coming} is verified" if missing == 1 else f"when {missing} later ones are verified"
    return ", ".join(filter(None, (rule, time if missing > 0 else "")))


def _is_measured(one: RunCheckpoint) -> bool:
    return one.metric is not None and math.isfinite(one.metric)


def _best(verified: Sequence[RunCheckpoint], rules: Rules) -> Sequence[RunCheckpoint]:
    """Return the best ones, and those that are as good as the last of them."""
    greater = rules.greater_is_better
    sign = -1 if (not rules.metric.endswith("loss") if greater is None else greater) else 1
    ranks = sorted(sign * (each.metric or 0.0) for each in verified if _is_measured(each))
    worst = ranks[: rules.best][-1]
    return [each for each in verified if _is_measured(each) and sign * (each.metric or 0.0) <= worst]
