"""`ckpt verify`."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt_tools import api
from ckpt_tools.checks.verify import Level, to_json
from ckpt_tools.cli import options
from ckpt_tools.cli.output import note, print_json, progress_of, say, say_findings
from ckpt_tools.errors import UsageError
from ckpt_tools.text import escape_name
from ckpt_tools.units import format_size

Against = Annotated[
    str | None,
    typer.Option("--against", envvar="CKPT_AGAINST", metavar="REF", help="Compare bit for bit, whatever the formats."),
]
LevelName = Annotated[
    str,
    typer.Option(
        "--level", envvar="CKPT_LEVEL", metavar="structure|data", help="structure reads headers, data every byte."
    ),
]
_MAX_SHOWN = 50


def verify(
    source: options.Source,
    against: Against = None,
    level: LevelName = "data",
    num_workers: options.NumWorkers = None,
    from_format: options.From = None,
    progress: options.ProgressMode = "auto",
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Check that a checkpoint is complete and intact: every element exactly once, every byte as written."""
    with progress_of(progress, quiet=quiet or json) as factory:
        result = api.verify(
            source,
            against=against,
            level=_level(level),
            num_workers=num_workers,
            progress=factory,
            format=from_format,
        )
    if json:
        print_json(to_json(result))
        return 0 if result.ok else 3
    say_findings(result.findings, most=None if verbose else _MAX_SHOWN)
    if not quiet:
        for text in result.not_checked:
            note(f"not checked: {text}")
        state = "ok" if result.ok else "NOT ok"
        data = f", {format_size(result.nbytes)} of data" if result.level == "data" else ", headers only"
        say(f"{escape_name(source)}: {state} ({result.tensors} tensors, {result.chunks} chunks{data})")
    return 0 if result.ok else 3


def _level(text: str) -> Level:
    if text == "structure":
        return "structure"
    if text == "data":
        return "data"
    raise UsageError(f"{text!r} is not a level", hint="--level takes structure or data")
