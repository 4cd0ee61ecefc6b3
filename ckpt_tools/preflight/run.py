"""Everything that can be known of a run before it is started: config, rules, memory, checkpoint, a smoke run."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated, Any

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.estimate import Estimate
from ckpt_tools.options import Doc, takes
from ckpt_tools.options.preflight import PreflightFields
from ckpt_tools.preflight.configs import Config, NotReadError, read_config
from ckpt_tools.preflight.host import Needs, check_host, look_at, needs_of
from ckpt_tools.preflight.match import CheckpointMatch, check_checkpoint, look_at_model
from ckpt_tools.preflight.memory import (
    MemoryQuestion,
    ask,
    blocks_too_small,
    check_memory,
    doubt_of,
    savers_of,
    start_estimate,
)
from ckpt_tools.preflight.model_comparison import ModelView
from ckpt_tools.preflight.model_facts import ModelFacts, Sources, checked_config, facts_of, find_sources, read_facts
from ckpt_tools.preflight.places import ConfigLocation
from ckpt_tools.preflight.report import CHECKS, CheckName, CheckResult, PreflightReport
from ckpt_tools.preflight.rules import RULES, check_rules
from ckpt_tools.preflight.rules.rule import look_up
from ckpt_tools.preflight.shrink_run import collapse_spec, describe_chosen, write_cuts
from ckpt_tools.preflight.smoke import SmokeReport, run_smoke
from ckpt_tools.preflight.spec import ParallelSpec
from ckpt_tools.sandbox.child import Child
from ckpt_tools.text import counted, escape_name
from ckpt_tools.units import format_device, format_size, parse_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightOptions(PreflightFields):
    """The options of `preflight`, who is told of its progress, and what follows from them."""

    on_check: Annotated[
        Callable[[str, str], None] | None,
        Doc('Called when a check begins and ends, with its name and "begun", "done" or "failed".'),
    ] = None
    on_findings: Annotated[
        Callable[[tuple[Finding, ...]], None] | None,
        Doc("Called with new findings as soon as they are known, before the slow checks begin; each finding once."),
    ] = None
    on_places: Annotated[
        Callable[[Mapping[Finding, ConfigLocation]], None] | None,
        Doc("Called once, at the beginning, with a mapping that fills: finding → the line that it points at."),
    ] = None

    @property
    def configs(self) -> tuple[str, ...]:
        """The files."""
        given = (self.config,) if isinstance(self.config, str | os.PathLike) else self.config
        return tuple(os.fspath(path) for path in given)

    def why_skipped(self, check: str) -> str:
        """Return the option that leaves a check out; "" where it is to be made."""
        if self.only and check not in self.only:
            return " ".join(f"--only {name}" for name in self.only)
        if self.host and check in ("memory", "checkpoint", "smoke"):
            return "--host"
        left_out = {"smoke": not self.smoke, "memory": not self.memory}.get(check, False)
        return f"--no-{check}" if left_out else ""

    @property
    def gpu_bytes(self) -> int | None:
        """Memory of a device."""
        return None if self.gpu_memory is None else parse_size(self.gpu_memory)


@dataclass(slots=True)
class PreflightRun:
    """What is checked, and what was found so far."""

    options: PreflightOptions
    findings: dict[Finding, None] = field(default_factory=dict)
    ignored: dict[Finding, None] = field(default_factory=dict)
    places: dict[Finding, ConfigLocation] = field(default_factory=dict)
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
            place = next((at for one in (config, *config.companions) if (at := one.place(finding.where))), None)
            if place is not None:
                self.places.setdefault(finding, place)
        return findings

    def report(self, **fields: Any) -> PreflightReport:  # noqa: ANN401 - those of the report
        """Return what was found, with the checks in the order in which they are shown."""
        names: list[CheckName] = [*CHECKS[:2], "host", *CHECKS[2:]]
        return PreflightReport(
            checks=tuple(self.checks[name] for name in names if name in self.checks),
            findings=tuple(self.findings),
            not_checked=tuple(dict.fromkeys(self.not_checked)),
            notes=tuple(dict.fromkeys(self.notes)),
            configs=self.options.configs,
            ignored=tuple(self.ignored),
            places=self.places,
            is_strict=self.options.strict,
            left_out=tuple(name for name in CHECKS if self.options.why_skipped(name)),
            **fields,
        )

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
    was_made: bool = False
    seconds: float | None = None


TITLES = {
    "config": "the config",
    "rules": "rules on the model",
    "host": "this machine",
    "memory": "whether it fits",
    "checkpoint": "the checkpoint",
    "smoke": "a smoke run",
}


@takes(PreflightOptions, 'ckpt_tools.preflight("train.toml", only="rules").ok', "True")
def preflight(options: PreflightOptions) -> PreflightReport:
    """Read a trainer's config and say whether the run will start, fit, load and train.

    Config and rules, memory, the checkpoint against the model and the mesh, and a smoke run of a cut-down model. What
    could not be checked is listed in the report (`not_checked`); where that is the config itself, or an option on which
    something depends, `ok` is false. The trainer itself is never imported.

    Raises:
        UsageError: Not the config of a known trainer, or a path that does not exist.
        UnreadableError: The config is damaged.
    """
    for name in options.only:
        if name not in CHECKS:
            raise UsageError(f"--only must be one of {', '.join(CHECKS)}, got {name!r}")
    paths = options.configs
    if not paths:
        return _machine_alone(options)
    config_path, world_size = ", ".join(paths), options.world_size
    model, checkpoint = (None if path is None else os.fspath(path) for path in (options.model, options.checkpoint))
    gpu_memory = options.gpu_bytes
    run = PreflightRun(options)
    if options.on_places is not None:
        options.on_places(run.places)
    given = [name for name, value in (("model", model), ("resume_from", checkpoint)) if value is not None]
    try:
        with run.check("config") as check:
            config = read_config(
                *paths, framework=options.framework, world_size=world_size, given=given, overrides=options.override
            )
            check.why_not, check.was_made = config.why_not, not config.why_not
            check.what = _describe_options(config)
            # Of what may be another trainer's config nothing is right or wrong.
            findings = tuple(chain.from_iterable(one.findings for one in (config, *config.companions)))
            check.findings = run.placed(findings, config) if config.options.is_known else ()
    except NotReadError as error:
        return _not_read(paths, error.name, error.what)
    if not config.options.is_known:
        return replace(_not_read(paths, config.framework, config.why_not), options=config.options)
    spec = config.spec
    sources = find_sources(spec, config_path=config.path, model=model, checkpoint=checkpoint)
    run.not_checked += sources.not_checked
    run.notes += _describe_files(config)
    run.not_checked += config.not_checked
    if spec.world_size is None and "world_size" not in config.unread_fields:
        run.not_checked.append("what depends on the number of ranks, which the config does not set: add --world-size N")
    if not options.why_skipped("rules"):
        run.tell(run.placed(_broken_rules(config), config))  # at once, and without the model
    is_quick = options.host or set(options.only) == {"rules"}
    facts = read_facts(sources.model) if is_quick and sources.model is not None else None
    if options.host:
        _check_host(run, needs_of((*config.companions, config), facts))
    why_not = _why_not_run(run, config)
    no_memory, no_smoke = (options.why_skipped(name) or why_not for name in ("memory", "smoke"))
    question = MemoryQuestion(options=None, why_not=no_memory) if no_memory else _question(config, sources, run.options)
    # The estimate has a process of its own, and runs while the others are made.
    with start_estimate(question) as estimating, tempfile.TemporaryDirectory(prefix="ckpt-preflight-") as workdir:
        with run.check("checkpoint") as check:
            cuts = write_cuts(sources.model, workdir) if not no_smoke and sources.model is not None else ()
            resumes = sources.resumes and _needs_optimizer(config)
            check.why_not = options.why_skipped("checkpoint")
            asked = replace(sources, resumes=resumes, checkpoint=None if check.why_not else sources.checkpoint)
            if options.host or _says_enough(facts, spec):
                match, view = None, ModelView(facts=facts)
            else:
                match, view = _check_checkpoint(check, run, spec, asked, cuts)
            check.what = check.why_not or check.what
        with run.check("rules") as check:
            check.why_not = options.why_skipped("rules")
            if not check.why_not:
                _check_rules(check, run, config, view)
        with run.check("smoke") as check:
            report = None
            check.why_not = no_smoke
            if not no_smoke:
                report = run_trial(check, run, spec, sources, match, view)
        with run.check("memory") as check:
            shapes = {} if view.facts is None else view.facts.shapes
            too_small = blocks_too_small(spec, shapes)
            doubted = replace(question, why_not=too_small) if too_small and not no_memory else question
            estimate = _check_memory(check, run, config, doubted, None if too_small else estimating, gpu_memory)
    for code in set(options.ignore) - {one.code for one in run.ignored}:
        run.notes.append(f"--ignore {escape_name(code)}: no such finding")
    return run.report(
        config=config_path,
        framework=" + ".join((*(one.framework for one in config.companions), config.framework)),
        mesh=None if spec.mesh is None else str(spec.mesh),
        spec=spec,
        options=config.options,
        estimate=estimate,
        verify=None if match is None else match.verify,
        checkpoint=match,
        smoke=report,
    )


def _not_read(paths: tuple[str, ...], framework: str, why_not: str) -> PreflightReport:
    """Return the report on a config that was not read: nothing was checked."""
    left: dict[CheckName, str] = {name: "the config was not read" for name in CHECKS if name != "config"}
    return PreflightReport(
        config=", ".join(paths),
        configs=paths,
        framework=framework,
        mesh=None,
        spec=None,
        checks=tuple(CheckResult(name=name, ok=None, seconds=0.0, what=left.get(name, why_not)) for name in CHECKS),
        findings=(),
        not_checked=(f"{TITLES['config']}: {why_not}",),
    )


def _machine_alone(options: PreflightOptions) -> PreflightReport:
    """Check this machine without a config; raise UsageError if that was not asked for."""
    if not options.host:
        raise UsageError("no CONFIG given", hint="name the trainer's config; only --host works without one")
    run = PreflightRun(options)
    with run.check("config") as check:
        check.was_made, check.what = True, "none: the needs of the run come from the environment"
    _check_host(run, needs_of((), None))
    return run.report(config="", framework="", mesh=None, spec=None)


def _check_host(run: PreflightRun, needs: Needs) -> None:
    with run.check("host") as check:
        result = check_host(look_at(needs), needs)
        check.findings, check.what, check.was_made = result.findings, result.what, True
        run.not_checked += result.not_checked


def _describe_files(config: Config) -> Iterator[str]:
    """Yield which files say a part of the config, and what they leave to the environment."""
    for one in (*config.companions, config):
        files = ", ".join(escape_name(name) for name in dict.fromkeys((one.path, *one.files)))
        if one.files or config.companions:
            yield f"config: {one.framework} was read from {files}"
        for name in one.assumed:
            if name == "$@":
                yield "config: the script is assumed to run without arguments (pass them after --)"
            else:
                yield f"config: the script does not set {name}: its default is used"
        for name in one.absent:
            yield f"config: the script uses {escape_name(name)}, which does not exist here: what it sets is not known"


def _broken_rules(config: Config, facts: ModelFacts | None = None) -> tuple[Finding, ...]:
    """Return what rules find in all configs of a run: in arguments below a launcher's, what they say themselves."""
    found = check_rules(config, facts)
    if config.companions:
        found = tuple(one for one in found if look_up(config.values, one.where) is not None)
    return (*chain.from_iterable(check_rules(one, facts) for one in config.companions), *found)


def _why_not_run(run: PreflightRun, config: Config) -> str:
    """Return why neither memory nor a smoke run is worth the time: they would be those of another run."""
    if run.has_errors:
        return "the config has errors"
    unread = config.unread_fields - {"resume_from"}
    return "not all of the config could be read" if unread else ""


def _describe_options(config: Config) -> str:
    """Return how much of a config is understood."""
    options = config.options
    passed = f", {options.passed_over} skipped" if options.passed_over else ""
    whose = " and ".join((*(one.framework for one in config.companions), config.framework))
    return f"understood {options.understood} of {options.read} options of {whose}{passed}"


def _check_rules(check: Check, run: PreflightRun, config: Config, view: ModelView) -> None:
    check.findings = run.placed(_broken_rules(config, view.facts), config)
    count = sum(any(rule.is_for(one) for one in (config, *config.companions)) for rule in RULES)
    told = "" if view.facts is not None else ", without those that need the model"
    # A rule that asks for what could not be read finds nothing.
    check.was_made = not config.unread_fields
    check.what = f"{count} rules for {config.framework}{told}"
    if not check.was_made:
        check.what += ", as far as the config could be read"


def _says_enough(facts: ModelFacts | None, spec: ParallelSpec) -> bool:
    """Do a config.json and the headers of weights tell all that rules ask of a model? Else it is built."""
    if facts is None or not facts.shapes or not facts.blocks:
        return False
    return set(spec.wrap_classes) <= set(facts.blocks) and (spec.adapter is None or not spec.adapter.targets)


def _question(config: Config, sources: Sources, options: PreflightOptions) -> MemoryQuestion:
    if sources.model is None:
        return MemoryQuestion(options=None, why_not="there is no config.json of the model")
    try:
        positions = facts_of(checked_config(sources.model).values).max_positions
        return ask(
            config.spec,
            model=sources.model,
            gpu_memory=options.gpu_bytes,
            max_positions=positions,
            savers=savers_of(config.framework, config.values),
            is_fixed=options.world_size is not None,
        )
    except CkptError as error:
        return MemoryQuestion(options=None, why_not=error.what)


def _check_memory(
    check: Check,
    run: PreflightRun,
    config: Config,
    question: MemoryQuestion,
    estimating: Child[Estimate] | None,
    gpu_memory: int | None,
) -> Estimate | None:
    if estimating is None:
        check.why_not = question.why_not
        return None
    try:
        found = estimating.result()
    except CkptError as error:
        check.why_not = error.what
        return None
    run.notes += [f"memory: {note}" for note in (*question.notes, *found.notes)]
    check.seconds = found.seconds
    case = min(found.cases, key=lambda one: one.needed)
    check.what = f"{format_size(case.needed)} per rank, including a margin of {format_size(case.margin.total)}"
    if gpu_memory is None:
        run.not_checked.append("whether it fits: the device memory is not known (pass --gpu-memory 80GB)")
        return found
    if doubt := doubt_of(found, question):
        run.not_checked.append(f"whether it fits: {doubt}")
    else:
        check.findings, check.was_made = run.placed(check_memory(found, config.spec), config), found.fits is not None
    run.not_checked += [f"whether it fits: {case.doubt}" for case in found.cases if case.doubt is not None]
    check.what += f"; a device has {format_device(gpu_memory)}"
    return found


def _needs_optimizer(config: Config) -> bool:
    """Must what is resumed hold an optimizer? Not torchtitan's initial_load_path, nor ai-toolkit's adapter."""
    if config.framework == "torchtitan":
        loads_model = look_up(config.values, "checkpoint.initial_load_model_only")
        return loads_model is not None and loads_model.is_off
    return config.framework != "ai-toolkit"


def _check_checkpoint(
    check: Check, run: PreflightRun, spec: ParallelSpec, sources: Sources, cuts: Sequence[str]
) -> tuple[CheckpointMatch | None, ModelView]:
    """Check the checkpoint; the model is looked at in any case."""
    if sources.checkpoint is not None:
        match = check_checkpoint(sources.checkpoint, spec, model=sources.model, resumes=sources.resumes, cuts=cuts)
        check.findings, check.was_made = match.findings, match.verify is not None or bool(match.findings)
        run.not_checked += match.not_checked
        check.what = _describe_match(match)
        return match, match.view
    check.what = "no checkpoint was given"
    if sources.model is None:
        return None, ModelView()
    return None, look_at_model(sources.model, cuts=cuts)


def _describe_match(match: CheckpointMatch) -> str:
    parts = [escape_name(match.path)]
    if match.verify is not None:
        parts += [each.title for each in match.verify.identities] + [f"{counted(match.verify.tensors, 'tensor')}"]
    if match.comparison is not None:
        parts.append(f"{len(match.comparison.found)} of them in the model")
    return ", ".join(parts)


# The smoke run of a preflight: the model cut down where it is large, with the config's settings


def run_trial(
    check: Check,
    run: PreflightRun,
    spec: ParallelSpec,
    sources: Sources,
    match: CheckpointMatch | None,
    view: ModelView,
) -> SmokeReport | None:
    """Run it, and say in `check` and `run` what it found; None where it was not run."""
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
                f"the model has {comparison.num_elems / 1e9:.1f} G parameters and cannot be reduced: {trial.why}"
            )
            return None
        model = trial.path
        notes.append(f"{comparison.title} is reduced: {describe_chosen(sources.model, model)}")
    elif match is not None and match.ok and comparison.found:
        source = match.path
    elif match is not None:
        notes.append("the checkpoint is not loaded, because of the findings above")
    blocks = () if view.facts is None else view.facts.blocks
    collapse = collapse_spec(spec, model=model, source=source, blocks=blocks)
    if collapse.options is None:
        check.why_not = collapse.why_not
        return None
    try:
        report = run_smoke(collapse.options)
    except CkptError as error:
        check.why_not = error.what + (f" ({error.where})" if error.where else "")
        return None
    report = replace(report, source=escape_name(source or sources.model))
    run.notes += [f"smoke: {note}" for note in (*notes, *collapse.notes, *report.notes)]
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
