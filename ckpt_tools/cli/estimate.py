"""`ckpt estimate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckpt_tools.checkpoint.infer_mesh import block_of
from ckpt_tools.cli.build import CommandCall
from ckpt_tools.cli.output import print_json, report_to, waiting
from ckpt_tools.cli.screen import Screen, terminal
from ckpt_tools.cli.views import page
from ckpt_tools.errors import UsageError
from ckpt_tools.estimate import Estimate
from ckpt_tools.estimate.case import Case
from ckpt_tools.estimate.report import CaseEstimate, Moment
from ckpt_tools.options.output import HtmlOptions, OutputOptions
from ckpt_tools.text import escape_name
from ckpt_tools.units import format_size


def run(call: CommandCall[Estimate], view: HtmlOptions, output: OutputOptions) -> int:
    """Estimate, and print how much memory is needed."""
    given = call.given
    if "frozen_dtype" in given and not given.get("lora") and "lora_rank" not in given:
        raise UsageError("--frozen-dtype needs --lora")
    shows_all = "all" in given.get("strategy", ()) and "activation_checkpointing" not in given
    with report_to(view.html, "estimate", str(given.get("model") or given.get("params") or ""), output) as report:
        with waiting(output, "estimating"):
            result = call(activation_checkpointing="both") if shows_all else call()
        if report is not None:
            report(estimate_page(result))
    if output.json:
        print_json(result.to_dict())
    else:
        _print(result, output)
    return 0 if result.fits or result.gpu_memory is None else 3


def _print(result: Estimate, output: OutputOptions) -> None:
    screen = terminal()
    if not output.quiet:
        _print_table(screen, result)
        margin = result.cases[0].margin
        screen.line(
            f"  margin: {format_size(margin.context)} CUDA context, {format_size(margin.workspace)} workspaces, "
            f"{format_size(margin.nccl)} NCCL, {format_size(margin.fragmentation)} fragmentation",
            "dim",
        )
        if output.verbose:
            _print_peaks(screen, result)
        for text in result.notes:
            screen.line(f"note: {text}")
        for reason in dict.fromkeys(case.why_not_tracked for case in result.cases if case.why_not_tracked):
            screen.line(f"note: by the formula: {escape_name(reason)}")
    if result.gpu_memory is not None:
        _print_verdict(screen, result, quiet=output.quiet)


def _print_table(screen: Screen, result: Estimate) -> None:
    first = result.cases[0].case
    ranks = f"{first.mesh.world_size} ranks" if first.mesh.world_size != 1 else "1 rank"
    screen.line(f"{escape_name(result.model)}: {result.params:,} parameters, {ranks}", "heading")
    tokens = f"{first.batch_size} × {first.seq_len} tokens per rank, {first.optimizer}"
    table = _table(result)
    screen.line(f"{_dtypes(first)}, {tokens}; {table.caption}")
    screen.show(table)


def _dtypes(case: Case) -> str:
    return f"{case.param_dtype} compute, {case.reduce_dtype} reduce, {case.master_dtype} master"


def _table(result: Estimate) -> page.PageTable:
    """Return every way to train: each column is the most at any time, and the peak less than their sum."""
    most = max(case.needed for case in result.cases)
    unit, scale = ("GiB", 1 << 30) if most >= 1 << 30 else ("MiB", 1 << 20)
    is_tracked = any(case.tracked is not None for case in result.cases)
    has_host = any(case.per_rank.host for case in result.cases)
    columns = "strategy, mesh, >params, >grads, >optimizer, >activations, >gathered, >peak"
    columns += ", >formula" * is_tracked + ", >with margin" + ", >host" * has_host
    columns += ", >fits" * (result.gpu_memory is not None)

    def cells(case: CaseEstimate) -> list[str]:
        memory = case.per_rank
        sizes = [memory.params, memory.grads, memory.optimizer, memory.activations, memory.gathered, memory.peak]
        by_formula = _size(case.formula.peak, scale)
        by_formula += "" if case.difference is None else f" ({case.difference:+.0%})"
        row = [case.case.label, str(case.case.mesh), *(_size(size, scale) for size in sizes)]
        row += [by_formula] * is_tracked + [_size(case.needed, scale)] + [_size(memory.host, scale)] * has_host
        return row + [_FITS[case.fits]] * (result.gpu_memory is not None)

    return page.PageTable.of(f"{unit} on the rank that holds the most", columns, result.cases, cells, most=None)


def _size(nbytes: int, scale: int) -> str:
    return f"{nbytes / scale:.1f}" if nbytes >= 10 * scale else f"{nbytes / scale:.2f}"


_FITS = {True: "yes", False: "no", None: "not known"}
_VERDICTS = {True: "fits", False: "does not fit", None: "not known whether it fits"}


def _print_peaks(screen: Screen, result: Estimate) -> None:
    for case in result.cases:
        parts = ", ".join(f"{name} {format_size(size)}" for name, size in case.per_rank.at_peak.items() if size)
        screen.line(f"  {case.case.label} at its peak: {parts}", "dim")
    memory = format_size(result.peak_rss_bytes)
    screen.line(f"  estimated in {result.seconds:.1f} s with {memory} of memory", "dim")


def _print_verdict(screen: Screen, result: Estimate, *, quiet: bool) -> None:
    for case in result.cases if not result.fits else ():
        if case.doubt is not None:
            screen.line(f"{_verdict(replace(result, cases=(case,)))}: {case.case.label}: {case.doubt}")
    if result.fits is not None:
        screen.line(_verdict(result))
    if result.fits:
        return
    for proposal in () if quiet else result.proposals:
        found = proposal.estimate
        how = "formula" if found.tracked is None else "tracked"
        screen.line(f"  {proposal.what}: {format_size(found.needed)} ({how}), {_VERDICTS[found.fits]}")
    advice = result.advice
    if advice is not None:
        screen.line(f"hint: {advice.what}")
    elif result.proposals:
        screen.line("hint: none of the changes tried fits: use a larger device, more ranks, or a smaller model")


def _verdict(result: Estimate) -> str:
    device = f"{(result.gpu_memory or 0) / 10**9:.3g} GB ({format_size(result.gpu_memory or 0)})"
    if result.fits:
        return f"fits in {device}: {', '.join(case.case.label for case in result.cases if case.fits)}"
    return f"does NOT fit in {device}" if result.fits is False else f"not known whether it fits in {device}"


# The page

_SERIES = ("params", "grads", "optimizer", "activations", "gathered", "step")


def estimate_page(result: Estimate) -> page.Page:
    """Return the page of an estimate."""
    if result.gpu_memory is None:
        verdict = "No device to compare with: give --gpu-memory."
        return page.Page("estimate", result.model, estimate_sections(result), verdict=verdict)
    # An estimate has assumptions: only its words say yes.
    moods: dict[bool | None, page.Mood] = {True: "partly", False: "bad", None: "unknown"}
    return page.Page("estimate", result.model, estimate_sections(result), moods[result.fits], _verdict(result))


def estimate_sections(result: Estimate) -> list[page.PageSection]:
    """Return what an estimate found, as sections."""
    first = result.cases[0].case
    rows = [
        ("parameters", f"{result.params:,}"),
        ("dtypes", _dtypes(first)),
        ("optimizer", first.optimizer),
        ("batch", f"{first.batch_size} × {first.seq_len} tokens per rank"),
    ]
    table = _table(result)
    table = table._replace(caption=f"{table.caption}; each column at any time, the peak less than their sum")
    parts: list[page.Part] = [page.FactList(rows), _memory_bars(result.cases, result.gpu_memory), table]
    sections = [page.PageSection("Memory of the rank that holds the most", parts)]
    if result.proposals:
        table = page.PageTable.of(
            "Changes that were tried",
            "change, >needs, by, fits",
            result.proposals,
            lambda each: (
                each.what,
                format_size(each.estimate.needed),
                "formula" if each.estimate.tracked is None else "tracked",
                _FITS[each.estimate.fits],
            ),
        )
        sections.append(page.PageSection("What would fit", [table]))
    if timelines := _timelines(result):
        sections.append(page.PageSection("One training step", timelines))
    doubts = [f"{case.case.label}: {case.doubt}" for case in result.cases if case.doubt]
    formula = [f"by the formula: {case.why_not_tracked}" for case in result.cases if case.why_not_tracked]
    return [*sections, *page.notes_section("What the numbers do not cover", [*result.notes, *formula, *doubts])]


def _memory_bars(cases: Sequence[CaseEstimate], limit: int | None) -> page.Bars:
    bars = []
    for case in cases:
        memory = case.per_rank
        parts = [memory.at_peak.get(name, 0) for name in _SERIES]
        other = max(0, memory.peak - sum(parts))
        total = f"{format_size(memory.peak)} + {format_size(case.margin.total)} margin = {format_size(case.needed)}"
        if case.fits is not None or limit is not None:
            total += f", fits: {_FITS[case.fits]}"
        name = f"{case.case.label} on {case.case.mesh}"
        bars.append(page.Bar(name, (*parts, other, case.margin.total), total))
    caption = "What is in memory at the peak, and the margin beside it"
    limit_name = "the device" if limit is None else f"the device: {format_size(limit)}"
    return page.Bars(caption, (*_SERIES, "other", "margin"), bars, limit, limit_name)


_MAX_TIMELINES = 4


def _num_between(before: Moment | None, after: Moment) -> int:
    """Return how many blocks of a stack run between two moments: those that are alike are tracked once."""
    first, second = (block_of(moment.block) if moment is not None else None for moment in (before, after))
    if before is None or before.phase != after.phase or first is None or second is None or first[0] != second[0]:
        return 0
    return max(0, abs(first[1] - second[1]) - 1)


def _timelines(result: Estimate) -> list[page.Part]:
    """Return what is alive in a step of each way that was tracked, those that fit first."""
    tracked = [case for case in result.cases if case.per_rank.moments]
    shown = sorted(tracked, key=lambda case: case.fits is not True)[:_MAX_TIMELINES]
    parts: list[page.Part] = []
    for case in shown:
        moments = case.per_rank.moments
        bars = []
        rows = []
        for before, moment in zip((None, *moments), moments, strict=False):
            if left_out := _num_between(before, moment):
                what = f"{page.count(left_out, 'block')} alike, not drawn"
                bars.append(page.Bar(moment.phase, [0] * len(_SERIES), what, moment.phase))
            held = [moment.held.get(name, 0) for name in _SERIES]
            block = moment.block or ("optimizer" if moment.phase == "step" else "outside of blocks")
            name = f"{moment.phase}, {block}"
            bars.append(page.Bar(name, held, format_size(sum(held)), moment.phase))
            rows.append((name, *map(format_size, (*held, sum(held)))))
        label = f"{case.case.label} on {case.case.mesh}"
        caption = f"{label}: the most that is held while each block runs, without the margin"
        caption += "; ⋯ stands for blocks like their neighbours" * any(not sum(bar.parts) for bar in bars)
        limit = result.gpu_memory
        # A device many times as large would leave no room for the step.
        limit = None if limit is None or limit > 4 * case.per_rank.peak else limit
        names = "" if limit is None else f"the device: {format_size(limit)}"
        columns = ", >".join(("moment", *_SERIES, "all"))
        table = page.PageTable.of(f"{label}, in numbers", columns, rows, lambda row: row, is_folded=True)
        parts += [page.Bars(caption, _SERIES, bars, limit, names, is_upright=True), table]
    if len(tracked) > len(shown):
        parts.append(page.NoteList([f"{len(tracked) - len(shown)} more were tracked; --json lists each step"]))
    return parts
