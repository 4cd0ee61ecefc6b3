"""What `check_lora` found out about an adapter, as a value and as a JSON document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from ckpt_tools.adapters.adapter import Sourced
from ckpt_tools.adapters.ecosystems.simulation import Loader, LoaderReport
from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.text import first_few

Verdict = Literal["loads", "fails", "unknown"]
"""loads: proven; fails: something is wrong; unknown: nothing is known to be wrong, and not everything was checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraCheck:
    """What was found out about an adapter."""

    path: str
    """As the user named it."""
    kind: str
    """lora, rslora, dora, loha, …; several are joined by "+"."""
    rank: int | None = None
    """The rank that most modules have."""
    ranks: Mapping[int, int] = field(default_factory=dict)
    """Rank → modules."""
    alpha: Sourced[float] | None = None
    """The alpha that most modules have."""
    alphas: Mapping[float, int] = field(default_factory=dict)
    """Alpha → modules."""
    num_modules: int = 0
    """Adapted modules."""
    targets: tuple[str, ...] = ()
    """Their paths, numbers as *."""
    convention: str | None = None
    """Whose names the file has; None for an adapter that ckpt does not judge."""
    architecture: str | None = None
    """The model family, where it is known."""
    judges: tuple[Loader, ...]
    """The loaders that decide: those that were named, or those of the adapter's own format."""
    needs_all: bool
    """Must all of them take it? Of those of a shared format one is enough."""
    loaders: tuple[LoaderReport, ...] = ()
    """What each loader would make of it, the judges first."""
    findings: tuple[Finding, ...] = ()
    """What is wrong: with the adapter, and for the judges."""
    not_checked: tuple[str, ...]
    """What would need more than was given."""

    @property
    def verdict(self) -> Verdict:
        """Do the judges take the adapter, whole, as far as was proven?"""
        if any(finding.severity == "error" for finding in self.findings):
            return "fails"
        proven = [report.is_whole and report.is_proven for report in self.loaders if report.loader in self.judges]
        takes = bool(proven) and (all(proven) if self.needs_all else any(proven))
        return "loads" if takes else "unknown"

    @property
    def ok(self) -> bool:
        """Is the adapter proven to load, whole?"""
        return self.verdict == "loads"


def fold(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Join findings that differ in their place alone: the first one stands, with how many there are and where."""
    groups: dict[tuple[str, str, str, str | None], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.code, finding.severity, finding.what, finding.hint), []).append(finding)
    folded = []
    for group in groups.values():
        first, places = group[0], list(dict.fromkeys(finding.where for finding in group))
        if len(places) == 1:
            folded.append(first)
            continue
        what = f"{first.what} ({len(places)} times: {first_few(places)})"
        folded.append(replace(first, what=what))
    return tuple(folded)


def to_json(result: LoraCheck) -> dict[str, object]:
    """Return the JSON document of `ckpt check-lora`."""
    return {
        "ok": result.ok,
        "verdict": result.verdict,
        "judges": list(result.judges),
        "path": result.path,
        "type": result.kind,
        "rank": result.rank,
        "ranks": {str(rank): count for rank, count in result.ranks.items()},
        "alpha": {
            "value": None if result.alpha is None else result.alpha.value,
            "source": None if result.alpha is None else result.alpha.source,
        },
        "alphas": {str(alpha): count for alpha, count in result.alphas.items()},
        "num_modules": result.num_modules,
        "targets": list(result.targets),
        "convention": result.convention,
        "architecture": result.architecture,
        "loaders": [
            {
                "loader": report.loader,
                "loads": report.loads,
                "changes": report.changes,
                "whole": report.is_whole,
                "proven": report.is_proven,
                "matched_modules": len(report.matched),
                "matched_tensors": report.num_matched,
                "unmatched_tensors": len(report.unmatched),
                "unmatched": list(report.unmatched[:20]),
                "findings": [asdict(finding) for finding in fold(report.findings)],
            }
            for report in result.loaders
        ],
        "not_checked": list(result.not_checked),
        "findings": [asdict(finding) for finding in result.findings],
    }
