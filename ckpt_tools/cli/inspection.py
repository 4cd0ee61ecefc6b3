"""`ckpt inspect`."""

from __future__ import annotations

from ckpt_tools.cli.build import Call
from ckpt_tools.cli.output import print_json, waiting
from ckpt_tools.cli.render_inspect import render
from ckpt_tools.cli.reports import report_to
from ckpt_tools.cli.screen import terminal
from ckpt_tools.description.summarise import Summary, to_json
from ckpt_tools.errors import UsageError
from ckpt_tools.options.check import InspectView
from ckpt_tools.options.output import Output

_AS_STORED = {"mesh": None, "rules": None, "set": (), "tp_plan": None, "world_size": None}


def run(call: Call[Summary], view: InspectView, output: Output) -> int:
    """Print what a checkpoint holds."""
    with report_to(view.html, "inspect", str(call.given["source"]), output) as report:
        with waiting(output, "looking"):
            summary = call()
        if report is not None:
            from ckpt_tools.report.inspect_page import build_page

            report(build_page(summary, call(**_AS_STORED) if summary.is_virtual else None))
    by_fqn = {entry.fqn: entry for entry in summary.tensors}
    unknown = [fqn for fqn in view.tensor if fqn not in by_fqn]
    if unknown:
        raise UsageError(f"there is no tensor {unknown[0]!r}", hint="--tensors lists the names")
    chosen = [by_fqn[fqn] for fqn in view.tensor]
    listed = summary.tensors if view.tensors else None
    if output.json:
        print_json(to_json(summary, tensors=chosen or listed))
    elif not output.quiet:
        render(summary, terminal(), by=view.by, tensors=listed, grids=chosen)
    return 0
