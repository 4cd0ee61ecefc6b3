"""`ckpt verify`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from ckpt_tools.checkpoint.infer_mesh import rank_of_file
from ckpt_tools.checkpoint.layout import Mesh
from ckpt_tools.checks.verify import Verification, describe
from ckpt_tools.cli.build import CommandCall
from ckpt_tools.cli.output import (
    error_json,
    note,
    note_identities,
    print_error,
    print_json,
    progress_of,
    report_to,
    say,
    say_findings,
)
from ckpt_tools.cli.views import page
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.options.check import VerifyView
from ckpt_tools.options.output import OutputOptions
from ckpt_tools.runs.folder import checkpoints_in
from ckpt_tools.text import escape_name
from ckpt_tools.transfer.threads import one_thread_each
from ckpt_tools.units import format_size

_MAX_SHOWN = 50
_MAX_FILES = 12  # Names of unread files in a line; -v shows all


def run(call: CommandCall[Verification], view: VerifyView, output: OutputOptions) -> int:
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
            report(verify_page(result, source))
    if output.json:
        print_json(result.to_dict())
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


def _run_each(call: CommandCall[Verification], paths: Sequence[str], output: OutputOptions) -> int:
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
        rows.append({"source": path, **result.to_json()})
        if not output.json:
            _say_causes(result, output)
            _say_state(path, result)
    if output.json:
        print_json({"ok": not worst, "checkpoints": rows})
    return worst


def _say_causes(result: Verification, output: OutputOptions) -> None:
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


# The page

_LEVELS = {
    "structure": "structure: headers alone, no data was read",
    "data": "data: headers and bytes",
    "values": "values: headers, bytes, and what the numbers are like",
}


def verify_page(result: Verification, source: str) -> page.Page:
    """Return the page of a verification."""
    facts = [
        ("level", _LEVELS[result.level]),
        ("tensors", f"{result.tensors:,}"),
        ("chunks", f"{result.chunks:,}"),
        ("data checked", format_size(result.nbytes) if result.level != "structure" else "none"),
    ]
    sections = [
        *page.identity_sections(result.identities),
        page.PageSection("What was checked", [page.FactList(facts)]),
        *page.notes_section("Not read", describe(result.not_read, page.MAX_ROWS)),
        *page.notes_section("Not checked", result.not_checked),
        *_places(result),
    ]
    if damaged := Counter(finding.tensor for finding in result.errors if finding.tensor is not None):
        sizes = {fqn: page.Sized(float(number), f"{number:,}") for fqn, number in damaged.items()}
        legend = (
            "Empty: nothing wrong was found, or there is no such tensor. Findings about no single tensor are not here."
        )
        parts = page.by_layer(sizes, caption="Errors by layer and kind of weight", legend=legend)
        sections.append(page.PageSection(f"Where: {page.count(len(damaged), 'tensor')}", parts))
    strange = {
        fqn: page.Sized(float(counts.num_nan + counts.num_inf), f"{counts.num_nan + counts.num_inf:,}")
        for fqn, counts in result.counts.items()
        if not counts.is_finite
    }
    if strange:
        caption = "NaN and infinite elements by layer and kind of weight"
        parts = page.by_layer(
            strange, caption=caption, legend="Empty: every element is finite, or there is no such tensor."
        )
        sections.append(page.PageSection("Where values are not finite", parts))
    if causes := result.causes:
        groups = [(f"{c.code}: {c.what}", [result.findings[at] for at in c.findings[: page.MAX_ROWS]]) for c in causes]
        part = page.FindingList(groups, len(result.findings) - sum(len(found) for _, found in groups))
        sections.append(
            page.PageSection(f"Findings: {page.count(len(causes), 'cause')}, {len(result.findings):,}", [part])
        )
    warnings = len(result.findings) - len(result.errors)
    others = f", {page.count(warnings, 'warning')}" if warnings else ""
    if not result.ok:
        verdict = f"NOT ok: {page.count(len(result.errors), 'error')}{others}"
    else:
        things = len(result.not_checked) + len({each.why for each in result.not_read})
        left = f"; not checked: {page.count(things, 'thing')}, listed below" if things else ""
        verdict = f"ok at level {result.level}{others}{left}"
    mood = page.mood_of(
        ok=result.ok, left=result.not_checked or result.not_read or result.level == "structure" or warnings
    )
    return page.Page("verify", source, sections, mood, verdict)


_WIDTH = 16  # Ranks in a row, where no mesh says how many
_MAX_WHOLE = 32  # Rows of a map that is drawn whole


def _places(result: Verification) -> Iterator[page.PageSection]:
    """Yield what is wrong by the rank that wrote it, and by file."""
    codes: dict[str, Counter[str]] = {}
    for finding in result.errors:
        if finding.file is not None:
            codes.setdefault(finding.file, Counter())[finding.code] += 1
    if not codes:
        return
    found = {file: rank_of_file(file) for file in dict.fromkeys((*result.files, *codes))}
    wrong: Counter[int] = Counter()
    for file, kinds in codes.items():
        if (rank := found[file]) is not None:
            wrong[rank] += kinds.total()
    ranks = {rank for rank in found.values() if rank is not None}
    unread = {found[each.file] for each in result.not_read if each.file in found}
    parts: list[page.Part] = [_rank_map(wrong, ranks, unread, result.mesh)] if wrong else []
    caption = f"{page.count(len(codes), 'file')} with errors of {len(found):,}"
    caption += "; errors that no single file explains are not here"

    def cells(item: tuple[str, Counter[str]]) -> tuple[str, ...]:
        file, kinds = item
        what = ", ".join(f"{code} {number:,}" for code, number in kinds.most_common())
        return file, "" if found[file] is None else str(found[file]), f"{kinds.total():,}", what

    worst = sorted(codes.items(), key=lambda item: -item[1].total())
    parts.append(page.PageTable.of(caption, "file, >rank, >errors, what", worst, cells))
    title = f"Whose: {page.count(len(wrong), 'rank')} of {len(ranks):,}" if wrong else f"Which files: {len(codes):,}"
    yield page.PageSection(title, parts)


def _rank_map(
    wrong: Mapping[int, int], ranks: Collection[int], unread: Collection[int | None], mesh: Mesh | None
) -> page.HeatTable:
    """Return errors by rank: a row of the mesh's last axis in a row of the map, or sixteen ranks in each."""
    axis, width = "", _WIDTH
    if mesh is not None and len(mesh.axes) > 1 and 1 < mesh.axes[-1][1] <= 4 * _WIDTH:
        axis, width = f"{mesh.axes[-1][0]} ", mesh.axes[-1][1]
    most = max(wrong.values())

    def show(rank: int) -> tuple[str, float] | None:
        if rank not in ranks:
            return None
        number = f"{wrong[rank]:,}" if rank in wrong else ""
        text = f"{number} not read".strip() if rank in unread else number
        return text, 0.2 + 0.8 * wrong[rank] / most if rank in wrong else 0.0

    firsts = sorted({rank // width * width for rank in ranks})
    is_small = len(firsts) <= _MAX_WHOLE
    firsts = firsts if is_small else sorted({rank // width * width for rank in wrong})
    rows = [(f"{at}–{at + width - 1}", [show(at + i) for i in range(width)]) for at in firsts[: page.MAX_ROWS]]
    columns = [f"{axis}{'' if axis else '+'}{i}" for i in range(width)]
    legend = "Empty: its files were read, and no error was found. Not read: all or a part. Dotted: no such rank."
    legend += "" if is_small else " Rows without an error are left out."
    return page.HeatTable("Errors by rank that wrote the file", "ranks", columns, rows, legend, len(firsts) - len(rows))
