"""What the files of several ranks hold of the same tensors, fitted together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckpt_tools.description.checkpoint import TensorEntry
from ckpt_tools.description.tiling import check_tiling
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats._torch_pieces import Piece
from ckpt_tools.formats._torch_state import State
from ckpt_tools.text import first_few


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The files of one model."""

    directory: str
    """In the checkpoint's, with its slash; "" for itself."""
    files: Mapping[int, str]
    """Rank → file."""
    world_size: int
    """As the names say; 0 where they do not."""


def assemble(states: Mapping[int, State], path: str) -> tuple[TensorEntry, ...]:
    """Fit the parts of all ranks together.

    Raises:
        UnreadableError: The files cannot be of one model and one save.
    """
    leader = min(states)
    pieces: dict[str, list[Piece]] = {piece.fqn: [piece] for piece in states[leader].pieces}
    for rank, state in states.items():
        for piece in state.pieces:
            if piece.rank not in (None, rank):
                raise misfit(path, f"the file of rank {rank} says that it is of rank {piece.rank}")
            if rank == leader:
                continue
            first = pieces.get(piece.fqn)
            if first is None:
                raise misfit(path, f"rank {rank} has tensor {piece.fqn!r}, and rank {leader} does not")
            for what, one, other in (
                ("dtype", first[0].dtype.name, piece.dtype.name),
                ("shape", first[0].shape, piece.shape),
                ("placement", first[0].layout, piece.layout),
            ):
                if one != other:
                    raise misfit(path, f"ranks {leader} and {rank} have another {what} of tensor {piece.fqn!r}")
            first.append(piece)
    lacking = next((fqn for fqn, held in pieces.items() if len(held) < len(states)), None)
    if lacking is not None:
        raise misfit(path, f"tensor {lacking!r} is not in the files of all ranks")
    return tuple(
        TensorEntry(
            fqn=fqn,
            dtype=held[0].dtype,
            shape=held[0].shape,
            chunks=tuple(chunk for piece in held for chunk in piece.chunks),
            path=held[0].path,
        )
        for fqn, held in pieces.items()
    )


def misfit(path: str, what: str) -> UnreadableError:
    """Return the error for files that are not of one save."""
    hint = "files of different models or saves lie here together: restore those of one"
    return UnreadableError(what, where=path, hint=hint)


def missing_ranks(
    read: Mapping[int, tuple[object, State]], ranks: Ranks, tensors: Iterable[TensorEntry], path: str
) -> tuple[str, ...]:
    """Say which ranks' files are not here, where the others have replicas of all that they hold.

    Raises:
        UnreadableError: They have not; or a file says that there are more ranks than the names do.
    """
    highest = max((piece.highest for _, state in read.values() for piece in state.pieces), default=0)
    if ranks.world_size and max(highest, *read) >= ranks.world_size:
        raise misfit(path, f"rank {max(highest, *read)} is named, in files of a world of {ranks.world_size} ranks")
    world_size = ranks.world_size or 1 + max(highest, *read)
    missing = [rank for rank in range(world_size) if rank not in read]
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
