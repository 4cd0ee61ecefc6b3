"""`ckpt push`."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

from ckpt_tools import api
from ckpt_tools.cli import hub_options, options
from ckpt_tools.cli.output import note, print_json, progress_of, say, say_findings
from ckpt_tools.cli.streams import complete
from ckpt_tools.errors import UsageError
from ckpt_tools.hub.card import CardFacts
from ckpt_tools.hub.plan import PushResult
from ckpt_tools.hub.push import CHECK_LEVELS, CheckLevel, result_json
from ckpt_tools.text import escape_name
from ckpt_tools.units import format_size

Directory = Annotated[str, typer.Argument(metavar="DIR", help="What to push: a model, an adapter, a checkpoint.")]
Repo = Annotated[
    str, typer.Argument(metavar="REPO", help="NAMESPACE/NAME, or NAME for one of your own; created if new.")
]
BaseModel = Annotated[
    str | None,
    typer.Option(
        "--base-model", envvar="CKPT_BASE_MODEL", metavar="ORG/NAME", help="For the model card: what it extends."
    ),
]
NoCard = Annotated[
    bool, typer.Option("--no-card", envvar="CKPT_NO_CARD", help="Make no model card, and add nothing to README.md.")
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        envvar="CKPT_INCLUDE",
        metavar="GLOB",
        help="Only these files (repeatable). Without a slash it is held against names in every directory.",
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option("--exclude", envvar="CKPT_EXCLUDE", metavar="GLOB", help="Without these files (repeatable)."),
]
DeleteStale = Annotated[
    bool,
    typer.Option(
        "--delete-stale", envvar="CKPT_DELETE_STALE", help="Delete weights beside the new ones that only the hub has."
    ),
]
Check = Annotated[
    str,
    typer.Option(
        "--check",
        envvar="CKPT_CHECK",
        metavar="sent|all|names",
        help="Read back what was sent, everything, or nothing (the hub's digests are compared in any case).",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option("-n", "--dry-run", envvar="CKPT_DRY_RUN", help="Show what is new, changed, unchanged; send nothing."),
]


def push(
    directory: Directory,
    repo: Repo,
    private: hub_options.Private = False,
    create_pr: hub_options.CreatePr = False,
    revision: hub_options.Revision = None,
    commit_message: hub_options.Message = None,
    base_model: BaseModel = None,
    license: hub_options.License = None,  # noqa: A002 - the option's name
    no_card: NoCard = False,
    include: Include = None,
    exclude: Exclude = None,
    delete_stale: DeleteStale = False,
    check: Check = "sent",
    endpoint: hub_options.Endpoint = None,
    dry_run: DryRun = False,
    num_workers: options.NumWorkers = None,
    progress: options.ProgressMode = "auto",
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Push a directory to the Hugging Face hub in one commit, and check what arrived.

    The token comes from HF_TOKEN or `hf auth login`. Nothing is sent that is not whole, and nothing over the head of
    somebody who commits meanwhile.
    """
    facts = CardFacts(base_model=base_model, license=license)
    is_silent = quiet or json
    with progress_of(progress, quiet=is_silent) as factory:
        result = api.push(
            directory,
            repo,
            private=private,
            create_pr=create_pr,
            revision=revision,
            commit_message=commit_message,
            endpoint=endpoint,
            dry_run=dry_run,
            card=False if no_card else facts,
            include=include or (),
            exclude=exclude or (),
            delete_stale=delete_stale,
            check=_level(check),
            num_workers=num_workers,
            progress=factory,
            say=None if is_silent else note,
            bars=not is_silent and (progress == "bar" or (progress == "auto" and sys.stderr.isatty())),
        )
    with contextlib.nullcontext() if dry_run or not result.ok else complete(f"the push to {escape_name(repo)}"):
        if json:
            print_json(result_json(result))
        else:
            print_push(result, quiet=quiet, verbose=verbose)
    return 0 if result.ok else 3


def _level(text: str) -> CheckLevel:
    for known in CHECK_LEVELS:
        if text == known:
            return known
    raise UsageError(f"{text!r} cannot be checked", hint="--check takes sent, all or names")


_MAX_SHOWN = 30


def print_push(result: PushResult, *, quiet: bool, verbose: bool) -> None:
    """Show what was sent, and the proof that it arrived."""
    say_findings(result.findings)
    for text in result.notes:
        note(f"note: {text}")
    if quiet:
        return
    rows = [file for file in result.files if verbose or result.dry_run or file.state != "unchanged"]
    shown = rows if verbose else rows[:_MAX_SHOWN]
    for file in shown:
        say(f"  {file.state:<9}  {format_size(file.nbytes):>10}  {file.mode or '':<7}  {escape_name(file.path)}")
    if len(shown) < len(rows):
        say(f"  … and {len(rows) - len(shown)} more (-v lists all)")
    if result.left_out:
        names = ", ".join(escape_name(path) for path, _ in result.left_out[: None if verbose else 5])
        more = "" if verbose or len(result.left_out) <= 5 else f" and {len(result.left_out) - 5} more"
        say(f"  left out: {names}{more}")
    for line in _summary(result):
        say(line)


def _summary(result: PushResult) -> list[str]:
    states = [file.state for file in result.files]
    kinds = ("new", "changed", "unchanged", "ignored", "deleted")
    counts = ", ".join(f"{states.count(kind)} {kind}" for kind in kinds if kind in states)
    is_private = ", private" if result.private else ""
    if result.dry_run:
        would = "would create it; " if result.created else ""
        return [f"{result.repo}{is_private}: {would}{counts}; {format_size(result.sent_bytes)} to send"]
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
    files = f"{result.num_checked} file" + ("s" if result.num_checked != 1 else "")
    return [f"checked: {files}, {format_size(result.checked_bytes)} read back, sha256 as here"]
