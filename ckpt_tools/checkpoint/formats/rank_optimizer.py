"""The optimizer's state that every rank left beside its part of the model, under the names that DCP has for it.

`get_optimizer_state_dict` and FSDP1's `optim_state_dict` name parameters; an optimizer's own `state_dict()` numbers
them, in the order of its groups. Those get names where order and shapes leave one way only.

Source: torch 2.13 `optim/optimizer.py` (`state_dict`), `distributed/checkpoint/_nested_dict.py` (what becomes an item).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt_tools.checkpoint.entries import BlobEntry, ByteSpan, KeyPath, TensorEntry
from ckpt_tools.checkpoint.formats._pickle_values import GlobalName, Record
from ckpt_tools.checkpoint.formats._torch_file import read_torch_file
from ckpt_tools.checkpoint.formats._torch_pieces import (
    Content,
    RankedFiles,
    assemble,
    describe_state,
    misfit,
    missing_ranks,
    show_path,
)
from ckpt_tools.checkpoint.formats.torch_value import build_value
from ckpt_tools.checkpoint.transform import strip_wrappers
from ckpt_tools.errors import UnreadableError
from ckpt_tools.storage.source import Source
from ckpt_tools.storage.virtual import VirtualFile
from ckpt_tools.text import first_few

ROOT = "optimizer"  # Key of it in what ckpt writes and loads
_FILES = (("model_world_size_", "optim_world_size_"), ("pytorch_model_fsdp_", "optimizer_"))
"""How the names of a model's files begin, and those of its optimizer's."""
_KEYS = ("state", "param_groups")
_Kind = tuple[tuple[int, ...], object]  # Shape and `TensorPiece.layout`, of a parameter and of its state


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptimizer:
    """What is there of an optimizer."""

    files: Mapping[str, int] = field(default_factory=dict)  # Size of every file that its tensors and options lie in
    tensors: tuple[TensorEntry, ...] = ()
    blobs: tuple[BlobEntry, ...] = ()  # Options of its groups, in a file that nobody has written
    virtual: Mapping[str, VirtualFile] = field(default_factory=dict)  # That file
    sums: tuple[tuple[ByteSpan, int], ...] = ()
    notes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    broken: UnreadableError | None = None  # Why its files are no whole state


def read_optimizer(
    source: Source,
    files: Collection[str],
    ranks: RankedFiles,
    model: Iterable[TensorEntry],
    layouts: Mapping[str, object],
    path: str,
) -> RankOptimizer:
    """Read the state of the optimizer whose files lie beside a model's, if there are any."""
    # `model` has the tensors in their order, `layouts` the `TensorPiece.layout` of each.
    own = {rank: name for rank, file in ranks.files.items() if (name := _file_of(file)) in files}
    if not own:
        return RankOptimizer()
    try:
        read = {rank: read_torch_file(source, name) for rank, name in own.items()}
    except UnreadableError as error:
        return RankOptimizer(broken=error)
    kinds: dict[object, tuple[str, _Kind]] = {}
    for entry in model:  # of tied ones the first, as of a model's parameters
        places = tuple((chunk.span, chunk.box) for chunk in entry.chunks)
        kinds.setdefault(places, (entry.fqn, (entry.shape, layouts[entry.fqn])))
    try:
        states = {rank: describe_state(file) for rank, file in read.items()}
        leader = min(read)
        named = _name(read[leader].value, states[leader], dict(kinds.values()))
        leaves = {rank: dict(leaves_of(file.value, (), (ROOT,), named)) for rank, file in read.items()}
        values = {rank: plain_values(leaves[rank], states[rank]) for rank in read}
    except UnreadableError as error:  # nothing is wrong with it: it is of a kind that is not carried
        return RankOptimizer(unread=(f"the optimizer's state ({error.what})",))
    try:
        stored = assemble(states, path)
        missing = missing_ranks(states, replace(ranks, files=own), stored, path)
        for rank, found in values.items():
            if repr(found) != repr(values[leader]):
                raise misfit(path, f"ranks {leader} and {rank} have different optimizer options")
    except UnreadableError as error:
        return RankOptimizer(broken=error)
    out = {raw: keys for raw, (keys, _) in leaves[leader].items()}
    tensors = tuple(replace(entry, fqn=show_path(out[entry.path]), path=out[entry.path]) for entry in stored)
    blobs, virtual = build_items(f"{own[leader]}#values", values[leader])
    return RankOptimizer(
        files={name: source.size(name) for name in own.values()} | {name: each.nbytes for name, each in virtual.items()}
        if tensors or blobs
        else {},
        tensors=tensors,
        blobs=blobs,
        virtual=virtual,
        sums=tuple(each for file in read.values() for each in file.sums),
        notes=tuple(_notes(tensors, named, {strip_wrappers(fqn) for fqn, _ in kinds.values()})),
        unread=tuple(f"the optimizer's: {what}" for what in missing),
    )


def _notes(tensors: Iterable[TensorEntry], named: Mapping[int, str], model: Collection[str]) -> Iterator[str]:
    """Say where the names are from, and which of them the model does not have."""
    if named:
        yield "the optimizer's parameters are numbered: they were matched in the model's order, where only one way fits"
    owners = (
        strip_wrappers(str(entry.path[2])) for entry in tensors if entry.path[1] == "state" and len(entry.path) > 3
    )
    if others := [owner for owner in dict.fromkeys(owners) if owner not in model]:
        yield f"the optimizer has state for parameters that the model's files do not have: {first_few(others, 4)}"


def _file_of(model: str) -> str:
    """Return the name of the file that a rank leaves of its optimizer beside its file of the model."""
    directory, slash, name = model.rpartition("/")
    begin, own = next((each for each in _FILES if name.startswith(each[0])), (name, ""))
    return directory + slash + own + name[len(begin) :]


def _name(value: object, state: Content, model: Mapping[str, _Kind]) -> dict[int, str]:
    """Return the names of parameters that have numbers; {} where they have names."""
    if not isinstance(value, dict) or (
        value and not any(str(key).startswith(("state", "param_groups")) for key in value)
    ):
        raise UnreadableError("it does not have the form of a torch optimizer")
    listed = value.get("param_groups")
    groups = [each for each in listed if isinstance(each, dict) and _numbers(each)] if isinstance(listed, list) else []
    held: dict[object, list[_Kind]] = {}
    for piece in state.pieces:
        if piece.path[0] == "state" and type(piece.path[1]) is int:
            kinds = held.setdefault(piece.path[1], [])
            kinds += [(piece.shape, piece.layout)] if piece.shape else []
    sharded = {fqn: kind for fqn, kind in model.items() if kind[1] is not None}
    found: dict[int, str] = {}
    for group in groups:
        numbers = _numbers(group)
        own = group.get("param_names")  # of an optimizer made of named parameters
        if not isinstance(own, list) or len(own) != len(numbers) or not all(name in model for name in own):
            own = _in_order([held.get(number, []) for number in numbers], sharded or model)
        found |= zip(numbers, own, strict=True)
    if len(set(found.values())) < sum(map(len, map(_numbers, groups))) or not held.keys() <= found.keys():
        raise UnreadableError("its groups and its state do not list the same parameters, each once")
    return {number: strip_wrappers(fqn) for number, fqn in found.items()}


def _numbers(group: dict[str, object]) -> list[int]:
    found = group.get("params")
    return found if isinstance(found, list) and all(type(each) is int for each in found) else []


def _in_order(wanted: Sequence[Sequence[_Kind]], model: Mapping[str, _Kind]) -> list[str]:
    """Return the parameters that some state is of, in the model's order, if there is one way to choose them."""
    first = _earliest(wanted, list(model.items()))
    last = _earliest(wanted[::-1], list(model.items())[::-1])
    if first is None or last is None:
        raise UnreadableError("its parameters are numbered, and their shapes and order do not match the model")
    if first != last[::-1]:
        raise UnreadableError("its parameters are numbered, and more than one choice of the model's fits")
    return first


def _earliest(wanted: Sequence[Sequence[_Kind]], model: Sequence[tuple[str, _Kind]]) -> list[str] | None:
    found = []
    left = iter(model)
    for state in wanted:
        for fqn, (shape, layout) in left:
            if not state or (all(kind[1] == layout for kind in state) and any(kind[0] == shape for kind in state)):
                found.append(fqn)
                break
        else:
            return None
    return found


def leaves_of(
    value: object, raw: KeyPath, out: KeyPath, names: Mapping[int, str]
) -> Iterator[tuple[KeyPath, tuple[KeyPath, object]]]:
    """Yield what DCP makes an item of: (keys in the file, (keys in the checkpoint, value))."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            name = names.get(key, str(key)) if raw == ("state",) else str(key)
            yield from leaves_of(inner, (*raw, key), (*out, name), names)
    elif isinstance(value, list) and any(map(_is_nested, value)):
        for index, inner in enumerate(value):
            yield from leaves_of(inner, (*raw, index), (*out, index), names)
    elif not isinstance(value, dict):
        if isinstance(value, list) and raw[:1] == ("param_groups",) and raw[-1] == "params":
            value = [names.get(each, each) for each in value]
        yield raw, (out, value)


def _is_nested(value: object) -> bool:
    return isinstance(value, dict | Record) or (isinstance(value, list) and any(map(_is_nested, value)))


def plain_values(leaves: Mapping[KeyPath, tuple[KeyPath, object]], state: Content) -> dict[KeyPath, object]:
    """Return what is no tensor, by its keys in the checkpoint."""
    tensors = {piece.path for piece in state.pieces}
    found = {out: value for raw, (out, value) in leaves.items() if raw not in tensors}
    odd = next((out for out, value in found.items() if not _is_plain(value)), None)
    if odd is not None or not tensors <= leaves.keys():
        raise UnreadableError(f"{show_path(odd or (ROOT,))} holds an object, or a tensor in a tuple")
    return found


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return not isinstance(value, Record | GlobalName)


def build_items(file: str, values: Mapping[KeyPath, object]) -> tuple[tuple[BlobEntry, ...], dict[str, VirtualFile]]:
    """Return values as items, one behind the other, and the file that has them."""
    content = bytearray()
    blobs = []
    for keys, value in values.items():
        item = build_value(value)
        span = ByteSpan(file=file, offset=len(content), nbytes=len(item))
        blobs.append(BlobEntry(fqn=show_path(keys), span=span, path=keys))
        content += item
    return tuple(blobs), {file: VirtualFile.of(bytes(content))} if blobs else {}
