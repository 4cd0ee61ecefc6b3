"""`ckpt inspect`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ckpt_tools import api
from ckpt_tools.cli import options
from ckpt_tools.cli.output import print_json, terminal_width, use_colour
from ckpt_tools.cli.render_inspect import By, render
from ckpt_tools.description.summarise import to_json
from ckpt_tools.errors import UsageError

Tensors = Annotated[bool, typer.Option("--tensors", envvar="CKPT_TENSORS", help="List every tensor.")]
Tensor = Annotated[
    list[str] | None,
    typer.Option("--tensor", envvar="CKPT_TENSOR", metavar="FQN", help="Show one tensor's chunks (repeatable)."),
]
ByName = Annotated[
    str | None,
    typer.Option("--by", envvar="CKPT_BY", metavar="rank|file|dtype|module", help="The one table to show."),
]


def inspect(
    source: options.Source,
    tensors: Tensors = False,
    tensor: Tensor = None,
    by: ByName = None,
    mesh: options.Mesh = None,
    world_size: options.WorldSize = None,
    rules: options.Rules = None,
    set_rules: options.Set = None,
    tp_plan: options.TpPlan = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    from_format: options.From = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,  # noqa: ARG001 - the application acts on it
) -> int:
    """Show what a checkpoint holds and how it is sharded, from its headers alone; --mesh shows another layout."""
    table = _by(by)
    summary = api.inspect(
        source,
        mesh=mesh,
        world_size=world_size,
        rules=rules,
        set=set_rules or (),
        tp_plan=tp_plan,
        include=include or (),
        exclude=exclude or (),
        format=from_format,
    )
    by_fqn = {entry.fqn: entry for entry in summary.tensors}
    unknown = [fqn for fqn in tensor or () if fqn not in by_fqn]
    if unknown:
        raise UsageError(f"there is no tensor {unknown[0]!r}", hint="--tensors lists the names")
    chosen = [by_fqn[fqn] for fqn in tensor or ()]
    if json:
        listed = chosen or (summary.tensors if tensors else None)
        print_json(to_json(summary, tensors=listed))
        return 0
    if quiet:
        return 0
    render(
        summary,
        stream=sys.stdout,
        width=terminal_width(),
        colour=use_colour(),
        by=table,
        tensors=summary.tensors if tensors else None,
        grids=chosen,
    )
    return 0


def _by(text: str | None) -> By | None:
    known: tuple[By, ...] = ("rank", "file", "dtype", "module")
    for word in known:
        if text == word:
            return word
    if text is None:
        return None
    raise UsageError(f"{text!r} is not a table", hint=f"--by takes {', '.join(known)}")
