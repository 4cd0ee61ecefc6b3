"""`ckpt prune` and `ckpt watch`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.cli.build import CommandCall
from ckpt_tools.cli.output import note, print_json, progress_of, report_to, say, say_findings
from ckpt_tools.cli.screen import terminal
from ckpt_tools.cli.views import page
from ckpt_tools.errors import UsageError
from ckpt_tools.options.output import HtmlOptions, OutputOptions
from ckpt_tools.runs.manage import PruneResult
from ckpt_tools.runs.retention import RunCheckpoint
from ckpt_tools.text import counted, escape_name, first_few
from ckpt_tools.units import format_number, format_size

_MAX_SHOWN = 100


def run(call: CommandCall[PruneResult], view: HtmlOptions, output: OutputOptions) -> int:
    """Manage the folder, and print what was found and done."""
    goes_on = call.given.get("once") is False and not call.given["status"]
    if goes_on and (output.json or view.html is not None):
        what = f"--{'json' if output.json else 'html'} needs --once or --status"
        raise UsageError(what, hint="one document is written at the end, and this goes on")
    more: dict[str, object] = {"say": None if output.is_silent else lambda text: note(escape_name(text))}
    shown: list[object] = []

    def each(pruned: PruneResult) -> None:
        now = (pruned.checkpoints, pruned.failed, pruned.notes)
        if now not in shown or pruned.verified or pruned.removed:
            _print(pruned, output)
            sys.stdout.flush()
        shown[:] = [now]

    command = "watch" if "once" in call.given else "prune"
    with report_to(view.html, command, str(call.given["directory"]), output) as report, progress_of(output) as factory:
        if command == "watch":
            more |= {"progress": factory, "each": each}
        pruned = call(**more)
        report(lambda: tending_page(pruned, command))
    if output.json:
        print_json(pruned.to_dict())
        return pruned.exit_code
    _print(pruned, output)
    if command == "prune" and any(each.state == "complete" for each in pruned.checkpoints):
        note(" hint: `ckpt watch DIR --once` verifies what is complete; only what is verified is removed")
    return pruned.exit_code


def _print(pruned: PruneResult, output: OutputOptions) -> None:
    say_findings(pruned.findings, most=None if output.verbose else _MAX_SHOWN)
    for text in pruned.failed:
        note(f"warning: {escape_name(text)}")
    if output.quiet and not pruned.dry_run:  # a plan is all that a dry run was started for
        return
    for text in pruned.notes:
        note(f"note: {escape_name(text)}")
    if pruned.dry_run and pruned.quarantine:
        back = first_few([f"{name} until {end}" for name, end in pruned.quarantine.items()], 20)
        note(f"in quarantine: {back}")
    for text in pruned.not_checked:
        note(f"not checked: {escape_name(text)}")
    if pruned.unknown and output.verbose:
        note(f"not known, and not touched: {first_few(pruned.unknown, 20)}")
    screen, table = terminal(), _table(pruned, None if output.verbose else _MAX_SHOWN)
    screen.show(table)
    if table.left_out:
        screen.line(f"  … and {table.left_out} earlier ones (-v lists all)")
    size = format_size(pruned.freed_bytes)
    gone = len(pruned.removed)
    would = "would remove" if pruned.dry_run else "removed"
    done = (
        f"{would} {gone} of {counted(len(pruned.checkpoints), 'checkpoint')}, {size}" if gone else "nothing to remove"
    )
    bad = sum(each.state in ("bad", "unfit") for each in pruned.checkpoints)
    say(f"{escape_name(pruned.path)}: {done}" + (f"; {bad} NOT ok" if bad else ""))


def _table(pruned: PruneResult, most: int | None, *, whole: bool = False) -> page.PageTable:
    """Return the latest checkpoints; the `whole` table has the metric, and when each goes, in any case."""
    has_goes = whole or pruned.dry_run

    def cells(one: RunCheckpoint) -> list[str]:
        fate = "stays" if one.stays else "would go" if pruned.dry_run else "removed"
        metric = "" if one.metric is None else format_number(one.metric, 5)
        why = ", ".join((one.explained, *(rule for rule in one.kept_by if rule not in one.explained)))
        row = [one.name, format_size(one.nbytes), one.state, *[metric] * whole, fate, why]
        return row + [one.goes_when] * has_goes

    columns = f"checkpoint, >size, state, {'>metric, outcome' * whole}, why{', goes' * has_goes}"
    latest = pruned.checkpoints if most is None else pruned.checkpoints[-most:]
    table = page.PageTable.of("By series and step", columns, latest, cells, most=None)
    return table._replace(left_out=len(pruned.checkpoints) - len(latest))


# The page

_MAX_BARS = 100
_KINDS = ("not verified", "bad or unfit", "fit")


def tending_page(pruned: PruneResult, command: str = "prune") -> page.Page:
    """Return the page of a look at a run's folder."""
    found = pruned.checkpoints
    fit = [each for each in found if each.state == "verified"]
    would = "would go" if pruned.dry_run else "removed"
    title = f"{counted(len(found), 'checkpoint')}, {format_size(sum(each.nbytes for each in found))} · "
    title += f"last verified: {pruned.last_fit or 'none'} · "
    title += f"{would}: {len(pruned.removed):,}, {format_size(pruned.freed_bytes)}"
    table = _table(pruned, page.MAX_ROWS, whole=True)
    sections = [
        page.PageSection("Checkpoints", [*_drawn(found, pruned.findings), table]),
        *page.findings_section(pruned.findings),
    ]
    back = [f"{name} until {end}" for name, end in pruned.quarantine.items()]
    sections += page.notes_section("In quarantine, and brought back by `ckpt prune DIR --undo NAME`", back)
    sections += page.notes_section("Not done", pruned.failed)
    sections += page.notes_section("Not checked", pruned.not_checked)
    sections += page.notes_section("Notes", pruned.notes)
    verdict = "no bad one was found" if pruned.ok else "NOT ok"
    verdict += f": {len(fit):,} of {counted(len(found), 'checkpoint')} verified and fit"
    left = len(fit) < len(found) or pruned.findings or pruned.not_checked or pruned.failed or pruned.notes
    return page.Page(command, pruned.path, sections, page.mood_of(ok=pruned.ok, left=left), verdict, titles=[title])


def _drawn(found: tuple[RunCheckpoint, ...], findings: Sequence[Finding]) -> list[page.Part]:
    bars = []
    for each in found[-_MAX_BARS:]:
        place = {"verified": 2, "bad": 1, "unfit": 1}.get(each.state, 0)
        sizes = [each.nbytes if place == number else 0 for number in range(len(_KINDS))]
        about = [finding for finding in findings if each.name in (finding.where, finding.file)]
        bars.append(page.Bar(each.name, sizes, f"{format_size(each.nbytes)}, {each.state}", findings=about))
    left_out = len(found) - len(bars)
    caption = "Size by step" + (f"; {left_out} earlier ones are not drawn" if left_out else "")
    parts: list[page.Part] = [page.Bars(caption, _KINDS, bars, is_upright=True)]
    metrics = [each.metric for each in found if each.metric is not None]
    if len(metrics) > 1:
        parts.append(page.Depth.over_steps("Metric of the steps that have one, in order", {"metric": metrics}))
    return parts
