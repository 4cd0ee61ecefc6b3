"""`ckpt diff`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from ckpt_tools.checks.alike import kind_of
from ckpt_tools.checks.diff import Change, Difference, to_json
from ckpt_tools.cli.build import Call
from ckpt_tools.cli.output import note, note_identities, print_json, progress_of, say
from ckpt_tools.cli.reports import report_to
from ckpt_tools.options.check import DiffView
from ckpt_tools.options.output import Output
from ckpt_tools.text import escape_name

_MOST = 20
"""Changed tensors that are all listed; more are gathered by their place in the layers."""
_TERMS = ("atol", "rtol", "include", "exclude")
"""Options that let fewer differences count."""


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def run(call: Call[Difference], view: DiffView, output: Output) -> int:
    """Compare, and print the differences."""
    a, b = str(call.given["a"]), str(call.given["b"])
    with report_to(view.html, "diff", f"{a} ↔ {b}", output) as report:
        with progress_of(output) as factory:
            difference = call(progress=factory)
        if report is not None:
            from ckpt_tools.report.checks_pages import diff_page

            terms = [f"--{name} {_shown(call.given[name])}" for name in _TERMS if call.given.get(name)]
            report(diff_page(difference, a, b, keys_only=call.given["keys_only"], terms=terms))
    if output.json:
        print_json(to_json(difference))
        return 0 if difference.equal else 3
    note_identities(difference.identities, output)
    for text in difference.notes:
        note(text)
    for fqn in difference.only_in_a:
        say(f"- {escape_name(fqn)}: only in {call.shown('a')}")
    for fqn in difference.only_in_b:
        say(f"+ {escape_name(fqn)}: only in {call.shown('b')}")
    if view.tensors or len(difference.changed) <= _MOST:
        for change in difference.changed:
            relative = "" if change.relative is None else f", by {change.relative:.2g} of its size"
            say(f"~ {escape_name(change.fqn)}: {change.what}{relative}")
    else:
        for line in _by_place(difference.changed):
            say(line)
    if not output.quiet:
        say(_summary(difference, keys_only=call.given["keys_only"]))
    return 0 if difference.equal else 3


def _by_place(changed: Sequence[Change]) -> Iterator[str]:
    """Yield a line for all tensors of one name in different layers: how many, and by how much they changed."""
    places: dict[str, list[Change]] = {}
    for change in changed:
        places.setdefault(kind_of(change.fqn), []).append(change)
    for place, changes in places.items():
        sizes = [change.relative for change in changes if change.relative is not None]
        by = f", by {median(sizes):.2g} of their size (most {max(sizes):.2g})" if sizes else ""
        say_how = f"{len(changes)} differ{by}" if len(changes) > 1 else f"{changes[0].what}{by}"
        yield f"~ {escape_name(place)}: {say_how}"


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
    text = ", ".join(f"{count} {kind}" for kind, count in counts.items()) + what
    sizes = [(change.relative, change.fqn) for change in difference.changed if change.relative is not None]
    if len(sizes) > 1:
        most, fqn = max(sizes)
        text += (
            f"\nchanged by {median(size for size, _ in sizes):.2g} of their size, most {most:.2g}: {escape_name(fqn)}"
        )
    return text
