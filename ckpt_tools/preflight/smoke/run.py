"""Start a smoke run from a process that imports no torch, or take part in torchrun's."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checkpoint.formats.hollow_copy import skeleton
from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.checks.verify import verify
from ckpt_tools.errors import UsageError
from ckpt_tools.floors import refuse_older
from ckpt_tools.models.config import component_of
from ckpt_tools.preflight.smoke.messages import RELOAD_NAME, WORLD_NAME, Launched, LaunchJob, OnPhase, tell
from ckpt_tools.preflight.smoke.options import SmokeOptions, absolute
from ckpt_tools.preflight.smoke.report import OtherStrategy, PhaseResult, SmokeReport, assemble
from ckpt_tools.preflight.smoke.watchdog import Watchdog
from ckpt_tools.sandbox.child import Child
from ckpt_tools.sandbox.journal import events_path, read_events
from ckpt_tools.sandbox.ranks import RanksOutcome
from ckpt_tools.storage.locations import is_remote, open_place
from ckpt_tools.units import format_size

DATA_LIMIT_BYTES = 2 << 30
"""Checkpoints up to this size are read whole to find damage; of larger ones only the structure is checked."""
LAUNCH = "ckpt_tools.preflight.smoke.launcher:launch"


def run_smoke(
    options: SmokeOptions, *, on_phase: OnPhase | None = None, on_abandoned: Callable[[SmokeReport], None] | None = None
) -> SmokeReport:
    """Try a model with a checkpoint, a mesh and a strategy, and return what is wrong.

    One process per rank starts on this machine; none outlives the call or the calling process. Under torchrun the
    processes that are there are the ranks, every one makes the same call, and `is_primary` of the report tells whose is
    shown. When ranks hang or have died there, `on_abandoned` gets the report in a fork of rank 0 (by default its
    findings go to stderr), and the ranks end with exit status 3.
    """
    refuse_older("torch", "smoke")
    given = (options.source, options.model)
    source, model = (None if path is None else component_of(os.fspath(path))[0] for path in given)
    options = replace(options, source=source, model=model)
    with ExitStack() as stack:
        here, notes = _bring_here(options, stack)
        report = _run(here, options.label, on_phase, on_abandoned)
    return replace(report, notes=(*report.notes, *notes)) if notes else report


def _bring_here(options: SmokeOptions, stack: ExitStack) -> tuple[SmokeOptions, list[str]]:
    """Return the options with paths of this machine alone: the ranks have no network; and what was copied, if any."""
    source, model = (None if path is None else os.fspath(path) for path in (options.source, options.model))
    notes = []
    if source is not None and is_remote(source):
        place, file = open_place(source)
        with place:
            nbytes = sum(place.list_files().values()) if file is None else place.size(file)
        if nbytes > DATA_LIMIT_BYTES:
            raise UsageError(
                f"{format_size(nbytes)} on another machine, but smoke copies at most {format_size(DATA_LIMIT_BYTES)}",
                where=source,
                hint=f"download it first (hf download), or try random weights: ckpt smoke --model {source}",
            )
        notes.append(f"{source} was copied to this machine for the run ({format_size(nbytes)})")
        source = stack.enter_context(skeleton(source, whole=True))
    if model is not None:
        model = stack.enter_context(skeleton(model))
    return replace(options, source=absolute(source), model=absolute(model)), notes


def _run(
    options: SmokeOptions, label: str, on_phase: OnPhase | None, on_abandoned: Callable[[SmokeReport], None] | None
) -> SmokeReport:
    # Schedulers set RANK and WORLD_SIZE as well, for processes of which each may start ranks of its own.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if options.compare is not None:
            raise UsageError("--compare starts its own ranks, not torchrun's", hint="run it without torchrun")
        speak = on_abandoned or _print_findings
        watchdog = None
        if is_first := os.environ["RANK"] == "0":
            watchdog = Watchdog(int(os.environ["WORLD_SIZE"]), partial(_speak_for_ranks, options, label, speak))
        try:
            from ckpt_tools.preflight.smoke.torchrun import run_in_torchrun

            check = SourceCheck(options if is_first else replace(options, source=None))
            report = run_in_torchrun(options, watchdog=watchdog, on_phase=on_phase, run_local=run_local)
            return check.add_to(replace(report, source=label))
        finally:
            if watchdog is not None:  # whatever is raised here is told by this process
                watchdog.dismiss()
    check = SourceCheck(options)
    options.read_model()  # before the launcher imports torch only to refuse it
    report = _report_of(run_local(LaunchJob(options=replace(options, compare=None)), on_phase=on_phase))
    if options.compare is not None:
        report = _with_other(report, options, on_phase)
    return check.add_to(replace(report, source=label))


def _report_of(launched: Launched) -> SmokeReport:
    if launched.report is None:
        raise RuntimeError("the launcher has returned no report")
    return launched.report


def _with_other(report: SmokeReport, options: SmokeOptions, on_phase: OnPhase | None) -> SmokeReport:
    """Return the report with what `--compare` asks for: the same ranks, each with all of the model."""
    if not report.ok:
        return replace(report, notes=(*report.notes, f"not compared with {options.compare}: the run itself failed"))
    if report.strategy == options.compare:
        return replace(report, notes=(*report.notes, f"not compared: the run itself is {options.compare}"))
    mesh = f"dp_replicate={report.world_size}"
    other = replace(options, compare=None, strategy=options.compare, mesh=mesh, nproc=None)
    found = _report_of(run_local(LaunchJob(options=other), on_phase=on_phase))
    compared = OtherStrategy(
        strategy=found.strategy, mesh=found.mesh, ok=found.ok, step_seconds=found.step_seconds, memory=found.memory
    )
    notes = [f"{found.strategy}: {each.code}: {each.where}: {each.what}" for each in found.findings]
    return replace(report, compared=compared, notes=(*report.notes, *notes))


def _speak_for_ranks(
    options: SmokeOptions, label: str, speak: Callable[[SmokeReport], None], outcome: RanksOutcome, directory: str
) -> None:
    """Report in the watchdog, which knows the options alone."""
    from ckpt_tools.preflight.smoke.launcher import judge_traces
    from ckpt_tools.preflight.smoke.setting import resolve

    judge_traces(directory, outcome)
    setting = resolve(options, world_size=len(outcome.logs))
    speak(SourceCheck(options).add_to(replace(assemble(setting, outcome), source=label)))


def _print_findings(report: SmokeReport) -> None:
    for finding in report.findings:
        print(f"{finding.severity}: {finding.code}: {finding.where}: {finding.what}", file=sys.stderr)  # noqa: T201


class SourceCheck:
    """Verifies the source in a thread of its own, while the ranks start."""

    def __init__(self, options: SmokeOptions) -> None:
        self._findings: tuple[Finding, ...] = ()
        self._phase = PhaseResult(name="source", ok=None, seconds=0.0, what="no checkpoint is loaded")
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        if options.source is not None:
            source = os.fspath(options.source)
            with open_path(source, as_part=True):
                pass
            self._thread = threading.Thread(target=self._run, args=(source,), daemon=True)
            self._thread.start()

    def _run(self, source: str) -> None:
        start = time.perf_counter()
        try:
            with open_path(source, as_part=True) as opened:
                is_small = opened.checkpoint.total_bytes <= DATA_LIMIT_BYTES
                found = verify(opened, level="data" if is_small else "structure", num_workers=1, purpose="weights")
        except BaseException as error:  # noqa: BLE001 - raised where the thread is joined
            self._error = error
            return
        self._findings = found.findings
        size = format_size(opened.checkpoint.total_bytes)
        read = f"{size} read" if is_small else f"{size}, headers only: ckpt verify reads every byte"
        seconds = round(time.perf_counter() - start, 3)
        what = f"{opened.identity.title}; {found.tensors} tensors, {read}"
        self._phase = PhaseResult(name="source", ok=found.ok, seconds=seconds, what=what)

    def add_to(self, report: SmokeReport) -> SmokeReport:
        """Return `report` with the phase "source" and its findings."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        findings = tuple(dict.fromkeys([*self._findings, *report.findings]))
        return replace(report, phases=(self._phase, *report.phases[1:]), findings=findings)


def run_local(job: LaunchJob, *, on_phase: OnPhase | None = None) -> Launched:
    """Run the launcher, which watches the ranks, and return what it found; raise CkptError if it failed."""
    relief = "try fewer ranks, or --memory"
    told = [0, 0]

    def follow() -> None:
        """Pass on what rank 0 reports."""
        for number, name in enumerate((WORLD_NAME, RELOAD_NAME)):
            events = read_events(events_path(os.path.join(child.directory, name), 0))
            for event in events[told[number] :]:
                tell(on_phase, event)
            told[number] = len(events)

    is_strange = job.options.factory is None
    with Child(LAUNCH, job, Launched, does="starts the ranks", relief=relief, gpu=True, sandboxed=is_strange) as child:
        return child.result(None, on_wait=follow)
