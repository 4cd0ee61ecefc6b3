"""`ckpt verify`."""

from __future__ import annotations

from ckpt_tools.checks.verify import Verification, to_json
from ckpt_tools.cli.build import Call
from ckpt_tools.cli.output import Output, note, print_json, progress_of, say, say_findings
from ckpt_tools.cli.reports import Html, report_to
from ckpt_tools.moving.threads import one_thread_each
from ckpt_tools.units import format_size

_MAX_SHOWN = 50


def run(call: Call[Verification], *, html: Html = None, output: Output) -> int:
    """Verify, and print what was found."""
    one_thread_each()
    source = str(call.given["source"])
    with report_to(html, "verify", source, output) as report:
        with progress_of(output) as factory:
            result = call(progress=factory)
        if report is not None:
            from ckpt_tools.report.checks_pages import verify_page

            report(verify_page(result, source))
    if output.json:
        print_json(to_json(result))
        return 0 if result.ok else 3
    say_findings(result.findings, most=None if output.verbose else _MAX_SHOWN)
    if not output.quiet:
        for text in result.not_checked:
            note(f"not checked: {text}")
        state = "ok" if result.ok else "NOT ok"
        data = f", {format_size(result.nbytes)} of data" if result.level != "structure" else ", headers only"
        share = "" if result.share is None else f"part {result.share} "
        say(f"{call.shown('source')}: {share}{state} ({result.tensors} tensors, {result.chunks} chunks{data})")
    return 0 if result.ok else 3
