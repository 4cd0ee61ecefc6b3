"""What is checked before a run, and what was found so far."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.preflight.configs import Config
from ckpt_tools.preflight.options import PreflightOptions
from ckpt_tools.preflight.places import Place
from ckpt_tools.preflight.report import CHECKS, CheckName, CheckResult


@dataclass(slots=True)
class Flight:
    """What is checked, and what was found so far."""

    options: PreflightOptions
    findings: dict[Finding, None] = field(default_factory=dict)
    ignored: dict[Finding, None] = field(default_factory=dict)
    places: dict[Finding, Place] = field(default_factory=dict)
    checks: dict[CheckName, CheckResult] = field(default_factory=dict)
    not_checked: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def check(self, name: CheckName) -> Iterator[Check]:
        """Make one check: its block says what was found."""
        start = time.perf_counter()
        follow = self.options.on_check or (lambda _name, _state: None)
        follow(name, "begun")
        check = Check()
        yield check
        seconds = check.seconds if check.seconds is not None else time.perf_counter() - start
        check.findings = self.without_ignored(check.findings)
        failed = any(finding.severity == "error" for finding in check.findings)
        ok = False if failed else True if check.was_made else None
        if check.why_not:
            self.not_checked.append(f"{TITLES[name]}: {check.why_not}")
        self.tell(check.findings)
        self.checks[name] = CheckResult(name=name, ok=ok, seconds=round(seconds, 3), what=check.what or check.why_not)
        follow(name, "failed" if failed else "done")

    def tell(self, findings: Sequence[Finding]) -> None:
        """Keep findings, and say those that are new."""
        findings = self.without_ignored(findings)
        new = tuple(finding for finding in dict.fromkeys(findings) if finding not in self.findings)
        self.findings |= dict.fromkeys(new)
        if new and self.options.on_findings is not None:
            self.options.on_findings(new)

    def without_ignored(self, findings: Sequence[Finding]) -> tuple[Finding, ...]:
        """Return the findings that count, and keep the others."""
        self.ignored |= dict.fromkeys(one for one in findings if one.code in self.options.ignore)
        return tuple(one for one in findings if one.code not in self.options.ignore)

    def placed(self, findings: tuple[Finding, ...], config: Config) -> tuple[Finding, ...]:
        """Return findings on a config, and remember where they point at in its files."""
        for finding in findings:
            place = next((at for one in (config, *config.beside) if (at := one.place(finding.where))), None)
            if place is not None:
                self.places.setdefault(finding, place)
        return findings

    def results(self) -> tuple[CheckResult, ...]:
        """Return what the checks said, in the order in which they are shown."""
        names: list[CheckName] = [*CHECKS[:2], "host", *CHECKS[2:]]
        return tuple(self.checks[name] for name in names if name in self.checks)

    @property
    def has_errors(self) -> bool:
        """Is anything wrong so far?"""
        return any(finding.severity == "error" for finding in self.findings)


@dataclass(slots=True)
class Check:
    """What one check says of itself."""

    findings: tuple[Finding, ...] = ()
    what: str = ""
    why_not: str = ""
    """Why it was not made, or not to its end."""
    was_made: bool = False
    seconds: float | None = None
    """Where it ran elsewhere."""


TITLES = {
    "config": "the config",
    "rules": "rules on the model",
    "host": "this machine",
    "memory": "whether it fits",
    "checkpoint": "the checkpoint",
    "smoke": "a smoke run",
}
