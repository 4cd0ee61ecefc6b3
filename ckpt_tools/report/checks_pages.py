"""The pages of `verify` and `diff`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from ckpt_tools.checks.diff import Change, Difference
from ckpt_tools.checks.reading import describe
from ckpt_tools.checks.verify import Verification
from ckpt_tools.description.infer import rank_of_file
from ckpt_tools.description.layout import Mesh
from ckpt_tools.report.page import Facts, FindingList, HeatTable, Mood, Page, Part, Section, Table
from ckpt_tools.report.parts import (
    MAX_ROWS,
    Sized,
    by_layer,
    count,
    identity_sections,
    mood_of,
    notes_section,
)
from ckpt_tools.units import format_size

_LEVELS = {
    "structure": "structure: headers alone, no data was read",
    "data": "data: headers and bytes",
    "values": "values: headers, bytes, and what the numbers are like",
}


def verify_page(result: Verification, source: str) -> Page:
    """Return the page of a verification."""
    facts = Facts(
        rows=[
            ("level", _LEVELS[result.level]),
            ("tensors", f"{result.tensors:,}"),
            ("chunks", f"{result.chunks:,}"),
            ("data checked", format_size(result.nbytes) if result.level != "structure" else "none"),
        ]
    )
    sections = [
        *identity_sections(result.identities),
        Section(title="What was checked", parts=(facts,)),
        *notes_section("Not read", describe(result.not_read, MAX_ROWS)),
        *notes_section("Not checked", result.not_checked),
        *_places(result),
    ]
    damaged: dict[str, int] = {}
    for finding in result.errors:
        if finding.tensor is not None:
            damaged[finding.tensor] = damaged.get(finding.tensor, 0) + 1
    if damaged:
        sizes = {fqn: Sized(value=float(number), text=f"{number:,}") for fqn, number in damaged.items()}
        legend = (
            "Empty: nothing wrong was found, or there is no such tensor. Findings about no single tensor are not here."
        )
        parts = by_layer(sizes, caption="Errors by layer and kind of weight", legend=legend)
        sections.append(Section(title=f"Where: {count(len(damaged), 'tensor')}", parts=parts))
    strange = {
        fqn: Sized(value=float(counts.num_nan + counts.num_inf), text=f"{counts.num_nan + counts.num_inf:,}")
        for fqn, counts in result.counts.items()
        if not counts.is_finite
    }
    if strange:
        caption = "NaN and infinite elements by layer and kind of weight"
        parts = by_layer(strange, caption=caption, legend="Empty: every element is finite, or there is no such tensor.")
        sections.append(Section(title="Where values are not finite", parts=parts))
    if causes := result.causes:
        groups = [(f"{c.code}: {c.what}", [result.findings[at] for at in c.findings[:MAX_ROWS]]) for c in causes]
        part = FindingList(groups=groups, left_out=len(result.findings) - sum(len(found) for _, found in groups))
        title = f"Findings: {count(len(causes), 'cause')}, {len(result.findings):,}"
        sections.append(Section(title=title, parts=(part,)))
    warnings = len(result.findings) - len(result.errors)
    others = f", {count(warnings, 'warning')}" if warnings else ""
    if not result.ok:
        verdict = f"NOT ok: {count(len(result.errors), 'error')}{others}"
    else:
        things = len(result.not_checked) + len({each.why for each in result.not_read})
        left = f"; not checked: {count(things, 'thing')}, listed below" if things else ""
        verdict = f"ok at level {result.level}{others}{left}"
    mood = mood_of(ok=result.ok, left=result.not_checked or result.not_read or result.level == "structure" or warnings)
    return Page(command="verify", subject=source, sections=sections, mood=mood, verdict=verdict)


_WIDTH = 16
"""Ranks in a row, where no mesh says how many."""
_MAX_WHOLE = 32
"""Rows of a map that is drawn whole."""


def _places(result: Verification) -> Iterator[Section]:
    """Yield what is wrong by the rank that wrote it, and by file."""
    codes: dict[str, Counter[str]] = {}
    for finding in result.errors:
        if finding.file is not None:
            codes.setdefault(finding.file, Counter())[finding.code] += 1
    if not codes:
        return
    found = {file: rank_of_file(file) for file in dict.fromkeys((*result.files, *codes))}
    wrong: Counter[int] = Counter()
    for file, kinds in codes.items():
        if (rank := found[file]) is not None:
            wrong[rank] += kinds.total()
    ranks = {rank for rank in found.values() if rank is not None}
    unread = {found[each.file] for each in result.not_read if each.file in found}
    parts: list[Part] = [_rank_map(wrong, ranks, unread, result.mesh)] if wrong else []
    rows = [
        (
            file,
            "" if found[file] is None else str(found[file]),
            f"{kinds.total():,}",
            ", ".join(f"{code} {number:,}" for code, number in kinds.most_common()),
        )
        for file, kinds in sorted(codes.items(), key=lambda item: -item[1].total())[:MAX_ROWS]
    ]
    caption = (
        f"{count(len(codes), 'file')} with errors of {len(found):,}; errors that no single file explains are not here"
    )
    headers = ("file", "rank", "errors", "what")
    parts.append(Table(caption=caption, headers=headers, rows=rows, align="lrrl", left_out=len(codes) - len(rows)))
    title = f"Whose: {count(len(wrong), 'rank')} of {len(ranks):,}" if wrong else f"Which files: {len(codes):,}"
    yield Section(title=title, parts=parts)


def _rank_map(
    wrong: Mapping[int, int], ranks: Collection[int], unread: Collection[int | None], mesh: Mesh | None
) -> HeatTable:
    """Return errors by rank: a row of the mesh's last axis in a row of the map, or sixteen ranks in each."""
    axis, width = "", _WIDTH
    if mesh is not None and len(mesh.axes) > 1 and 1 < mesh.axes[-1][1] <= 4 * _WIDTH:
        axis, width = f"{mesh.axes[-1][0]} ", mesh.axes[-1][1]
    most = max(wrong.values())

    def show(rank: int) -> tuple[str, float] | None:
        if rank not in ranks:
            return None
        number = f"{wrong[rank]:,}" if rank in wrong else ""
        text = f"{number} not read".strip() if rank in unread else number
        return text, 0.2 + 0.8 * wrong[rank] / most if rank in wrong else 0.0

    firsts = sorted({rank // width * width for rank in ranks})
    is_small = len(firsts) <= _MAX_WHOLE
    firsts = firsts if is_small else sorted({rank // width * width for rank in wrong})
    rows = [(f"{at}–{at + width - 1}", [show(at + i) for i in range(width)]) for at in firsts[:MAX_ROWS]]
    return HeatTable(
        caption="Errors by rank that wrote the file",
        corner="ranks",
        columns=[f"{axis}{'' if axis else '+'}{i}" for i in range(width)],
        rows=rows,
        legend="Empty: its files were read, and no error was found. Not read: all or a part. Dotted: no such rank."
        + ("" if is_small else " Rows without an error are left out."),
        left_out=len(firsts) - len(rows),
    )


def diff_page(difference: Difference, a: str, b: str, *, keys_only: bool, terms: Sequence[str] = ()) -> Page:
    """Return the page of a comparison; `terms` are what limits it: tolerances, and names that were chosen."""
    counts = {
        "equal": difference.num_equal,
        "changed": len(difference.changed),
        "only in A": len(difference.only_in_a),
        "only in B": len(difference.only_in_b),
    }
    compared = "names, shapes and dtypes; no data was read" if keys_only else "names, shapes, dtypes and every value"
    rows = [("A", a), ("B", b), ("compared", compared), *((name, f"{number:,}") for name, number in counts.items())]
    sections = [
        *identity_sections(difference.identities),
        Section(title="What was compared", parts=(Facts(rows=rows),)),
    ]
    sections += notes_section("On these terms", terms)
    sections += notes_section("Not compared", difference.notes)
    sections += _changed_sections(difference)
    for name, fqns in (("A", difference.only_in_a), ("B", difference.only_in_b)):
        if fqns:
            only = [(fqn,) for fqn in fqns[:MAX_ROWS]]
            left_out = len(fqns) - len(only)
            table = Table(
                caption=f"Tensors only in {name}", headers=("tensor",), rows=only, align="l", left_out=left_out
            )
            sections.append(Section(title=f"Only in {name}: {len(fqns):,}", parts=(table,)))
    mood: Mood | None = None
    if difference.equal:
        mood = mood_of(ok=True, left=difference.notes or keys_only or terms)
        verdict = "equal" + (" in names, shapes and dtypes; values were not compared" if keys_only else "")
        verdict += f" ({'; '.join(terms)})" if terms else ""
        verdict += "; some things were not compared, listed below" if difference.notes else ""
    else:
        verdict = ", ".join(f"{number:,} {name}" for name, number in counts.items())
    return Page(command="diff", subject=f"{a} ↔ {b}", sections=sections, mood=mood, verdict=verdict)


def _changed_sections(difference: Difference) -> Iterator[Section]:
    changed = difference.changed
    if not changed:
        return
    parts: list[Part] = []
    sized = {change.fqn: _sized(change) for change in changed}
    if any(change.relative is not None for change in changed):
        parts += by_layer(
            sized,
            caption="Relative change |B − A| / |A| by layer and kind of weight",
            legend="Colours are logarithmic. ≠: different without such a number. Empty: equal, or no such tensor.",
        )
    ordered = sorted(changed, key=lambda change: -sized[change.fqn].weight)
    rows = [(change.fqn, sized[change.fqn].text, change.what) for change in ordered[:MAX_ROWS]]
    table = Table(
        caption=f"All {count(len(changed), 'changed tensor')}, the most changed first",
        headers=("tensor", "relative", "what"),
        rows=rows,
        align="lrl",
        left_out=len(changed) - len(rows),
        is_folded=len(changed) > 20,
    )
    yield Section(title=f"Changed: {len(changed):,}", parts=[*parts, table])


def _sized(change: Change) -> Sized:
    return Sized(value=change.relative, text="≠" if change.relative is None else f"{change.relative:.1e}")
