"""`ckpt prune` and `ckpt watch`."""

from __future__ import annotations

import sys

from ckpt_tools.cli.build import Call
from ckpt_tools.cli.output import note, print_json, progress_of, say, say_findings
from ckpt_tools.cli.reports import report_to
from ckpt_tools.cli.screen import terminal
from ckpt_tools.errors import UsageError
from ckpt_tools.moving.threads import one_thread_each
from ckpt_tools.options.output import HtmlOptions, Output
from ckpt_tools.tending.retention import Candidate
from ckpt_tools.tending.tend import Tended, tended_json
from ckpt_tools.text import escape_name, first_few
from ckpt_tools.units import format_size

_MAX_SHOWN = 100


def run(call: Call[Tended], page: HtmlOptions, output: Output) -> int:
    """Tend the folder, and print what was found and done."""
    one_thread_each()
    goes_on = call.given.get("once") is False and not call.given["status"]
    if goes_on and (output.json or page.html is not None):
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
    with report_to(page.html, command, str(call.given["directory"]), output) as report, progress_of(output) as factory:
        if command == "watch":
            more |= {"progress": factory, "each": each}
        tended = call(**more)
        if report is not None:
            from ckpt_tools.report.tending_page import tending_page

            report(tending_page(tended, command))
    if output.json:
        print_json(tended_json(tended))
        return tended.exit_code
    _print(tended, output)
    if command == "prune" and any(each.state == "complete" for each in tended.checkpoints):
        note("hint: `ckpt watch DIR --once` verifies what is complete; only what is verified is removed")
    return tended.exit_code


def _print(tended: Tended, output: Output) -> None:
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
    rows = [_row(each, tended) for each in tended.checkpoints]
    shown = rows if output.verbose else rows[-_MAX_SHOWN:]
    screen = terminal()
    headers = ("checkpoint", "size", "state", "", "why", "goes")
    screen.table(headers if tended.dry_run else headers[:-1], shown, align="lrllll"[: 5 + tended.dry_run])
    if len(shown) < len(rows):
        screen.line(f"  … and {len(rows) - len(shown)} earlier ones (-v lists all)")
    size = format_size(tended.freed_bytes)
    count = len(tended.removed)
    would = "would remove" if tended.dry_run else "removed"
    done = f"{would} {count} of {len(rows)} checkpoints, {size}" if count else "nothing to remove"
    bad = sum(each.state in ("bad", "unfit") for each in tended.checkpoints)
    say(f"{escape_name(tended.path)}: {done}" + (f"; {bad} NOT ok" if bad else ""))


def _row(one: Candidate, tended: Tended) -> tuple[str, ...]:
    fate = "stays" if one.stays else "would go" if tended.dry_run else "removed"
    row = (escape_name(one.name), format_size(one.nbytes), one.state, fate, escape_name(one.explained))
    return (*row, escape_name(one.goes_when)) if tended.dry_run else row
