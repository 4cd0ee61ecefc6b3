"""The fp32 weights and the optimizer's state of DeepSpeed's ZeRO, from the parts of all ranks or the universal form.

Source: deepspeed 0.19.8 `runtime/engine.py` (`save_checkpoint`), `utils/zero_to_fp32.py`,
`checkpoint/ds_to_universal.py`.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import ByteSpan, Chunk, KeyPath, TensorEntry, fqn_problem
from ckpt_tools.checkpoint.formats._torch_file import TorchFile, read_torch_file
from ckpt_tools.checkpoint.formats._zero_files import (
    ALL_RANKS,
    FROZEN,
    MERGE,
    Save,
    check_number,
    content_of,
    find_save,
    integer_of,
    open_save,
    plain_entry,
    read_files,
    read_pieces,
)
from ckpt_tools.checkpoint.formats._zero_flat import (
    Flat,
    Flats,
    Rank,
    Run,
    Shapes,
    build_entry,
    find_runs,
    integers,
    is_shuffled,
    read_flat,
    read_rank,
    read_shapes,
)
from ckpt_tools.checkpoint.formats.format import Format, Opened
from ckpt_tools.checkpoint.formats.manifest import Manifest
from ckpt_tools.checkpoint.formats.rank_optimizer import ROOT, build_items
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.errors import UnreadableError
from ckpt_tools.storage.source import Source
from ckpt_tools.storage.virtual import VirtualFile, VirtualSource
from ckpt_tools.text import first_few

_F32 = BY_NAME["F32"]
_NUMBERS = {"F32": "<f", "F64": "<d", "I32": "<i", "I64": "<q"}
_MOST = 1 << 62
_PLAIN = (int, float, bool, str, type(None))


class DeepSpeedFp32(Format):
    """The fp32 weights and the optimizer's state of ZeRO."""

    name = "deepspeed-fp32"
    found_by = "`--from` alone"
    about = (
        "the fp32 weights and the optimizer's state of ZeRO-1, 2, 3 and the universal form, from the parts "
        "of all ranks. `verify` checks every storage's CRC-32, sizes, places and step counts; not whether "
        "ranks' files of equal layout and step were swapped (stage 3). TP, pipelines and experts only in "
        "the universal form"
    )
    whole_by = "the number of ranks and `param_shapes`, which lists what is trained"
    suffix = ".pt"
    is_sharded = True
    is_training = True
    has_views = True
    unchecked = ("whether the files of all ranks are of one step and in their places, where they do not record it",)

    def detects(self, files: Mapping[str, int]) -> bool:  # noqa: ARG002
        """Only `--from` asks for it, or `deepspeed` where there is nothing else."""
        return False

    def open(self, source: Source, files: Mapping[str, int], *, path: str, manifest: Manifest | None) -> Opened:  # noqa: ARG002
        """Read the pickles of every rank, without running them, and fit the parts together."""
        save = find_save(source, files, path)
        models = read_files(source, save.models or ({0: save.model} if save.model else {}))
        found = _read_universal(source, save, models) if save.universal else _read_ranks(source, save, models, path)
        if save.models:
            _add_frozen(found, models)
        numbers = bytearray()
        made = found.ranks[0].file
        tensors = [*_model([] if save.parts else models, found, is_stage_3=bool(save.models))]
        tensors += _optimizer(found, source, f"{made}#numbers", numbers)
        blobs, virtual = build_items(f"{made}#options", dict(_options(found)))
        virtual[f"{made}#numbers"] = VirtualFile.of(bytes(numbers))
        unread = [] if blobs else ["the options of the optimizer's groups (learning rate, betas, …)"]
        if rest := dict.fromkeys(each for rank in found.ranks for each in rank.rest):
            unread.append(f"other state of the optimizer: {first_few(list(rest), 6)}")
        if len(models) > 1 and content_of(models[0]).get("buffer_names"):
            unread.append("the buffers of ranks above 0; those of rank 0 are read")
        if save.parts or not models:
            unread.append("what only the model's own files have: buffers, and dtypes of what was not trained")
        opened = open_save(self, source, files, save, tensors, [*models, *found.files], [found.note], unread)
        sizes = {name: file.nbytes for name, file in virtual.items() if file.nbytes}
        checkpoint = replace(opened.checkpoint, blobs=blobs, files={**opened.checkpoint.files, **sizes})
        return replace(opened, excuse=FROZEN, checkpoint=checkpoint, source=VirtualSource(source, virtual))


FORMAT = DeepSpeedFp32()


@dataclass(slots=True, kw_only=True)
class _Found:
    """What lies where."""

    note: str
    files: list[TorchFile]
    ranks: list[Rank]
    shapes: dict[str, tuple[int, ...]]
    runs: dict[str, list[Run]]
    groups: Sequence[Shapes] = ()
    """Every vector's parameters."""
    flats: Flats = field(default_factory=dict)
    """Of the weights."""

    def __post_init__(self) -> None:
        self.flats |= {(n, group): flat for n, rank in enumerate(self.ranks) for group, flat in rank.masters.items()}


# The parts of all ranks


def _read_ranks(source: Source, save: Save, models: Sequence[TorchFile], path: str) -> _Found:
    for what, names in (("optimizer's", save.optimizers), ("model's", save.models or save.optimizers)):
        if lacking := set(range(max((0, *save.optimizers, *save.models)) + 1)) - names.keys():
            shown = first_few(list(map(str, sorted(lacking))), 6)
            hint = f"{ALL_RANKS}; --from deepspeed reads the model's weights" if save.model else ALL_RANKS
            raise UnreadableError(f"the {what} files of ranks are missing: {shown}", where=path, hint=hint)
    files = read_files(source, save.optimizers)
    ranks = [read_rank(file) for file in files]
    stage = ranks[0].stage
    for rank in ranks:
        if rank.counts - {len(ranks)} or rank.stage != stage or (stage == 3) != bool(save.models):
            counts = first_few(sorted(map(str, rank.counts)))
            what = f"it is of stage {rank.stage} of ZeRO on {counts} ranks; here are files of {len(ranks)} ranks"
            raise UnreadableError(what, where=rank.file, hint=ALL_RANKS)
    for model in models:
        check_number(model, "dp_world_size", len(ranks), ALL_RANKS)
        check_number(model, "mp_world_size", 1, MERGE)
    groups = read_shapes(content_of(models[0]).get("param_shapes"), models[0].name)
    for other in models[1:]:
        shapes = read_shapes(content_of(other).get("param_shapes"), other.name)
        if [list(each.items()) for each in shapes] != [list(each.items()) for each in groups]:
            raise UnreadableError("its parameters are not those of rank 0", where=other.name, hint=ALL_RANKS)
        check_number(other, "global_steps", integer_of(models[0], "global_steps", 0), ALL_RANKS)
    return _Found(
        note=f"reads the fp32 weights of ZeRO's stage {stage}, of {len(ranks)} ranks",
        files=files,
        ranks=ranks,
        shapes={name: shape for each in groups for name, shape in each.items()},
        runs=find_runs(ranks, groups),
        groups=groups,
    )


def _add_frozen(found: _Found, models: Sequence[TorchFile]) -> None:
    """Add what was not trained in stage 3: every rank has a part of each parameter, as it is computed with."""
    (shapes,) = read_shapes([content_of(models[0]).get("frozen_param_shapes") or {}], models[0].name)
    for name, shape in shapes.items():
        parts = []
        for file in models:
            fragments = content_of(file).get("frozen_param_fragments")
            flat = read_flat(file, fragments.get(name) if isinstance(fragments, dict) else None)
            if flat is None or len(flat.shape) != 1:
                raise UnreadableError(f"no part of the frozen parameter {name!r}", where=file.name, hint=ALL_RANKS)
            parts.append(Rank(file=file.name, stage=3, masters={0: flat}))
        runs = find_runs(parts, [{name: shape}])[name]
        found.shapes[name], found.runs[name] = shape, [replace(run, group=name) for run in runs]
        found.flats |= {(number, name): rank.masters[0] for number, rank in enumerate(parts)}


# The universal form: a directory for every parameter, with a file for each of its states


def _read_universal(source: Source, save: Save, models: Sequence[TorchFile]) -> _Found:
    rank = Rank(file=save.directory, stage=3 if save.models else 2)
    known = {}
    if models and not save.parts:  # otherwise these have parts of parameters
        check_number(models[0], "mp_world_size", 1, "copy the model's files of all ranks beside it")
        groups = read_shapes(content_of(models[0]).get("param_shapes"), models[0].name)
        known = {name: shape for each in groups for name, shape in each.items()}
    for model in models if save.model else ():
        if integer_of(model, "dp_world_size", 2) != 1 and is_shuffled(content_of(model).get("ds_config")):
            what = "made with round_robin_gradients, of which DeepSpeed's converter (0.19.8) takes the wrong elements"
            raise UnreadableError(what, where=model.name, hint="pass the directory that it was made from")
    files = []
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parts in save.universal.items():
        if known and (name not in known or "fp32" not in parts):  # else as the model's file has it
            continue
        for key in sorted(parts, key="fp32".__ne__):
            file = read_torch_file(source, parts[key])
            files.append(file)
            is_flat = not isinstance(file.value, dict)  # of stage 3, with padding
            value = file.value if is_flat else content_of(file).get("param")
            if key != "fp32" and name in shapes:
                rank.add_state(file, name, key, value)
                continue
            flat = read_flat(file, value)
            shape = known.get(name, () if flat is None or is_flat else flat.shape)
            most = len(models) - 1 if is_flat else 0
            is_whole = flat is not None and 0 <= flat.num_elems - math.prod(shape) <= most
            if key != "fp32" or flat is None or not is_whole or fqn_problem(name) is not None:
                raise UnreadableError(f"no whole parameter {name!r}", where=file.name, hint="convert it again")
            rank.masters[name], shapes[name] = flat, shape
    if lacking := [name for name in known if name not in shapes]:
        what = f"{len(lacking)} of {len(known)} parameters have no fp32 weights here: {first_few(lacking)}"
        raise UnreadableError(what, where=save.directory, hint="convert it again")
    return _Found(
        note="reads the fp32 weights of DeepSpeed's universal form",
        files=files,
        ranks=[rank],
        shapes=shapes,
        runs={n: [Run(start=0, num_elems=math.prod(s), rank=0, group=n, offset=0)] for n, s in shapes.items()},
    )


# The tensors


def _model(models: Sequence[TorchFile], found: _Found, *, is_stage_3: bool) -> Iterator[TensorEntry]:
    """Yield the model's tensors in its own order: fp32 where there is that, else as the model's file has them."""
    entries = {}
    for name, shape in found.shapes.items():
        dtype = found.flats[0, name].dtype if (0, name) in found.flats else _F32
        entries[name] = build_entry(("model", name), shape, found.runs[name], found.flats, dtype)
    content: Mapping[object, object] = content_of(models[0]) if models else {}
    shared, buffers = content.get("shared_params"), content.get("buffer_names")
    pieces = read_pieces(models[0], "module") if models else {}
    for name, piece in pieces.items():
        kept = shared.get(name) if isinstance(shared, dict) else None
        if name in entries:
            yield entries[name]
        elif type(kept) is str and kept in entries:
            yield replace(entries[kept], fqn=f"model.{name}", path=("model", name))
        elif is_stage_3 and 0 in piece.shape and not (isinstance(buffers, list) and name in buffers):
            what = f"{name!r} is in the file of no rank: it was neither trained nor frozen"
            hint = "save the model with stage3_gather_16bit_weights_on_model_save"
            raise UnreadableError(what, where=models[0].name, hint=hint)
        else:
            yield plain_entry(piece, ("model", name))
    yield from (entry for name, entry in entries.items() if name not in pieces)


def _options(found: _Found) -> Iterator[tuple[KeyPath, object]]:
    """Yield what the optimizer's groups say, with the names of their parameters, by the keys that FSDP2 has for it."""
    for number, options in enumerate(found.ranks[0].options if found.groups else ()):
        root: KeyPath = (ROOT, "param_groups", number)
        members = integers(options.get("params"))
        yield (*root, "params"), [fqn for each in members for fqn in (*found.groups[each : each + 1], {})[0]]
        for key, value in options.items():
            parts = value if isinstance(value, list | tuple) else [value]
            if type(key) is str and key not in ("params", "step") and all(type(each) in _PLAIN for each in parts):
                yield (*root, key), value


def _optimizer(found: _Found, source: Source, file: str, numbers: bytearray) -> Iterator[TensorEntry]:
    """Yield the optimizer's state of every parameter, named as FSDP2 has it; adds to what `file` has."""
    ranks = list(enumerate(found.ranks))
    for key in dict.fromkeys(key for rank in found.ranks for key in rank.states):
        flats: Flats = {(n, group): flat for n, rank in ranks for group, flat in rank.states.get(key, {}).items()}
        for name, shape in found.shapes.items():
            if any((run.rank, run.group) in flats for run in found.runs[name]):
                yield build_entry((ROOT, "state", name, key), shape, found.runs[name], flats, _F32)
    for key in dict.fromkeys(key for rank in found.ranks for key in rank.numbers):
        values = {
            (n, group): _number(value, source, rank.file)
            for n, rank in ranks
            for group, value in rank.numbers.get(key, {}).items()
        }
        for name in found.shapes:
            said = {values.get((run.rank, run.group)) for run in found.runs[name]}
            if len(said) > 1:
                what = f"the optimizer's {key} of {name!r} is {' and '.join(sorted(map(str, said)))}, by rank"
                raise UnreadableError(what, where=found.ranks[0].file, hint=ALL_RANKS)
            if said and (value := said.pop()) is not None:
                content = struct.pack("<f", value)
                span = ByteSpan(file=file, offset=len(numbers), nbytes=len(content))
                chunk = Chunk(box=Box((), ()), span=span, crc32=zlib.crc32(content))
                numbers += content
                path = (ROOT, "state", name, key)
                yield TensorEntry(fqn=".".join(path), dtype=_F32, shape=(), chunks=(chunk,), path=path)


def _number(value: object, source: Source, where: str) -> float:
    """Return a number of the optimizer's, or what a tensor of one element is."""
    if isinstance(value, Flat) and value.dtype.name in _NUMBERS:
        content = source.read(value.span.file, value.span.offset, value.span.nbytes)
        (value,) = struct.unpack(_NUMBERS[value.dtype.name], content)
    if not isinstance(value, int | float) or not abs(value) < _MOST:
        raise UnreadableError("a number of the optimizer's is of another dtype, or not finite", where=where)
    return float(value)
