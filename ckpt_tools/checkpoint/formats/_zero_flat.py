"""What the ranks of DeepSpeed's ZeRO have of a model: parts of flat vectors, and which elements of which parameter.

Stages 1 and 2 lay the parameters of a group one after the other and give every rank a stretch of that. Stage 3 gives
every rank a stretch of every parameter, and lays these one after the other. Nothing here is imported or called.

Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py`, `stage3.py`, `runtime/bf16_optimizer.py` (`state_dict`),
`utils/tensor_fragment.py`, `utils/zero_to_fp32.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.entries import ByteSpan, Chunk, KeyPath, TensorEntry, fqn_problem, is_possible_shape
from ckpt_tools.checkpoint.flat import flat_boxes
from ckpt_tools.checkpoint.formats._pickle_values import Record
from ckpt_tools.checkpoint.formats._torch_file import TorchFile
from ckpt_tools.checkpoint.formats._torch_pieces import read_piece
from ckpt_tools.checkpoint.formats._torch_state import MAX_TENSORS
from ckpt_tools.checkpoint.formats._zero_files import ALL_RANKS, MERGE
from ckpt_tools.errors import LimitError, UnreadableError

Shapes = Mapping[str, tuple[int, ...]]
"""Name of a parameter → its shape, in the order in which parameters lie."""
Flats = dict[tuple[int, Hashable], "Flat"]
"""Rank, and which of its vectors (as `Run.group`) → the vector."""


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
class Run:
    """Elements of a parameter, in row-major order, that lie side by side in one vector."""

    start: int
    """First of these elements in the parameter."""
    num_elems: int
    rank: int
    group: Hashable
    """Which of the rank's vectors: number of a group, or the name of a parameter that has one of its own."""
    offset: int
    """Of the first element in the vector."""


@dataclass(slots=True, kw_only=True)
class Rank:
    """What the optimizer keeps on one rank."""

    file: str
    stage: int
    counts: frozenset[int] = frozenset()
    """In how many parts groups are cut, as the rank says."""
    masters: dict[Hashable, Flat] = field(default_factory=dict)
    """Group, or sub-group in stage 3 → its fp32 weights."""
    addresses: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    """Of every group: name → first element in the vector, number of elements; none where nobody wrote it."""
    paddings: list[list[int]] = field(default_factory=list)
    """Of every group: elements between a parameter and the next; none where nobody wrote it."""
    states: dict[str, dict[Hashable, Flat]] = field(default_factory=dict)
    """Name of a state of the optimizer's → group → vector, in which elements lie as in that of the weights."""
    numbers: dict[str, dict[Hashable, object]] = field(default_factory=dict)
    """Name of a state → group → one number for all of the group, or where it lies."""
    options: list[dict[object, object]] = field(default_factory=list)
    """Of every group of the optimizer's; `params` are the numbers of its vectors."""
    rest: list[str] = field(default_factory=list)
    """States that are neither."""

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
        raise UnreadableError("no optimizer_state_dict: not a rank's file of ZeRO's", where=file.name)
    if "ds_zero_partition_groups" in state:
        raise UnreadableError("experts that other ranks share than the rest (AutoEP)", where=file.name, hint=MERGE)
    stage = state.get("zero_stage", 1)  # BF16_Optimizer does not say
    stage = stage.args[0] if isinstance(stage, Record) and stage.args else stage
    vectors = state.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    if type(stage) is not int or not 1 <= stage <= 3 or not isinstance(vectors, list):
        raise UnreadableError("no fp32 groups of ZeRO's stages 1 to 3", where=file.name)
    saved = state.get("partition_count")
    counts = frozenset(each if type(each) is int else -1 for each in (_list(saved) or [saved]))
    found = Rank(file=file.name, stage=stage, counts=counts)
    for group, value in enumerate(vectors):
        flat = read_flat(file, value)
        if flat is None or len(flat.shape) != 1:
            raise UnreadableError(f"the fp32 weights of group {group} are not one vector", where=file.name)
        found.masters[group] = flat
    if not is_shuffled(content.get("ds_config")):
        found.addresses = [_addresses(each, file) for each in _list(state.get("param_slice_mappings"))]
    found.paddings = [integers(each) for each in _list(state.get("param_alignment_paddings"))]
    base = state.get("base_optimizer_state" if stage < 3 else "optimizer_state_dict")
    groups = base.get("state") if isinstance(base, dict) else dict(enumerate(_list(base)))  # a list: elastic
    for group, states in groups.items() if isinstance(groups, dict) else ():
        for key, value in states.items() if isinstance(states, dict) else ():
            found.add_state(file, group, key if type(key) is str else "?", value)
    options = _list(base.get("param_groups")) if isinstance(base, dict) else []
    found.options = [each for each in options if isinstance(each, dict)]
    for each in found.options:
        for member in integers(each.get("params")) if "step" in each else ():  # FusedAdam's, of older releases
            found.numbers.setdefault("step", {}).setdefault(member, each["step"])
    return found


def is_shuffled(config: object) -> bool:
    """Do ranks not have what they say (`param_slice_mappings`)? So it is with DeepSpeed 0.19.8's round robin."""
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    return isinstance(zero, dict) and zero.get("round_robin_gradients") is True


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else []


def integers(value: object) -> list[int]:
    """Return the integers in a list."""
    return [each for each in _list(value) if type(each) is int]


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
            raise UnreadableError("where parameters lie is not said in a way that is known", where=file.name)
        found[name] = (start, num_elems)
    return found


def read_shapes(value: object, where: str) -> list[Shapes]:
    """Return the shapes of every group's parameters, in their order."""
    groups: list[Shapes] = []
    for group in value if isinstance(value, list) else [None]:
        if not isinstance(group, dict):
            raise UnreadableError("no param_shapes: not a file of ZeRO's", where=where)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in group.items():
            saved = shape.args[0] if type(shape) is Record and shape.name == "torch.Size" and shape.args else shape
            sizes = tuple(n for n in _list(saved) if type(n) is int and n >= 0)
            is_whole = isinstance(saved, tuple | list) and len(sizes) == len(saved)
            if type(name) is not str or fqn_problem(name) or not is_whole or not is_possible_shape(sizes):
                raise UnreadableError(f"the shape of parameter {len(shapes)} is not one, or its name", where=where)
            shapes[name] = sizes
        groups.append(shapes)
    if sum(map(len, groups)) > MAX_TENSORS:
        raise LimitError(f"more than {MAX_TENSORS} parameters", where=where)
    return groups


def find_runs(ranks: Sequence[Rank], groups: Sequence[Shapes]) -> dict[str, list[Run]]:
    """Return where the elements of every trained parameter lie, in their order."""
    shapes = {name: shape for each in groups for name, shape in each.items()}
    if len(shapes) != sum(map(len, groups)):
        raise UnreadableError("a parameter is in two groups", where=ranks[0].file)
    runs: dict[str, list[Run]] = {}
    if ranks[0].stage == 3:
        runs = _by_parts(ranks, shapes)
    else:
        for rank in ranks:
            if len(rank.masters) != len(groups):
                what = f"{len(rank.masters)} groups, and the model's file has {len(groups)}"
                raise UnreadableError(what, where=rank.file, hint=ALL_RANKS)
        for group, each in enumerate(groups):
            runs |= _by_order(ranks, group, each)
    for name, shape in shapes.items():
        held = sum(run.num_elems for run in runs[name])
        if held != math.prod(shape):
            what = f"the ranks have {held} elements of {name!r}, its shape {list(shape)} has {math.prod(shape)}"
            raise UnreadableError(what, where=ranks[0].file, hint=ALL_RANKS)
    return runs


def _by_order(ranks: Sequence[Rank], group: int, shapes: Shapes) -> dict[str, list[Run]]:
    """Stages 1 and 2: count through the stretches of all ranks, and hold that against what every rank says of its."""
    ends = list(accumulate(rank.masters[group].num_elems for rank in ranks))
    paddings = ranks[0].paddings[group] if group < len(ranks[0].paddings) else [0] * len(shapes)
    if len(paddings) != len(shapes) or min(paddings, default=0) < 0:
        raise UnreadableError(f"the paddings of group {group} are not those of its parameters", where=ranks[0].file)
    runs, position = {}, 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        runs[name] = [
            Run(start=start, num_elems=count, rank=number, group=group, offset=offset)
            for start, number, offset, count in _take(ends, position, math.prod(shape))
        ]
        position += math.prod(shape) + padding
    align = 2 * len(ranks)
    if -(-position // align) != -(-ends[-1] // align):
        what = f"the parameters of group {group} have {position} elements, the ranks' vectors {ends[-1]}"
        raise UnreadableError(what, where=ranks[0].file, hint=ALL_RANKS)
    said = [rank.addresses[group] if group < len(rank.addresses) else {} for rank in ranks]
    counted: list[dict[str, tuple[int, int]]] = [{} for _ in ranks]
    for name, each in runs.items():
        for run in each:
            counted[run.rank][name] = (run.offset, run.num_elems)
    for rank, theirs, ours in zip(ranks, said, counted, strict=True):
        if any(said) and theirs != ours:  # BF16_Optimizer may write empty ones
            what = f"its stretch of group {group} is not the one that the order of the parameters gives it"
            raise UnreadableError(what, where=rank.file, hint=ALL_RANKS)
    return runs


def _by_parts(ranks: Sequence[Rank], shapes: Shapes) -> dict[str, list[Run]]:
    """Stage 3: of each parameter every rank has as much, one after the other through all sub-groups."""
    runs: dict[str, list[Run]] = {name: [] for name in shapes}
    ends = [list(accumulate(flat.num_elems for flat in rank.masters.values())) for rank in ranks]
    position = 0
    for name, shape in shapes.items():
        total = math.prod(shape)
        part = -(-total // len(ranks))  # with padding
        for number, of_rank in enumerate(ends):
            first = min(number * part, total)
            runs[name] += [
                Run(start=first + start, num_elems=count, rank=number, group=group, offset=offset)
                for start, group, offset, count in _take(of_rank, position, min(part, total - first))
            ]
        position += part
    for rank, of_rank in zip(ranks, ends, strict=True):
        held = of_rank[-1] if of_rank else 0
        if held != position:
            what = f"its vectors have {held} elements, its parts of the parameters {position}"
            raise UnreadableError(what, where=rank.file, hint=ALL_RANKS)
    return runs


def _take(ends: Sequence[int], position: int, count: int) -> Iterator[tuple[int, int, int, int]]:
    """Find elements in vectors that follow one another: (how many before, which vector, offset in it, how many).

    Fewer come where the vectors end before.
    """
    done, number = 0, bisect_right(ends, position)
    while done < count and number < len(ends):
        start = position + done
        taken = min(ends[number] - start, count - done)
        if taken:
            yield done, number, start - (ends[number - 1] if number else 0), taken
        done, number = done + taken, number + 1


def build_entry(path: KeyPath, shape: tuple[int, ...], runs: Sequence[Run], flats: Flats, dtype: DType) -> TensorEntry:
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
