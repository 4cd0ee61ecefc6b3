"""`ckpt inspect`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from ckpt_tools.cli.build import Call
from ckpt_tools.cli.output import Output, print_json, waiting
from ckpt_tools.cli.render_inspect import By, render
from ckpt_tools.cli.reports import Html, report_to
from ckpt_tools.cli.screen import terminal
from ckpt_tools.description.summarise import Summary, to_json
from ckpt_tools.errors import UsageError
from ckpt_tools.options import Option

_AS_STORED = {"mesh": None, "rules": None, "set": (), "tp_plan": None, "world_size": None}


def run(
    call: Call[Summary],
    *,
    tensors: Annotated[bool, Option("List every tensor.")] = False,
    tensor: Annotated[Sequence[str], Option("Show the chunks of a tensor (repeatable).", metavar="FQN")] = (),
    by: Annotated[By | None, Option("Show only this table.")] = None,
    html: Html = None,
    output: Output,
) -> int:
    """Print what a checkpoint holds."""
    with report_to(html, "inspect", str(call.given["source"]), output) as report:
        with waiting(output, "looking"):
            summary = call()
        if report is not None:
            from ckpt_tools.report.inspect_page import build_page

            report(build_page(summary, call(**_AS_STORED) if summary.is_virtual else None))
    by_fqn = {entry.fqn: entry for entry in summary.tensors}
    unknown = [fqn for fqn in tensor if fqn not in by_fqn]
    if unknown:
        raise UsageError(f"there is no tensor {unknown[0]!r}", hint="--tensors lists the names")
    chosen = [by_fqn[fqn] for fqn in tensor]
    listed = summary.tensors if tensors else None
    if output.json:
        print_json(to_json(summary, tensors=chosen or listed))
    elif not output.quiet:
        render(summary, terminal(), by=by, tensors=listed, grids=chosen)
    return 0
