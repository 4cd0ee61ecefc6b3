"""`ckpt push`."""

from __future__ import annotations

import contextlib

from ckpt_tools.cli.build import CommandCall
from ckpt_tools.cli.output import note, print_json, progress_of, say, say_findings
from ckpt_tools.cli.streams import complete
from ckpt_tools.hub.card import CardFacts
from ckpt_tools.hub.plan import PushResult, visibility
from ckpt_tools.options.hub import CardFields, PushView
from ckpt_tools.options.output import OutputOptions
from ckpt_tools.text import counted, escape_name, first_few
from ckpt_tools.units import format_size


def run(call: CommandCall[PushResult], view: PushView, said: CardFields, output: OutputOptions) -> int:
    """Push, and print the proof that it arrived."""
    with progress_of(output) as factory:
        result = call(
            card=False if view.no_card else CardFacts.of(said),
            progress=factory,
            log=None if output.is_silent else note,
            bars=output.has_bars,
        )
    is_done = result.ok and not call.given["dry_run"]
    with complete(f"the push to {call.shown('repo')}") if is_done else contextlib.nullcontext():
        if output.json:
            print_json(result.to_dict())
        else:
            print_push(result, output)
    return 0 if result.ok else 3


_MAX_SHOWN = 30


def print_push(result: PushResult, output: OutputOptions) -> None:
    """Show what was sent, and the proof that it arrived."""
    say_findings(result.findings)
    for text in result.notes:
        note(f"note: {text}")
    for path, why in result.not_searched:
        note(f"not searched for secrets: {escape_name(path)}: {why}")
    if output.quiet and not result.dry_run:
        return
    rows = [file for file in result.files if output.verbose or result.dry_run or file.state != "unchanged"]
    if result.dry_run:
        is_new = result.created or any(file.state == "not compared" for file in rows)
        say(f"{result.repo}: {visibility(result.private, is_new=is_new)}")
    shown = rows if output.verbose else rows[:_MAX_SHOWN]
    for file in shown:
        say(f"  {file.state:<12}  {format_size(file.nbytes):>10}  {file.mode or '':<7}  {escape_name(file.path)}")
    if len(shown) < len(rows):
        say(f"  … and {len(rows) - len(shown):,} more (-v lists all)")
    if result.left_out:
        paths = [path for path, _ in result.left_out]
        say(f"  left out: {first_few(paths, len(paths) if output.verbose else 5)}")
    if result.dry_run and result.card is not None:
        lines = result.card.splitlines()
        head = next((at for at, line in enumerate(lines) if at and line == "---"), 0) + _MAX_SHOWN
        for line in lines if output.verbose else lines[:head]:
            say(f"  | {escape_name(line)}")
        if len(lines) > head and not output.verbose:
            say(f"  | … and {len(lines) - head:,} more lines of README.md (-v shows all)")
    for line in _summary(result):
        say(line)


def _summary(result: PushResult) -> list[str]:
    states = [file.state for file in result.files]
    kinds = ("new", "changed", "unchanged", "ignored", "deleted", "not compared")
    counts = ", ".join(f"{states.count(kind)} {kind}" for kind in kinds if kind in states)
    is_private = ", private" if result.private else ""
    if result.dry_run:
        would = "would create it; " if result.created else ""
        most = "at most " if "not compared" in states else ""
        plan = f"{would}{counts}; {most}{format_size(result.sent_bytes)} to send"
        return [f"{result.repo}{is_private}: {plan}; dry run, nothing was uploaded"]
    if result.commit is None:
        return [f"{result.url}: nothing to push, {counts}", *_proof(result)]
    where = result.pull_request or f"{result.url}/commit/{result.commit}"
    made = "created, " if result.created else ""
    return [f"{result.repo}{is_private}: {made}{counts}; {format_size(result.sent_bytes)} sent", where, *_proof(result)]


def _proof(result: PushResult) -> list[str]:
    if not result.ok:
        return ["NOT ok: what arrived is not what is here"]
    if not result.num_checked:
        return []
    files = counted(result.num_checked, "file")
    return [f"checked: {files}, {format_size(result.checked_bytes)} read back, sha256 as here"]
