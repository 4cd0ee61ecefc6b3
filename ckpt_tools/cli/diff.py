"""`ckpt diff`."""

from __future__ import annotations

from ckpt_tools.checks.diff import Difference, to_json
from ckpt_tools.cli.build import Call
from ckpt_tools.cli.output import Output, print_json, progress_of, say
from ckpt_tools.text import escape_name


def run(call: Call[Difference], *, output: Output) -> int:
    """Compare, and print the differences."""
    with progress_of(output) as factory:
        difference = call(progress=factory)
    if output.json:
        print_json(to_json(difference))
        return 0 if difference.equal else 3
    for fqn in difference.only_in_a:
        say(f"- {escape_name(fqn)}: only in {call.shown('a')}")
    for fqn in difference.only_in_b:
        say(f"+ {escape_name(fqn)}: only in {call.shown('b')}")
    for change in difference.changed:
        say(f"~ {escape_name(change.fqn)}: {change.what}")
    if not output.quiet:
        say(_summary(difference, keys_only=call.given["keys_only"]))
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
