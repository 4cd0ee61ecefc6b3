"""`ckpt stats`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from ckpt_tools.checks.sibling_tensors import kind_of
from ckpt_tools.checks.stats import Stats, TensorStats
from ckpt_tools.checks.updates import Update
from ckpt_tools.cli.build import CommandCall
from ckpt_tools.cli.output import note, note_identities, print_json, progress_of, report_to, say, say_findings
from ckpt_tools.cli.screen import Screen, terminal
from ckpt_tools.cli.views import page
from ckpt_tools.options.check import StatsView
from ckpt_tools.options.output import OutputOptions
from ckpt_tools.text import counted, escape_name
from ckpt_tools.units import format_number, format_size

_MAX_KINDS = 40
_MAX_SHOWN = 50


def run(call: CommandCall[Stats], view: StatsView, output: OutputOptions) -> int:
    """Measure, and print what stands out, then the figures."""
    source, against = str(call.given["source"]), call.given.get("against")
    with report_to(view.html, "stats", source, output) as report:
        with progress_of(output) as factory:
            result = call(progress=factory)
        report(lambda: stats_page(result, source, None if against is None else str(against)))
    if output.json:
        print_json(result.to_dict())
        return 0 if result.ok else 3
    note_identities(result.identities, output)
    for text in result.notes:
        note(text)
    say_findings(result.findings, most=None if output.verbose else _MAX_SHOWN)
    if not output.quiet:
        for text in result.not_checked:
            note(f"not checked: {text}")
        _tables(result, terminal(), every=view.tensors)
        for where, fqns in (("SRC", result.only_in_source), ("--against", result.only_in_other)):
            if fqns:
                say(f"only in {where}: {counted(len(fqns), 'tensor')}, e.g. {escape_name(fqns[0])}")
        state = "ok" if result.ok else "NOT ok"
        stand_out = f"; findings: {len(result.findings):,}" if result.findings else "; nothing stands out"
        size = format_size(result.nbytes)
        say(f"{call.shown('source')}: {state} ({counted(len(result.tensors), 'tensor')}, {size}{stand_out})")
    return 0 if result.ok else 3


def _tables(result: Stats, screen: Screen, *, every: bool) -> None:
    kinds: dict[str, list[TensorStats]] = {}
    for row in result.tensors:
        kinds.setdefault(row.fqn if every else kind_of(row.fqn), []).append(row)
    shown = list(kinds.items()) if every else list(kinds.items())[:_MAX_KINDS]
    headers = ["", "", "mean", "std", "rms", "|x| max", "zeros", "NaN/Inf"]
    ranks = any(row.spectrum is not None for row in result.tensors)
    has_updates = bool(result.updates["kind"])
    headers += ["rank"] * ranks + ["update", "cosine"] * has_updates
    screen.section(
        "Values, by name" if every else "Values (medians of all layers; extremes of any; update of all together)"
    )
    rows = []
    for name, group in shown:
        cells = [escape_name(name), f"×{len(group):,}" if len(group) > 1 else "", *_figures(group)]
        if ranks:
            found = [row.spectrum for row in group if row.spectrum is not None]
            middle = median(each.effective_rank for each in found) if found else None
            cells.append(f"{middle:.0f} of {min(found[0].rows, found[0].columns)}" if middle is not None else "")
        if has_updates:
            cells += _update_cells(sum((row.update for row in group if row.update is not None), Update()))
        rows.append(cells)
    screen.table(", >".join(headers), rows)
    if has_updates:
        more = "unchanged ones too; ckpt diff: of each tensor"
        screen.line(f"  update: |new − old| / |old|, of all layers of a row together, {more}", "dim")
    if len(shown) < len(kinds):
        screen.line(f"  … and {len(kinds) - len(shown):,} more (--tensors lists all)")
    layers = {layer: update for layer, update in result.updates["layer"].items() if layer != "none"}
    if len(layers) > 1:
        screen.section("Updates by layer")
        lines = [(layer, *_update_cells(update)) for layer, update in layers.items()]
        screen.table(">layer, >update, >cosine", lines)
    screen.line()


def _figures(group: Sequence[TensorStats]) -> list[str]:
    """Return the cells of some tensors: what is usual of them, and what is the most of any."""
    zeros, elems = (sum(n) for n in zip(*((r.counts.num_zero, r.counts.num_elems) for r in group), strict=True))
    bad = sum(row.counts.num_nan + row.counts.num_inf for row in group)
    shown = f"{bad:,}" if bad else ""
    share = f"{format_number(100 * zeros / elems)}%" if zeros else ""
    found = [row.moments for row in group if row.moments is not None and row.moments.num_elems]
    if not found:
        why = "not measured" if not any(row.moments for row in group) else "nothing finite" if elems else "no elements"
        return [why, "", "", "", share, shown]
    middle = [format_number(median(getattr(each, name) for each in found)) for name in ("mean", "std", "rms")]
    return [*middle, format_number(max(each.absmax for each in found)), share, shown]


def _update_cells(update: Update) -> tuple[str, str]:
    if not update.num_elems:
        return "", ""
    odd = "from zeros" if math.isfinite(update.change) else "NaN or Inf"
    relative = odd if update.relative is None else format_number(update.relative, 2)
    cosine = "" if update.cosine is None else f"{update.cosine:.4f}"
    return ("same", "") if not update.num_changed else (relative, cosine)


# The page


def stats_page(result: Stats, source: str = "", against: str | None = None) -> page.Page:
    """Return the page of a measurement; `against` is the other checkpoint of an update."""
    facts = [("tensors", f"{len(result.tensors):,}"), ("data read", format_size(result.nbytes))]
    if against is not None:
        facts.append(("against", against))
        for name, fqns in (("only in SRC", result.only_in_source), ("only in the other", result.only_in_other)):
            facts.append((name, f"{len(fqns):,}" + (f", first {fqns[0]}" if fqns else "")))
    chart = page.Depth("By layer, a line for each kind of weight", _measures(result), result.findings)
    drawn: list[page.Part] = [chart] if chart.places() else []
    sections = [
        page.PageSection("Values over depth", [*drawn, _table(result)]),
        *page.findings_section(result.findings),
        *page.notes_section("Not checked", result.not_checked),
        *page.notes_section("Notes", result.notes),
        page.PageSection("What was measured", [page.FactList(facts)]),
        *page.identity_sections(result.identities),
    ]
    verdict = ("ok" if result.ok else "NOT ok") + f": {counted(len(result.tensors), 'tensor')}, "
    verdict += f"{counted(len(result.findings), 'finding')}" if result.findings else "nothing stands out"
    if result.not_checked:
        verdict += f"; not checked: {counted(len(result.not_checked), 'thing')}, listed below"
    mood = page.mood_of(ok=result.ok, left=result.findings or result.not_checked or result.notes)
    titles = page.identity_titles(result.identities, (source or "SRC", f"against {against or 'the other'}"))
    return page.Page("stats", source, sections, mood, verdict, titles=titles)


def _measures(result: Stats) -> dict[str, dict[str, float | str]]:
    """Return what is drawn over the layers, by tensor: a number, or why there is none."""

    def figure(row: TensorStats, name: str) -> float | str:
        if row.counts.num_nan + row.counts.num_inf:
            return "NaN or Inf"
        return "not measured" if row.moments is None else float(getattr(row.moments, name))

    def update(row: Update) -> float | str:
        return "unchanged" if not row.num_changed else "changed" if row.relative is None else row.relative

    updates = {row.fqn: update(row.update) for row in result.tensors if row.update is not None}
    names = {"root of the mean square": "rms", "standard deviation": "std", "largest |x|": "absmax"}
    figures = {words: {row.fqn: figure(row, name) for row in result.tensors} for words, name in names.items()}
    return {"relative update |new − old| / |old|": updates, **figures} if updates else figures


def _table(result: Stats) -> page.PageTable:
    def cells(row: TensorStats) -> tuple[str, ...]:
        found = row.moments
        numbers = () if found is None else (found.min, found.max, found.mean, found.std, found.absmax)
        figures = [*map(format_number, numbers)] or [""] * 5
        return row.fqn, row.dtype, *figures, f"{row.counts.num_zero:,}", f"{row.counts.num_nan + row.counts.num_inf:,}"

    columns = "tensor, dtype, >min, >max, >mean, >std, >|x| max, >zeros, >NaN or Inf"
    return page.PageTable.of("The numbers, tensor by tensor", columns, result.tensors, cells, is_folded=True)
