"""The one judge of a step: whose it is, whether its trainer could resume from it, and whether it is all of one step.

It reads names, sizes, small documents and the pickles beside a model, and runs nothing. A thorough look also reads the
numbers that optimizers count steps by.
"""

from __future__ import annotations

import operator
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.formats._json import parse_json
from ckpt_tools.checkpoint.formats._pickle_values import Record
from ckpt_tools.checkpoint.formats._torch_file import TorchFile, read_torch_file
from ckpt_tools.checkpoint.formats._torch_pieces import TensorPiece, read_piece
from ckpt_tools.checkpoint.formats.file_names import METADATA_NAME
from ckpt_tools.checkpoint.formats.format import Opened, read_document
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME
from ckpt_tools.checkpoint.formats.safetensors import read_file
from ckpt_tools.checkpoint.formats.torch_value import parse_value
from ckpt_tools.checkpoint.formats.torch_zip import check_archive
from ckpt_tools.checkpoint.formats.trainer_contracts import (
    KEY,
    MODEL,
    OPTIMIZER,
    SCALER,
    SCHEDULE,
    Contract,
    Need,
    find_contract,
)
from ckpt_tools.checkpoint.identity import Known, StepCount
from ckpt_tools.checkpoint.infer_mesh import rank_of_file
from ckpt_tools.errors import LimitError, UnreadableError
from ckpt_tools.storage.source import Source

# How many steps of training each file of a step says that there were, and which files cannot be of one step.
#
# Adam's `step`, a trainer's `global_step`, a schedule's `last_epoch` count different things: unused parameters have
# fewer of Adam's, accelerate's schedules take a step for every process, verl's one for several of Adam's, and what a
# gradient scaler skips only some count. So equals are compared with equals, and others by what the trainer's code makes
# of them.
#
# Source: torch 2.13 `optim/lr_scheduler.py`; transformers 5.23 `trainer.py`; accelerate 1.15 `scheduler.py`; deepspeed
# 0.19.8 `runtime/engine.py`.

ADAM, SCHEDULED = "the optimizer counts step", "the schedule is at step"
GLOBAL, ENGINE, LOOP = "the trainer counts step", "DeepSpeed counts step", "the loop counts step"
RATES, GIVEN = "the optimizer's learning rates are", "the schedule's learning rates are"
_NUMBERS = {"F32": "<f", "F64": "<d", "I32": "<i", "I64": "<q"}
_MOST_READ = 24  # Numbers that are read of one file
_MAX_DEPTH = 8
_MAX_ITEM_BYTES = 1 << 16
_LAZY = re.compile(r"experts?[._]", re.ASCII)  # Parameters that may well have had fewer steps than the others
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
            SCHEDULED: None if "num_bad_epochs" in found else found.get("last_epoch"),
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
        for what, rates in ((RATES, taken), (GIVEN, found.get("_last_lr") if type(counts[SCHEDULED]) is int else [])):
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


def _read(source: Source, entry: TensorPiece | TensorEntry) -> float | None:
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
        what = {"last_epoch": SCHEDULED, "lr": RATES}.get(blob.fqn.rpartition(".")[2], "")
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
    kinds = (GLOBAL, ENGINE, ADAM, *((SCHEDULED,) if trainer in ("trainer", "torchtitan") else ()))
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
    for other in (alone[kind] for kind in (SCHEDULED, ENGINE) if kind in alone) if trainer == "trainer" else ():
        if total and number == other.value != total.value:
            yield other, total
            return


_COUNTING = ("trainer", "deepspeed", "torchtitan", "lightning")
_RULES: tuple[tuple[str, str, tuple[str, ...], Callable[[Any, Any], bool]], ...] = (
    (ADAM, SCHEDULED, ("trainer",), operator.ne),  # loaded together or not at all; a skipped step is none of either
    (ADAM, GLOBAL, _COUNTING, operator.gt),  # the state of an optimizer may have begun anew, and not run ahead
    (ADAM, ENGINE, _COUNTING, operator.gt),
    (ADAM, GLOBAL, ("lightning", "torchtitan"), operator.ne),  # which load all or nothing
    (SCHEDULED, GLOBAL, ("trainer",), operator.gt),
    (ENGINE, GLOBAL, ("trainer",), operator.gt),
)
"""(one count, another, trainers, when they cannot be of one step)"""


Found = Mapping[Need, Mapping[str, int | None]]  # Need → the names that are it, each with its number
PICKLE = re.compile(r".*\.(pt|pth|bin|pkl)", re.ASCII)  # Names of what `torch.save` writes
_NAMED = re.compile(r"(?:.*/)?checkpoint[-_](\d{1,18})/?", re.ASCII)
_OTHERS = {MANIFEST_NAME, METADATA_NAME, "adapter_config.json"}  # Not in a directory that a trainer had only begun
_NUMBERED = re.compile(r"model(_\d+)?\.safetensors", re.ASCII)  # accelerate's several models in DDP
_ARGUMENTS = "training_args.bin"
_SMALL_BYTES = 1 << 20  # A pickle that is read whole for a cheap look
_MOST_RANKS = 8  # Ranks of which a cheap look reads files
_MAX_DOCUMENT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a trainer would not resume as if nothing had happened."""

    file: str
    what: str
    does: str
    of: str = ""  # The `what` of its need
    is_sure: bool = True  # Not so where a save with other settings would be whole


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVerdict:
    """What is known of a step."""

    trainer: str = ""
    resumable: Known = "no"  # not known: nothing is missed, and what its trainer needs is not known
    reasons: tuple[Reason, ...] = ()
    is_weights_only: bool = False
    has: frozenset[str] = frozenset({MODEL})
    needed: frozenset[str] = frozenset()  # Files of it without which the trainer stops with an error
    steps: tuple[StepCount, ...] = ()
    mixed: tuple[Mixed, ...] = ()


@dataclass(slots=True)
class _StepLook:
    """What is read of a step."""

    source: Source
    files: Mapping[str, int]
    is_thorough: bool
    opened: list[tuple[str, Opened]] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    contents: dict[str, Any] = field(default_factory=dict)  # File → what it holds, of those that are read

    def read(self, name: str) -> Any:  # noqa: ANN401 - whatever was pickled
        """Return what a pickle holds; None where it is not there or not readable."""
        if name in self.files and name not in self.contents:
            with suppress(UnreadableError):
                self.contents[name] = read_torch_file(self.source, name).value
        return self.contents.get(name)

    def dicts(self) -> Iterator[dict[str, Any]]:
        """Yield what is read and is a dict, and the groups of optimizers in them."""
        for content in self.contents.values():
            if isinstance(content, dict):
                yield content
                groups = content.get("param_groups")
                yield from (each for each in groups if isinstance(each, dict)) if isinstance(groups, list) else ()


def judge_step(
    source: Source,
    files: Mapping[str, int],
    opened: Opened | None = None,
    *,
    thorough: bool = False,
    num_ranks: int | None = None,
) -> StepVerdict:
    """Judge the step that a directory is, or of `files` (relative name → size) the only one that is a checkpoint."""
    # A `thorough` look also reads the numbers that optimizers count steps by, and the metadata of all parts;
    # `num_ranks` are to resume it, by default as many as saved it.
    look = _StepLook(source, files, thorough)
    names = {*files, *(name.partition("/")[0] for name in files if "/" in name)}
    named = _NAMED.fullmatch(source.root)
    with ExitStack() as stack:
        if opened is not None and METADATA_NAME in files:
            look.opened.append(("", opened))
            names |= {f"{KEY}{(each.path or (each.fqn,))[0]}" for each in opened.checkpoint.tensors}
            names |= {f"{KEY}{(each.path or (each.fqn,))[0]}" for each in opened.checkpoint.blobs}
        elif thorough:
            look.opened += ((name, stack.enter_context(each)) for name, each in _parts(source, files))
        if len(files) == 1 and (name := next(iter(files))).endswith(".ckpt") and isinstance(look.read(name), dict):
            names |= {f"{KEY}{key}" for key in look.read(name)}
        contract = find_contract(names)
        if contract is None and named and not _OTHERS & files.keys():  # killed before anything else was saved
            contract = find_contract({*names, "trainer_state.json" if "config.json" in files else "optimizer.bin"})
        if contract is None:
            return StepVerdict(is_weights_only=True)
        found = contract.sort(names)
        reasons = [*_judge(look, contract, found, num_ranks)]
        for name, what in () if opened is None or any(each.file == "common.pt" for each in reasons) else opened.missing:
            reasons.append(Reason(file=name, what=what, does=f"{contract.title} stops with an error on resuming"))
        for directory, each in look.opened if thorough else ():
            look.said += read_items(each, directory)
    if is_weights_only := _is_weights_only(look, contract, found, is_named=named is not None):
        reasons = [each for each in reasons if _NUMBERED.fullmatch(each.file) and "missing" not in each.what]
    mixed = tuple(find_mixed(look.said, contract.trainer, number=int(named[1]) if named else None))
    is_known = contract.trainer not in ("plain", "megatron") and all(each.is_sure for each in reasons)
    is_wrong = is_weights_only or mixed or any(each.is_sure for each in reasons)
    return StepVerdict(
        trainer=contract.trainer,
        resumable="no" if is_wrong else "yes" if is_known else "not known",
        reasons=tuple(reasons),
        is_weights_only=is_weights_only,
        has=frozenset(need.what for need, each in found.items() if each),
        needed=frozenset(name for need, each in found.items() if not need.anew for name in each),
        steps=find_steps(look.said, contract.trainer),
        mixed=mixed,
    )


def _attributes(value: object) -> Mapping[str, Any]:
    return state if isinstance(state := getattr(value, "state", None), dict) else {}


def _parts(source: Source, files: Mapping[str, int]) -> Iterator[tuple[str, Opened]]:
    """Yield the DCP directories in a step, as far as they can be read."""
    from ckpt_tools.checkpoint.formats.opening import open_path

    for name in files:
        directory, slash, base = name.rpartition("/")
        if base == METADATA_NAME and slash and "/" not in directory:
            with suppress(UnreadableError):
                yield directory + slash, open_path(os.path.join(source.root, directory), format="dcp", as_part=True)


def _is_weights_only(look: _StepLook, contract: Contract, found: Found, *, is_named: bool) -> bool:
    """Is nothing there but weights, and was nothing else meant to be?"""
    rest = {need.what for need, names in found.items() if names}
    rest -= {MODEL, "the config", "the name of the save to continue from"}
    if contract.trainer == "lightning" and rest == {"loops, callbacks and schedules"}:
        content = look.read("meta.pt")
        return isinstance(content, dict) and "loops" not in content
    if contract.trainer in ("megatron", "deepspeed") or rest - {"the Trainer's progress", "the loops"}:
        return False
    if (wanted := _attributes(look.read(_ARGUMENTS)).get("save_only_model")) is not None:
        return bool(wanted) or not (is_named or rest)
    return bool(rest) or not is_named or MANIFEST_NAME in look.files


def _judge(look: _StepLook, contract: Contract, found: Found, num_ranks: int | None) -> Iterator[Reason]:
    """Yield what cannot be read and what is missing, in the order of saving."""
    for need, names in found.items():
        for count, name in enumerate(name for name in names if not name.startswith(KEY)):
            if what := _problem(look, contract, need, name, is_read=count < _MOST_RANKS or look.is_thorough):
                yield Reason(file=name, what=what, does=need.tell(contract.title, is_broken=True), of=need.what)
    own_ranks, is_own = _num_ranks(look, found)
    ranks = own_ranks if num_ranks is None else num_ranks
    for need, names in found.items():
        numbers, is_sure = {*names.values()}, True
        missing: set[int | None] = set()
        if not names:
            missing = {0 if need.by_rank and ranks != 1 else None} if _is_needed(look, contract, need, found) else set()
        elif need.by_rank:
            is_sure = is_own and num_ranks is None
            missing = {None} if ranks == 1 and "[_#]" in need.names else {*range(ranks)}
            missing = set() if None in numbers and need.what == MODEL else missing - numbers
        elif "#" in need.names:
            lacking, is_sure = _siblings(look, need, found)
            missing = {None if number == 0 and "[_#]" in need.names else number for number in lacking}
        if missing:
            first, *more = sorted(missing, key=lambda each: each or 0)
            what = f"it is missing, as are those of {len(more)} more" if more else "it is missing"
            does = need.tell(contract.title)
            yield Reason(file=need.file(first), what=what, does=does, of=need.what, is_sure=is_sure)


def _siblings(look: _StepLook, need: Need, found: Found) -> tuple[set[int], bool]:
    """Return which of a script's several models, optimizers or schedules lack, and whether that is sure."""
    numbers = {each.what: {number or 0 for number in names.values()} for each, names in found.items()}
    models, trained = numbers[MODEL], numbers[OPTIMIZER]
    missing = {*range(max(numbers[need.what]))} - numbers[need.what]
    if missing or need.what not in (MODEL, OPTIMIZER) or not models or not trained:
        return missing, True
    weights = next(names for each, names in found.items() if each.what == MODEL)
    tensors = {name: len(look.contents.get(name) or ()) for name in weights}
    known = {name for names in found.values() for name in names}
    is_counted = all(tensors.values()) and not any(PICKLE.fullmatch(name) for name in look.files.keys() - known)
    of_trained = sum(tensors[name] for name, number in weights.items() if (number or 0) in trained)
    has_more = is_counted and sum(len(each.get("params", ())) for each in look.dicts()) > of_trained
    if need.what == MODEL:  # FSDP's optimizers are saved with a model each; else one model may have several
        return trained - models if has_more or "fsdp" in need.names else set(), True
    return set() if has_more else models - trained, False  # which may be frozen


def _is_needed(look: _StepLook, contract: Contract, need: Need, found: Found) -> bool:
    """Would a trainer look for it, as far as the rest tells?"""
    is_universal = any(re.match(r"(?:[^/]+/)?zero/", name) for name in look.files)
    dicts = [*look.dicts()]
    if "zero" in need.names and need.what == OPTIMIZER:
        return not is_universal and all(each.get("optimizer") is None for each in dicts)
    if need.names == "latest":  # else this is the directory that it would name
        return not is_universal and any("/" in name for name in look.files)
    if need.what == SCALER:
        return contract.trainer == "trainer" and _attributes(look.read(_ARGUMENTS)).get("fp16") is True
    if need.what == SCHEDULE and contract.trainer == "trainer" and not need.is_sure:  # else DeepSpeed has its own
        configs = [each.get("ds_config") for each in dicts if each.get("lr_scheduler", 0) is None]
        return any(isinstance(config, dict) and "scheduler" not in config for config in configs)
    if need.what == SCHEDULE and contract.trainer == "accelerate":
        keys = {blob.fqn.rpartition(".")[2] for _, each in look.opened for blob in each.checkpoint.blobs}
        has_own = any(name.startswith("custom_checkpoint_") for name in look.files)
        return not has_own and "initial_lr" in keys.union(*dicts)
    if need.by_rank and contract.trainer == "accelerate" and need.what != MODEL:
        rest = any(names for other, names in found.items() if other.what not in (MODEL, OPTIMIZER))
        return rest or "fsdp" not in contract.marks or _NAMED.fullmatch(look.source.root) is not None
    return need.is_sure


def _num_ranks(look: _StepLook, found: Found) -> tuple[int, bool]:
    """Return how many ranks a step is for, and whether that is what its trainer had."""
    manifests = (each.manifest for _, each in look.opened)
    if meshes := [each.mesh.world_size for each in manifests if each is not None and each.mesh is not None]:
        return max(meshes), False
    state = _attributes(look.read(_ARGUMENTS)).get("distributed_state")
    if type(number := _attributes(state).get("num_processes")) is int and number > 0:
        return min(number, 1 << 20), True
    ranks = [*map(rank_of_file, look.files), 1 if "rng_state_0.pth" in look.files else None]
    ranks += [rank for need, names in found.items() if need.by_rank for rank in names.values()]
    sizes = [int(size[1]) for name in look.files if (size := re.search(r"world_size_(\d{1,6})_", name))]
    sizes += [size for each in look.dicts() if type(size := each.get("dp_world_size")) is int]
    return min(max([0, *sizes, *(1 + rank for rank in ranks if rank is not None)]), 1 << 20), True


def _problem(look: _StepLook, contract: Contract, need: Need, name: str, *, is_read: bool) -> str:
    """Say why a file cannot be read, "" where it can; keep what it says."""
    if name not in look.files:  # a directory of a part
        name = f"{name}/{METADATA_NAME}"
        if name not in look.files:
            return f"it has no {METADATA_NAME}: its save was not finished"
    if not look.files[name]:
        return "it is empty"
    is_zip = False
    try:
        if name.endswith(".json") and need.what != MODEL:
            text = read_document(look.source, name, _MAX_DOCUMENT_BYTES)
            document = parse_json(text, what="it", where=name, infinite=True)
            if not isinstance(document, dict):
                return "it is not a JSON object"
            if type(step := document.get("global_step")) is int:
                look.said.append(Said(GLOBAL, step, name))
        elif PICKLE.fullmatch(name) and is_read:
            is_zip = check_archive(look.files[name], partial(look.source.read, name), content=False)
            is_ours = need.what != MODEL or "model_states" in name
            if not is_zip or (is_ours and (look.is_thorough or look.files[name] <= _SMALL_BYTES)):
                file = read_torch_file(look.source, name)
                look.contents[name] = file.value
                with suppress(UnreadableError):
                    look.said += read_counts(look.source, file)
        elif contract.trainer == "accelerate" and _NUMBERED.fullmatch(name) and look.is_thorough:
            look.contents[name] = read_file(look.source, name).header.tensors
    except UnreadableError as error:  # of a zip, something in it may be of an unknown kind
        return "" if is_zip or isinstance(error, LimitError) else error.what
    return ""
