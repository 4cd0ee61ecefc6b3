"""`ckpt verify`."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tools.checks.reading import describe
from ckpt_tools.checks.verify import Verification, to_json
from ckpt_tools.cli.build import Call
from ckpt_tools.cli.output import (
    error_json,
    note,
    note_identities,
    print_error,
    print_json,
    progress_of,
    say,
    say_findings,
)
from ckpt_tools.cli.reports import report_to
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.moving.threads import one_thread_each
from ckpt_tools.options.check import VerifyView
from ckpt_tools.options.output import Output
from ckpt_tools.tending.series import checkpoints_in
from ckpt_tools.text import escape_name
from ckpt_tools.units import format_size

_MAX_SHOWN = 50
_MAX_FILES = 12
"""Names of unread files in a line; -v shows all."""


def run(call: Call[Verification], view: VerifyView, output: Output) -> int:
    """Verify, and print what was found."""
    one_thread_each()
    source = str(call.given["source"])
    paths = [path for given in (*map(str, view.more), source) for path in checkpoints_in(given) or (given,)]
    for_one = [f"--{name}" for name in ("against", "part", "accept") if call.given.get(name)] + ["--html"] * bool(
        view.html
    )
    if len(paths) > 1 and for_one:
        raise UsageError(f"{for_one[0]} takes one checkpoint, got {len(paths)}", hint="verify them one by one")
    if len(paths) > 1:
        return _run_each(call, paths, output)
    with report_to(view.html, "verify", source, output) as report:
        with progress_of(output) as factory:
            result = call(source=paths[0], progress=factory)
        if report is not None:
            from ckpt_tools.report.checks_pages import verify_page

            report(verify_page(result, source))
    if output.json:
        print_json(to_json(result))
        return 0 if result.ok else 3
    note_identities(result.identities, output)
    _say_causes(result, output)
    if not output.quiet:
        for text in describe(result.not_read, len(result.not_read) if output.verbose else _MAX_FILES):
            note(f"not read: {text}")
        for text in result.not_checked:
            note(f"not checked: {text}")
        _say_state(paths[0], result)
    return 0 if result.ok else 3


def _run_each(call: Call[Verification], paths: Sequence[str], output: Output) -> int:
    """Verify several; the exit code is the worst."""
    worst, rows = 0, []
    for path in paths:
        try:
            with progress_of(output) as factory:
                result = call(source=path, progress=factory)
        except UnreadableError as error:
            worst = max(worst, error.exit_code)
            rows.append({"source": path, "ok": False, **error_json(error)})
            if not output.json:
                print_error(error, as_json=False)
                say(f"{escape_name(path)}: NOT readable")
            continue
        worst = max(worst, 0 if result.ok else 3)
        rows.append({"source": path, **to_json(result)})
        if not output.json:
            _say_causes(result, output)
            _say_state(path, result)
    if output.json:
        print_json({"ok": not worst, "checkpoints": rows})
    return worst


def _say_causes(result: Verification, output: Output) -> None:
    """Print a line for each cause, and its hint; with -v the findings behind it."""
    causes = result.causes
    shown = causes if output.verbose else causes[:_MAX_SHOWN]
    for number, cause in enumerate(shown):
        say(f"{cause.severity}: {cause.code}: {cause.what}")
        if cause.hint is not None and (number == 0 or causes[number - 1].hint != cause.hint):
            say(f" hint: {cause.hint}")
        if output.verbose and len(cause.findings) > 1:
            say_findings([result.findings[at] for at in cause.findings], indent="   ")
    if len(shown) < len(causes):
        say(f"… and {len(causes) - len(shown)} more causes (-v shows all)")


def _say_state(path: str, result: Verification) -> None:
    state = "ok" if result.ok else "NOT ok"
    data = f", {format_size(result.nbytes)} of data" if result.level != "structure" else ", headers only"
    share = "" if result.share is None else f"part {result.share} "
    say(f"{escape_name(path)}: {share}{state} ({result.tensors} tensors, {result.chunks} chunks{data})")
