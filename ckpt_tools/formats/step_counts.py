"""How many steps of training each file of a step says that there were, and which files cannot be of one step.

Adam's `step`, a trainer's `global_step`, a schedule's `last_epoch` count different things: unused parameters have fewer
of Adam's, accelerate's schedules take a step for every process, verl's one for several of Adam's. So equals are
compared with equals, and others by what the trainer's own code makes of them.

Source: torch 2.13 `optim/lr_scheduler.py`; transformers 5.23 `trainer.py`; accelerate 1.15 `scheduler.py`; deepspeed
0.19.8 `runtime/engine.py`.
"""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ckpt_tools.description.checkpoint import ByteSpan, TensorEntry
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats._pickle_values import Record
from ckpt_tools.formats._torch_file import TorchFile
from ckpt_tools.formats._torch_pieces import read_piece
from ckpt_tools.formats.format import Opened
from ckpt_tools.formats.torch_value import parse_value
from ckpt_tools.storage.source import Source

T = TypeVar("T")
Kind = Literal["adam", "global", "schedule", "count", "rates", "scale"]
_NUMBERS = {"F32": "<f", "F64": "<d", "I32": "<i", "I64": "<q"}
_MOST_READ = 24
"""Numbers that are read of one file."""
_MAX_DEPTH = 8
_MAX_ITEM_BYTES = 1 << 16
_LAZY = re.compile(r"experts?[._]", re.ASCII)
"""Parameters that may well have had fewer steps than the others."""
_RANK = re.compile(r"(rank_?|random_states_)\d+|(__)\d+_\d+", re.ASCII)
_WORDS: Mapping[Kind, str] = {
    "adam": "the optimizer counts step",
    "global": "the trainer counts step",
    "schedule": "the schedule is at step",
    "count": "the loop counts step",
    "rates": "the learning rates are",
    "scale": "a gradient scaler is",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a file says."""

    kind: Kind
    value: float | tuple[float, ...]
    file: str
    of: str = ""
    """Which of several in the file."""

    @property
    def group(self) -> str:
        """The same for files that differ by their rank."""
        return _RANK.sub(r"\1\2*", self.file) + self.of

    def __str__(self) -> str:
        value = self.value if isinstance(self.value, tuple) else f"{self.value:g}"
        return f"{_WORDS[self.kind]} {value} in {self.file}"


Mixed = tuple[Said, Said]
"""Two that cannot be of one step."""


def read_counts(source: Source, file: TorchFile) -> Iterator[Said]:
    """Yield what a file of `torch.save` says: schedules, progress, and the numbers of an optimizer's state."""
    adam: list[object] = []
    for path, found in _dicts(file.value, ()):
        if type(found.get("last_epoch")) is int and "num_bad_epochs" not in found:
            yield Said(kind="schedule", value=found["last_epoch"], file=file.name)
            yield from _rates(found.get("_last_lr"), file.name)
        for key in ("global_step", "global_steps"):
            if type(found.get(key)) is int and not path:
                skipped = found.get("skipped_steps")
                value = found[key] - (skipped if type(skipped) is int else 0)
                yield Said(kind="global", value=value, file=file.name)
        if type(found.get("step")) is int and "random_state" in found:
            yield Said(kind="count", value=found["step"], file=file.name)
        if "growth_factor" in found:
            yield Said(kind="scale", value=0, file=file.name)
        if path[-2:-1] == ("state",) and "step" in found:
            adam.append(found["step"])
        if path[-2:-1] == ("param_groups",) and "step" in found:
            adam.append(found["step"])
        groups = found.get("param_groups")
        if isinstance(groups, list) and "state" in found:
            yield from _rates([each.get("lr") for each in groups if isinstance(each, dict)], file.name)
    numbers = [number for each in _some(adam) if (number := _number(source, file, each)) is not None]
    if numbers:
        yield Said(kind="adam", value=max(numbers), file=file.name)


def _dicts(value: object, path: tuple[object, ...]) -> Iterator[tuple[tuple[object, ...], dict[str, Any]]]:
    """Yield every dict in a value, and its keys."""
    if isinstance(value, dict):
        yield path, value
    if len(path) < _MAX_DEPTH and isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(inner, dict | list):
                yield from _dicts(inner, (*path, key))


def _rates(value: object, file: str) -> Iterator[Said]:
    if isinstance(value, list) and value and all(type(each) in (int, float) for each in value):
        yield Said(kind="rates", value=tuple(map(float, value)), file=file)


def _some(items: list[T]) -> list[T]:
    """Return some of them, from everywhere."""
    return items[:: -(-len(items) // _MOST_READ)] if items else items


def _number(source: Source, file: TorchFile, value: object) -> float | None:
    if type(value) in (int, float):
        return float(value)  # type: ignore[arg-type]
    try:
        piece = read_piece(file, (), value, {}) if type(value) is Record else None
    except UnreadableError:
        return None
    return None if piece is None or len(piece.chunks) != 1 else _read(source, piece.dtype.name, piece.chunks[0].span)


def _read(source: Source, dtype: str, span: ByteSpan) -> float | None:
    """Return the one number of a dtype that lies there."""
    form = _NUMBERS.get(dtype)
    if form is None or span.nbytes != struct.calcsize(form):
        return None
    value = struct.unpack(form, source.read(span.file, span.offset, span.nbytes))[0]
    return float(value) if abs(value) < 1 << 60 else None


def read_items(opened: Opened, directory: str = "") -> Iterator[Said]:
    """Yield what the items of a DCP checkpoint say; of a file whose parameters have had different steps, nothing.

    Args:
        opened: The checkpoint.
        directory: Where it lies in the step, with its slash.
    """
    checkpoint = opened.checkpoint
    held: dict[tuple[str, str], list[TensorEntry]] = {}
    for entry in checkpoint.tensors:
        if entry.fqn.endswith(".step") and entry.num_elems == 1 and entry.chunks and not _LAZY.search(entry.fqn):
            held.setdefault((str(entry.path[:1]), entry.chunks[0].span.file), []).append(entry)
    for (root, file), entries in held.items():
        chosen = [opened.resolve(entry) for entry in _some(entries)]
        found = {_read(opened.source, entry.dtype.name, entry.chunks[0].span) for entry in chosen}
        if len(found) == 1 and (len(chosen) > 1 or len(held) == 1) and (value := found.pop()) is not None:
            yield Said(kind="adam", value=value, file=directory + file, of=root)
    rates: list[float] = []
    for blob in checkpoint.blobs:
        keys = blob.fqn.split(".")
        is_number = keys[-1] in ("last_epoch", "lr") or keys == ["train_state", "step"]
        if not is_number or blob.span.nbytes > _MAX_ITEM_BYTES or len(rates) > _MOST_READ:
            continue
        try:
            content = opened.source.read(blob.span.file, blob.span.offset, blob.span.nbytes)
            held_value = parse_value(content, where=blob.fqn)
        except UnreadableError:
            continue
        if keys[-1] == "lr" and isinstance(held_value, int | float):
            rates.append(float(held_value))
        elif type(held_value) is int:
            kind: Kind = "schedule" if keys[-1] == "last_epoch" else "global"
            yield Said(kind=kind, value=held_value, file=f"{directory}{blob.span.file} ({blob.fqn})")
    yield from _rates(rates, f"{directory}.metadata")


def find_mixed(said: Iterable[Said], trainer: str, *, number: int | None = None) -> Iterator[Mixed]:
    """Yield pairs of files that cannot be of one step.

    Args:
        said: What all of its files say.
        trainer: Whose step it is, as contracts have it.
        number: What the name of its directory says; it is no witness alone, for a directory may be renamed.
    """
    kinds: dict[str, dict[str, list[Said]]] = {}
    for each in said:
        kinds.setdefault(each.kind, {}).setdefault(each.group, []).append(each)
    for groups in kinds.values():
        for group in groups.values():
            other = next((each for each in group if each.value != group[0].value), None)
            if other is not None:
                yield group[0], other
    if trainer == "lightning" and "scale" in kinds:  # steps that a gradient scaler skips are counted
        kinds.pop("global", None)
    alone = {kind: next(iter(groups.values()))[0] for kind, groups in kinds.items() if len(groups) == 1}
    for trainers, first, second, is_wrong in _RULES:
        one, two = alone.get(first), alone.get(second)
        if trainer in trainers and one and two and is_wrong(one.value, two.value):
            yield one, two
            return
    rates = [group[0] for group in kinds.get("rates", {}).values()]
    lengths = {len(each.value) for each in rates if isinstance(each.value, tuple)}
    differ = len(rates) == 2 and len(lengths) == 1 and rates[0].value != rates[1].value
    if trainer in ("trainer", "accelerate") and differ:  # a schedule keeps the rates that it has given its optimizer
        yield rates[0], rates[1]
        return
    total, schedule = alone.get("global"), alone.get("schedule")
    if trainer == "trainer" and total and schedule and number == schedule.value != total.value:
        yield schedule, total


_COUNTING = ("trainer", "deepspeed", "torchtitan", "lightning")
_RULES: tuple[tuple[tuple[str, ...], Kind, Kind, Callable[[Any, Any], bool]], ...] = (
    (("trainer",), "adam", "schedule", operator.ne),  # loaded together or not at all; a skipped step is none of either
    (_COUNTING, "adam", "global", operator.gt),  # the state of an optimizer may have begun anew, and not run ahead
    (("trainer",), "schedule", "global", operator.gt),
    (("lightning", "torchtitan"), "adam", "global", operator.ne),  # which load all or nothing
)
"""(trainers, one count, another, when they cannot be of one step)"""
