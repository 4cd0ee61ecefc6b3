"""The pages of `estimate`, `smoke` and `preflight`: of a run before it starts."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tools.description.infer import block_of
from ckpt_tools.estimate import Estimate
from ckpt_tools.estimate.report import CaseEstimate, Moment
from ckpt_tools.preflight.report import PreflightReport, describe_spec, describe_verdict as describe_preflight
from ckpt_tools.report.page import Bar, Bars, Curves, Facts, Listing, Mood, Notes, Page, Part, Section, Table
from ckpt_tools.report.parts import MAX_ROWS, Sized, by_layer, count, findings_section, mood_of, notes_section
from ckpt_tools.smoke.report import (
    HOW_HELD,
    HOW_MEMORY,
    ReloadResult,
    SmokeReport,
    describe_compared,
    describe_verdict as describe_smoke,
)
from ckpt_tools.units import format_size

_SERIES = ("params", "grads", "optimizer", "activations", "gathered", "step")
_MARKS = {True: "ok", False: "FAILED", None: "not checked"}
_FITS = {True: "yes", False: "NO", None: "not known"}


def estimate_page(result: Estimate) -> Page:
    """Return the page of an estimate."""
    mood: Mood | None = None
    verdict = "No device to compare with: give --gpu-memory."
    if result.gpu_memory is not None:
        device = f"{result.gpu_memory / 10**9:.3g} GB ({format_size(result.gpu_memory)})"
        fitting = ", ".join(case.case.label for case in result.cases if case.fits)
        verdicts = {
            True: f"Fits in {device}: {fitting}",
            False: f"Does NOT fit in {device}",
            None: f"Not known whether it fits in {device}",
        }
        verdict = verdicts[result.fits]
        # An estimate has assumptions: only its words say yes.
        moods: dict[bool | None, Mood] = {True: "partly", False: "bad", None: "unknown"}
        mood = moods[result.fits]
    return Page(
        command="estimate", subject=result.model, sections=_estimate_sections(result), mood=mood, verdict=verdict
    )


def _estimate_sections(result: Estimate) -> list[Section]:
    first = result.cases[0].case
    facts = Facts(
        rows=[
            ("parameters", f"{result.params:,}"),
            ("dtypes", f"{first.param_dtype} compute, {first.reduce_dtype} reduce, {first.master_dtype} master"),
            ("optimizer", first.optimizer),
            ("batch", f"{first.batch_size} × {first.seq_len} tokens per rank"),
        ]
    )
    parts: list[Part] = [facts, _memory_bars(result.cases, result.gpu_memory), _memory_table(result)]
    sections = [Section(title="Memory of the rank that holds the most", parts=parts)]
    if result.proposals:
        rows = [
            (
                each.what,
                format_size(each.estimate.needed),
                "formula" if each.estimate.tracked is None else "tracked",
                _FITS[each.estimate.fits],
            )
            for each in result.proposals
        ]
        headers = ("change", "needs", "by", "fits")
        table = Table(caption="Changes that were tried", headers=headers, rows=rows, align="lrll")
        sections.append(Section(title="What would fit", parts=(table,)))
    if timelines := _timelines(result):
        sections.append(Section(title="One training step", parts=timelines))
    doubts = [f"{case.case.label}: {case.doubt}" for case in result.cases if case.doubt]
    formula = [f"by the formula: {case.why_not_tracked}" for case in result.cases if case.why_not_tracked]
    return [*sections, *notes_section("What the numbers do not cover", [*result.notes, *formula, *doubts])]


def _memory_bars(cases: Sequence[CaseEstimate], limit: int | None) -> Bars:
    bars = []
    for case in cases:
        memory = case.per_rank
        parts = [memory.at_peak.get(name, 0) for name in _SERIES]
        other = max(0, memory.peak - sum(parts))
        total = f"{format_size(memory.peak)} + {format_size(case.margin.total)} margin = {format_size(case.needed)}"
        if case.fits is not None or limit is not None:
            total += f", fits: {_FITS[case.fits]}"
        name = f"{case.case.label} on {case.case.mesh}"
        bars.append(Bar(name=name, parts=(*parts, other, case.margin.total), total=total))
    return Bars(
        caption="What is in memory at the peak, and the margin beside it",
        series=(*_SERIES, "other", "margin"),
        bars=bars,
        limit=limit,
        limit_name="the device" if limit is None else f"the device: {format_size(limit)}",
    )


_MAX_TIMELINES = 4


def _num_between(before: Moment | None, after: Moment) -> int:
    """Return how many blocks of a stack run between two moments: those that are alike are tracked once."""
    first, second = (block_of(moment.block) if moment is not None else None for moment in (before, after))
    if before is None or before.phase != after.phase or first is None or second is None or first[0] != second[0]:
        return 0
    return max(0, abs(first[1] - second[1]) - 1)


def _timelines(result: Estimate) -> list[Part]:
    """Return what is alive in a step of each way that was tracked, those that fit first."""
    tracked = [case for case in result.cases if case.per_rank.moments]
    shown = sorted(tracked, key=lambda case: case.fits is not True)[:_MAX_TIMELINES]
    parts: list[Part] = []
    for case in shown:
        moments = case.per_rank.moments
        bars = []
        rows = []
        for before, moment in zip((None, *moments), moments, strict=False):
            if left_out := _num_between(before, moment):
                what = f"{count(left_out, 'block')} alike, not drawn"
                bars.append(Bar(name=moment.phase, parts=[0] * len(_SERIES), total=what, group=moment.phase))
            held = [moment.held.get(name, 0) for name in _SERIES]
            block = moment.block or ("optimizer" if moment.phase == "step" else "outside of blocks")
            name = f"{moment.phase}, {block}"
            bars.append(Bar(name=name, parts=held, total=format_size(sum(held)), group=moment.phase))
            rows.append((name, *map(format_size, (*held, sum(held)))))
        label = f"{case.case.label} on {case.case.mesh}"
        caption = f"{label}: the most that is held while each block runs, without the margin"
        caption += "; ⋯ stands for blocks like their neighbours" * any(not sum(bar.parts) for bar in bars)
        limit = result.gpu_memory
        # A device many times as large would leave no room for the step.
        limit = None if limit is None or limit > 4 * case.per_rank.peak else limit
        names = "" if limit is None else f"the device: {format_size(limit)}"
        columns = Bars(caption=caption, series=_SERIES, bars=bars, limit=limit, limit_name=names, is_upright=True)
        headers = ("moment", *_SERIES, "all")
        table = Table(
            caption=f"{label}, in numbers",
            headers=headers,
            rows=rows[:MAX_ROWS],
            align="l" + "r" * (len(headers) - 1),
            left_out=max(0, len(rows) - MAX_ROWS),
            is_folded=True,
        )
        parts += [columns, table]
    if len(tracked) > len(shown):
        parts.append(Notes(items=[f"{len(tracked) - len(shown)} more were tracked; --json lists each step"]))
    return parts


def _memory_table(result: Estimate) -> Table:
    rows = []
    for case in result.cases:
        memory = case.per_rank
        sizes = (memory.params, memory.grads, memory.optimizer, memory.activations, memory.gathered, memory.peak)
        how = "formula" if case.tracked is None else "tracked"
        needed = (format_size(case.needed), format_size(memory.host) if memory.host else "", how)
        rows.append((case.case.label, str(case.case.mesh), *map(format_size, sizes), *needed, _FITS[case.fits]))
    headers = ("strategy", "mesh", "params", "grads", "optimizer", "activations", "gathered", "peak", "with margin")
    caption = "Each column is the most at any time; the peak is less than their sum"
    return Table(caption=caption, headers=(*headers, "host", "by", "fits"), rows=rows, align="llrrrrrrrrll")


def smoke_page(report: SmokeReport) -> Page:
    """Return the page of a smoke run."""
    skipped = [phase for phase in report.phases if phase.ok is None]
    return Page(
        command="smoke",
        subject=report.source,
        sections=smoke_sections(report),
        mood=mood_of(ok=report.ok, left=report.notes or skipped or report.findings),
        verdict=describe_smoke(report),
    )


def smoke_sections(report: SmokeReport) -> list[Section]:
    """Return what a smoke run found, as sections."""
    rows = [
        ("model", report.model),
        ("ranks", f"{report.world_size} ({report.mesh}), {report.strategy}, {report.device}"),
    ]
    if report.max_grad_error is not None:
        tolerances = ", ".join(f"{name} {value:.1e}" for name, value in report.tolerances.items())
        held = f"; tolerances: {tolerances}" if tolerances else ""
        rows.append(("gradients", f"largest relative error {report.max_grad_error:.2e}{held}"))
    for name, reload in (("reload", report.reload_same_world), ("reload", report.reload_other_world)):
        if isinstance(reload, ReloadResult):
            same = "the same number" if reload.bitwise else f"loss {reload.loss:.7g}, saved {reload.saved_loss:.7g}"
            rows.append((name, f"on {reload.mesh}: {same}" + ("" if reload.ok else " (FAILED)")))
    if report.compared is not None:
        rows.append(("compared", describe_compared(report, report.compared)))
    sections = [Section(title="The smoke run", parts=(Facts(rows=rows),))]
    sections += findings_section(report.findings, "Findings of the smoke run")
    sections.append(Section(title="Phases", parts=_phase_parts(report)))
    if report.grad_errors:
        errors = {
            name: Sized(value=error, text=f"{error:.0e}" if error else "0")
            for name, error in report.grad_errors.items()
        }
        legend = (
            "Relative to the largest element of the reference's gradient; colours are logarithmic. "
            "Empty: no such parameter, or one whose gradient is frozen, missing, or compared to rounding alone."
        )
        parts = by_layer(errors, caption="Gradient error by layer and kind of weight", legend=legend)
        sections.append(Section(title="Gradients against the reference", parts=parts))
    if report.losses:
        sections.append(Section(title="Losses", parts=_loss_parts(report)))
    if report.memory:
        sections.append(Section(title="Memory by rank", parts=_rank_memory_parts(report)))
    stacks = [
        Listing(caption=f"Stacks of rank {rank}", lines=text.splitlines())
        for rank, text in sorted(report.stacks.items())
    ]
    if stacks:
        sections.append(Section(title="Where ranks stood", parts=stacks))
    return [*sections, *notes_section("Not tried, or on less than the whole model", report.notes)]


def _phase_parts(report: SmokeReport) -> list[Part]:
    rows = [
        (
            phase.name,
            _MARKS[phase.ok],
            f"{phase.seconds:.2f}" if phase.ok is not None else "",
            "" if phase.memory_bytes is None else format_size(phase.memory_bytes),
            phase.what,
        )
        for phase in report.phases
    ]
    headers = ("phase", "result", "seconds", "memory", "what")
    parts: list[Part] = [Table(caption="In the order in which they run", headers=headers, rows=rows, align="llrrl")]
    bars = [
        Bar(name=phase.name, parts=(phase.memory_bytes,), total=format_size(phase.memory_bytes))
        for phase in report.phases
        if phase.memory_bytes
    ]
    if bars:
        parts.append(Bars(caption=f"Memory by phase, {HOW_HELD}", series=("memory",), bars=bars, is_upright=True))
    return parts


def _loss_parts(report: SmokeReport) -> list[Part]:
    series = [("sharded", report.losses)]
    if report.reference_losses:
        series.append(("reference, one process", report.reference_losses))
    parts: list[Part] = []
    if len(report.losses) > 1:
        parts.append(Curves(caption="Loss per step", series=series))
    steps = max(len(numbers) for _, numbers in series)
    rows = [
        (str(step + 1), *(f"{numbers[step]:.7g}" if step < len(numbers) else "" for _, numbers in series))
        for step in range(min(steps, MAX_ROWS))
    ]
    headers = ("step", *(name for name, _ in series))
    caption = "Mean over ranks" if report.reference_losses else "Mean over ranks; there was no reference"
    table = Table(caption=caption, headers=headers, rows=rows, align="r" * len(headers), left_out=steps - len(rows))
    return [*parts, table]


def _rank_memory_parts(report: SmokeReport) -> list[Part]:
    shown = report.memory[:64]
    bars = [
        Bar(
            name=f"rank {memory.rank}",
            parts=(memory.params, memory.grads, memory.optimizer),
            total=format_size(memory.params + memory.grads + memory.optimizer),
        )
        for memory in shown
    ]
    rows = [
        (str(memory.rank), *map(format_size, (memory.params, memory.grads, memory.optimizer, memory.peak)))
        for memory in report.memory[:MAX_ROWS]
    ]
    headers = ("rank", "params", "grads", "optimizer", "peak")
    left_out = len(report.memory) - len(rows)
    names = headers[1:4]
    return [
        Bars(caption="Each rank's own tensors after the first step", series=names, bars=bars),
        Table(caption=HOW_MEMORY, headers=headers, rows=rows, align="rrrrr", left_out=left_out),
    ]


def preflight_page(report: PreflightReport) -> Page:
    """Return the page of a preflight: one page for everybody who must agree to a run."""
    skipped = [check.name for check in report.checks if check.ok is None]
    mood = mood_of(ok=not report.failed, left=report.not_checked or skipped or report.findings)
    go = "NO-GO" if report.failed else "NOT CHECKED" if not report.was_read else "GO, as far as it was checked"
    if mood == "good":
        go = "GO"
    if not report.failed and not report.was_read:
        mood = "unknown"
    facts = [("framework", report.framework), ("mesh", report.mesh or "not known")]
    if report.spec is not None:
        facts.append(("asks for", describe_spec(report.spec)))
    rows = [
        (check.name, _MARKS[check.ok], f"{check.seconds:.1f}" if check.ok is not None else "", check.what)
        for check in report.checks
    ]
    checks = Table(caption="Checks", headers=("check", "result", "seconds", "what"), rows=rows, align="llrl")
    unseen = report.not_checked or skipped
    sections = [
        *findings_section(report.findings),
        Section(title="The run", parts=(Facts(rows=facts), checks)),
        *notes_section(f"What could not be seen: {count(len(unseen), 'thing')}", unseen),
        *notes_section("On what terms", report.notes),
    ]
    if report.estimate is not None:
        sections += _estimate_sections(report.estimate)
    if report.smoke is not None:
        sections += smoke_sections(report.smoke)
    verdict = f"{go}. {describe_preflight(report)}"
    return Page(command="preflight", subject=report.config, sections=sections, mood=mood, verdict=verdict)
