"""The fp32 weights and the optimizer's state of DeepSpeed's ZeRO, from the parts of all ranks or the universal form.

Source: deepspeed 0.19.8 `runtime/engine.py` (`save_checkpoint`), `utils/zero_to_fp32.py`,
`checkpoint/ds_to_universal.py`.
"""

from __future__ import annotations

import math
import struct
import zlib
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from ckpt_tools.checkpoint.dtypes import BY_NAME, DType
from ckpt_tools.checkpoint.entries import ByteSpan, Chunk, KeyPath, TensorEntry, fqn_problem
from ckpt_tools.checkpoint.formats._pickle_values import Record
from ckpt_tools.checkpoint.formats._torch_file import TorchFile, read_torch_file
from ckpt_tools.checkpoint.formats._torch_pieces import read_piece
from ckpt_tools.checkpoint.formats.deepspeed import (
    ALL_RANKS,
    FROZEN,
    MERGE,
    Save,
    Shapes,
    check_number,
    content_of,
    find_save,
    integer_of,
    list_of,
    open_save,
    plain_entry,
    read_files,
    read_pieces,
    read_shapes,
)
from ckpt_tools.checkpoint.formats.format import Format, Opened
from ckpt_tools.checkpoint.formats.manifest import Manifest
from ckpt_tools.checkpoint.formats.rank_optimizer import ROOT, build_items
from ckpt_tools.checkpoint.layout import Box, flat_boxes
from ckpt_tools.errors import UnreadableError
from ckpt_tools.storage.source import Source
from ckpt_tools.storage.virtual import VirtualFile, VirtualSource
from ckpt_tools.text import first_few

# What the ranks of DeepSpeed's ZeRO have of a model: parts of flat vectors, and which elements of which parameter.
#
# Stages 1 and 2 lay the parameters of a group one after the other and give every rank a stretch of that. Stage 3 gives
# every rank a stretch of every parameter, and lays these one after the other. Nothing here is imported or called.
#
# Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py`, `stage3.py`, `runtime/bf16_optimizer.py` (`state_dict`),
# `utils/tensor_fragment.py`, `utils/zero_to_fp32.py`.

Flats = dict[tuple[int, Hashable], "Flat"]  # Rank, and which of its vectors (as `FlatRun.group`) → the vector


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """A tensor in a file, whose elements lie in their order."""

    span: ByteSpan
    dtype: DType
    shape: tuple[int, ...]

    @property
    def num_elems(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatRun:
    """Elements of a parameter, in row-major order, that lie side by side in one vector."""

    start: int  # First of these elements in the parameter
    num_elems: int
    rank: int
    group: Hashable  # Which of the rank's vectors: a group's number, or the name of a parameter with its own
    offset: int  # Of the first element in the vector


@dataclass(slots=True, kw_only=True)
class Rank:
    """What the optimizer keeps on one rank."""

    file: str
    stage: int
    counts: frozenset[int] = frozenset()  # In how many parts groups are cut, as the rank says
    masters: dict[Hashable, Flat] = field(default_factory=dict)  # Group, or sub-group in stage 3 → its fp32 weights
    addresses: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    """Of every group: name → first element in the vector, number of elements; none where nobody wrote it."""
    paddings: list[list[int]] = field(default_factory=list)
    """Of every group: elements between a parameter and the next; none where nobody wrote it."""
    states: dict[str, dict[Hashable, Flat]] = field(default_factory=dict)
    """Name of a state of the optimizer's → group → vector, in which elements lie as in that of the weights."""
    numbers: dict[str, dict[Hashable, object]] = field(default_factory=dict)
    """Name of a state → group → one number for all of the group, or where it lies."""
    options: list[dict[object, object]] = field(default_factory=list)  # Of every group; `params` number its vectors
    rest: list[str] = field(default_factory=list)  # States that are neither

    def add_state(self, file: TorchFile, group: Hashable, key: str, value: object) -> None:
        """Keep what the optimizer has of a group."""
        flat = read_flat(file, value) if group in self.masters else None
        if type(value) in (int, float) or (flat is not None and flat.shape == ()):
            self.numbers.setdefault(key, {})[group] = flat or value
        elif flat is not None and flat.num_elems >= self.masters[group].num_elems:
            self.states.setdefault(key, {})[group] = flat
        elif value is not None:
            self.rest.append(f"{group}.{key}")


def read_rank(file: TorchFile) -> Rank:
    """Read what the optimizer's file of a rank says."""
    content = file.value if isinstance(file.value, dict) else {}
    state = content.get("optimizer_state_dict")
    if not isinstance(state, dict):
        raise UnreadableError("no optimizer_state_dict: not a ZeRO rank file", where=file.name)
    if "ds_zero_partition_groups" in state:
        raise UnreadableError("experts shared by other ranks than the rest (AutoEP)", where=file.name, hint=MERGE)
    stage = state.get("zero_stage", 1)  # BF16_Optimizer does not say
    stage = stage.args[0] if isinstance(stage, Record) and stage.args else stage
    vectors = state.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    if type(stage) is not int or not 1 <= stage <= 3 or not isinstance(vectors, list):
        raise UnreadableError("no fp32 groups of ZeRO's stages 1 to 3", where=file.name)
    saved = state.get("partition_count")
    counts = frozenset(each if type(each) is int else -1 for each in (list_of(saved) or [saved]))
    found = Rank(file=file.name, stage=stage, counts=counts)
    for group, value in enumerate(vectors):
        flat = read_flat(file, value)
        if flat is None or len(flat.shape) != 1:
            raise UnreadableError(f"the fp32 weights of group {group} are not one vector", where=file.name)
        found.masters[group] = flat
    if not is_shuffled(content.get("ds_config")):
        found.addresses = [_addresses(each, file) for each in list_of(state.get("param_slice_mappings"))]
    found.paddings = [integers(each) for each in list_of(state.get("param_alignment_paddings"))]
    base = state.get("base_optimizer_state" if stage < 3 else "optimizer_state_dict")
    groups = base.get("state") if isinstance(base, dict) else dict(enumerate(list_of(base)))  # a list: elastic
    for group, states in groups.items() if isinstance(groups, dict) else ():
        for key, value in states.items() if isinstance(states, dict) else ():
            found.add_state(file, group, key if type(key) is str else "?", value)
    options = list_of(base.get("param_groups")) if isinstance(base, dict) else []
    found.options = [each for each in options if isinstance(each, dict)]
    for each in found.options:
        for member in integers(each.get("params")) if "step" in each else ():  # FusedAdam's, of older releases
            found.numbers.setdefault("step", {}).setdefault(member, each["step"])
    return found


def is_shuffled(config: object) -> bool:
    """Do ranks not have what they say (`param_slice_mappings`)? So it is with DeepSpeed 0.19.8's round robin."""
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    return isinstance(zero, dict) and zero.get("round_robin_gradients") is True


def integers(value: object) -> list[int]:
    """Return the integers in a list."""
    return [each for each in list_of(value) if type(each) is int]


def read_flat(file: TorchFile, value: object) -> Flat | None:
    """Return a tensor of a file; None where that is none, or its storage does not hold its elements in their order."""
    try:
        piece = read_piece(file, (), value, {}) if type(value) is Record else None
    except UnreadableError:
        return None
    if piece is None or len(piece.chunks) != 1 or piece.chunks[0].strides is not None:
        return None
    return Flat(span=piece.chunks[0].span, dtype=piece.dtype, shape=piece.shape)


def _addresses(mapping: object, file: TorchFile) -> dict[str, tuple[int, int]]:
    found = {}
    for name, address in mapping.items() if isinstance(mapping, dict) else ():
        fields = address.state if type(address) is Record else None
        start, num_elems = (fields.get("start"), fields.get("numel")) if isinstance(fields, dict) else (None, None)
        if type(name) is not str or type(start) is not int or type(num_elems) is not int:
            raise UnreadableError("the positions of parameters are stored in an unknown form", where=file.name)
        found[name] = (start, num_elems)
    return found


def find_runs(ranks: Sequence[Rank], groups: Sequence[Shapes]) -> dict[str, list[FlatRun]]:
    """Return where the elements of every trained parameter lie, in their order."""
    shapes = {name: shape for each in groups for name, shape in each.items()}
    if len(shapes) != sum(map(len, groups)):
        raise UnreadableError("a parameter is in two groups", where=ranks[0].file)
    runs: dict[str, list[FlatRun]] = {}
    if ranks[0].stage == 3:
        runs = _by_parts(ranks, shapes)
    else:
        for rank in ranks:
            if len(rank.masters) != len(groups):
                what = f"{len(rank.masters)} groups, but the model's file has {len(groups)}"
                raise UnreadableError(what, where=rank.file, hint=ALL_RANKS)
        for group, each in enumerate(groups):
            runs |= _by_order(ranks, group, each)
    for name, shape in shapes.items():
        held = sum(run.num_elems for run in runs[name])
        if held != math.prod(shape):
            what = f"the ranks have {held} elements of {name!r}, its shape {list(shape)} has {math.prod(shape)}"
            raise UnreadableError(what, where=ranks[0].file, hint=ALL_RANKS)
    return runs


def _by_order(ranks: Sequence[Rank], group: int, shapes: Shapes) -> dict[str, list[FlatRun]]:
    """Stages 1 and 2: count through the stretches of all ranks, and hold that against what every rank says of its."""
    ends = list(accumulate(rank.masters[group].num_elems for rank in ranks))
    paddings = ranks[0].paddings[group] if group < len(ranks[0].paddings) else [0] * len(shapes)
    if len(paddings) != len(shapes) or min(paddings, default=0) < 0:
        raise UnreadableError(f"the paddings of group {group} do not match its parameters", where=ranks[0].file)
    runs, position = {}, 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        runs[name] = [
            FlatRun(start=start, num_elems=count, rank=number, group=group, offset=offset)
            for start, number, offset, count in _take(ends, position, math.prod(shape))
        ]
        position += math.prod(shape) + padding
    align = 2 * len(ranks)
    if -(-position // align) != -(-ends[-1] // align):
        what = f"the parameters of group {group} have {position} elements, but the ranks' vectors have {ends[-1]}"
        raise UnreadableError(what, where=ranks[0].file, hint=ALL_RANKS)
    said = [rank.addresses[group] if group < len(rank.addresses) else {} for rank in ranks]
    counted: list[dict[str, tuple[int, int]]] = [{} for _ in ranks]
    for name, each in runs.items():
        for run in each:
            counted[run.rank][name] = (run.offset, run.num_elems)
    for rank, theirs, ours in zip(ranks, said, counted, strict=True):
        if any(said) and theirs != ours:  # BF16_Optimizer may write empty ones
            what = f"its stretch of group {group} does not match the order of the parameters"
            raise UnreadableError(what, where=rank.file, hint=ALL_RANKS)
    return runs


def _by_parts(ranks: Sequence[Rank], shapes: Shapes) -> dict[str, list[FlatRun]]:
    """Stage 3: of each parameter every rank has as much, one after the other through all sub-groups."""
    runs: dict[str, list[FlatRun]] = {name: [] for name in shapes}
    ends = [list(accumulate(flat.num_elems for flat in rank.masters.values())) for rank in ranks]
    position = 0
    for name, shape in shapes.items():
        total = math.prod(shape)
        part = -(-total // len(ranks))  # with padding
        for number, of_rank in enumerate(ends):
            first = min(number * part, total)
            runs[name] += [
                FlatRun(start=first + start, num_elems=count, rank=number, group=group, offset=offset)
                for start, group, offset, count in _take(of_rank, position, min(part, total - first))
            ]
        position += part
    for rank, of_rank in zip(ranks, ends, strict=True):
        held = of_rank[-1] if of_rank else 0
        if held != position:
            what = f"its vectors have {held} elements, but its parts of the parameters have {position}"
            raise UnreadableError(what, where=rank.file, hint=ALL_RANKS)
    return runs


def _take(ends: Sequence[int], position: int, count: int) -> Iterator[tuple[int, int, int, int]]:
    """Find elements in vectors that follow one another: (how many before, which vector, offset in it, how many)."""
    # Fewer come where the vectors end before.
    done, number = 0, bisect_right(ends, position)
    while done < count and number < len(ends):
        start = position + done
        taken = min(ends[number] - start, count - done)
        if taken:
            yield done, number, start - (ends[number - 1] if number else 0), taken
        done, number = done + taken, number + 1


def build_entry(
    path: KeyPath, shape: tuple[int, ...], runs: Sequence[FlatRun], flats: Flats, dtype: DType
) -> TensorEntry:
    """Return the tensor that lies so in vectors of this rank and group; `dtype` where it has no elements."""
    fqn = ".".join(map(str, path))
    chunks = []
    for run in runs:
        flat = flats.get((run.rank, run.group))
        if flat is None or run.offset + run.num_elems > flat.num_elems:
            raise UnreadableError(f"rank {run.rank} does not have its part of {fqn!r}", hint=ALL_RANKS)
        if run is not runs[0] and flat.dtype != dtype:
            what = f"rank {run.rank} has {fqn!r} as {flat.dtype.name}, rank {runs[0].rank} as {dtype.name}"
            raise UnreadableError(what, hint=ALL_RANKS)
        dtype, position = flat.dtype, flat.span.offset + flat.dtype.num_bytes(run.offset)
        for box in flat_boxes(shape, run.start, run.start + run.num_elems):
            span = ByteSpan(file=flat.span.file, offset=position, nbytes=dtype.num_bytes(box.num_elems))
            chunks.append(Chunk(box=box, span=span))
            position += span.nbytes
    return TensorEntry(fqn=fqn, dtype=dtype, shape=shape, chunks=tuple(chunks), path=path)


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
class _ZeroLayout:
    """What lies where."""

    note: str
    files: list[TorchFile]
    ranks: list[Rank]
    shapes: dict[str, tuple[int, ...]]
    runs: dict[str, list[FlatRun]]
    groups: Sequence[Shapes] = ()  # Every vector's parameters
    flats: Flats = field(default_factory=dict)  # Of the weights

    def __post_init__(self) -> None:
        self.flats |= {(n, group): flat for n, rank in enumerate(self.ranks) for group, flat in rank.masters.items()}


# The parts of all ranks


def _read_ranks(source: Source, save: Save, models: Sequence[TorchFile], path: str) -> _ZeroLayout:
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
            what = f"it is from ZeRO stage {rank.stage} on {counts} ranks, but there are files of {len(ranks)} ranks"
            raise UnreadableError(what, where=rank.file, hint=ALL_RANKS)
    for model in models:
        check_number(model, "dp_world_size", len(ranks), ALL_RANKS)
        check_number(model, "mp_world_size", 1, MERGE)
    groups = read_shapes(content_of(models[0]).get("param_shapes"), models[0].name)
    for other in models[1:]:
        shapes = read_shapes(content_of(other).get("param_shapes"), other.name)
        if [list(each.items()) for each in shapes] != [list(each.items()) for each in groups]:
            raise UnreadableError("its parameters differ from those of rank 0", where=other.name, hint=ALL_RANKS)
        check_number(other, "global_steps", integer_of(models[0], "global_steps", 0), ALL_RANKS)
    return _ZeroLayout(
        note=f"reads the fp32 weights of ZeRO's stage {stage}, of {len(ranks)} ranks",
        files=files,
        ranks=ranks,
        shapes={name: shape for each in groups for name, shape in each.items()},
        runs=find_runs(ranks, groups),
        groups=groups,
    )


def _add_frozen(found: _ZeroLayout, models: Sequence[TorchFile]) -> None:
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


def _read_universal(source: Source, save: Save, models: Sequence[TorchFile]) -> _ZeroLayout:
    rank = Rank(file=save.directory, stage=3 if save.models else 2)
    known = {}
    if models and not save.parts:  # otherwise these have parts of parameters
        check_number(models[0], "mp_world_size", 1, "copy the model's files of all ranks beside it")
        groups = read_shapes(content_of(models[0]).get("param_shapes"), models[0].name)
        known = {name: shape for each in groups for name, shape in each.items()}
    for model in models if save.model else ():
        if integer_of(model, "dp_world_size", 2) != 1 and is_shuffled(content_of(model).get("ds_config")):
            what = "made with round_robin_gradients, for which DeepSpeed's converter (0.19.8) picks the wrong elements"
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
    return _ZeroLayout(
        note="reads the fp32 weights of DeepSpeed's universal form",
        files=files,
        ranks=[rank],
        shapes=shapes,
        runs={n: [FlatRun(start=0, num_elems=math.prod(s), rank=0, group=n, offset=0)] for n, s in shapes.items()},
    )


# The tensors


def _model(models: Sequence[TorchFile], found: _ZeroLayout, *, is_stage_3: bool) -> Iterator[TensorEntry]:
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


def _options(found: _ZeroLayout) -> Iterator[tuple[KeyPath, object]]:
    """Yield what the optimizer's groups say, with the names of their parameters, by the keys that FSDP2 has for it."""
    for number, options in enumerate(found.ranks[0].options if found.groups else ()):
        root: KeyPath = (ROOT, "param_groups", number)
        members = integers(options.get("params"))
        yield (*root, "params"), [fqn for each in members for fqn in (*found.groups[each : each + 1], {})[0]]
        for key, value in options.items():
            parts = value if isinstance(value, list | tuple) else [value]
            if type(key) is str and key not in ("params", "step") and all(type(each) in _PLAIN for each in parts):
                yield (*root, key), value


def _optimizer(found: _ZeroLayout, source: Source, file: str, numbers: bytearray) -> Iterator[TensorEntry]:
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
        raise UnreadableError("an optimizer number has another dtype or is not finite", where=where)
    return float(value)
