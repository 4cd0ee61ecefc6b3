"""`ckpt diff`."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt_tools import api
from ckpt_tools.checks.diff import Difference, to_json
from ckpt_tools.cli import options
from ckpt_tools.cli.output import print_json, progress_of, say
from ckpt_tools.text import escape_name

A = Annotated[str, typer.Argument(metavar="A", help="A checkpoint of any format.")]
B = Annotated[str, typer.Argument(metavar="B", help="Another one.")]
KeysOnly = Annotated[
    bool, typer.Option("--keys-only", envvar="CKPT_KEYS_ONLY", help="Names, shapes and dtypes only; reads no tensor.")
]
Atol = Annotated[
    float | None, typer.Option("--atol", envvar="CKPT_ATOL", min=0, help="Absolute tolerance; bitwise by default.")
]
Rtol = Annotated[float | None, typer.Option("--rtol", envvar="CKPT_RTOL", min=0, help="Relative tolerance.")]


def diff(
    a: A,
    b: B,
    keys_only: KeysOnly = False,
    atol: Atol = None,
    rtol: Rtol = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    num_workers: options.NumWorkers = None,
    progress: options.ProgressMode = "auto",
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,  # noqa: ARG001 - the application acts on it
) -> int:
    """Compare two checkpoints: names, shapes, dtypes and values. Exit code 3 when they differ."""
    with progress_of(progress, quiet=quiet or json) as factory:
        difference = api.diff(
            a,
            b,
            keys_only=keys_only,
            atol=atol,
            rtol=rtol,
            include=include or (),
            exclude=exclude or (),
            num_workers=num_workers,
            progress=factory,
        )
    if json:
        print_json(to_json(difference))
    else:
        for fqn in difference.only_in_a:
            say(f"- {escape_name(fqn)}: only in {escape_name(a)}")
        for fqn in difference.only_in_b:
            say(f"+ {escape_name(fqn)}: only in {escape_name(b)}")
        for change in difference.changed:
            say(f"~ {escape_name(change.fqn)}: {change.what}")
        if not quiet:
            say(_summary(difference, keys_only=keys_only))
    return 0 if difference.equal else 3


def _summary(difference: Difference, *, keys_only: bool) -> str:
    """Return the last line: how many differ, and how."""
    what = " (names, shapes and dtypes)" if keys_only else ""
    if difference.equal:
        return f"equal{what}"
    counts = {
        "differ": len(difference.changed),
        "equal": difference.num_equal,
        "only in A": len(difference.only_in_a),
        "only in B": len(difference.only_in_b),
    }
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) + what
