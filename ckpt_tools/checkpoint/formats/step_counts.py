"""How many steps of training each file of a step says that there were, and which files cannot be of one step.

Adam's `step`, a trainer's `global_step`, a schedule's `last_epoch` count different things: unused parameters have fewer
of Adam's, accelerate's schedules take a step for every process, verl's one for several of Adam's, and what a gradient
scaler skips only some count. So equals are compared with equals, and others by what the trainer's code makes of them.

Source: torch 2.13 `optim/lr_scheduler.py`; transformers 5.23 `trainer.py`; accelerate 1.15 `scheduler.py`; deepspeed
0.19.8 `runtime/engine.py`.
"""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.formats._pickle_values import Record
from ckpt_tools.checkpoint.formats._torch_file import TorchFile
from ckpt_tools.checkpoint.formats._torch_pieces import Piece, read_piece
from ckpt_tools.checkpoint.formats.format import Opened
from ckpt_tools.checkpoint.formats.torch_value import parse_value
from ckpt_tools.checkpoint.identity import StepCount
from ckpt_tools.errors import UnreadableError
from ckpt_tools.storage.source import Source

ADAM, SCHEDULE = "the optimizer counts step", "the schedule is at step"
GLOBAL, ENGINE, LOOP = "the trainer counts step", "DeepSpeed counts step", "the loop counts step"
RATES, GIVEN = "the optimizer's learning rates are", "the schedule's learning rates are"
_NUMBERS = {"F32": "<f", "F64": "<d", "I32": "<i", "I64": "<q"}
_MOST_READ = 24
"""Numbers that are read of one file."""
_MAX_DEPTH = 8
_MAX_ITEM_BYTES = 1 << 16
_LAZY = re.compile(r"experts?[._]", re.ASCII)
"""Parameters that may well have had fewer steps than the others."""
_RANK = re.compile(r"(rank_?|random_states_)\d+|(__)\d+_\d+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Said:
    """What a file says."""

    what: str
    value: float | tuple[float, ...]
    file: str

    @property
    def group(self) -> str:
        """The same for files that differ by their rank."""
        return _RANK.sub(r"\1\2*", self.file)

    def __str__(self) -> str:
        value = self.value if isinstance(self.value, tuple) else f"{self.value:g}"
        return f"{self.what} {value} in {self.file}"


Mixed = tuple[Said, Said]  # that cannot be of one step


def read_counts(source: Source, file: TorchFile) -> Iterator[Said]:
    """Yield what a file of `torch.save` says: schedules, progress, and the numbers of an optimizer's state."""
    adam: list[object] = []
    for path, found in _dicts(file.value, ()):
        skips = any(
            "growth_factor" in each for each in found.values() if isinstance(each, dict)
        )  # steps that it counts
        progress = {} if path or skips else found
        counts = {
            SCHEDULE: None if "num_bad_epochs" in found else found.get("last_epoch"),
            GLOBAL: progress.get("global_step"),
            ENGINE: progress.get("global_steps"),
            LOOP: found.get("step") if "random_state" in found else None,
        }
        for what, count in counts.items():
            if type(count) is int:
                skipped = found.get("skipped_steps") if what == ENGINE else 0
                yield Said(what, count - (skipped if type(skipped) is int else 0), file.name)
        groups = found.get("param_groups") if "state" in found else None
        taken = [each.get("lr") for each in groups if isinstance(each, dict)] if isinstance(groups, list) else []
        for what, rates in ((RATES, taken), (GIVEN, found.get("_last_lr") if type(counts[SCHEDULE]) is int else [])):
            if isinstance(rates, list) and rates and all(type(each) in (int, float) for each in rates):
                yield Said(what, tuple(map(float, rates)), file.name)
        if path[-2:-1] in (("state",), ("param_groups",)) and "step" in found:
            adam.append(found["step"])
    numbers = [float(each) for each in adam if isinstance(each, int | float)]
    pieces = (read_piece(file, (), each, {}) for each in adam[:: 1 + len(adam) // _MOST_READ] if type(each) is Record)
    numbers += [number for each in pieces if each and each.chunks and (number := _read(source, each)) is not None]
    if numbers:
        yield Said(ADAM, max(numbers), file.name)


def _dicts(value: object, path: tuple[object, ...]) -> Iterator[tuple[tuple[object, ...], dict[str, Any]]]:
    """Yield every dict in a value, and its keys."""
    if isinstance(value, dict):
        yield path, value
    if len(path) < _MAX_DEPTH and isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(inner, dict | list):
                yield from _dicts(inner, (*path, key))


def _read(source: Source, entry: Piece | TensorEntry) -> float | None:
    """Return the one number that a tensor holds."""
    form, span = _NUMBERS.get(entry.dtype.name), entry.chunks[0].span
    if form is None or span.nbytes != struct.calcsize(form):
        return None
    value = struct.unpack(form, source.read(span.file, span.offset, span.nbytes))[0]
    return float(value) if abs(value) < 1 << 60 else None


def read_items(opened: Opened, directory: str = "") -> Iterator[Said]:
    """Yield what the items of a DCP checkpoint say; of a file whose parameters have had different steps, nothing."""
    held: dict[str, list[TensorEntry]] = {}
    for entry in opened.checkpoint.tensors:
        if entry.fqn.endswith(".step") and entry.num_elems == 1 and entry.chunks and not _LAZY.search(entry.fqn):
            held.setdefault(entry.chunks[0].span.file, []).append(entry)
    for file, entries in held.items():
        chosen = [opened.resolve(entry) for entry in entries[:: 1 + len(entries) // _MOST_READ]]
        found = {_read(opened.source, entry) for entry in chosen}
        if len(found) == 1 and (len(chosen) > 1 or len(held) == 1) and (value := found.pop()) is not None:
            yield Said(ADAM, value, directory + file)
    rates: list[float] = []
    for blob in opened.checkpoint.blobs:
        what = {"last_epoch": SCHEDULE, "lr": RATES}.get(blob.fqn.rpartition(".")[2], "")
        what = GLOBAL if blob.fqn == "train_state.step" else what
        if not what or blob.span.nbytes > _MAX_ITEM_BYTES or len(rates) > _MOST_READ:
            continue
        with suppress(UnreadableError):
            content = opened.source.read(blob.span.file, blob.span.offset, blob.span.nbytes)
            number = parse_value(content, where=blob.fqn)
            if what == RATES and isinstance(number, int | float):
                rates.append(float(number))
            elif type(number) is int:
                yield Said(what, number, f"{directory}{blob.span.file} ({blob.fqn})")
    if rates:
        yield Said(RATES, tuple(rates), f"{directory}.metadata")


def find_steps(said: Iterable[Said], trainer: str) -> tuple[StepCount, ...]:
    """Return the counts of the trainer's steps, and the files that say them."""
    kinds = (GLOBAL, ENGINE, ADAM, *((SCHEDULE,) if trainer in ("trainer", "torchtitan") else ()))
    found: dict[int, dict[str, None]] = {}
    for each in said:
        if each.what in kinds and isinstance(each.value, int | float):
            found.setdefault(int(each.value), {})[each.file] = None
    return tuple(StepCount(step=step, files=tuple(files)) for step, files in sorted(found.items()))


def find_mixed(said: Iterable[Said], trainer: str, *, number: int | None = None) -> Iterator[Mixed]:
    """Yield pairs of files that cannot be of one step; its name's number is no witness alone, for it may be renamed."""
    kinds: dict[str, dict[str, list[Said]]] = {}
    for each in sorted(said, key=lambda each: each.file):
        kinds.setdefault(each.what, {}).setdefault(each.group, []).append(each)
    for group in (group for groups in kinds.values() for group in groups.values()):
        yield from [(group[0], other) for other in group if other.value != group[0].value][:1]
    firsts = {kind: [group[0] for group in groups.values()] for kind, groups in kinds.items()}
    alone = {kind: each[0] for kind, each in firsts.items() if len(each) == 1}
    for first, second, trainers, is_wrong in _RULES:
        one, two = alone.get(first), alone.get(second)
        if trainer in trainers and one and two and is_wrong(one.value, two.value):
            yield one, two
            return
    for given in firsts.get(GIVEN, []) if trainer in ("trainer", "accelerate") else ():
        taken = [each for each in firsts.get(RATES, []) if len(each.value) == len(given.value)]  # type: ignore[arg-type]
        if taken and given.value not in [each.value for each in taken]:  # a schedule keeps the rates that it has given
            yield given, taken[0]
            return
    total = alone.get(GLOBAL)
    for other in (alone[kind] for kind in (SCHEDULE, ENGINE) if kind in alone) if trainer == "trainer" else ():
        if total and number == other.value != total.value:
            yield other, total
            return


_COUNTING = ("trainer", "deepspeed", "torchtitan", "lightning")
_RULES: tuple[tuple[str, str, tuple[str, ...], Callable[[Any, Any], bool]], ...] = (
    (ADAM, SCHEDULE, ("trainer",), operator.ne),  # loaded together or not at all; a skipped step is none of either
    (ADAM, GLOBAL, _COUNTING, operator.gt),  # the state of an optimizer may have begun anew, and not run ahead
    (ADAM, ENGINE, _COUNTING, operator.gt),
    (ADAM, GLOBAL, ("lightning", "torchtitan"), operator.ne),  # which load all or nothing
    (SCHEDULE, GLOBAL, ("trainer",), operator.gt),
    (ENGINE, GLOBAL, ("trainer",), operator.gt),
)
"""(one count, another, trainers, when they cannot be of one step)"""
