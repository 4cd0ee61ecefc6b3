"""`ckpt diff`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checks.diff import Change, Difference
from ckpt_tools.checks.sibling_tensors import gathered, kind_of, outliers
from ckpt_tools.cli.build import CommandCall
from ckpt_tools.cli.output import note, note_identities, print_json, progress_of, report_to, say
from ckpt_tools.cli.views import page
from ckpt_tools.cli.views.layouts import format_ranges
from ckpt_tools.options.check import DiffView
from ckpt_tools.options.output import OutputOptions
from ckpt_tools.text import counted, escape_message, escape_name, natural_key
from ckpt_tools.units import format_number

_MOST = 40  # Lines


def run(call: CommandCall[Difference], view: DiffView, output: OutputOptions) -> int:
    """Compare, and print the differences."""
    a, b = str(call.given["a"]), str(call.given["b"])
    with report_to(view.html, "diff", f"{a} ↔ {b}", output) as report:
        with progress_of(output) as factory:
            difference = call(progress=factory)
        report(lambda: diff_page(difference, a, b))
    if output.json:
        print_json(difference.to_dict())
        return 0 if difference.equal else 3
    note_identities(difference.identities, output)
    for text in difference.notes:
        note(text)
    if difference.other_model:
        say(f"another model: {escape_message(difference.other_model)}")
    lines = list(_lines(difference, call.shown("a"), call.shown("b"), every=view.tensors))
    for line in lines if view.tensors else lines[:_MOST]:
        say(line)
    if len(lines) > _MOST and not view.tensors:
        say(f"… and {len(lines) - _MOST:,} more lines (--tensors lists every tensor)")
    if not output.quiet:
        say(_summary(difference))
    return 0 if difference.equal else 3


def _lines(difference: Difference, a: str, b: str, *, every: bool) -> Iterator[str]:
    """Yield what differs: names, shapes, dtypes, values; a line for the same tensor of different layers."""
    changes = sorted(difference.changed, key=_rank)
    rows = [
        *((fqn, ("-", f"only in {a}"), None) for fqn in difference.only_in_a),
        *((fqn, ("+", f"only in {b}"), None) for fqn in difference.only_in_b),
        *((c.fqn, ("~", c.what if _rank(c) < _VALUES else ""), c) for c in changes),
    ]
    groups: dict[tuple[str, ...], list[tuple[str, Change | None]]] = {}
    for fqn, how, change in rows:
        groups.setdefault((fqn if every else kind_of(fqn), *how), []).append((fqn, change))
    for (_, sign, said), found in groups.items():
        what = said or _describe([change for _, change in found if change is not None])
        yield f"{sign} {_folded([fqn for fqn, _ in found])}: {what}"


_VALUES = 2


def _rank(change: Change) -> int:
    """Return 0 for another shape, 1 for another dtype, 2 for other values."""
    return 0 if change.shapes is not None else 1 if change.what.startswith("dtype ") else _VALUES


def _describe(changes: Sequence[Change]) -> str:
    """Return how the values of one tensor differ, or those of several."""
    sizes = [change.relative for change in changes if change.relative is not None]
    by = f", relative change {format_number(median(sizes), 2)}" if sizes else ""
    if len(changes) == 1:
        return changes[0].what + by
    usual, most = (format_number(find(sizes), 2) if sizes else "" for find in (median, max))
    by += f" (most {most})" if most != usual else ""
    odd = [change.what.partition("; ")[2] for change in changes if "with NaN" in change.what]
    return f"values differ{by}" + (f"; {len(odd):,} of them: {odd[0]}" if odd else "")


def _folded(fqns: Sequence[str]) -> str:
    """Return names that differ in numbers as one: `layers.{0-35}.up ×36`."""
    if len(fqns) == 1:
        return escape_name(fqns[0])
    columns = (list(dict.fromkeys(column)) for column in zip(*map(natural_key, fqns), strict=False))
    parts = [  # texts differ in names that only a fuzzer has
        str(c[0]) if len(c) == 1 else f"{{{format_ranges(sorted(map(int, c)))}}}" if i % 2 else "*"
        for i, c in enumerate(columns)
    ]
    return f"{escape_name(''.join(parts))} ×{len(fqns):,}"


def _counts(difference: Difference) -> list[tuple[str, str]]:
    """Return how many tensors differ, are equal, or are on one side alone."""
    numbers = (len(difference.changed), difference.num_equal, len(difference.only_in_a), len(difference.only_in_b))
    return list(zip(("differ", "equal", "only in A", "only in B"), map("{:,}".format, numbers), strict=True))


def _summary(difference: Difference) -> str:
    """Return the last line: how many differ, and how."""
    what = " (names, shapes and dtypes)" if difference.keys_only else ""
    if difference.equal:
        return f"equal{what}"
    text = ", ".join(f"{number} {name}" for name, number in _counts(difference)) + what
    sizes = [(change.relative, change.fqn) for change in difference.changed if change.relative is not None]
    if len(sizes) > 1:
        most, fqn = max(sizes)
        usual = median(size for size, _ in sizes)
        figures = f"median {format_number(usual, 2)}, most {format_number(most, 2)}"
        text += f"\nrelative change |B − A| / |A| of the tensors that differ: {figures}: {escape_name(fqn)}"
    return text


# The page


def diff_page(difference: Difference, a: str = "A", b: str = "B") -> page.Page:
    """Return the page of a comparison."""
    keys_only, terms = difference.keys_only, difference.terms
    compared = "names, shapes and dtypes; no data was read" if keys_only else "names, shapes, dtypes and every value"
    rows = [("compared", compared), *_counts(difference)]
    sections = [*_changed_sections(difference, _odd(difference), page.UNREAD if keys_only else "equal")]
    for name, fqns in (("A", difference.only_in_a), ("B", difference.only_in_b)):
        if fqns:
            table = page.PageTable.of(f"Tensors only in {name}", "tensor", fqns, lambda fqn: (fqn,))
            sections.append(page.PageSection(f"Only in {name}: {len(fqns):,}", [table]))
    sections += page.notes_section("Settings", terms)
    sections += page.notes_section("Not compared", difference.notes)
    sections += [page.PageSection("What was compared", [page.FactList(rows)])]
    sections += page.identity_sections(difference.identities)
    mood: page.Mood | None = None
    if difference.equal:
        mood = page.mood_of(ok=True, left=difference.notes or keys_only or terms)
        verdict = "equal" + (" in names, shapes and dtypes; values were not compared" if keys_only else "")
        verdict += f" ({'; '.join(terms)})" if terms else ""
        verdict += "; some things were not compared, listed below" if difference.notes else ""
    else:
        verdict = ", ".join(f"{number} {name}" for name, number in _counts(difference))
    titles = page.identity_titles(difference.identities)
    return page.Page("diff", f"{a} ↔ {b}", sections, mood, verdict, titles=titles)


def _odd(difference: Difference) -> list[Finding]:
    """Return what stands out of a difference: other shapes or dtypes, NaN, changes unlike those of other layers."""
    changes = {change.fqn: change for change in difference.changed}
    sizes = {fqn: change.relative for fqn, change in changes.items() if change.relative is not None}
    far, others = outliers(sizes, {fqn: kind_of(fqn) for fqn in sizes}, 1.0), "the same weight in other layers by about"
    found = {fqn: f"changed by {format_number(sizes[fqn])}, {others} {format_number(usual)}" for fqn, usual in far}
    found |= {fqn: change.what for fqn, change in changes.items() if change.relative is None}
    return list(gathered(found, "info", "stands-out", "`ckpt stats` shows what it is like in each"))


def _changed_sections(difference: Difference, odd: Sequence[Finding], otherwise: str) -> Iterator[page.PageSection]:
    changed = difference.changed
    if not changed:
        return
    numbers: dict[str, float | str] = dict.fromkeys(difference.same, otherwise)
    numbers |= {each.fqn: "different" if each.relative is None else each.relative for each in changed}
    chart = page.Depth("Relative change |B − A| / |A| by layer, a line for each kind of weight", {"": numbers}, odd)
    parts: list[page.Part] = [chart] if chart.places() else []
    ordered = sorted(changed, key=lambda change: -math.inf if change.relative is None else -change.relative)
    table = page.PageTable.of(
        f"All {counted(len(changed), 'changed tensor')}, the most changed first",
        "tensor, >relative change, what",
        ordered,
        lambda change: (change.fqn, "≠" if change.relative is None else format_number(change.relative), change.what),
        is_folded=len(changed) > 20,
    )
    yield page.PageSection(f"Changed: {len(changed):,}", [*parts, table])
    yield from page.findings_section(odd, "What stands out")
