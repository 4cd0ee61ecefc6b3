"""What an inert pickle of `torch.save` holds: the tensors with the keys that lead to them, and what is none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ckpt_tools.checkpoint.entries import Census, KeyPath, fqn_problem
from ckpt_tools.checkpoint.formats._pickle_values import KEY, GlobalName, Record
from ckpt_tools.checkpoint.formats._torch_file import TorchFile
from ckpt_tools.checkpoint.formats._torch_pieces import Piece, read_piece, show_path
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.errors import LimitError, UnreadableError

MAX_TENSORS = 1 << 20
MAX_VALUES = 1 << 22
"""Keys and items that are looked at: a container may be in the file many times, in many others."""
MAX_DEPTH = 64
MAX_SHARED = 256
"""Bytes of all tensors for each byte of a storage, at most: tensors may share one, and a view costs nothing."""
REBUILD = ("torch._utils._rebuild", "torch._tensor._rebuild")
"""How the names of functions begin that make tensors."""
_ARRAY = re.compile(r"numpy\.(_?core\.(multiarray\._reconstruct|numeric\._frombuffer)|ma\.core\._mareconstruct)")
"""Functions that make arrays, of old and new numpy."""


@dataclass(slots=True, kw_only=True)
class State:
    """What one file holds."""

    pieces: list[Piece] = field(default_factory=list)
    values: Counter[str] = field(default_factory=Counter)
    """First key → how many plain values (numbers, texts, …) are below it."""
    objects: dict[str, str] = field(default_factory=dict)
    """Keys → class of everything else."""
    sealed: dict[str, str] = field(default_factory=dict)
    """Keys → what it is, of those of these objects that are or hold tensors or arrays."""
    counts: dict[int, int] = field(default_factory=dict)
    """Id of such an object, which may lie under several keys → how many it holds."""
    seen: set[int] = field(default_factory=set)
    """What has been looked through for them."""
    census: Census = field(default_factory=Counter)
    """What was found in them."""


def settings_of(value: object) -> dict[str, object]:
    """Return the plain values of the command line that Megatron, fairseq and others keep under `args`; {} without."""
    args = value.get("args") if type(value) is dict else None
    state = args.state if type(args) is Record else args
    values = state.items() if type(state) is dict else ()
    return {key: each for key, each in values if type(key) is str and type(each) in (bool, int, float, str)}


def describe_state(file: TorchFile, root: KeyPath = ()) -> State:
    """Find every tensor of a file that keys and indices lead to; `root` leads to the file."""
    state = State()
    boxes: dict[tuple[int, ...], Box] = {}
    names: set[str] = set()
    pending: list[tuple[KeyPath, object]] = [(root, file.value)]
    most_bytes = MAX_SHARED * sum(record.nbytes for record in file.storages.values())
    num_values = num_chunks = num_bytes = 0
    while pending:
        path, value = pending.pop()
        num_values += 1
        if num_values > MAX_VALUES or len(path) > MAX_DEPTH:
            raise LimitError(f"more than {MAX_VALUES} values, or more than {MAX_DEPTH} containers in each other")
        if isinstance(value, dict) or (isinstance(value, list | tuple) and _holds_tensors(value)):
            children = value.items() if isinstance(value, dict) else enumerate(value)
            inner: list[tuple[KeyPath, object]] = []
            for key, child in children:
                if isinstance(key, str | int | None):  # True and None as DCP spells them when it flattens a state dict
                    inner.append(((*path, key if type(key) is int else str(key)), child))
                else:
                    of = key.args[0] if isinstance(key, Record) and key.name == KEY else key
                    name = getattr(of, "name", type(of).__name__).replace("_codecs.encode", "bytes")
                    _add_object(state, (*path, f"({name} as key)"), child)
            pending += reversed(inner)
        elif type(value) is Record and value.name.startswith(REBUILD):
            if not path:
                raise UnreadableError(
                    "a tensor by itself, without a name", hint="save a dict: torch.save({NAME: tensor}, …)"
                )
            piece = read_piece(file, path, value, boxes)
            if (problem := fqn_problem(piece.fqn)) is not None:
                raise UnreadableError(f"tensor {piece.fqn!r} {problem}")
            if piece.fqn in names:
                raise UnreadableError(f"two tensors have the name {piece.fqn!r}")
            names.add(piece.fqn)
            state.pieces.append(piece)
            num_chunks += len(piece.chunks)
            num_bytes += sum(piece.dtype.num_bytes(chunk.box.num_elems) for chunk in piece.chunks)
            if num_chunks > MAX_TENSORS or num_bytes > most_bytes:
                raise LimitError(f"more than {MAX_TENSORS} tensors, or {MAX_SHARED} times as many bytes as are stored")
        elif type(value) in (Record, GlobalName):
            _add_object(state, path, value)
        else:
            state.values[show_path(path[:1])] += 1
    return state


def _holds_tensors(values: Iterable[object]) -> bool:
    """Is something in a list that may be or hold a tensor? A list of numbers is one value."""
    return any(type(value) in (dict, list, tuple, Record) for value in values)


def _add_object(state: State, path: KeyPath, value: object) -> None:
    name = value.name if isinstance(value, Record | GlobalName) else type(value).__name__
    state.objects[show_path(path)] = name
    state.census[name] += type(value) is GlobalName
    if id(value) not in state.counts:
        state.counts[id(value)] = _count_tensors(value, state)
    if count := state.counts[id(value)]:
        what = "a tensor" if name.startswith(REBUILD) else f"{name} with {count} tensors"
        state.sealed[show_path(path)] = "a numpy array" if _ARRAY.fullmatch(name) else what


def _count_tensors(value: object, state: State) -> int:
    """Count the tensors anywhere in a value, which may contain itself, but for what was seen before."""
    pending = [value]
    count = 0
    while pending:
        each = pending.pop()
        if type(each) not in (dict, list, tuple, Record) or id(each) in state.seen:
            continue
        state.seen.add(id(each))
        if isinstance(each, Record):
            name = "tensors" if each.name.startswith(REBUILD) else _ARRAY.sub("numpy.ndarray", each.name)
            state.census[name] += name not in (KEY, "_codecs.encode")
            if name in ("tensors", "numpy.ndarray"):
                count += 1
                continue
            pending += (*each.args, each.state, *(each.content or ()))
        elif isinstance(each, dict):
            pending += (*each, *each.values())
        elif isinstance(each, list | tuple):
            pending += each
    return count
