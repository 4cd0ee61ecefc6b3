"""`ckpt estimate`."""

from __future__ import annotations

from dataclasses import replace

from ckpt_tools.checkpoint.identity import count_text
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
from ckpt_tools.text import counted, escape_name
from ckpt_tools.units import format_device, format_size


def run(call: CommandCall[Estimate], view: HtmlOptions, output: OutputOptions) -> int:
    """Estimate, and print how much memory is needed."""
    given = call.given
    if "frozen_dtype" in given and not given.get("lora") and "lora_rank" not in given:
        raise UsageError("--frozen-dtype needs --lora")
    shows_all = "all" in given.get("strategy", ()) and "activation_checkpointing" not in given
    with report_to(view.html, "estimate", str(given.get("model") or given.get("params") or ""), output) as report:
        with waiting(output, "estimating") as say_instead:
            both = {"activation_checkpointing": "both"} if shows_all else {}
            result = call(on_case=say_instead, **both)
        report(lambda: estimate_page(result))
    if output.json:
        print_json(result.to_dict())
    else:
        _print(result, output)
    return 0 if result.fits or result.gpu_memory is None else 3


def _print(result: Estimate, output: OutputOptions) -> None:
    screen = terminal()
    if not output.quiet:
        _print_table(screen, result)
        best = _best_first(result)[0]
        kinds = {"CUDA context": "context", "workspaces": "workspace", "NCCL": "nccl", "fragmentation": "fragmentation"}
        sizes = [f"{format_size(getattr(best.margin, name))} {what}" for what, name in kinds.items()]
        screen.line(f"  margin of {best.case.label}: {', '.join(sizes)}", "dim")
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
    ranks = counted(first.mesh.world_size, "rank")
    screen.line(f"{escape_name(result.model)}: {result.params:,} parameters, {ranks}", "heading")
    tokens = f"{first.batch_size:,} × {first.seq_len:,} tokens per rank, {first.optimizer}"
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
        screen.line(f"{_chosen(result)}: {result.recommendation}")
        return
    for proposal in () if quiet else result.proposals:
        found = proposal.estimate
        how = "formula" if found.tracked is None else "tracked"
        screen.line(f"  {proposal.what}: {format_size(found.needed)} ({how}), {_VERDICTS[found.fits]}")
    if result.advice is not None:
        screen.line(f" hint: {result.advice.what}")
    elif result.proposals:
        screen.line(f" hint: {_NOTHING}")


def _chosen(result: Estimate) -> str:
    """Return what the way that fits best is called: one of several is recommended."""
    return "recommended" if len(result.cases) > 1 else "tried"


_NOTHING = "none of the changes tried fits: use a larger device, more ranks, or a smaller model"


def _verdict(result: Estimate) -> str:
    device = format_device(result.gpu_memory or 0)
    if result.fits:
        return f"fits in {device}: {', '.join(case.case.label for case in result.cases if case.fits)}"
    return f"does NOT fit in {device}" if result.fits is False else f"not known whether it fits in {device}"


# The page

_SERIES = ("params", "grads", "optimizer", "activations", "gathered", "step")


def estimate_page(result: Estimate) -> page.Page:
    """Return the page of an estimate: the one recommended first."""
    first = result.cases[0].case
    sizes = f"{count_text(result.params)} parameters · {counted(first.mesh.world_size, 'rank')}"
    title = f"{sizes} · {first.optimizer} · {first.batch_size:,} × {first.seq_len:,} tokens per rank · {_dtypes(first)}"
    sections, mood = estimate_sections(result), None
    verdict = "No device to compare with: give --gpu-memory."
    if result.gpu_memory is not None:
        # An estimate has assumptions: only its words say yes.
        moods: dict[bool | None, page.Mood] = {True: "partly", False: "bad", None: "unknown"}
        mood = moods[result.fits]
        advice = result.recommendation or (_NOTHING if result.proposals else "")
        head = f"{_chosen(result).capitalize()}: " if result.fits else _verdict(result) + "; " * bool(advice)
        verdict = head + advice
    return page.Page("estimate", result.model, sections, mood, verdict, titles=[title])


def _best_first(result: Estimate) -> list[CaseEstimate]:
    """Return every way, first the recommended one, or the one that needs the least."""
    best = result.recommended or min(result.cases, key=lambda case: case.needed)
    return sorted(result.cases, key=lambda case: (case is not best, case.fits is not True))


def estimate_sections(result: Estimate) -> list[page.PageSection]:
    """Return what an estimate found, as sections."""
    sections = []
    if result.proposals:
        table = page.PageTable.of(
            "Changes that were tried; the last one fits" if result.advice else "Changes that were tried: none fits",
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
    table = _table(result)
    caption = f"In numbers: {table.caption}; each column at any time, the peak less than their sum"
    table = table._replace(caption=caption, is_folded=len(result.cases) > 1)
    parts: list[page.Part] = [_memory_bars(result), table]
    sections.append(page.PageSection("Memory of the rank that holds the most", parts))
    if timelines := _timelines(result):
        sections.append(page.PageSection("One training step", timelines))
    doubts = [f"{case.case.label}: {case.doubt}" for case in result.cases if case.doubt]
    formula = [f"by the formula: {case.why_not_tracked}" for case in result.cases if case.why_not_tracked]
    return [*sections, *page.notes_section("What the numbers do not cover", [*result.notes, *formula, *doubts])]


def _memory_bars(result: Estimate) -> page.Bars:
    bars, limit = [], result.gpu_memory
    for case in _best_first(result):
        memory = case.per_rank
        parts = [memory.at_peak.get(name, 0) for name in _SERIES]
        other = max(0, memory.peak - sum(parts))
        total = f"{format_size(memory.peak)} + {format_size(case.margin.total)} margin = {format_size(case.needed)}"
        if case.fits is not None or limit is not None:
            total += f", fits: {_FITS[case.fits]}"
        name = f"{_chosen(result)}: " * (case is result.recommended) + f"{case.case.label} on {case.case.mesh}"
        bars.append(page.Bar(name, (*parts, other, case.margin.total), total))
    caption = "What is in memory at the peak, and the margin beside it"
    limit_name = "the device" if limit is None else f"the device: {format_device(limit)}"
    return page.Bars(caption, (*_SERIES, "other", "margin"), bars, limit, limit_name)


def _num_between(before: Moment | None, after: Moment) -> int:
    """Return how many blocks of a stack run between two moments: those that are alike are tracked once."""
    first, second = (block_of(moment.block) if moment is not None else None for moment in (before, after))
    if before is None or before.phase != after.phase or first is None or second is None or first[0] != second[0]:
        return 0
    return max(0, abs(first[1] - second[1]) - 1)


def _timelines(result: Estimate) -> list[page.Part]:
    """Return what is alive in a step of the first way that was tracked, the recommended one if it was."""
    case = next((case for case in _best_first(result) if case.per_rank.moments), None)
    if case is None:
        return []
    moments, bars, rows = case.per_rank.moments, [], []
    for before, moment in zip((None, *moments), moments, strict=False):
        if left_out := _num_between(before, moment):
            what = f"{counted(left_out, 'block')} alike, not drawn"
            bars.append(page.Bar(moment.phase, [0] * len(_SERIES), what, moment.phase))
        held = [moment.held.get(name, 0) for name in _SERIES]
        block = moment.block or ("optimizer" if moment.phase == "step" else "outside of blocks")
        name = f"{moment.phase}, {block}"
        bars.append(page.Bar(name, held, format_size(sum(held)), moment.phase))
        rows.append((name, *map(format_size, (*held, sum(held)))))
    label = f"{case.case.label} on {case.case.mesh}"
    caption = f"{label}: peak memory while each block runs, without the margin"
    caption += "; ⋯ stands for blocks like their neighbours" * any(not sum(bar.parts) for bar in bars)
    limit = result.gpu_memory
    # A device many times as large would leave no room for the step.
    limit = None if limit is None or limit > 4 * case.per_rank.peak else limit
    names = "" if limit is None else f"the device: {format_device(limit)}"
    columns = ", >".join(("moment", *_SERIES, "all"))
    table = page.PageTable.of(f"{label}, in numbers", columns, rows, lambda row: row, is_folded=True)
    return [page.Bars(caption, _SERIES, bars, limit, names, is_upright=True), table]
