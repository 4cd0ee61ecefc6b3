"""`ckpt prune` and `ckpt watch`."""

from __future__ import annotations

import sys

from ckpt_tools.cli.build import CommandCall
from ckpt_tools.cli.output import note, print_json, progress_of, report_to, say, say_findings
from ckpt_tools.cli.screen import terminal
from ckpt_tools.cli.views import page
from ckpt_tools.errors import UsageError
from ckpt_tools.options.output import HtmlOptions, OutputOptions
from ckpt_tools.runs.manage import Tended, tended_json
from ckpt_tools.runs.retention import Candidate
from ckpt_tools.text import escape_name, first_few
from ckpt_tools.transfer.threads import one_thread_each
from ckpt_tools.units import format_size

_MAX_SHOWN = 100


def run(call: CommandCall[Tended], view: HtmlOptions, output: OutputOptions) -> int:
    """Tend the folder, and print what was found and done."""
    one_thread_each()
    goes_on = call.given.get("once") is False and not call.given["status"]
    if goes_on and (output.json or view.html is not None):
        what = f"--{'json' if output.json else 'html'} needs --once or --status"
        raise UsageError(what, hint="one document is written at the end, and this goes on")
    more: dict[str, object] = {"say": None if output.is_silent else lambda text: note(escape_name(text))}
    shown: list[object] = []

    def each(tended: Tended) -> None:
        now = (tended.checkpoints, tended.failed, tended.notes)
        if now not in shown or tended.verified or tended.removed:
            _print(tended, output)
            sys.stdout.flush()
        shown[:] = [now]

    command = "watch" if "once" in call.given else "prune"
    with report_to(view.html, command, str(call.given["directory"]), output) as report, progress_of(output) as factory:
        if command == "watch":
            more |= {"progress": factory, "each": each}
        tended = call(**more)
        if report is not None:
            report(tending_page(tended, command))
    if output.json:
        print_json(tended_json(tended))
        return tended.exit_code
    _print(tended, output)
    if command == "prune" and any(each.state == "complete" for each in tended.checkpoints):
        note("hint: `ckpt watch DIR --once` verifies what is complete; only what is verified is removed")
    return tended.exit_code


def _print(tended: Tended, output: OutputOptions) -> None:
    say_findings(tended.findings, most=None if output.verbose else _MAX_SHOWN)
    for text in tended.failed:
        note(f"warning: {escape_name(text)}")
    if output.quiet:
        return
    for text in tended.notes:
        note(f"note: {escape_name(text)}")
    if tended.dry_run and tended.quarantine:
        back = first_few([f"{name} until {end}" for name, end in tended.quarantine.items()], 20)
        note(f"in quarantine: {back}")
    for text in tended.not_checked:
        note(f"not checked: {escape_name(text)}")
    if tended.unknown and output.verbose:
        note(f"not known, and not touched: {first_few(tended.unknown, 20)}")
    screen, table = terminal(), _table(tended, None if output.verbose else _MAX_SHOWN)
    screen.show(table)
    if table.left_out:
        screen.line(f"  … and {table.left_out} earlier ones (-v lists all)")
    size = format_size(tended.freed_bytes)
    gone = len(tended.removed)
    would = "would remove" if tended.dry_run else "removed"
    done = f"{would} {gone} of {len(tended.checkpoints)} checkpoints, {size}" if gone else "nothing to remove"
    bad = sum(each.state in ("bad", "unfit") for each in tended.checkpoints)
    say(f"{escape_name(tended.path)}: {done}" + (f"; {bad} NOT ok" if bad else ""))


def _table(tended: Tended, most: int | None, *, whole: bool = False) -> page.PageTable:
    """Return the latest checkpoints; the `whole` table has the metric, and when each goes, in any case."""
    has_goes = whole or tended.dry_run

    def cells(one: Candidate) -> list[str]:
        fate = "stays" if one.stays else "would go" if tended.dry_run else "removed"
        metric = "" if one.metric is None else f"{one.metric:.5g}"
        why = ", ".join((one.explained, *(rule for rule in one.kept_by if rule not in one.explained)))
        row = [one.name, format_size(one.nbytes), one.state, *[metric] * whole, fate, why]
        return row + [one.goes_when] * has_goes

    columns = f"checkpoint, >size, state, {'>metric, ' * whole}, why{', goes' * has_goes}"
    latest = tended.checkpoints if most is None else tended.checkpoints[-most:]
    table = page.PageTable.of("By series and step", columns, latest, cells, most=None)
    return table._replace(left_out=len(tended.checkpoints) - len(latest))


# The page

_MAX_BARS = 100
_KINDS = ("not known", "not fit or not readable", "fit")


def tending_page(tended: Tended, command: str) -> page.Page:
    """Return the page of a look at a run's folder."""
    found = tended.checkpoints
    fit = [each for each in found if each.state == "verified"]
    would = "would go" if tended.dry_run else "removed"
    facts = [
        ("checkpoints", f"{len(found):,}, {format_size(sum(each.nbytes for each in found))}"),
        ("last verified", tended.last_fit or "none"),
        (would, f"{len(tended.removed):,}, {format_size(tended.freed_bytes)}"),
    ]
    sections = [
        page.PageSection("The folder", [page.FactList(facts)]),
        *page.findings_section(tended.findings),
        page.PageSection("Checkpoints", [*_drawn(found), _table(tended, page.MAX_ROWS, whole=True)]),
    ]
    back = [f"{name} until {end}" for name, end in tended.quarantine.items()]
    sections += page.notes_section("In quarantine, and brought back by `ckpt prune DIR --undo NAME`", back)
    sections += page.notes_section("Not done", tended.failed)
    sections += page.notes_section("Not checked", tended.not_checked)
    sections += page.notes_section("Notes", tended.notes)
    verdict = f"{'ok' if tended.ok else 'NOT ok'}: {len(fit)} of {page.count(len(found), 'checkpoint')} fit"
    left = len(fit) < len(found) or tended.findings or tended.not_checked or tended.failed or tended.notes
    return page.Page(command, tended.path, sections, page.mood_of(ok=tended.ok, left=left), verdict)


def _drawn(found: tuple[Candidate, ...]) -> list[page.Part]:
    bars = []
    for each in found[-_MAX_BARS:]:
        place = {"verified": 2, "bad": 1, "unfit": 1}.get(each.state, 0)
        sizes = [each.nbytes if place == number else 0 for number in range(len(_KINDS))]
        bars.append(page.Bar(each.name, sizes, f"{format_size(each.nbytes)}, {each.state}"))
    left_out = len(found) - len(bars)
    caption = "Size by step" + (f"; {left_out} earlier ones are not drawn" if left_out else "")
    parts: list[page.Part] = [page.Bars(caption, _KINDS, bars, is_upright=True)]
    metrics = [each.metric for each in found if each.metric is not None]
    if len(metrics) > 1:
        parts.append(page.Curves("Metric of the steps that have one, in order", [("metric", metrics)]))
    return parts
