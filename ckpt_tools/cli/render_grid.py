"""Draws one tensor chunk by chunk: a small grid of who holds what, and the table of chunks."""

from __future__ import annotations

from ckpt_tools.cli.screen import Screen
from ckpt_tools.description.checkpoint import Chunk, TensorEntry
from ckpt_tools.description.infer import rank_of_file
from ckpt_tools.description.summarise import Summary
from ckpt_tools.text import escape_name

_MAX_ROWS = 64


def render_tensor(summary: Summary, tensor: TensorEntry, *, screen: Screen) -> None:
    """Write the shape, the placements, the chunk grid and every chunk of `tensor`."""
    screen.line(f"{escape_name(tensor.fqn)}  {tensor.dtype.name} {list(tensor.shape)}", "heading")
    placements = summary.placements_of(tensor.fqn)
    if placements is not None:
        said = ", ".join(f"{placement} on {axis}" for axis, placement in placements.items())
        suffix = {"inferred": " (inferred)", "overlay": " (overlay)"}.get(summary.mesh_source or "", "")
        screen.line(f"  placement: {said}{suffix}")
    _draw_grid(tensor, screen)
    screen.line()
    screen.table(
        ("rank", "offsets", "sizes", "file", "offset", "bytes"),
        (
            (
                _rank_text(chunk),
                str(list(chunk.box.offsets)),
                str(list(chunk.box.sizes)),
                escape_name(chunk.span.file),
                "-" if summary.is_virtual else f"{chunk.span.offset:,}",
                f"{chunk.span.nbytes:,}",
            )
            for chunk in tensor.chunks
        ),
        align="rlllrr",
    )


def _rank_text(chunk: Chunk) -> str:
    rank = rank_of_file(chunk.span.file)
    return "-" if rank is None else str(rank)


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
            rank = rank_of_file(chunk.span.file)
            held.setdefault(key, []).append(f"#{number}" if rank is None else str(rank))
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
    screen.table(
        (corner, *join([str(column) for column in columns])),
        ((head, *join(line)) for head, line in list(zip(heads, labels, strict=True))[:_MAX_ROWS]),
        align="r" * (1 + len(columns) + clipped),
    )
    if len(rows) > _MAX_ROWS:
        screen.line(f"  ... and {len(rows) - _MAX_ROWS:,} more rows")
    if num_empty:
        screen.line(f"  and {num_empty:,} empty: {'chunk' if num_empty == 1 else 'chunks'} without elements")
