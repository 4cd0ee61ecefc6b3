"""FSDP1's LOCAL_STATE_DICT: every unit's parameters, flat in a row that ranks have cut; shapes come from elsewhere.

With `use_orig_params=True` every rank also names the pieces that it has of parameters, each a view into its part of the
row; without it, only the order in which the model has its parameters says what is where.

Source: torch 2.13 `distributed/fsdp/_flat_param.py` (`_init_flat_param_and_metadata`: gaps that align to 16 bytes, and
fill the row up to the ranks), `_state_dict_utils.py` (`_local_post_state_dict_hook`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from ckpt_tools.description.checkpoint import Chunk, TensorEntry
from ckpt_tools.description.flat import flat_boxes
from ckpt_tools.description.transform import strip_wrappers
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats._rank_parts import assemble
from ckpt_tools.formats._torch_pieces import Piece
from ckpt_tools.formats._torch_state import State
from ckpt_tools.formats.flat_shapes import Shapes

_FLAT = re.compile(r"(?:.*\.)?_?flat_param(?:_\d+)?")
_ALIGNMENT_BYTES = 16
_SAME = "is it a checkpoint of the same model? Tied weights count once: torch.save(model.state_dict(), FILE) says which"
_Run = tuple[str, int, int]
"""Elements of a row: its name, the first, and where they end."""


def read_rows(states: Mapping[int, State], path: str) -> dict[str, TensorEntry]:
    """Return the rows that the files of a local state dict have parts of; {} where they are another kind."""
    rows = {rank: State(pieces=[piece for piece in state.pieces if _is_row(piece)]) for rank, state in states.items()}
    return {entry.fqn: entry for entry in assemble(rows, path)}


def unflatten(
    states: Mapping[int, State], rows: Mapping[str, TensorEntry], shapes: Shapes | None, path: str
) -> tuple[TensorEntry, ...]:
    """Return the tensors of a local state dict; its rows have a part for every element."""
    if shapes is None:
        raise UnreadableError(
            "a local state dict of FSDP1: flat pieces of parameters, without their shapes",
            where=path,
            hint="name a checkpoint of the same model: --shapes-from MODEL (names and shapes are read, no weights)",
        )
    runs = _named_runs(states, path)
    others = {
        rank: State(pieces=[piece for piece in state.pieces if not _is_row(piece) and piece.fqn not in runs])
        for rank, state in states.items()
    }
    rest = assemble(others, path)
    if not runs:
        runs = dict(_ordered_runs(rows, {strip_wrappers(entry.fqn) for entry in rest}, shapes))
    found = []
    for name, run in runs.items():
        twins = (other for other, its in runs.items() if its == run)  # tied: one of the names has the shape
        shape = next(
            (shapes.shapes[each] for each in map(strip_wrappers, (name, *twins)) if each in shapes.shapes), None
        )
        if shape is None or math.prod(shape) != run[2] - run[1]:
            said = "which does not have it" if shape is None else f"where it has the shape {list(shape)}"
            raise _misfit(f"{name!r} has {run[2] - run[1]} elements", said, shapes)
        row = rows[run[0]]
        chunks = tuple(_cut(row, shape, run[1]))
        found.append(TensorEntry(fqn=name, dtype=row.dtype, shape=shape, chunks=chunks, path=(name,)))
    for entry in rest:
        shape = shapes.shapes.get(strip_wrappers(entry.fqn), entry.shape)
        if shape != entry.shape:
            raise _misfit(f"{entry.fqn!r} has the shape {list(entry.shape)}", f"where it has {list(shape)}", shapes)
    for fqn, row in rows.items():
        _check_filled(row, sorted({run[1:] for run in runs.values() if run[0] == fqn}), len(states), path)
    return (*found, *rest)


def _is_row(piece: Piece) -> bool:
    return _FLAT.fullmatch(piece.fqn) is not None and len(piece.shape) == 1 and piece.layout is not None


def _misfit(what: str, said: str, shapes: Shapes) -> UnreadableError:
    return UnreadableError(f"{what}, {said}", where=shapes.title, hint=_SAME)


def _named_runs(states: Mapping[int, State], path: str) -> dict[str, _Run]:
    """Return where every parameter lies that ranks name pieces of: views into their parts of the rows."""
    found: dict[str, set[_Run]] = {}
    for state in states.values():
        parts = [(piece.fqn, chunk) for piece in state.pieces if _is_row(piece) for chunk in piece.chunks]
        for piece in state.pieces:
            if piece.layout is None and len(piece.shape) == len(piece.chunks) == 1 and piece.shape[0]:
                own, itemsize = piece.chunks[0].span, piece.dtype.num_bytes(1)
                for row, part in parts:
                    skipped, odd = divmod(own.offset - part.span.offset, itemsize)
                    if 0 <= skipped <= part.box.sizes[0] - piece.shape[0] and not odd:
                        start = part.box.offsets[0] + skipped
                        found.setdefault(piece.fqn, set()).add((row, start, start + piece.shape[0]))
    runs = {}
    for fqn, pieces in found.items():
        first, *more = sorted(pieces)
        row, start, stop = first
        for other, begin, end in more:
            if (other, begin) != (row, stop):
                raise UnreadableError(f"the pieces of {fqn!r} on the ranks do not follow each other", where=path)
            stop = end
        runs[fqn] = (row, start, stop)
    return runs


def _ordered_runs(
    rows: Mapping[str, TensorEntry], buffers: Collection[str], shapes: Shapes
) -> Iterator[tuple[str, _Run]]:
    """Yield where every parameter lies by the order of the model's: those of a unit are in its row."""
    units = {fqn: strip_wrappers(fqn[: fqn.rfind(".") + 1]) for fqn in rows}
    for fqn, unit in units.items():
        inner = tuple(other for other in units.values() if other != unit and other.startswith(unit))
        names = [n for n in shapes.shapes if n.startswith(unit) and not n.startswith(inner) and n not in buffers]
        if len(names) > 1 and not shapes.is_ordered:
            raise UnreadableError(
                "saved with use_orig_params=False, without names: the order of the parameters must be known, and "
                "safetensors and DCP do not keep it",
                where=shapes.title,
                hint="--shapes-from a file of torch.save's: torch.save(model.state_dict(), FILE), of any weights",
            )
        position = 0
        for name in names:
            start, position = position, position + math.prod(shapes.shapes[name])
            yield name, (fqn, start, position)
        if (length := rows[fqn].shape[0]) != position:
            raise _misfit(f"{fqn!r} has {length} elements", f"where its parameters have {position}", shapes)


def _cut(row: TensorEntry, shape: tuple[int, ...], start: int) -> Iterator[Chunk]:
    """Yield the chunks of a tensor that begins at an element of a row."""
    itemsize = row.dtype.num_bytes(1)
    for part in row.chunks:
        (begin,), (length,) = part.box.offsets, part.box.sizes
        first, last = max(start, begin), min(start + math.prod(shape), begin + length)
        offset = part.span.offset + (first - begin) * itemsize
        for box in flat_boxes(shape, first - start, last - start):
            span = replace(part.span, offset=offset, nbytes=box.num_elems * itemsize)
            yield Chunk(box=box, span=span)
            offset += span.nbytes


def _check_filled(row: TensorEntry, runs: Iterable[tuple[int, int]], num_ranks: int, path: str) -> None:
    """Check that parameters fill a row, but for what aligns them and makes the row's parts equally long."""
    gap = _ALIGNMENT_BYTES // row.dtype.num_bytes(1)
    position = 0
    for start, stop in (*runs, (row.shape[0], row.shape[0])):
        most = gap if stop > start else max(gap, num_ranks)
        if not 0 <= start - position < most or any(part.strides is not None for part in row.chunks):
            what = f"elements {min(start, position)} to {max(start, position)} of {row.fqn!r}"
            raise UnreadableError(f"{what} are of no parameter, or of two", where=path)
        position = stop
