"""The page of `stats`: what the values are like, by layer and kind of weight."""

from __future__ import annotations

from ckpt_tools.checks.stats import Stats
from ckpt_tools.report.page import Facts, Page, Part, Section, Table
from ckpt_tools.report.parts import (
    MAX_ROWS,
    Sized,
    by_layer,
    count,
    findings_section,
    identity_sections,
    mood_of,
    notes_section,
)
from ckpt_tools.units import format_size


def stats_page(result: Stats, source: str, against: str | None = None) -> Page:
    """Return the page of a measurement; `against` is the other checkpoint of an update."""
    facts = [("tensors", f"{len(result.tensors):,}"), ("data read", format_size(result.nbytes))]
    if against is not None:
        facts.append(("against", against))
        for name, fqns in (("only in SRC", result.only_in_source), ("only in the other", result.only_in_other)):
            facts.append((name, f"{len(fqns):,}" + (f", first {fqns[0]}" if fqns else "")))
    sections = [
        *identity_sections(result.identities),
        Section(title="What was measured", parts=(Facts(rows=facts),)),
        *findings_section(result.findings),
        *notes_section("Not checked", result.not_checked),
        *notes_section("Notes", result.notes),
    ]
    rms = {
        row.fqn: Sized(value=row.moments.rms, text=f"{row.moments.rms:.2g}") for row in result.tensors if row.moments
    }
    updates = {
        row.fqn: Sized(
            value=row.update.relative, text="≠" if row.update.relative is None else f"{row.update.relative:.1e}"
        )
        for row in result.tensors
        if row.update is not None and row.update.num_changed
    }
    logarithmic = "Colours are logarithmic. Empty: "
    if updates:
        caption = "Relative update |new − old| / |old| by layer and kind of weight"
        parts = by_layer(
            updates,
            caption=caption,
            legend="≠: changed, without such a number. " + logarithmic + "unchanged, or no such tensor.",
        )
        sections.append(Section(title="Updates", parts=parts))
    if rms:
        legend = logarithmic + "no such tensor, or one without figures."
        parts = by_layer(rms, caption="Root of the mean square by layer and kind of weight", legend=legend)
        sections.append(Section(title="Values", parts=[*parts, _table(result)]))
    verdict = ("ok" if result.ok else "NOT ok") + f": {count(len(result.tensors), 'tensor')}, "
    verdict += f"{count(len(result.findings), 'finding')}" if result.findings else "nothing stands out"
    if result.not_checked:
        verdict += f"; not checked: {count(len(result.not_checked), 'thing')}, listed below"
    mood = mood_of(ok=result.ok, left=result.findings or result.not_checked or result.notes)
    return Page(command="stats", subject=source, sections=sections, mood=mood, verdict=verdict)


def _table(result: Stats) -> Part:
    rows = []
    for row in result.tensors[:MAX_ROWS]:
        found = row.moments
        figures = (
            ("",) * 5
            if found is None
            else tuple(f"{number:.3g}" for number in (found.min, found.max, found.mean, found.std, found.absmax))
        )
        rows.append(
            (row.fqn, row.dtype, *figures, f"{row.counts.num_zero:,}", f"{row.counts.num_nan + row.counts.num_inf:,}")
        )
    return Table(
        caption="Figures of every tensor",
        headers=("tensor", "dtype", "min", "max", "mean", "std", "|x| max", "zeros", "NaN or Inf"),
        rows=rows,
        align="llrrrrrrr",
        left_out=len(result.tensors) - len(rows),
        is_folded=True,
    )
