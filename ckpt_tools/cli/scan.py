"""`ckpt scan`."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checkpoint.formats.scan import Scan, find_dangerous
from ckpt_tools.checks.for_ci import Located, build_sarif, describe_failure
from ckpt_tools.cli.build import CommandCall
from ckpt_tools.cli.output import note, print_json, say, waiting
from ckpt_tools.errors import CkptError
from ckpt_tools.options.check import ScanView
from ckpt_tools.options.output import OutputOptions
from ckpt_tools.text import escape_name, first_few

_MAX_NAMES = 8


def run(call: CommandCall[Scan], view: ScanView, output: OutputOptions) -> int:
    """Scan, and print what could run."""
    form = "json" if output.json else view.format
    try:
        with waiting(output, "looking"):
            result = call()
    except CkptError as error:
        if form == "sarif":
            notices = [(describe_failure(error), "error")]
            say(json.dumps(build_sarif("ckpt scan", [], notices=notices, was_read=False), indent=1))
        raise
    if form == "json":
        print_json(result.to_dict())
    elif form == "sarif":
        shown = [f"{escape_name(each.file)}: {escape_name(each.why)}" for each in result.not_read]
        notices = [(f"not read: {text}", "warning") for text in shown]
        say(json.dumps(build_sarif("ckpt scan", list(_located(result)), notices=notices, was_read=True), indent=1))
    else:
        _print(result, output)
    return 0 if result.ok else 3


def _print(result: Scan, output: OutputOptions) -> None:
    for each in result.executables:
        if output.quiet and each.verdict != "dangerous":
            continue
        most = None if output.verbose else _MAX_NAMES
        shown = [name for name, verdict in each.names if verdict == each.verdict or output.verbose]
        names = (
            f": {first_few(shown, most or len(shown))}" if shown and (each.verdict != "torch" or most is None) else ""
        )
        say(f"{each.verdict}: {escape_name(each.file)} ({each.kind}){names}")
    if not output.quiet:
        for missed in result.not_read:
            note(f"not read: {escape_name(missed.file)} ({missed.nbytes} bytes): {escape_name(missed.why)}")
        say(f"{escape_name(result.source)}: {result.title}")


def _located(result: Scan) -> Iterator[Located]:
    for each in result.executables:
        for finding in find_dangerous([each]):
            yield Located(finding, each.file.partition("!")[0])
        if each.verdict == "unknown":
            what = f"{each.kind} that ckpt does not know: {first_few([name for name, _ in each.names], 6) or each.kind}"
            finding = Finding(code=f"unknown-{each.kind.lower()}", severity="info", where=each.file, what=what)
            yield Located(finding, each.file.partition("!")[0])
