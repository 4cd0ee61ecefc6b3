"""The page of a run's folder: what is there, what it is worth, what stays by which rule, and what goes when."""

from __future__ import annotations

from ckpt_tools.report.page import Bar, Bars, Curves, Facts, Page, Part, Section, Table
from ckpt_tools.report.parts import MAX_ROWS, count, findings_section, mood_of, notes_section
from ckpt_tools.tending.retention import Candidate
from ckpt_tools.tending.tend import Tended
from ckpt_tools.units import format_size

_MAX_BARS = 100
_KINDS = ("not known", "not fit or not readable", "fit")


def tending_page(tended: Tended, command: str) -> Page:
    """Return the page of a look at a run's folder."""
    found = tended.checkpoints
    fit = [each for each in found if each.state == "verified"]
    would = "would go" if tended.dry_run else "removed"
    facts = [
        ("checkpoints", f"{len(found):,}, {format_size(sum(each.nbytes for each in found))}"),
        ("last verified", tended.last_fit or "none"),
        (would, f"{len(tended.removed):,}, {format_size(tended.freed_bytes)}"),
    ]
    shown = found[-MAX_ROWS:]
    headers = ("checkpoint", "size", "state", "metric", "stays", "why", "goes")
    rows = [
        (
            each.name,
            format_size(each.nbytes),
            each.state,
            "" if each.metric is None else f"{each.metric:.5g}",
            "yes" if each.stays else would,
            ", ".join(dict.fromkeys((each.explained, *each.kept_by))),
            each.goes_when,
        )
        for each in shown
    ]
    left_out = len(found) - len(shown)
    table = Table(caption="By series and step", headers=headers, rows=rows, align="lrlrlll", left_out=left_out)
    sections = [
        Section(title="The folder", parts=(Facts(rows=facts),)),
        *findings_section(tended.findings),
        Section(title="Checkpoints", parts=[*_drawn(found), table]),
    ]
    back = [f"{name} until {end}" for name, end in tended.quarantine.items()]
    sections += notes_section("In quarantine, and brought back by `ckpt prune DIR --undo NAME`", back)
    sections += notes_section("Not done", tended.failed)
    sections += notes_section("Not checked", tended.not_checked)
    sections += notes_section("Notes", tended.notes)
    verdict = f"{'ok' if tended.ok else 'NOT ok'}: {len(fit)} of {count(len(found), 'checkpoint')} fit"
    left = len(fit) < len(found) or tended.findings or tended.not_checked or tended.failed or tended.notes
    mood = mood_of(ok=tended.ok, left=left)
    return Page(command=command, subject=tended.path, sections=sections, mood=mood, verdict=verdict)


def _drawn(found: tuple[Candidate, ...]) -> list[Part]:
    bars = []
    for each in found[-_MAX_BARS:]:
        place = {"verified": 2, "bad": 1, "unfit": 1}.get(each.state, 0)
        sizes = [each.nbytes if place == number else 0 for number in range(len(_KINDS))]
        bars.append(Bar(name=each.name, parts=sizes, total=f"{format_size(each.nbytes)}, {each.state}"))
    left_out = len(found) - len(bars)
    caption = "Size by step" + (f"; {left_out} earlier ones are not drawn" if left_out else "")
    parts: list[Part] = [Bars(caption=caption, series=_KINDS, bars=bars, is_upright=True)]
    metrics = [each.metric for each in found if each.metric is not None]
    if len(metrics) > 1:
        parts.append(Curves(caption="Metric of the steps that have one, in order", series=[("metric", metrics)]))
    return parts
