"""`ckpt inspect`: header, ranks, files, dtypes, modules, the rank × layer map, tensors."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from ckpt_tools.checkpoint.entries import BlobEntry, Chunk, Finding, TensorEntry, say_census
from ckpt_tools.checkpoint.identity import count_text
from ckpt_tools.checkpoint.infer_mesh import rank_of_file
from ckpt_tools.checkpoint.summarise import FileSummary, PrefixSummary, RankSummary, Summary
from ckpt_tools.cli.build import CommandCall
from ckpt_tools.cli.next_steps import NextCommand, next_commands, quote
from ckpt_tools.cli.output import print_json, report_to, waiting
from ckpt_tools.cli.screen import Screen, pad, terminal
from ckpt_tools.cli.views import page
from ckpt_tools.cli.views.layouts import (
    LayoutData,
    build_tree,
    dtype_names,
    fold_blocks,
    format_placement,
    format_ranges,
)
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.options.check import By, InspectView
from ckpt_tools.options.output import OutputOptions
from ckpt_tools.text import counted, display_width, escape_message, escape_name, first_few
from ckpt_tools.units import format_size

FOLD_ABOVE = 32  # Ranks, and files unless asked for, that are listed one by one
UNEVEN_ABOVE = 1.1  # Fullest rank ÷ mean from which ranks are called uneven
_MOST_FILES = 8
_MAX_MAP_ROWS = 48
_MAX_BLOBS = 8
_MIN_BAR, _MAX_BAR = 10, 24  # Columns that a bar beside a module may take; with less room there is none

_SOURCES = {
    "manifest": " (from the manifest)",
    "inferred": " (inferred from the chunks)",
    "overlay": ", planned layout (nothing written)",
}


_WHOLE = {"yes": "whole", "not known": "whole?"}
_RESUMES = {"yes": "resumable", "no": "not resumable", "not known": "resumable or not: not known"}


def render(
    summary: Summary,
    screen: Screen,
    *,
    by: By | None = None,
    tensors: Sequence[TensorEntry] | None = None,
    grids: Sequence[TensorEntry] = (),
    then: Sequence[NextCommand] = (),
) -> None:
    """Write `summary` for people: one table (`by`), `tensors`, or `grids` chunk by chunk; else the usual tables."""
    if grids:
        for number, tensor in enumerate(grids):
            if number:
                screen.line()
            render_tensor(summary, tensor, screen=screen)
        return
    _render_header(summary, screen)
    if tensors is not None:
        _render_tensors(summary, tensors, screen)
    elif by == "rank":
        _render_ranks(summary, screen)
    elif by == "file":
        _render_files(summary, screen, most=None)
    elif by == "dtype":
        _render_dtypes(summary, screen)
    elif by == "module":
        _render_prefixes(summary, screen)
        _render_map(summary, screen)
    else:
        if not summary.ranks and len(summary.files) > 1:
            _render_files(summary, screen, most=_MOST_FILES)
        elif summary.ranks and (summary.is_virtual or (summary.imbalance or 1) > UNEVEN_ABOVE):
            _render_ranks(summary, screen)
        _render_prefixes(summary, screen)
        _render_blobs(summary, screen)
        if summary.contents:
            screen.section("the step")
            screen.show(_contents(summary))
        if then:
            screen.section("next")
            width = max(display_width(each.what) for each in then)
            for each in then:
                screen.line(f"  {pad(each.what, width)}  {each.command}")


def _contents(summary: Summary) -> page.PageTable:
    return page.PageTable.of(
        "Parts of the training step",
        "part, >bytes, what it is",
        summary.contents,
        lambda part: (part.name, format_size(part.num_bytes), part.what or "not known"),
    )


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else ""


def _render_header(summary: Summary, screen: Screen) -> None:
    identity = summary.identity
    if identity is not None:
        screen.line(identity.title, "heading")
    for text in _stands_out(summary):
        screen.line(escape_message(text), "warning")
    rows = [("path", escape_name(summary.path))]
    if identity is not None:
        rows += [(_WHOLE[identity.whole], why) for why in identity.evidence if identity.whole != "part"]
        rows += [("models", first_few(identity.components, 8))] if identity.components else []
        rows += [("taken" if one.is_taken else "not taken", f"{one.name}: {one.why}") for one in identity.candidates]
    if summary.contents:
        whole = "repository" if identity is not None and identity.components else "step"
        rows.append(("part", f"{summary.contents[0].name} of the {whole}"))
    ranks = _evenness(summary)
    for name, text in (*rows, *_holds(summary, summary.names), *([("ranks", ranks)] if ranks else [])):
        screen.line(f"{name:<9} {escape_message(text)}")


def _stands_out(summary: Summary) -> Iterator[str]:
    """Yield what somebody should know before anything else."""
    if missing := _missing(summary):
        yield f"missing: {len(missing):,} of {counted(len(summary.files), 'file')}: {first_few(missing)}"
    identity, ranks = summary.identity, summary.ranks
    if identity is not None:
        part = f"a part, on purpose ({identity.chosen})" if identity.chosen else "a PART"
        yield from (f"{part}: {why}" for why in identity.evidence if identity.whole == "part" and not missing)
        if len(identity.steps) > 1:
            yield "of several steps: " + "; ".join(f"step {one.step}: {first_few(one.files)}" for one in identity.steps)
        yield from (f"{_RESUMES[identity.resumable]}: {why}" for why in identity.reasons)
        yield from identity.executables
    if (imbalance := summary.imbalance) is not None and imbalance > UNEVEN_ABOVE:
        fullest, mean = max(ranks, key=lambda rank: rank.num_bytes), sum(rank.num_bytes for rank in ranks) / len(ranks)
        held = format_size(fullest.num_bytes)
        yield f"uneven: rank {fullest.rank} holds {held}, the mean is {format_size(mean)}"
    if ranks and summary.mesh is None:
        yield "mesh not known: none explains every chunk"


def _holds(summary: Summary, names: str | None) -> list[tuple[str, str]]:
    """Return how much a checkpoint holds, and in which form; `names` are those of its tensors."""
    files = [file for file in summary.files if file.num_chunks or file.file_bytes]
    chunks = f"{summary.num_chunks:,} in {files[0].file if len(files) == 1 else counted(len(files), 'file')}"
    if not summary.is_virtual:
        chunks += f", {format_size(sum(file.file_bytes or 0 for file in files))} on disk"
    assets = f"{counted(len(summary.assets), 'file')}, {format_size(sum(asset.nbytes for asset in summary.assets))}"
    elems = count_text(summary.num_elems)
    rows = [
        ("format", summary.format),
        ("names", names),
        ("tensors", f"{summary.num_tensors:,}: {elems} elements, {format_size(summary.total_bytes)}"),
        ("chunks", chunks),
        ("dtypes", ", ".join(f"{name} {format_size(size)}" for name, size in summary.dtypes.items()) or "-"),
        ("mesh", _mesh(summary)),
        ("blobs" if summary.blobs else "objects", summary.objects),
        ("assets", assets if summary.assets else None),
    ]
    return [(name, text) for name, text in rows if text]


def _mesh(summary: Summary) -> str | None:
    if summary.mesh is not None and summary.mesh_source is not None:
        return f"{summary.mesh}, {counted(summary.mesh.world_size, 'rank')}{_SOURCES[summary.mesh_source]}"
    return None


def _evenness(summary: Summary) -> str | None:
    if summary.imbalance is None:
        return None
    return f"{len(summary.ranks):,}, fullest rank ÷ mean {summary.imbalance:.2f}"


def _missing(summary: Summary) -> list[str]:
    return [file.file for file in summary.files if file.file_bytes is None and not summary.is_virtual]


def _render_ranks(summary: Summary, screen: Screen) -> None:
    if not summary.ranks:
        screen.section("ranks: the names of these files carry none; see --by file")
        return
    screen.section(f"ranks: {_evenness(summary) or f'{len(summary.ranks):,}'}")
    mean = sum(rank.num_bytes for rank in summary.ranks) / len(summary.ranks)
    most = max(rank.num_bytes for rank in summary.ranks)
    if len(summary.ranks) > FOLD_ABOVE:
        _render_folded_ranks(summary.ranks, mean, most, screen)
        return

    def cells(rank: RankSummary) -> tuple[str, ...]:
        files = escape_name(rank.files[0]) + (f" +{len(rank.files) - 1:,}" if len(rank.files) > 1 else "")
        return str(rank.rank), *_load(rank.num_bytes, mean, most, screen), f"{rank.num_chunks:,}", files

    screen.table(">rank, >bytes, , , >chunks, files", map(cells, summary.ranks))


def _load(num_bytes: int, mean: float, most: int, screen: Screen) -> tuple[str, str, str]:
    """Return the cells of what a rank holds: its size, how warm that is, and how far off the mean, when that is far."""
    deviation = ""
    if mean and not 2 - UNEVEN_ABOVE <= num_bytes / mean <= UNEVEN_ABOVE:
        percent = round(100 * (num_bytes / mean - 1))
        deviation = f"{'high' if percent > 0 else 'low'} {percent:+d}%"
    return format_size(num_bytes), screen.heat(num_bytes, most) * 4, deviation


def _render_folded_ranks(ranks: Sequence[RankSummary], mean: float, most: int, screen: Screen) -> None:
    sizes = [rank.num_bytes for rank in ranks]
    low, middle, high = min(sizes), statistics.median(sizes), max(sizes)
    screen.line(f"  min {format_size(low)}, median {format_size(middle)}, max {format_size(high)} per rank")
    groups: dict[tuple[int, int], list[int]] = {}
    for rank in ranks:
        groups.setdefault((rank.num_bytes, rank.num_chunks), []).append(rank.rank)
    shown = list(groups.items())
    if len(shown) > FOLD_ABOVE:
        ordered = sorted(shown, key=lambda group: -group[0][0])
        shown = ordered[: FOLD_ABOVE // 2] + ordered[-FOLD_ABOVE // 2 :]
        left_out = sum(len(members) for _, members in ordered[FOLD_ABOVE // 2 : -FOLD_ABOVE // 2])
        screen.line(f"  the fullest and the emptiest, {counted(left_out, 'rank')} between them left out")
    rows = (
        (format_ranges(members), f"{len(members):,}", *_load(num_bytes, mean, most, screen), f"{num_chunks:,}")
        for (num_bytes, num_chunks), members in shown
    )
    screen.table("ranks, >count, >bytes each, , , >chunks each", rows)


def _render_files(summary: Summary, screen: Screen, *, most: int | None) -> None:
    screen.section(f"files: {len(summary.files):,}")
    table = _files(summary, most)
    screen.show(table)
    if table.left_out:
        screen.line(f"  ... and {table.left_out:,} more; --by file lists all")


def _files(summary: Summary, most: int | None) -> page.PageTable:
    def cells(file: FileSummary) -> tuple[str, ...]:
        on_disk = "missing" if file.file_bytes is None else format_size(file.file_bytes)
        return (
            file.file,
            "virtual" if summary.is_virtual else on_disk,
            format_size(file.num_bytes),
            f"{file.num_chunks:,}",
        )

    return page.PageTable.of("Files", "file, >on disk, >tensor bytes, >chunks", summary.files, cells, most=most)


def _render_dtypes(summary: Summary, screen: Screen) -> None:
    screen.section(f"dtypes: {len(summary.dtypes):,}")
    rows = ((name, format_size(size), _share(size, summary.total_bytes)) for name, size in summary.dtypes.items())
    screen.table("dtype, >bytes, >share", rows)


def _render_prefixes(summary: Summary, screen: Screen) -> None:
    screen.section("modules")
    table = _modules(summary)
    columns, rows = _MODULES, [(escape_name(name), *cells) for name, *cells in table.rows]
    widths = [max(map(display_width, column)) for column in zip(table.headers, *rows, strict=True)]
    room = min(screen.width - sum(widths) - 2 * len(widths) - 2, _MAX_BAR)
    if room < _MIN_BAR:
        screen.table(columns, rows)
        return
    most = max((row.num_bytes for row in summary.prefixes), default=0)
    bars = (screen.bar(row.num_bytes, most, room) for row in summary.prefixes)
    screen.table(f"{columns}, ", [(*row, bar) for row, bar in zip(rows, bars, strict=True)])


_MODULES = "module, >tensors, >elements, >bytes, >share"


def _modules(summary: Summary) -> page.PageTable:
    def cells(row: PrefixSummary) -> tuple[str, ...]:
        size, share = format_size(row.num_bytes), _share(row.num_bytes, summary.total_bytes)
        return row.prefix, f"{row.num_tensors:,}", count_text(row.num_elems), size, share

    return page.PageTable.of("Modules, in numbers", _MODULES, summary.prefixes, cells, most=None, is_folded=True)


def _render_blobs(summary: Summary, screen: Screen) -> None:
    if not summary.blobs:
        return
    screen.section(f"blobs: {len(summary.blobs):,}")
    table = _blobs(summary, _MAX_BLOBS)
    screen.show(table)
    if table.left_out:
        screen.line(f"  ... and {table.left_out:,} more; --json lists all")


def _blobs(summary: Summary, most: int) -> page.PageTable:
    def cells(blob: BlobEntry) -> tuple[str, ...]:
        census = summary.inside.get(blob.fqn)
        holds = "not known" if census is None else say_census(census)
        return blob.fqn, f"{blob.span.nbytes:,}", blob.span.file, holds

    caption = "Items that are not tensors; they are never unpickled"
    return page.PageTable.of(caption, "name, >bytes, file, holds", summary.blobs, cells, most=most)


def _render_map(summary: Summary, screen: Screen) -> None:
    """Draw bytes by block and rank: every row against its own largest, so that any unevenness shows."""
    if not summary.ranks or not summary.blocks:
        return
    rows = [(escape_name(name), alike, by_rank) for name, alike, by_rank in fold_blocks(summary.blocks)]
    shown = rows[:_MAX_MAP_ROWS]
    name_width = max(display_width(name) for name, _, _ in shown)
    num_ranks = len(summary.ranks)
    per_column = -(-num_ranks // max(8, screen.width - min(name_width, screen.width // 2) - 16))
    starts = range(0, num_ranks, per_column)
    each = "one rank" if per_column == 1 else f"{per_column} ranks (their mean)"
    screen.section(f"bytes by module and rank: a column is {each}, a row is scaled to its fullest")
    ruler = [" "] * (len(starts) + 8)
    for column in range(0, len(starts), 8):
        label = str(summary.ranks[starts[column]].rank)[:7]
        ruler[column : column + len(label)] = label
    screen.line(f"  {pad('', name_width)}  {''.join(ruler)}", "dim")
    for name, num_alike, by_rank in shown:
        means = [sum(part) / len(part) for part in (by_rank[i : i + per_column] for i in starts)]
        cells = "".join(screen.heat(mean, max(means)) for mean in means)
        screen.line(
            f"  {pad(name, name_width)}  {cells}  {format_size(sum(by_rank))}{' each' if num_alike > 1 else ''}"
        )
    if len(rows) > len(shown):
        screen.line(f"  ... and {len(rows) - len(shown):,} more rows")


def _render_tensors(summary: Summary, tensors: Sequence[TensorEntry], screen: Screen) -> None:
    screen.section(f"tensors: {len(tensors):,}")

    def cells(tensor: TensorEntry) -> tuple[str, ...]:
        placement, nbytes = format_placement(summary, tensor.fqn), -(-tensor.num_elems * tensor.dtype.bits // 8)
        shown = (escape_name(tensor.fqn), tensor.dtype.name, str(list(tensor.shape)), placement)
        return *shown, f"{len(tensor.chunks):,}", f"{nbytes:,}"

    screen.table("name, dtype, shape, placement, >chunks, >bytes", map(cells, tensors))


# Draws one tensor chunk by chunk: a small grid of who holds what, and the table of chunks

_MAX_ROWS = 64


def render_tensor(summary: Summary, tensor: TensorEntry, *, screen: Screen) -> None:
    """Write the shape, the placements, the chunk grid and every chunk of `tensor`."""
    screen.line(f"{escape_name(tensor.fqn)}  {tensor.dtype.name} {list(tensor.shape)}", "heading")
    placements = summary.placements_of(tensor.fqn)
    if placements is not None:
        said = ", ".join(f"{placement} on {axis}" for axis, placement in placements.items())
        suffix = {"inferred": " (inferred)", "overlay": " (planned)"}.get(summary.mesh_source or "", "")
        screen.line(f"  placement: {said}{suffix}")
    _draw_grid(tensor, screen)
    screen.line()

    def cells(chunk: Chunk) -> tuple[str, ...]:
        at = "-" if summary.is_virtual else f"{chunk.span.offset:,}"
        box, file = (str(list(chunk.box.offsets)), str(list(chunk.box.sizes))), escape_name(chunk.span.file)
        return _rank_text(chunk, "-"), *box, file, at, f"{chunk.span.nbytes:,}"

    screen.table(">rank, offsets, sizes, file, >offset, >bytes", map(cells, tensor.chunks))


def _rank_text(chunk: Chunk, otherwise: str) -> str:
    rank = rank_of_file(chunk.span.file)
    return otherwise if rank is None else str(rank)


def _draw_grid(tensor: TensorEntry, screen: Screen) -> None:
    """Draw rows along the first cut dim and columns along the second; a single cut dim runs to the right."""
    full = [chunk for chunk in tensor.chunks if chunk.box.num_elems]
    starts = [sorted({chunk.box.offsets[dim] for chunk in full}) for dim in range(len(tensor.shape))]
    cut_dims = [dim for dim, offsets in enumerate(starts) if len(offsets) > 1]
    num_empty = len(tensor.chunks) - len(full)
    if not cut_dims or len(cut_dims) > 2:
        if len(cut_dims) > 2:
            screen.line(f"  cut along {len(cut_dims)} dims: no drawing")
        return
    held: dict[tuple[int, ...], list[str]] = {}
    for number, chunk in enumerate(tensor.chunks):
        if chunk.box.num_elems:
            key = tuple(chunk.box.offsets[dim] for dim in cut_dims)
            held.setdefault(key, []).append(_rank_text(chunk, f"#{number}"))
    column_dim = cut_dims[-1]
    columns = starts[column_dim]
    rows = starts[cut_dims[0]] if len(cut_dims) == 2 else [None]
    labels = [
        ["+".join(held.get((column,) if row is None else (row, column), ("?",))) for column in columns] for row in rows
    ]
    heads = [str(row) for row in rows] if len(cut_dims) == 2 else ["rank"]
    corner = f"dim {cut_dims[0]} \\ dim {column_dim}" if len(cut_dims) == 2 else f"dim {column_dim} from"
    widest = max(len(text) for text in (*map(str, columns), *(text for line in labels for text in line)))
    fitting = max(1, (screen.width - len(corner) - 4) // (widest + 2))
    clipped = len(columns) > fitting
    if clipped:
        # The last column is worth more than one in the middle: it shows where the tensor ends.
        fitting = max(1, (screen.width - len(corner) - 9) // (widest + 2))
        columns, labels = [*columns[: fitting - 1], columns[-1]], [[*x[: fitting - 1], x[-1]] for x in labels]

    def join(cells: list[str]) -> list[str]:
        return [*cells[:-1], "...", cells[-1]] if clipped else cells

    screen.line()
    lines = [(head, *join(line)) for head, line in zip(heads, labels, strict=True)]
    named = ", ".join(f">{name}" for name in (corner, *join(list(map(str, columns)))))
    screen.table(named, lines[:_MAX_ROWS])
    if len(rows) > _MAX_ROWS:
        screen.line(f"  ... and {len(rows) - _MAX_ROWS:,} more rows")
    if num_empty:
        screen.line(f"  and {num_empty:,} empty: {'chunk' if num_empty == 1 else 'chunks'} without elements")


_AS_STORED = {"mesh": None, "rules": None, "set": (), "tp_plan": None, "world_size": None}


def run(call: CommandCall[Summary], view: InspectView, output: OutputOptions) -> int:
    """Print what a checkpoint holds."""
    with report_to(view.html, "inspect", str(call.given["source"]), output) as report:
        try:
            with waiting(output, "looking"):
                summary = call()
        except UnreadableError as error:
            _hint_at_run(error, str(call.given["source"]))
            raise
        report(lambda: build_page(summary, call(**_AS_STORED) if summary.is_virtual else None))
    by_fqn = {entry.fqn: entry for entry in summary.tensors}
    unknown = [fqn for fqn in view.tensor if fqn not in by_fqn]
    if unknown:
        raise UsageError(f"there is no tensor {unknown[0]!r}", hint="--tensors lists the names")
    chosen = [by_fqn[fqn] for fqn in view.tensor]
    listed = summary.tensors if view.tensors else None
    then = [] if output.storage else next_commands(summary, call.given)
    if output.json:
        print_json(summary.to_json(tensors=chosen or listed))
    elif not output.quiet:
        render(summary, terminal(), by=view.by, tensors=listed, grids=chosen, then=then)
    return 0


def _hint_at_run(error: UnreadableError, source: str) -> None:
    """Let the error about the folder of a run say what shows it, and its last checkpoint."""
    from ckpt_tools.runs.folder import checkpoints_in  # rare, and slow to import

    if (error.hint or "").startswith("use ") and checkpoints_in(source):
        error.hint = f"{error.hint}; the whole run: ckpt watch {quote(source)} --status"


# The page

_MAX_FILES = 500


def build_page(summary: Summary, stored: Summary | None = None) -> page.Page:
    """Return the page of a summary; of a planned layout with the `stored` one beside it, where that is known."""
    summaries = [summary] if stored is None else [stored, summary]
    first = summaries[0]
    renamed = stored is not None and {t.fqn for t in stored.tensors} != {t.fqn for t in summary.tensors}
    names = ["stored", "planned"] if stored is not None else ["planned" if summary.is_virtual else "stored"]
    layouts = [LayoutData(each, name) for each, name in zip(summaries, names, strict=True)]
    tree = build_tree(summaries, layouts)
    drawn = [layout.to_json() for layout in layouts]
    identities = [first.identity] if first.identity is not None else []
    drawing = page.ScriptDrawing("modules", _HOW_MODULES + _RENAMED * renamed)
    sections = [page.PageSection("Modules", [drawing, _modules(first)])]
    for number, (each, name) in enumerate(zip(summaries, names, strict=True)):
        suffix = " (planned layout, nothing written)" if name == "planned" else f" ({name})" * (stored is not None)
        sections += _layout_sections(each, number, suffix, drawn[number])
    lost = _missing(first)
    sections += page.findings_section(_lost(first), "Missing files")
    sections += [page.PageSection("What it holds", _facts(first, summary)), *_more_sections(first)]
    sections += page.identity_sections(identities)
    data = {
        "layouts": drawn,
        "tree": tree,
        "dtypes": dtype_names(summaries),
        "files": [file.file for file in first.files],
        "missing": [(number, rank_of_file(f.file)) for number, f in enumerate(first.files) if f.file in lost],
    }
    titles, verdict = page.identity_titles(identities), _verdict(first)
    return page.Page("inspect", first.path, sections, "unknown" if lost else None, verdict, data, titles)


def _lost(summary: Summary) -> list[Finding]:
    """Return a finding for every file that is missing."""
    what, hint = "the file is missing, with {} of tensors", "restore it; `ckpt verify` lists the tensors that it holds"
    sizes = {file.file: format_size(file.num_bytes) for file in summary.files}
    return [Finding.warning("missing-file", name, what.format(sizes[name]), hint) for name in _missing(summary)]


_HOW_MODULES = "Areas are bytes. Open a module for its parts, and a tensor for its chunks; Escape goes back."
_RENAMED = " Names are those of the plan; where what is stored has another name, its chunks are not shown."


def _verdict(summary: Summary) -> str:
    missing = _missing(summary)
    lost = f"; NOT read: {len(missing):,} of {len(summary.files):,} files missing" if missing else ""
    held = f"{summary.num_tensors:,} tensors, {format_size(summary.total_bytes)}"
    return f"{held}, from headers alone: no data was read or checked{lost}"


def _facts(first: Summary, summary: Summary) -> list[page.Part]:
    people = {"elements": count_text(first.num_elems), "bytes": format_size(first.total_bytes)}
    rows = [(name, people.get(name, text)) for name, text in _holds(first, first.names or summary.names)]
    if first is not summary and (planned := _mesh(summary)):
        rows.append(("plan", planned))
    uneven = [each for each in (first, summary)[first is summary :] if each.imbalance is not None]
    rows += [("fullest rank ÷ mean", f"{each.imbalance:.2f} of {len(each.ranks):,} ranks") for each in uneven]
    return [page.FactList(rows)]


def _layout_sections(summary: Summary, number: int, suffix: str, drawn: dict[str, object]) -> list[page.PageSection]:
    sections = []
    if summary.mesh is not None and drawn["mesh"]:
        how = f"{summary.mesh}: what lies in the files of each rank. Of replicas, one rank writes."
        sections.append(page.PageSection(f"Mesh{suffix}", [page.ScriptDrawing("mesh", how, number)]))
    if summary.ranks and summary.blocks:
        parts: list[page.Part] = [page.ScriptDrawing("heat", "What each rank wrote of each module.", number)]
        if drawn["rows_left_out"]:
            parts.append(page.NoteList([f"{drawn['rows_left_out']} modules with the fewest bytes are not drawn"]))
        sections.append(page.PageSection(f"Bytes by module and rank{suffix}", parts))
    return sections


def _more_sections(summary: Summary) -> list[page.PageSection]:
    sections = []
    if not summary.ranks and summary.files:
        sections.append(page.PageSection("Files", [_files(summary, _MAX_FILES)]))
    if summary.blobs:
        sections.append(page.PageSection("Blobs", [_blobs(summary, _MAX_FILES)]))
    if summary.contents:
        sections.append(page.PageSection("The step", [_contents(summary)]))
    return sections
