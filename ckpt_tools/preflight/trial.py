"""The smoke run of a preflight: the model cut down where it is large, with the config's settings."""

from __future__ import annotations

from dataclasses import replace

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.errors import CkptError
from ckpt_tools.preflight.comparison import ModelView
from ckpt_tools.preflight.flight import Check, Flight
from ckpt_tools.preflight.fold import describe_chosen, fold_spec
from ckpt_tools.preflight.match import CheckpointMatch
from ckpt_tools.preflight.sources import Sources
from ckpt_tools.preflight.spec import ParallelSpec
from ckpt_tools.smoke import SmokeReport, run_smoke
from ckpt_tools.text import escape_name


def run_trial(
    check: Check,
    flight: Flight,
    spec: ParallelSpec,
    sources: Sources,
    match: CheckpointMatch | None,
    view: ModelView,
) -> SmokeReport | None:
    """Run it, and say in `check` and `flight` what it found; None where it was not run."""
    if sources.model is None:
        check.why_not = "there is no config.json of the model"
        return None
    comparison = view.comparison
    if comparison is None:
        check.why_not = view.why_not
        return None
    model, source = sources.model, None
    notes = []
    trial = comparison.trial
    if trial is not None:
        if trial.path is None:
            check.why_not = (
                f"the model has {comparison.num_elems / 1e9:.1f} G parameters and cannot be cut down: {trial.why}"
            )
            return None
        model = trial.path
        notes.append(f"{comparison.title} is cut down: {describe_chosen(sources.model, model)}")
    elif match is not None and match.ok and comparison.found:
        source = match.path
    elif match is not None:
        notes.append("the checkpoint is not loaded: what is wrong with it is above")
    blocks = () if view.facts is None else view.facts.blocks
    fold = fold_spec(spec, model=model, source=source, blocks=blocks)
    if fold.options is None:
        check.why_not = fold.why_not
        return None
    try:
        report = run_smoke(fold.options)
    except CkptError as error:
        check.why_not = error.what + (f" ({error.where})" if error.where else "")
        return None
    report = replace(report, source=escape_name(source or sources.model))
    flight.notes += [f"smoke: {note}" for note in (*notes, *fold.notes, *report.notes)]
    check.findings, check.was_made = _smoke_findings(report), True
    check.what = f"{report.model} on {report.mesh}, {report.strategy}"
    if report.losses:
        check.what += f": loss {report.losses[0]:.4f} → {report.losses[-1]:.4f}"
    return report


def _smoke_findings(report: SmokeReport) -> tuple[Finding, ...]:
    """Return what the run found; a phase that failed without a word is one more finding."""
    findings = report.findings
    if report.ok or any(finding.severity == "error" for finding in findings):
        return findings
    failed = [phase.name for phase in report.phases if phase.ok is False]
    what = f"these phases failed: {', '.join(failed)}"
    return (*findings, Finding.error("smoke-failed", "smoke", what))
