"""What a preflight says, as values and as the JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checks.verify import Verification
from ckpt_tools.estimate import Estimate
from ckpt_tools.preflight.match import CheckpointMatch
from ckpt_tools.preflight.places import ConfigLocation
from ckpt_tools.preflight.smoke import SmokeReport
from ckpt_tools.preflight.spec import ParallelSpec
from ckpt_tools.results import CheckedResult, as_json, plain
from ckpt_tools.text import counted, escape_name

if TYPE_CHECKING:
    from ckpt_tools.preflight.configs import Options

CheckName = Literal["config", "rules", "host", "memory", "checkpoint", "smoke"]
CHECKS: tuple[CheckName, ...] = ("config", "rules", "memory", "checkpoint", "smoke")
"""In the order in which they are shown; the machine is looked at only where that is asked for, and comes third."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One of the checks."""

    name: CheckName
    ok: bool | None
    seconds: float
    what: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PreflightReport(CheckedResult):
    """What `preflight` found."""

    config: str  # The config, or several, as the user named them
    framework: str
    mesh: str | None  # The run's mesh; None when the number of ranks is not known, or does not fit
    spec: ParallelSpec | None  # What the config asks for; None where it was not read
    checks: tuple[CheckResult, ...]  # One per name of `CHECKS`, and "host" where it was asked for
    findings: tuple[Finding, ...]
    options: Options | None = None  # How much of the config is understood; None where it was not read
    estimate: Estimate | None = None
    verify: Verification | None = None
    checkpoint: CheckpointMatch | None = None
    smoke: SmokeReport | None = None
    not_checked: tuple[str, ...] = ()  # What a green report says nothing about
    notes: tuple[str, ...] = ()
    """On what terms something was checked: assumptions of the estimate, what the smoke run folded."""
    configs: tuple[str, ...] = ()
    ignored: tuple[Finding, ...] = ()
    places: Mapping[Finding, ConfigLocation] = field(default_factory=dict)
    is_strict: bool = False  # Do warnings fail, and checks that could not be made?
    left_out: tuple[CheckName, ...] = ()

    @property
    def ok(self) -> bool:
        """True when the config was read, no check failed, and there is no error; if strict, no warning either."""
        return self.was_read and not self.failed and not self.why_too_little

    @property
    def title(self) -> str:
        """Its verdict, in a line."""
        return describe_verdict(self)

    @property
    def why_too_little(self) -> str:
        """What a strict reader misses: warnings, checks that were asked for and not made."""
        if not self.is_strict:
            return ""
        warnings = sum(finding.severity == "warning" for finding in self.findings)
        left = [check.name for check in self.checks if check.ok is None and check.name not in self.left_out]
        said = [counted(warnings, "warning")] if warnings else []
        return "; ".join([*said, *([f"not checked: {', '.join(left)}"] if left else [])])

    @property
    def was_read(self) -> bool:
        """Was the config read, all that something depends on? Otherwise `not_checked` begins with the reason."""
        return next(check.ok for check in self.checks if check.name == "config") is not None

    @property
    def failed(self) -> bool:
        """Is anything known to be wrong?"""
        failed = any(check.ok is False for check in self.checks)
        return failed or any(finding.severity == "error" for finding in self.findings)

    def to_json(self) -> dict[str, object]:
        """Return the JSON document (without the schema version)."""
        return {
            **as_json(self, "ok config framework mesh options"),
            "spec": None if self.spec is None else _spec_json(self.spec),
            "checks": plain(self.checks),
            "findings": [self._finding_json(finding) for finding in self.findings],
            "ignored": [self._finding_json(finding) for finding in self.ignored],
            **as_json(self, "estimate verify checkpoint smoke not_checked notes"),
        }

    def _finding_json(self, finding: Finding) -> dict[str, object]:
        place = self.places.get(finding)
        return asdict(finding) | {"file": place and place.path, "line": (place and place.line) or None}


def _spec_json(spec: ParallelSpec) -> dict[str, object]:
    mesh = None if spec.mesh is None else dict(spec.mesh.axes)
    return as_json(spec, " ".join(spec.__slots__)) | {"mesh": mesh}


def describe_spec(spec: ParallelSpec) -> str:
    """Return engine, strategy, mesh, precision and adapter in a line."""
    parts: list[str] = [spec.engine]
    if spec.strategy is not None:
        parts.append(spec.strategy)
    parts.append(f"on {spec.mesh}" if spec.mesh is not None else "on an unknown mesh")
    precision = {"compute": spec.param_dtype, "reduce": spec.reduce_dtype, "master": spec.master_dtype}
    dtypes = [f"{name} {value}" for name, value in precision.items() if value is not None]
    parts += [", ".join(dtypes)] if dtypes else []
    if spec.adapter is not None:
        rank = "" if spec.adapter.rank is None else f" r{spec.adapter.rank}"
        parts.append(f"{escape_name(spec.adapter.kind)}{rank}" + (f" on {spec.quantize}" if spec.quantize else ""))
    return ", ".join(parts)


def describe_verdict(report: PreflightReport, *, begins: str = "ok") -> str:
    """Return what the report comes to, in a line; one that passes begins with "ok", or with "GO" and what is left."""
    errors = sum(finding.severity == "error" for finding in report.findings)
    warnings = sum(finding.severity == "warning" for finding in report.findings)
    told = counted(warnings, "warning")
    if report.failed:
        return f"NOT ok: {counted(errors, 'error')}, {told}"
    if not report.was_read:
        return f"NOT CHECKED: {next(text for text in report.not_checked if text.startswith('the config: '))}"
    if report.why_too_little:
        return f"NOT ok (--strict): {report.why_too_little}"
    skipped = [check.name for check in report.checks if check.ok is None]
    made = ", ".join(check.name for check in report.checks if check.ok)
    left = f"not checked: {', '.join(skipped)}" if skipped else ""
    passed = f"; ignored: {', '.join(dict.fromkeys(one.code for one in report.ignored))}" if report.ignored else ""
    if begins != "ok":
        return f"{begins}{f' ({left})' if left else ''}: {made}; {told}{passed}"
    return f"ok: {made}; {told}{f'; {left}' if left else ''}{passed}"
