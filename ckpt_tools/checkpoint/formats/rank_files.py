"""Directories where every rank left its own part of a state dict, as `torch.save` writes it.

That is what verl and SkyRL keep of a step, accelerate with `use_dcp=False`, and whoever saves `model.state_dict()` of
FSDP per rank. Every part says itself where it belongs: a DTensor by its mesh, its placements and its rank's place in
the mesh, a ShardedTensor by its offsets.

Source: verl `utils/checkpoint/fsdp_checkpoint_manager.py`; accelerate 1.15 `utils/fsdp_utils.py`.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from ckpt_tools.checkpoint.entries import Asset, Checkpoint, Chunk, TensorEntry
from ckpt_tools.checkpoint.formats._torch_pieces import (
    Content,
    RankedFiles,
    TensorPiece,
    assemble,
    keep_one,
    missing_ranks,
)
from ckpt_tools.checkpoint.formats.file_names import is_hf_asset
from ckpt_tools.checkpoint.formats.format import Format, Opened, Reader, Shapes
from ckpt_tools.checkpoint.formats.item_frames import digest_frames
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME, Manifest
from ckpt_tools.checkpoint.formats.rank_optimizer import read_optimizer
from ckpt_tools.checkpoint.formats.step_layouts import ROLES, Step
from ckpt_tools.checkpoint.formats.torch_save import list_tied, list_unread, read_state
from ckpt_tools.checkpoint.layout import flat_boxes
from ckpt_tools.checkpoint.transform import strip_wrappers
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.storage.locations import open_source
from ckpt_tools.storage.source import Source
from ckpt_tools.storage.virtual import VirtualSource
from ckpt_tools.text import first_few

_MODEL_FILES = (
    re.compile(r"model_world_size_(?P<world>\d{1,6})_rank_(?P<rank>\d{1,6})\.pt", re.ASCII),
    re.compile(r"pytorch_model_fsdp(?:_(?P<model>\d{1,6}))?_rank(?P<rank>\d{1,6})\.bin", re.ASCII),
)
VERL_FILE = re.compile(
    r"(?P<kind>model|optim|extra_state)_world_size_(?P<world>\d{1,6})_rank_(?P<rank>\d{1,6})\.pt", re.ASCII
)
"""What verl keeps for every rank."""
_HUGGINGFACE = "huggingface/"  # Where verl puts the config and the tokenizer


class RankFiles(Format):
    """One file of `torch.save` for every rank."""

    name = "ranks"
    found_by = (
        "`model_world_size_N_rank_R.pt` (verl, SkyRL; also in `actor/`), `pytorch_model_fsdp_N_rankR.bin` (accelerate)"
    )
    about = (
        "DTensor and ShardedTensor of every rank, fitted together, and the optimizer's state beside them; "
        "flat pieces of FSDP1's LOCAL_STATE_DICT with `--shapes-from`. `verify` does not see whether the "
        "files are of one step, beyond what schedulers and step counts say"
    )
    written_by = "`reshard --for verl`"
    whole_by = "the number of ranks in names and DTensors, whose parts must tile every tensor"
    suffix = ".pt"
    is_sharded = True
    is_training = True
    has_views = True
    unchecked = ("whether the files of all ranks are of one step, which they do not record",)

    def __init__(self, shapes: Shapes | None = None) -> None:
        self._shapes = shapes

    def shaped(self, shapes: Shapes) -> Format:
        """Return the format for local state dicts of a model with these shapes."""
        return RankFiles(shapes)

    def detects(self, files: Mapping[str, int]) -> bool:
        """By the names that trainers give."""
        return bool(_find(files))

    def open(self, source: Source, files: Mapping[str, int], *, path: str, manifest: Manifest | None) -> Opened:
        """Read the pickle of every rank's file, without running it, and fit the parts together."""
        found = _find(files)
        if not found:
            raise UnreadableError("no rank files here", where=path)
        ranks = _choose(found, path)
        read = {rank: read_state(source, name) for rank, name in sorted(ranks.files.items())}
        states = {rank: state for rank, (_, state) in read.items()}
        rows = read_rows(states, path)
        if self._shapes is not None and not rows:
            raise UsageError("--shapes-from: these files record their own shapes", where=path, hint="leave it out")
        whole = assemble(states, path) if not rows else tuple(rows.values())
        missing = missing_ranks(states, ranks, whole, path)
        tensors = unflatten(states, rows, self._shapes, path) if rows else whole
        layouts = {piece.fqn: piece.layout for piece in states[min(states)].pieces}
        companions = () if rows else files  # an optimizer's flat pieces have no names at all
        optimizer = read_optimizer(source, companions, ranks, tensors, layouts, path)
        own = {**{name: files[name] for name in ranks.files.values()}, **optimizer.files}
        home = ranks.directory + _HUGGINGFACE
        known = {*own, MANIFEST_NAME, ranks.directory + MANIFEST_NAME}
        others = [name for name in files if name.startswith(ranks.directory) and name not in known]
        if not any(name.startswith(home) for name in others):
            home = ranks.directory
        near = (name[len(home) :] for name in others if name.startswith(home))
        assets = [name for name in near if "/" not in name and is_hf_asset(name)]
        rest = [name for name in others if name.removeprefix(home) not in assets]
        return Opened(
            format=self,
            checkpoint=Checkpoint(
                root=source.root,
                format=self.name,
                tensors=(*tensors, *optimizer.tensors),
                blobs=optimizer.blobs,
                assets=tuple(Asset(file=name, nbytes=files[home + name]) for name in assets),
                files=own,
                sealed={path: what for state in states.values() for path, what in state.sealed.items()},
                objects=sum((state.census for state in states.values()), Counter()),
            ),
            source=VirtualSource(source, optimizer.virtual) if optimizer.virtual else source,
            manifest=manifest if manifest is not None and manifest.format == self.name else None,
            asset_source=open_source(os.path.join(source.root, home)) if home and assets else None,
            step=_step(found, files) if ranks.directory else None,
            unread=(*missing, *list_unread(states.values()), *optimizer.unread, *_rest(rest, ranks.directory)),
            broken=() if optimizer.broken is None else (optimizer.broken,),
            notes=(*list_tied(tensors), *optimizer.notes),
            complete="" if missing else f"the files of all {len(states)} ranks are there",
            sums=(*(each for file, _ in read.values() for each in file.sums), *optimizer.sums),
        )

    def digest_frames(self, target: Checkpoint, reader: Reader, *, marker: bytes | None = None) -> dict[str, str]:  # noqa: ARG002
        """Digest the pickles and directories of archives, and the padding between tensors."""
        payloads = (chunk.span for entry in target.tensors for chunk in entry.chunks)
        return digest_frames(target.files, payloads, (), reader)

    def resolve(self, entry: TensorEntry, reader: Reader) -> TensorEntry:
        """Keep one of the equal parts that several ranks have."""
        return keep_one(entry, reader)


FORMAT = RankFiles()


def _find(files: Mapping[str, int]) -> list[RankedFiles]:
    """Return the models whose ranks' files are here, or in the directories of a step; the policy first."""
    found: dict[tuple[str, str, str], dict[int, str]] = {}
    for path in files:
        directory, slash, name = path.rpartition("/")
        if slash and directory not in ROLES:
            continue
        for pattern in _MODEL_FILES:
            if (match := pattern.fullmatch(name)) is not None:
                groups = match.groupdict()
                key = (directory + slash, groups.get("world") or "0", groups.get("model") or "")
                found.setdefault(key, {})[int(groups["rank"])] = path
    top = [key for key in found if not key[0]]
    order = sorted(top or found, key=lambda key: (ROLES.index(key[0][:-1]) if key[0] else 0, key))
    return [RankedFiles(directory=key[0], files=found[key], world_size=int(key[1])) for key in order]


def _choose(found: list[RankedFiles], path: str) -> RankedFiles:
    first = found[0]
    same = [each for each in found if each.directory == first.directory]
    if len(same) > 1:
        shown = first_few([each.files[min(each.files)] for each in same])
        what = f"rank files of {len(same)} models or world sizes: {shown}"
        raise UnreadableError(what, where=path, hint="a save over an older one left both: move the files of one away")
    return first


def _rest(names: Iterable[str], directory: str) -> tuple[str, ...]:
    """Say what else lies beside the files of a model; what lies in its step is said of the step."""
    rest = dict.fromkeys(re.sub(r"rank_?\d+", "rank*", name[len(directory) :]) for name in names)
    return (f"files beside the model's: {first_few(rest, 6)}",) if rest else ()


def _step(found: list[RankedFiles], files: Mapping[str, int]) -> Step:
    """Describe the step that a model's directory lies in."""
    parts = {each.directory[:-1]: each for each in found}
    sizes = {name: sum(size for file, size in files.items() if file.startswith(f"{name}/")) for name in parts}
    return Step.of_models("verl", sizes, {n: size for n, size in files.items() if n.partition("/")[0] not in parts})


# FSDP1's LOCAL_STATE_DICT: every unit's parameters, flat in a row that ranks have cut; shapes come from elsewhere
# With `use_orig_params=True` every rank also names the pieces that it has of parameters, each a view into its part of
# the row; without it, only the order in which the model has its parameters says what is where.
# Source: torch 2.13 `distributed/fsdp/_flat_param.py` (`_init_flat_param_and_metadata`: gaps that align to 16 bytes,
# and fill the row up to the ranks), `_state_dict_utils.py` (`_local_post_state_dict_hook`).

_FLAT = re.compile(r"(?:.*\.)?_?flat_param(?:_\d+)?")
_ALIGNMENT_BYTES = 16
_SAME = "is it a checkpoint of the same model? Tied weights count once: torch.save(model.state_dict(), FILE) shows them"
_Run = tuple[str, int, int]  # Elements of a row: its name, the first, and where they end


def read_rows(states: Mapping[int, Content], path: str) -> dict[str, TensorEntry]:
    """Return the rows that the files of a local state dict have parts of; {} where they are another kind."""
    rows = {rank: Content(pieces=[piece for piece in state.pieces if _is_row(piece)]) for rank, state in states.items()}
    return {entry.fqn: entry for entry in assemble(rows, path)}


def unflatten(
    states: Mapping[int, Content], rows: Mapping[str, TensorEntry], shapes: Shapes | None, path: str
) -> tuple[TensorEntry, ...]:
    """Return the tensors of a local state dict; its rows have a part for every element."""
    if shapes is None:
        what = "a local state dict of FSDP1: flat pieces of parameters, without their shapes"
        hint = "pass a checkpoint of the same model: --shapes-from MODEL (only names and shapes are read)"
        raise UnreadableError(what, where=path, hint=hint)
    runs = _named_runs(states, path)
    others = {
        rank: Content(pieces=[piece for piece in state.pieces if not _is_row(piece) and piece.fqn not in runs])
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


def _is_row(piece: TensorPiece) -> bool:
    return _FLAT.fullmatch(piece.fqn) is not None and len(piece.shape) == 1 and piece.layout is not None


def _misfit(what: str, said: str, shapes: Shapes) -> UnreadableError:
    return UnreadableError(f"{what}, {said}", where=shapes.title, hint=_SAME)


def _named_runs(states: Mapping[int, Content], path: str) -> dict[str, _Run]:
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
                raise UnreadableError(f"the pieces of {fqn!r} are not contiguous across ranks", where=path)
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
                hint="pass --shapes-from a torch.save file: torch.save(model.state_dict(), FILE), with any weights",
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
            raise UnreadableError(f"{what} belong to no parameter, or to two", where=path)
        position = stop
