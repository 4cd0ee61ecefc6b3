"""`ckpt smoke`."""

from __future__ import annotations

import math
import os

from ckpt_tools.cli.build import CommandCall
from ckpt_tools.cli.output import ChangingLine, note, print_json, report_to, say, say_findings
from ckpt_tools.cli.screen import Screen, terminal
from ckpt_tools.cli.views import page
from ckpt_tools.options.output import HtmlOptions, OutputOptions
from ckpt_tools.preflight.smoke.report import (
    HOW_HELD,
    HOW_MEMORY,
    PHASES,
    PhaseResult,
    ReloadResult,
    SmokeReport,
    describe_compared,
    describe_verdict,
)
from ckpt_tools.text import counted, escape_name
from ckpt_tools.units import format_number, format_size


def run(call: CommandCall[SmokeReport], view: HtmlOptions, output: OutputOptions) -> int:
    """Try a model, and print what was found."""
    is_shown = os.environ.get("RANK", "0") == "0" and not output.is_silent
    line = ChangingLine(shown=is_shown and not output.verbose)

    def follow(phase: str, state: str) -> None:
        """Change a line on a terminal; with --verbose, write one for every phase."""
        if state == "begun":
            number = PHASES.index(phase) if phase in PHASES else 0
            line.show(f"{number}/{len(PHASES) - 1} {phase}")
        elif is_shown and output.verbose:
            note(f"{phase}: {state}")

    with report_to(view.html, "smoke", str(call.given.get("source", "")), output) as write:

        def show(report: SmokeReport) -> None:
            if report.is_primary:
                write(lambda: smoke_page(report))
                print_json(report.to_dict()) if output.json else _print(report, output)

        try:
            report = call(on_phase=follow, on_abandoned=show)
        finally:
            line.close()
        show(report)
    return 0 if report.ok else 3


MARKS = {True: "ok", False: "FAILED", None: "not checked"}


def _print(report: SmokeReport, output: OutputOptions) -> None:
    screen = terminal()
    if not output.quiet:
        ranks = counted(report.world_size, "rank")
        title = f"{escape_name(report.source)}: {escape_name(report.model)} on {ranks} ({report.mesh}), "
        screen.line(title + f"{report.strategy}, {report.device}", "heading")
        screen.show(_phases(report, with_memory=False))
        if report.memory:
            screen.line()
            _print_memory(screen, report)
            if output.verbose:
                screen.line(f"  {HOW_MEMORY}", "dim")
        if report.compared is not None:
            screen.line(describe_compared(report, report.compared))
        for text in report.notes:
            screen.line(f"note: {text}")
        screen.line()
    say_findings(report.findings)
    if output.verbose:
        for rank, text in sorted(report.stacks.items()):
            say(f"stacks of rank {rank}:")
            say("\n".join(escape_name(line) for line in text.splitlines()))
    if not output.quiet:
        screen.line(describe_verdict(report))


def _print_memory(screen: Screen, report: SmokeReport) -> None:
    table = _memory(report)
    rows = table.rows if len(report.memory) <= 8 else [*table.rows[:4], ("…", "", "", "", ""), *table.rows[-3:]]
    screen.show(table._replace(rows=rows))


# The page


def smoke_page(report: SmokeReport) -> page.Page:
    """Return the page of a smoke run."""
    skipped = [phase for phase in report.phases if phase.ok is None]
    mood = page.mood_of(ok=report.ok, left=report.notes or skipped or report.findings)
    facts = (report.model, f"{counted(report.world_size, 'rank')} {report.mesh}", report.strategy, report.device)
    titles, verdict = [" · ".join(facts)], describe_verdict(report)
    return page.Page("smoke", report.source, smoke_sections(report), mood, verdict, titles=titles)


def smoke_sections(report: SmokeReport) -> list[page.PageSection]:
    """Return what a smoke run found, as sections."""
    rows = []
    if report.max_grad_error is not None:
        tolerances = ", ".join(f"{name} {format_number(value, 2)}" for name, value in report.tolerances.items())
        held = f"; tolerances: {tolerances}" if tolerances else ""
        rows.append(("gradients", f"largest relative error {format_number(report.max_grad_error)}{held}"))
    for name, reload in (("reload", report.reload_same_world), ("reload", report.reload_other_world)):
        if isinstance(reload, ReloadResult):
            same = "the same number" if reload.bitwise else f"loss {reload.loss:.7g}, saved {reload.saved_loss:.7g}"
            rows.append((name, f"on {reload.mesh}: {same}" + ("" if reload.ok else " (FAILED)")))
    if report.compared is not None:
        rows.append(("compared", describe_compared(report, report.compared)))
    sections = [page.PageSection("Phases", _phase_parts(report))]
    if report.grad_errors:
        sections.append(page.PageSection("Gradients against the reference", _gradient_parts(report)))
    sections += page.findings_section(report.findings, "Findings of the smoke run")
    sections += [page.PageSection("What was compared", [page.FactList(rows)])] if rows else []
    if report.losses:
        sections.append(page.PageSection("Losses", _loss_parts(report)))
    if report.memory:
        sections.append(page.PageSection("Memory by rank", _rank_memory_parts(report)))
    if report.stacks:
        stacks = [
            page.Listing(f"Stacks of rank {rank}", text.splitlines()) for rank, text in sorted(report.stacks.items())
        ]
        sections.append(page.PageSection("Where ranks stood", stacks))
    return [*sections, *page.notes_section("Not tried, or on less than the whole model", report.notes)]


def _phases(report: SmokeReport, *, with_memory: bool) -> page.PageTable:
    def cells(phase: PhaseResult) -> list[str]:
        seconds = f"{phase.seconds:.2f}" if phase.ok is not None else ""
        memory = "" if phase.memory_bytes is None else format_size(phase.memory_bytes)
        return [phase.name, MARKS[phase.ok], seconds, *[memory] * with_memory, phase.what]

    columns = f"phase, result, >seconds, {'>memory, ' * with_memory}what"
    return page.PageTable.of("In the order in which they run", columns, report.phases, cells)


def _phase_parts(report: SmokeReport) -> list[page.Part]:
    held = [(phase.name, phase.memory_bytes) for phase in report.phases if phase.memory_bytes]
    bars = [page.Bar(name, (nbytes,), format_size(nbytes)) for name, nbytes in held]
    drawn = [page.Bars(f"Memory by phase, {HOW_HELD}", ("memory",), bars, is_upright=True)] if bars else []
    return [_phases(report, with_memory=True), *drawn]


def _gradient_parts(report: SmokeReport) -> list[page.Part]:
    caption = "Error relative to the largest element of the reference's gradient; a gap: not compared"
    chart = page.Depth(caption, {"": report.grad_errors}, report.findings)
    worst = sorted(report.grad_errors.items(), key=lambda item: -item[1] if math.isfinite(item[1]) else -math.inf)
    rows, name = [(name, format_number(error, 2)) for name, error in worst], "The numbers, the largest first"
    table = page.PageTable.of(name, "parameter, >error", rows, lambda row: row, is_folded=True)
    return [*([chart] if chart.places() else []), table]


def _loss_parts(report: SmokeReport) -> list[page.Part]:
    series = [("sharded", report.losses)]
    if report.reference_losses:
        series.append(("reference in one process", report.reference_losses))
    parts: list[page.Part] = []
    if len(report.losses) > 1:
        parts.append(page.Depth.over_steps("Loss per step", dict(series)))
    steps = range(max(len(numbers) for _, numbers in series))
    caption = "Mean over ranks" if report.reference_losses else "Mean over ranks; there was no reference"
    table = page.PageTable.of(
        caption,
        ", ".join(f">{name}" for name in ("step", *(name for name, _ in series))),
        steps,
        lambda step: (str(step + 1), *(f"{numbers[step]:.7g}" if step < len(numbers) else "" for _, numbers in series)),
    )
    return [*parts, table]


def _memory(report: SmokeReport) -> page.PageTable:
    return page.PageTable.of(
        HOW_MEMORY,
        ">rank, >params, >grads, >optimizer, >peak",
        report.memory,
        lambda held: (str(held.rank), *map(format_size, (held.params, held.grads, held.optimizer, held.peak))),
    )


def _rank_memory_parts(report: SmokeReport) -> list[page.Part]:
    names = ("params", "grads", "optimizer")
    sizes = [(held.rank, (held.params, held.grads, held.optimizer)) for held in report.memory[:64]]
    bars = [page.Bar(f"rank {rank}", parts, format_size(sum(parts))) for rank, parts in sizes]
    return [page.Bars("Each rank's own tensors after the first step", names, bars), _memory(report)]
