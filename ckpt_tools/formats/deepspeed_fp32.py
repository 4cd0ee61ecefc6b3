"""The fp32 weights and the optimizer's state of DeepSpeed's ZeRO, from the parts of all ranks.

Source: deepspeed 0.19.8 `runtime/engine.py` (`save_checkpoint`), `utils/zero_to_fp32.py`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckpt_tools.description.checkpoint import Chunk, TensorEntry
from ckpt_tools.description.dtypes import BY_NAME
from ckpt_tools.description.layout import Box
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats._torch_file import TorchFile
from ckpt_tools.formats._torch_pieces import Piece
from ckpt_tools.formats._zero_files import (
    ALL_RANKS,
    MERGE,
    Save,
    WithNumbers,
    content_of,
    find_save,
    open_save,
    plain_entry,
    read_file,
    read_pieces,
)
from ckpt_tools.formats._zero_flat import (
    Flats,
    Rank,
    Run,
    Shapes,
    build_entry,
    find_runs,
    frozen_flat,
    part_of,
    read_rank,
    read_shapes,
)
from ckpt_tools.formats.format import Format, Opened
from ckpt_tools.formats.manifest import Manifest
from ckpt_tools.storage.source import Source
from ckpt_tools.text import first_few


class DeepSpeedFp32(Format):
    """The fp32 weights and the optimizer's state of ZeRO, fitted together from the parts of all ranks."""

    name = "deepspeed-fp32"
    suffix = ".pt"
    is_sharded = True
    is_training = True
    has_views = True
    unchecked = ("whether the files of all ranks are of one step and in their places, where they do not record it",)

    def detects(self, files: Mapping[str, int]) -> bool:  # noqa: ARG002
        """Only `--from` asks for it, or `DeepSpeed` for stage 3."""
        return False

    def open(self, source: Source, files: Mapping[str, int], *, path: str, manifest: Manifest | None) -> Opened:  # noqa: ARG002
        """Read the pickles of every rank, without running them."""
        tag = find_save(source, files, path)
        if not tag.optimizers:
            raise UnreadableError(
                "no fp32 weights here: the files of ZeRO's optimizer (zero_pp_rank_N_…_optim_states.pt) are missing",
                where=path,
                hint="restore them" if not tag.model else "--from deepspeed reads the model's weights",
            )
        _check_ranks(tag, path)
        files_read = {rank: read_file(source, name) for rank, name in sorted(tag.optimizers.items())}
        ranks = [read_rank(file) for file in files_read.values()]
        models = [read_file(source, name) for _, name in sorted(tag.models.items())] or [read_file(source, tag.model)]
        _check_same(ranks, models, path)
        return _assemble(self, source, files, tag, ranks, models, [*files_read.values(), *models])


FORMAT = DeepSpeedFp32()


def _check_ranks(tag: Save, path: str) -> None:
    """Refuse gaps in the numbers of ranks, and files of the model's and the optimizer's of other ranks."""
    for what, files in (("optimizer's", tag.optimizers), ("model's", tag.models)):
        lacking = sorted(set(range(max((*tag.optimizers, *tag.models)) + 1)) - files.keys()) if files else []
        if lacking:
            shown = first_few(list(map(str, lacking)), 6)
            raise UnreadableError(f"the {what} files of ranks are missing: {shown}", where=path, hint=ALL_RANKS)


def _check_same(ranks: Sequence[Rank], models: Sequence[TorchFile], path: str) -> None:
    """Refuse files that say something else of the world or the step than others."""
    for rank in ranks:
        if rank.counts - {len(ranks)} or rank.stage != ranks[0].stage:
            said = first_few(sorted(map(str, rank.counts)))
            raise UnreadableError(
                f"it is of a save of {said} ranks and stage {rank.stage}, here are files of {len(ranks)} ranks and "
                f"stage {ranks[0].stage}",
                where=rank.file,
                hint=ALL_RANKS,
            )
    if (ranks[0].stage == 3) != (len(models) == len(ranks) and "zero_pp_rank" in models[0].name):
        raise UnreadableError("the files of the model and of the optimizer are of other stages of ZeRO", where=path)
    for key in ("global_steps", "dp_world_size", "mp_world_size", "global_samples"):
        found = {content[key] for file in models if key in (content := content_of(file))}
        if len(found) > 1:
            shown = " and ".join(sorted(map(str, found)))
            raise UnreadableError(
                f"files of ranks with other {key}: {shown}", where=path, hint="restore those of one save"
            )
        wanted = {"dp_world_size": len(ranks), "mp_world_size": 1}.get(key)
        if wanted is not None and found - {wanted}:
            hint = MERGE if key == "mp_world_size" else ALL_RANKS
            what = f"the model's file says {key} {found.pop()}, here are files of {wanted}"
            raise UnreadableError(what, where=path, hint=hint)


def _assemble(
    kind: Format,
    source: Source,
    files: Mapping[str, int],
    tag: Save,
    ranks: Sequence[Rank],
    models: Sequence[TorchFile],
    read: Sequence[TorchFile],
) -> Opened:
    """Fit the parts of all ranks together."""
    content = content_of(models[0])
    groups = read_shapes(content.get("param_shapes"), models[0].name)
    shapes = {name: shape for each in groups for name, shape in each.items()}
    runs = find_runs(ranks, groups)
    flats: Flats = {(n, group): flat for n, rank in enumerate(ranks) for group, flat in enumerate(rank.masters)}
    masters = {name: build_entry(("model", name), shape, runs[name], flats) for name, shape in shapes.items()}
    if ranks[0].stage == 3:
        for other in models[1:]:
            if [list(each.items()) for each in read_shapes(content_of(other).get("param_shapes"), other.name)] != [
                list(each.items()) for each in groups
            ]:
                raise UnreadableError("other parameters than rank 0 has", where=other.name, hint=ALL_RANKS)
        masters |= _frozen(models)
    source = WithNumbers(source)
    optimizer = tuple(_optimizer_entries(ranks, shapes, runs, source, f"{tag.directory}numbers of the optimizer"))
    unread = ["the options of the optimizer's groups (learning rate, betas, …)"]
    if rest := dict.fromkeys(each for rank in ranks for each in rank.rest):
        unread.append(f"other state of the optimizer: {first_few(list(rest), 6)}")
    if ranks[0].stage == 3 and len(ranks) > 1 and content.get("buffer_names"):
        unread.append("the buffers of ranks above 0; those of rank 0 are read")
    notes = [f"reads the fp32 weights of ZeRO's stage {ranks[0].stage}, of {len(ranks)} ranks"]
    tensors = (*_model_entries(models[0], masters, is_whole=ranks[0].stage < 3), *optimizer)
    return open_save(kind, source, files, tag, tensors, read, notes, unread)


def _model_entries(file: TorchFile, masters: Mapping[str, TensorEntry], *, is_whole: bool) -> Iterator[TensorEntry]:
    """Yield the model's tensors in its own order: fp32 where there is that, else as the model's file has them.

    Raises:
        UnreadableError: A tensor is nowhere.
    """
    content = content_of(file)
    shared = content.get("shared_params")
    kept = {k: masters[v] for k, v in shared.items() if v in masters} if isinstance(shared, dict) else {}
    found = {name: replace(entry, fqn=f"model.{name}", path=("model", name)) for name, entry in kept.items()}
    found |= masters
    buffers = content.get("buffer_names")
    known = frozenset(map(str, buffers)) if isinstance(buffers, list) else frozenset()
    pieces = read_pieces(file, "module")
    for name, piece in pieces.items():
        if name in found:
            yield found[name]
        elif is_whole or name in known or 0 not in piece.shape:
            yield plain_entry(piece, ("model", name))
        else:
            raise UnreadableError(
                f"{name!r} is not in the file of any rank: it was neither trained nor frozen",
                where=file.name,
                hint="save the model with stage3_gather_16bit_weights_on_model_save",
            )
    yield from (entry for name, entry in found.items() if name not in pieces)


def _frozen(models: Sequence[TorchFile]) -> dict[str, TensorEntry]:
    """Return the parameters that were not trained in stage 3: every rank has a part, as they are computed with."""
    found = {}
    (shapes,) = read_shapes([content_of(models[0]).get("frozen_param_shapes") or {}], models[0].name)
    for name, shape in shapes.items():
        flats: Flats = {}
        runs = []
        part, total = part_of(shape, len(models)), math.prod(shape)
        for number, file in enumerate(models):
            fragments = content_of(file).get("frozen_param_fragments")
            value = fragments.get(name) if isinstance(fragments, dict) else None
            flats[number, name] = frozen_flat(file, name, value)
            first = min(number * part, total)
            if first < total:
                count = min(part, total - first)
                runs.append(Run(start=first, num_elems=count, rank=number, group=name, offset=0))
        found[name] = build_entry(("model", name), shape, runs, flats)
    return found


def _optimizer_entries(
    ranks: Sequence[Rank], shapes: Shapes, runs: Mapping[str, Sequence[Run]], source: WithNumbers, file: str
) -> Iterator[TensorEntry]:
    """Yield the optimizer's state of every parameter, named as FSDP2 has it."""
    for key in dict.fromkeys(key for rank in ranks for key in rank.states):
        flats: Flats = {
            (n, group): flat for n, rank in enumerate(ranks) for group, flat in rank.states.get(key, {}).items()
        }
        for name, shape in shapes.items():
            if any((run.rank, run.group) in flats for run in runs[name]):
                yield build_entry(("optimizer", "state", name, key), shape, runs[name], flats)
    for key in dict.fromkeys(key for rank in ranks for key in rank.numbers):
        values = {
            (n, group): _number(value, source, rank.file)
            for n, rank in enumerate(ranks)
            for group, value in rank.numbers.get(key, {}).items()
        }
        for name in shapes:
            found = {values.get((run.rank, run.group)) for run in runs[name] if isinstance(run.group, int)}
            if len(found) > 1:
                shown = " and ".join(sorted(map(str, found)))
                raise UnreadableError(
                    f"ranks have other optimizer state {key!r} of {name!r}: {shown}",
                    where=ranks[0].file,
                    hint="their files are of different saves: restore those of one",
                )
            if found and (value := found.pop()) is not None:
                span = source.add(file, struct.pack("<f", value))
                entry = Chunk(box=Box((), ()), span=span)
                path = ("optimizer", "state", name, key)
                yield TensorEntry(fqn=".".join(path), dtype=BY_NAME["F32"], shape=(), chunks=(entry,), path=path)


def _number(value: object, source: Source, where: str) -> float:
    """Return a number of the optimizer's, or what a tensor of one element is."""
    if not isinstance(value, Piece):
        return float(value) if isinstance(value, int | float) else math.nan
    code = {"F32": "<f", "F64": "<d", "I32": "<i", "I64": "<q"}.get(value.dtype.name)
    if code is None:
        raise UnreadableError(f"a {value.dtype.name} as a number of the optimizer's", where=where)
    span = value.chunks[0].span
    (found,) = struct.unpack(code, source.read(span.file, span.offset, span.nbytes))
    return float(found)
