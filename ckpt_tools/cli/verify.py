"""`ckpt verify`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from ckpt_tools.checkpoint.entries import Finding
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
from ckpt_tools.text import counted, escape_name
from ckpt_tools.units import format_size

_MAX_SHOWN = 50
_MAX_FILES = 12  # Names of unread files in a line; -v shows all


def run(call: CommandCall[Verification], view: VerifyView, output: OutputOptions) -> int:
    """Verify, and print what was found."""
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
        report(lambda: verify_page(result, source))
    if output.json:
        print_json(result.to_dict())
        return 0 if result.ok else 3
    note_identities(result.identities, output)
    _say_causes(result, output)
    if not output.quiet:
        for text in _unproven(result, output):
            note(text)
        _say_state(paths[0], result, call.given.get("against"))
    return 0 if result.ok else 3


def _run_each(call: CommandCall[Verification], paths: Sequence[str], output: OutputOptions) -> int:
    """Verify several; the exit code is the worst."""
    worst, rows, unproven = 0, [], Counter[str]()
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
        unproven.update(_unproven(result, output))
        if not output.json:
            _say_causes(result, output)
            _say_state(path, result)
    if output.json:
        print_json({"ok": not worst, "checkpoints": rows})
    elif not output.quiet:
        for text, times in unproven.items():
            note(text if times == len(paths) else f"{text} ({times} of {len(paths)} checkpoints)")
    return worst


def _unproven(result: Verification, output: OutputOptions) -> list[str]:
    """Return what was not read, and what was not checked."""
    not_read = describe(result.not_read, len(result.not_read) if output.verbose else _MAX_FILES)
    return [*(f"not read: {text}" for text in not_read), *(f"not checked: {text}" for text in result.not_checked)]


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
        say(f"… and {len(causes) - len(shown):,} more causes (-v shows all)")


def _say_state(path: str, result: Verification, against: object = None) -> None:
    state = "ok" if result.ok else "NOT ok"
    if against is not None and result.ok and result.level != "structure":
        is_all = not any(text.startswith("against the reference") for text in result.not_checked)
        state += f", the same as {escape_name(str(against))}" + ", but for what was not compared" * (not is_all)
    data = f", {format_size(result.nbytes)} of data" if result.level != "structure" else ", headers only"
    share = "" if result.share is None else f"part {result.share} "
    held = f"{counted(result.tensors, 'tensor')}, {counted(result.chunks, 'chunk')}{data}"
    say(f"{escape_name(path)}: {share}{state} ({held})")


# The page

_LEVELS = {
    "structure": "structure: headers alone, no data was read",
    "data": "data: headers and bytes",
    "values": "values: headers, bytes, and what the numbers are like",
}


def verify_page(result: Verification, source: str = "") -> page.Page:
    """Return the page of a verification."""
    facts = [
        ("level", _LEVELS[result.level]),
        ("tensors", f"{result.tensors:,}"),
        ("chunks", f"{result.chunks:,}"),
        ("data checked", format_size(result.nbytes) if result.level != "structure" else "none"),
    ]
    sections = [*_places(result), *_tensors(result)]
    if causes := result.causes:
        groups = [(f"{c.code}: {c.what}", [result.findings[at] for at in c.findings[: page.MAX_ROWS]]) for c in causes]
        part = page.FindingList(groups, len(result.findings) - sum(len(found) for _, found in groups))
        title = f"Findings: {counted(len(result.findings), 'finding')} of {counted(len(causes), 'cause')}"
        sections.append(page.PageSection(title, [part]))
    sections += [
        *page.notes_section("Not checked", result.not_checked),
        page.PageSection("What was checked", [page.FactList(facts), *_extent(result)]),
        *page.identity_sections(result.identities),
    ]
    warnings = len(result.findings) - len(result.errors)
    others = f", {counted(warnings, 'warning')}" if warnings else ""
    verdict = f"ok at level {result.level}{others}"
    if not result.ok:
        verdict = f"NOT ok: {counted(len(result.errors), 'error')}{others}"
    if result.not_read:
        verdict += f"; not read: {counted(len({each.file for each in result.not_read}), 'file')}"
    if result.not_checked:
        verdict += f"; not checked: {counted(len(result.not_checked), 'thing')}, listed below"
    mood = page.mood_of(
        ok=result.ok, left=result.not_checked or result.not_read or result.level == "structure" or warnings
    )
    return page.Page("verify", source, sections, mood, verdict, titles=page.identity_titles(result.identities))


def _tensors(result: Verification) -> Iterator[page.PageSection]:
    """Yield what is wrong by layer and kind of weight."""
    damaged = Counter(finding.tensor for finding in result.errors if finding.tensor is not None)
    strange = {f: c.num_nan + c.num_inf for f, c in result.counts.items() if not c.is_finite}
    legend = "▲: far more than in the others. Dotted: nothing was found, or there is no such tensor."
    for title, caption, numbers in (
        ("Tensors with errors", "Errors by layer and kind of weight, where they are about one tensor", damaged),
        ("Tensors that are not finite", "NaN and infinite elements by layer and kind of weight", strange),
    ):
        if numbers:
            parts = page.by_layer(numbers, caption=caption, legend=legend, findings=result.findings)
            yield page.PageSection(f"{title}: {len(numbers):,}", parts)


def _extent(result: Verification) -> list[page.Part]:
    """Return how much was read, and what was not and why."""
    sizes = [sum(each.nbytes for each in some) for some in (result.read, result.not_read)]
    bar = page.Bar("all files", sizes, f"{format_size(sizes[0])} read, {format_size(sizes[1])} not read")
    listed = [f"not read: {text}" for text in describe(result.not_read, page.MAX_ROWS)]
    return [page.Bars("Bytes beside headers", ("read", page.UNREAD), [bar]), *[page.NoteList(listed)] * bool(listed)]


_WIDTH = 16  # Ranks in a row, where no mesh says how many
_MAX_WHOLE = 32  # Rows of a map that is drawn whole


def _places(result: Verification) -> Iterator[page.PageSection]:
    """Yield what is wrong, or was not read, by the rank that wrote it, and by file."""

    def cells(item: tuple[str, list[Finding]]) -> tuple[str, ...]:
        codes = Counter(finding.code for finding in item[1]).most_common()
        rank = found[item[0]]
        what = ", ".join(f"{code} {number:,}" for code, number in codes)
        return item[0], "" if rank is None else str(rank), f"{len(item[1]):,}", what

    by_file: dict[str, list[Finding]] = {}
    for finding in result.errors:
        if finding.file is not None:
            by_file.setdefault(finding.file, []).append(finding)
    found = {file: rank_of_file(file) for file in dict.fromkeys((*result.files, *by_file))}
    wrong: dict[int, list[Finding]] = {}
    for file, here in by_file.items():
        if (rank := found[file]) is not None:
            wrong.setdefault(rank, []).extend(here)
    ranks = {rank for rank in found.values() if rank is not None}
    unread = ranks & {found.get(each.file) for each in result.not_read}
    parts: list[page.Part] = [_rank_map(wrong, ranks, unread, result.mesh)] if wrong or unread else []
    title = f"Ranks with errors: {len(wrong):,} of {len(ranks):,}" if wrong else f"Files with errors: {len(by_file):,}"
    if not by_file:
        title = f"Ranks with bytes not read: {len(unread):,} of {len(ranks):,}"
    else:
        caption = f"{counted(len(by_file), 'file')} with errors of {len(found):,}"
        caption += "; errors that no single file explains are not here"
        worst = sorted(by_file.items(), key=lambda item: -len(item[1]))
        parts.append(page.PageTable.of(caption, "file, >rank, >errors, what", worst, cells))
    if parts:
        yield page.PageSection(title, parts)


def _rank_map(
    wrong: Mapping[int, Sequence[Finding]], ranks: Collection[int], unread: Collection[int], mesh: Mesh | None
) -> page.HeatTable:
    """Return errors by rank: a row of the mesh's last axis in a row of the map, or sixteen ranks in each."""
    axis, width = "", _WIDTH
    if mesh is not None and len(mesh.axes) > 1 and 1 < mesh.axes[-1][1] <= 4 * _WIDTH:
        axis, width = f"{mesh.axes[-1][0]} ", mesh.axes[-1][1]
    heat_of = page.heats([len(found) for found in wrong.values()])

    def show(rank: int) -> page.Cell | None:
        if rank not in ranks:
            return None
        here = wrong.get(rank, ())
        heat, sign = heat_of(len(here))
        text = f"{sign}{len(here):,}" if here else ""
        text = f"{text} {page.UNREAD}".strip() if rank in unread else text
        return page.Cell(text, heat, rank in unread, here)

    firsts = sorted({rank // width * width for rank in ranks})
    is_small = len(firsts) <= _MAX_WHOLE
    firsts = firsts if is_small else sorted({rank // width * width for rank in (*wrong, *unread)})
    rows = [(f"{at}–{at + width - 1}", [show(at + i) for i in range(width)]) for at in firsts[: page.MAX_ROWS]]
    columns = [f"{axis}{'' if axis else '+'}{i}" for i in range(width)]
    legend = "Empty: its files were read, and no error was found. Hatched: all or a part was not read. Dotted: no such "
    legend += "rank. ▲: far more than of the others." + ("" if is_small else " Rows without either are left out.")
    left_out = len(firsts) - len(rows)
    return page.HeatTable("Errors, and what was not read, by rank", "ranks", columns, rows, legend, left_out)
