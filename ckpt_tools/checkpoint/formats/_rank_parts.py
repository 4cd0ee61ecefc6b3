"""What the files of several ranks hold of the same tensors, fitted together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from ckpt_tools.checkpoint.entries import Chunk, TensorEntry
from ckpt_tools.checkpoint.formats._torch_pieces import Piece
from ckpt_tools.checkpoint.formats._torch_state import State
from ckpt_tools.checkpoint.formats.format import Reader
from ckpt_tools.checkpoint.tiling import check_tiling
from ckpt_tools.errors import UnreadableError
from ckpt_tools.text import first_few

_COMPARED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The files of one model."""

    directory: str
    """In the checkpoint's, with its slash; "" for itself."""
    files: Mapping[int, str]
    """Rank → file."""
    world_size: int
    """As the names say; 0 where they do not."""


def assemble(
    states: Mapping[int, State], path: str, owners: Mapping[str, Collection[int]] | None = None
) -> tuple[TensorEntry, ...]:
    """Fit the parts of all ranks together.

    `owners` has for every FQN the ranks that have a part of it; by default all.
    """
    leader = min(states)
    pieces: dict[str, dict[int, Piece]] = {}
    for rank, state in states.items():
        for piece in state.pieces:
            if piece.rank not in (None, rank):
                raise misfit(path, f"the file of rank {rank} says that it is of rank {piece.rank}")
            held = pieces.setdefault(piece.fqn, {})
            held[rank] = piece
            known, first = next(iter(held.items()))
            for what, one, other in (
                ("dtype", first.dtype.name, piece.dtype.name),
                ("shape", first.shape, piece.shape),
                ("placement", first.layout, piece.layout),
            ):
                if one != other:
                    raise misfit(path, f"ranks {known} and {rank} have another {what} of tensor {piece.fqn!r}")
    for fqn, held in pieces.items():
        wanted = states.keys() if owners is None else owners.get(fqn, ())
        if more := sorted(held.keys() - wanted):
            raise misfit(path, f"rank {more[0]} has tensor {fqn!r}, and should not have it")
        if held.keys() != {*wanted} & states.keys():
            if leader not in held and leader in wanted:
                raise misfit(path, f"rank {min(held)} has tensor {fqn!r}, and rank {leader} does not")
            raise misfit(path, f"tensor {fqn!r} is not in the files of all ranks")
    return tuple(
        TensorEntry(
            fqn=fqn,
            dtype=first.dtype,
            shape=first.shape,
            chunks=tuple(chunk for piece in held.values() for chunk in piece.chunks),
            path=first.path,
        )
        for fqn, held in pieces.items()
        for first in (next(iter(held.values())),)
    )


def misfit(path: str, what: str) -> UnreadableError:
    """Return the error for files that are not of one save."""
    hint = "files of different models or saves lie here together: restore those of one"
    return UnreadableError(what, where=path, hint=hint)


def missing_ranks(
    states: Mapping[int, State], ranks: Ranks, tensors: Iterable[TensorEntry], path: str
) -> tuple[str, ...]:
    """Say which ranks' files are not here, where the others have replicas of all that they hold."""
    highest = max((piece.highest for state in states.values() for piece in state.pieces), default=0)
    if ranks.world_size and max(highest, *states) >= ranks.world_size:
        raise misfit(path, f"rank {max(highest, *states)} is named, in files of a world of {ranks.world_size} ranks")
    world_size = ranks.world_size or 1 + max(highest, *states)
    missing = [rank for rank in range(world_size) if rank not in states]
    if not missing:
        return ()
    shown = first_few([str(rank) for rank in missing], 6)
    what = f"{len(missing)} of {world_size} ranks have no file here: {shown}"
    for entry in tensors:
        if check_tiling(entry.shape, (chunk.box for chunk in entry.chunks)) is not None:
            raise UnreadableError(
                what, where=path, hint="copy the files of all ranks, from every node, into one directory"
            )
    return (f"{what}; the others hold everything",)


def keep_one(entry: TensorEntry, reader: Reader) -> TensorEntry:
    """Compare what several ranks have of a tensor, and return it with one of each."""
    firsts: dict[object, Chunk] = {}
    for chunk in entry.chunks:
        first = firsts.setdefault(chunk.box, chunk)
        if first is not chunk and not _is_same(first, chunk, reader):
            raise UnreadableError(
                f"tensor {entry.fqn!r}: ranks that should have the same part have different ones",
                where=f"{first.span.file}, {chunk.span.file}",
                hint="files of different steps, or every rank has a tensor of its own: --exclude leaves it out",
            )
    return entry if len(firsts) == len(entry.chunks) else replace(entry, chunks=tuple(firsts.values()))


def _is_same(one: Chunk, other: Chunk, reader: Reader) -> bool:
    """Are two chunks of one box the same, by their CRC-32s where they are recorded?"""
    if one.span.nbytes != other.span.nbytes or one.strides != other.strides:
        return False
    if one.crc32 is not None and other.crc32 is not None:
        return one.crc32 == other.crc32
    for start in range(0, one.span.nbytes, _COMPARED_BYTES):
        count = min(_COMPARED_BYTES, one.span.nbytes - start)
        left, right = (reader.read(c.span.file, c.span.offset + start, count) for c in (one, other))
        if left != right:
            return False
    return True
