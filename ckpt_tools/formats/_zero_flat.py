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
from itertools import accumulate, pairwise

from ckpt_tools.description.checkpoint import ByteSpan, Chunk, KeyPath, TensorEntry, is_possible_shape
from ckpt_tools.description.dtypes import DType
from ckpt_tools.description.flat import flat_boxes
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats._pickle_values import Record
from ckpt_tools.formats._torch_file import TorchFile
from ckpt_tools.formats._torch_pieces import read_piece

Shapes = Mapping[str, tuple[int, ...]]
"""Name of a parameter → its shape, in the order in which parameters lie."""
Flats = dict[tuple[int, Hashable], "Flat"]
"""Rank, and which of its vectors (as `Run.group`) → the vector."""
_SHARE = "restore the files of one save, of all ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """A vector in a file."""

    span: ByteSpan
    dtype: DType
    num_elems: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Elements of a parameter, in row-major order, that lie side by side in one vector."""

    start: int
    """First of these elements in the parameter."""
    num_elems: int
    rank: int
    group: Hashable
    """Which of the rank's vectors: number of a group, or the name of a frozen parameter."""
    offset: int
    """Of the first element in the vector."""


@dataclass(slots=True, kw_only=True)
class Rank:
    """What the optimizer's file of one rank holds."""

    file: str
    stage: int
    counts: frozenset[int]
    """In how many parts a group is cut, as the rank says."""
    masters: list[Flat]
    """Of every group, or sub-group in stage 3."""
    addresses: list[dict[str, tuple[int, int]]]
    """Of every group: name → first element in the vector, number of elements; empty where nobody wrote it."""
    is_shuffled: bool
    """The addresses are not those of the order that parameters lie in (`round_robin_gradients`)."""
    paddings: list[list[int]]
    """Of every group: elements between a parameter and the next; empty where nobody wrote it."""
    states: dict[str, dict[int, Flat]] = field(default_factory=dict)
    """Name of a state of the optimizer's → group → vector, as long as that of the masters or longer."""
    numbers: dict[str, dict[int, object]] = field(default_factory=dict)
    """Name of a state → group → one number for all of the group, or where it lies."""
    rest: list[str] = field(default_factory=list)
    """States that are neither."""

    @property
    def lengths(self) -> list[int]:
        """Elements of every vector."""
        return [flat.num_elems for flat in self.masters]


def read_rank(file: TorchFile) -> Rank:
    """Read what the optimizer's file of a rank says.

    Raises:
        UnreadableError: It is none of ZeRO's.
    """
    content = file.value if isinstance(file.value, dict) else {}
    state = content.get("optimizer_state_dict")
    if not isinstance(state, dict):
        raise UnreadableError("no optimizer_state_dict: not a rank's file of ZeRO's", where=file.name)
    if "ds_zero_partition_groups" in state:
        raise UnreadableError(
            "experts of AutoEP, which other ranks share than the rest of the model", where=file.name, hint=_universal()
        )
    saved = state.get("zero_stage")
    if isinstance(saved, Record) and saved.name.endswith(".ZeroStageEnum"):
        saved = saved.args[0] if saved.args else None
    flats = state.get("fp32_flat_groups" if saved == 3 else "single_partition_of_fp32_groups")
    if saved not in (None, 1, 2, 3) or not isinstance(flats, list | tuple):  # BF16_Optimizer says no stage
        raise UnreadableError("no fp32 groups of ZeRO's stages 1 to 3", where=file.name)
    counts = state.get("partition_count")
    found = Rank(
        file=file.name,
        stage=saved if isinstance(saved, int) else 1,
        counts=frozenset(each for each in (counts if isinstance(counts, list) else [counts]) if type(each) is int),
        masters=[_flat(file, ("fp32", i), value) for i, value in enumerate(flats)],
        is_shuffled=_is_shuffled(content.get("ds_config")),
        addresses=[_addresses(each, file) for each in _list(state.get("param_slice_mappings"))],
        paddings=[[n for n in _list(each) if type(n) is int] for each in _list(state.get("param_alignment_paddings"))],
    )
    base = state.get("base_optimizer_state" if found.stage < 3 else "optimizer_state_dict")
    _read_states(file, base, found)
    return found


def _is_shuffled(config: object) -> bool:
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    return isinstance(zero, dict) and zero.get("round_robin_gradients") is True


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else []


def _flat(file: TorchFile, path: KeyPath, value: object) -> Flat:
    """Return a vector of a file."""
    if type(value) is not Record:
        raise UnreadableError(f"{path[0]} of group {path[-1]} is not a tensor", where=file.name)
    try:
        piece = read_piece(file, path, value, {})
    except UnreadableError as error:
        raise type(error)(error.what, where=file.name, hint=error.hint) from error
    (chunk, *more) = piece.chunks
    if len(piece.shape) != 1 or more or chunk.strides is not None:
        raise UnreadableError(f"{path[0]} of group {path[-1]} is not one vector", where=file.name)
    return Flat(span=chunk.span, dtype=piece.dtype, num_elems=piece.shape[0])


def frozen_flat(file: TorchFile, name: str, value: object) -> Flat:
    """Return what a rank has of a frozen parameter."""
    return _flat(file, ("frozen", name), value)


def _addresses(mapping: object, file: TorchFile) -> dict[str, tuple[int, int]]:
    found = {}
    for name, address in mapping.items() if isinstance(mapping, dict) else ():
        fields = address.state if type(address) is Record else None
        start, num_elems = (fields.get("start"), fields.get("numel")) if isinstance(fields, dict) else (None, None)
        if type(name) is not str or type(start) is not int or type(num_elems) is not int or min(start, num_elems) < 0:
            raise UnreadableError(f"where {str(name)!r} lies is not said in a way that is known", where=file.name)
        found[name] = (start, num_elems)
    return found


def _read_states(file: TorchFile, base: object, found: Rank) -> None:
    """Sort what the optimizer keeps of every group."""
    groups: dict[object, object] = {}
    if isinstance(base, dict) and isinstance(base.get("state"), dict):
        groups = base["state"]
    elif isinstance(base, list):  # an elastic checkpoint of stages 1 and 2
        groups = dict(enumerate(base))
    for group, state in groups.items():
        if type(group) is not int or not 0 <= group < len(found.masters) or not isinstance(state, dict):
            found.rest.append(f"state.{group}")
            continue
        for key, value in state.items():
            if value is not None and not _add_state(file, group, str(key), value, found):
                found.rest.append(f"state.{group}.{key}")
    options = base.get("param_groups") if isinstance(base, dict) else None
    for group, each in enumerate(_list(options)):
        if not isinstance(each, dict) or type(each.get("step")) is not int:
            continue
        for member in _list(each.get("params")) if found.stage == 3 else [group]:
            if type(member) is int:
                found.numbers.setdefault("step", {}).setdefault(member, each["step"])


def _add_state(file: TorchFile, group: int, key: str, value: object, found: Rank) -> bool:
    """Keep what the optimizer has of a group, where it is a number or goes with the elements."""
    if type(value) in (int, float):
        found.numbers.setdefault(key, {})[group] = value
        return True
    if type(value) is not Record:
        return False
    try:
        piece = read_piece(file, ("state", group, key), value, {})
    except UnreadableError:
        return False
    if piece.shape == () and len(piece.chunks) == 1:
        found.numbers.setdefault(key, {})[group] = piece
        return True
    if len(piece.shape) == 1 and piece.shape[0] >= found.masters[group].num_elems:
        found.states.setdefault(key, {})[group] = _flat(file, (key, group), value)
        return True
    return False


# Shapes


def read_shapes(value: object, where: str) -> list[Shapes]:
    """Return the shapes of every group's parameters, in their order.

    Raises:
        UnreadableError: They are not written as DeepSpeed does.
    """
    groups: list[Shapes] = []
    for group in value if isinstance(value, list) else [None]:
        if not isinstance(group, dict):
            raise UnreadableError("no param_shapes: not a file of ZeRO's", where=where)
        shapes = {}
        for name, shape in group.items():
            sizes = shape.args[0] if type(shape) is Record and shape.name == "torch.Size" and shape.args else shape
            sizes = tuple(sizes) if isinstance(sizes, list | tuple) else ()
            is_sound = type(name) is str and isinstance(shape, Record | list | tuple)
            if not is_sound or not all(type(n) is int and n >= 0 for n in sizes) or not is_possible_shape(sizes):
                raise UnreadableError(f"the shape of {str(name)!r} is not one", where=where)
            shapes[name] = sizes
        groups.append(shapes)
    return groups


# Where parameters lie


def find_runs(ranks: Sequence[Rank], groups: Sequence[Shapes]) -> dict[str, list[Run]]:
    """Return where the elements of every trained parameter lie, in their order.

    Raises:
        UnreadableError: The ranks' vectors do not hold exactly these parameters.
    """
    if len({name for shapes in groups for name in shapes}) != sum(map(len, groups)):
        raise UnreadableError("a parameter is in two groups", where=ranks[0].file)
    if ranks[0].stage == 3:
        runs = _by_parts(ranks, {name: shape for shapes in groups for name, shape in shapes.items()})
    else:
        for rank in ranks:
            if len(rank.masters) != len(groups):
                what = f"{len(rank.masters)} groups, the model's file has {len(groups)}"
                raise UnreadableError(what, where=rank.file, hint=_SHARE)
        runs = {}
        for group, shapes in enumerate(groups):
            found = _by_order(ranks, group, shapes)
            _check_addresses(ranks, group, found)
            runs |= found
    for shapes in groups:
        for name, shape in shapes.items():
            held = sum(run.num_elems for run in runs[name])
            if held != math.prod(shape):
                what = f"the ranks have {held} elements of {name!r}, its shape {list(shape)} has {math.prod(shape)}"
                raise UnreadableError(what, where=ranks[0].file, hint=_SHARE)
    _check_runs(ranks, runs)
    return runs


def _by_order(ranks: Sequence[Rank], group: int, shapes: Shapes) -> dict[str, list[Run]]:
    """Count through the stretches of all ranks, as `zero_to_fp32` does."""
    ends = list(accumulate(rank.lengths[group] for rank in ranks))
    paddings = ranks[0].paddings[group] if group < len(ranks[0].paddings) else []
    if any(n < 0 for n in paddings) or (paddings and len(paddings) != len(shapes)):
        raise UnreadableError(f"the paddings of group {group} are not those of its parameters", where=ranks[0].file)
    runs, position = {}, 0
    for name, padding in zip(shapes, paddings or [0] * len(shapes), strict=True):
        runs[name] = [
            Run(start=start, num_elems=count, rank=number, group=group, offset=offset)
            for start, number, offset, count in _take(ends, position, math.prod(shapes[name]))
        ]
        position += math.prod(shapes[name]) + padding
    align = 2 * len(ranks)
    if -(-position // align) != -(-ends[-1] // align):
        what = f"the parameters of group {group} have {position} elements, the ranks' vectors {ends[-1]}"
        raise UnreadableError(what, where=ranks[0].file, hint=_SHARE)
    return runs


def _check_addresses(ranks: Sequence[Rank], group: int, runs: Mapping[str, Sequence[Run]]) -> None:
    """Hold it against what every rank says itself of its stretch: a file in the place of another is noticed so."""
    said = [rank.addresses[group] if group < len(rank.addresses) else {} for rank in ranks]
    if not any(said) or ranks[0].is_shuffled:
        return
    counted: list[dict[str, tuple[int, int]]] = [{} for _ in ranks]
    for name, each in runs.items():
        for run in each:
            counted[run.rank][name] = (run.offset, run.num_elems)
    for rank, theirs, ours in zip(ranks, said, counted, strict=True):
        if theirs != ours:
            name = next(iter({**theirs, **ours}.items() - (theirs.items() & ours.items())))[0]
            what = f"{name!r} is said to lie elsewhere in group {group} than the order of the parameters has it"
            raise UnreadableError(what, where=rank.file, hint=_SHARE)


def _by_parts(ranks: Sequence[Rank], shapes: Shapes) -> dict[str, list[Run]]:
    """Stage 3: of each parameter every rank has as much, one after the other through all sub-groups."""
    runs: dict[str, list[Run]] = {name: [] for name in shapes}
    ends = [list(accumulate(rank.lengths)) for rank in ranks]
    position = 0
    for name, shape in shapes.items():
        part, total = part_of(shape, len(ranks)), math.prod(shape)
        for number in range(len(ranks)):
            first = min(number * part, total)
            runs[name] += [
                Run(start=first + start, num_elems=count, rank=number, group=group, offset=offset)
                for start, group, offset, count in _take(ends[number], position, min(part, total - first))
            ]
        position += part
    for rank in ranks:
        if sum(rank.lengths) != position:
            what = f"its vectors have {sum(rank.lengths)} elements, its parts of the parameters {position}"
            raise UnreadableError(what, where=rank.file, hint=_SHARE)
    return runs


def part_of(shape: tuple[int, ...], num_ranks: int) -> int:
    """Return how many elements of a parameter every rank has in stage 3, with padding."""
    return -(-math.prod(shape) // num_ranks)


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


def _end(run: Run) -> int:
    return run.offset + run.num_elems


def _check_runs(ranks: Sequence[Rank], runs: Mapping[str, Sequence[Run]]) -> None:
    """No two parameters share elements of a vector, and none lies outside of it."""
    places: dict[tuple[int, Hashable], list[tuple[int, int, str]]] = {}
    for name, each in runs.items():
        for run in each:
            places.setdefault((run.rank, run.group), []).append((run.offset, _end(run), name))
    for (number, group), found in places.items():
        found.sort()
        for (_, end, one), (start, _, other) in pairwise(found):
            if start < end:
                what = f"{one!r} and {other!r} share elements of group {group}"
                raise UnreadableError(what, where=ranks[number].file, hint=_SHARE)
        _, end, name = max(found, key=lambda place: place[1])
        if isinstance(group, int) and end > ranks[number].lengths[group]:
            what = f"{name!r} ends at element {end} of a vector of {ranks[number].lengths[group]}"
            raise UnreadableError(what, where=ranks[number].file, hint=_SHARE)


def build_entry(path: KeyPath, shape: tuple[int, ...], runs: Sequence[Run], flats: Flats) -> TensorEntry:
    """Return the tensor that lies so in vectors of this rank and group.

    Raises:
        UnreadableError: One is missing, too short or of another dtype.
    """
    fqn = ".".join(map(str, path))
    chunks = []
    dtypes = {}
    for run in runs:
        flat = flats.get((run.rank, run.group))
        if flat is None or _end(run) > flat.num_elems:
            raise UnreadableError(f"rank {run.rank} does not have its part of {fqn!r}", hint=_SHARE)
        dtypes[flat.dtype.name] = flat.dtype
        position = flat.span.offset + flat.dtype.num_bytes(run.offset)
        for box in flat_boxes(shape, run.start, run.start + run.num_elems):
            span = ByteSpan(file=flat.span.file, offset=position, nbytes=flat.dtype.num_bytes(box.num_elems))
            chunks.append(Chunk(box=box, span=span))
            position += span.nbytes
    if len(dtypes) > 1:
        raise UnreadableError(f"ranks have {fqn!r} as {' and '.join(sorted(dtypes))}", hint=_SHARE)
    dtype = next(iter(dtypes.values()), None) or next(iter(flats.values())).dtype
    return TensorEntry(fqn=fqn, dtype=dtype, shape=shape, chunks=tuple(chunks), path=path)


def _universal() -> str:
    return "convert it with DeepSpeed's ds_to_universal.py, whose result ckpt reads"
