"""What the guide and `ckpt watch --help` promise about a run's folder, as a model that shares nothing with the code.

Steps are judged by what the life that wrote them knows, and never by their bytes.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field

Content = dict[str, bytes]
"""File in a step → its bytes."""


@dataclass
class Step:
    """What is known of a step by who has saved it."""

    number: int
    kind: str
    """Names, shapes and magnitudes of its tensors: two steps of one kind can succeed each other."""
    content: Content
    holds: int = 1
    """1 with what a trainer resumes from beside the weights, else 0."""
    state: str = "whole"
    """whole; bad: readable, never fit (NaN, or every shape is [0]); half: cut off; rotten: other bytes than those that
    were verified; perhaps rotten: nobody can know it any more."""
    metric: float | None = None
    verdict: str = ""
    """fit, unfit or bad; empty: nobody has verified it as it is."""
    order: int = 0
    is_back: bool = False
    away_since: float = 0.0

    def change(self) -> None:
        """Something of it is no longer as it was verified, if only a time."""
        self.verdict = ""
        self.state = "perhaps rotten" if self.state == "rotten" else self.state

    @property
    def score(self) -> float | None:
        """Its metric, if that is a number."""
        return self.metric if self.metric is not None and math.isfinite(self.metric) else None


@dataclass(frozen=True)
class Rules:
    """Options of a pass."""

    last: int | None = None
    every: int | None = None
    best: int | None = None
    quarantine_s: float = 86400.0
    accept: str = ""

    @property
    def remove(self) -> bool:
        """Do they remove anything?"""
        return bool(self.last or self.every or self.best)


@dataclass
class Folder:
    """A run's folder: what is in its place, what is in quarantine, what was fit once."""

    steps: dict[str, Step] = field(default_factory=dict)
    away: dict[str, Step] = field(default_factory=dict)
    ghosts: list[Step] = field(default_factory=list)
    """Fit steps that are in neither: they may still be compared with."""
    pins: set[str] = field(default_factory=set)
    count: int = 0

    def copy(self) -> Folder:
        """Return one that can change apart from this one."""
        return Folder(*(copy.deepcopy(each) for each in vars(self).values()))

    def rows(self) -> list[tuple[str, Step]]:
        """Return the steps in their order."""
        return sorted(self.steps.items(), key=lambda item: item[1].number)

    def fit(self) -> list[tuple[str, Step]]:
        """Return those that are known to be fit."""
        return [(name, step) for name, step in self.rows() if step.verdict == "fit"]

    def forget(self) -> None:
        """The record is lost: nothing is verified, and nobody knows what was brought back."""
        for step in (*self.steps.values(), *self.away.values()):
            step.change()
            step.is_back = False
        self.ghosts = []

    def accept(self, name: str) -> None:
        """What was unfit is fit; what was unfit because of its predecessors is judged anew."""
        for step in self.steps.values():
            if step.number > self.steps[name].number and step.verdict == "unfit":
                step.verdict = ""
        self.steps[name].verdict = "fit"

    def verify(self, accept: str, seen: dict[str, bool]) -> int:
        """Verify what is new, in the order of steps; `seen` decides what the guide leaves open. How often did it?"""
        num_open = 0
        for name, step in self.rows():
            if step.verdict or step.state == "half":
                continue
            possible = {"bad"} if step.state == "bad" else {"fit"} if accept == name else self._judge(step)
            num_open += len(possible) > 1
            step.verdict = possible.pop() if len(possible) == 1 else "fit" if seen.get(name) else "unfit"
            if step.verdict == "unfit" and not step.holds:
                step.verdict = ""  # it counts as half-written, and is looked at again
            else:
                self.count += 1
                step.order = self.count
        return num_open

    def _judge(self, step: Step) -> set[str]:
        """Return the verdicts that are right, by the last fit one before it."""
        if "rotten" in step.state:
            return {"unfit"} if step.state == "rotten" else {"fit", "unfit"}
        sure = [one for one in (*self.steps.values(), *self.away.values()) if one.verdict == "fit"]
        least = max((one.number for one in sure if one.number < step.number), default=-1)
        before = [one for one in sure if one.number == least]
        before += [one for one in self.ghosts if least < one.number < step.number]
        found = {"fit" if one.kind == step.kind and one.holds <= step.holds else "unfit" for one in before}
        return found if least >= 0 else {"fit", *found}

    def plan(self, rules: Rules) -> set[str]:
        """Return the names of what must go: everything else must stay."""
        fit = self.fit()
        if not fit or not rules.remove:
            return set()
        scores = sorted(step.score for _, step in fit if step.score is not None)
        best = scores[: rules.best][-1] if rules.best and scores else -math.inf
        last = fit[-1][1]
        return {
            name
            for name, step in fit[: -rules.last if rules.last else -1]
            if name not in self.pins
            and not step.is_back
            and step.order <= last.order  # else the run has gone back to an earlier step
            and not (rules.every and step.number % rules.every == 0)
            and not (rules.best and (step.score is None or step.score <= best))
        }
