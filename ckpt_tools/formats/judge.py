"""The one judge of a step: whose it is, whether its trainer could resume from it, and whether it is all of one step.

It reads names, sizes, small documents and the pickles beside a model, and runs nothing. A thorough look also reads the
numbers that optimizers count steps by.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ckpt_tools.description.identity import Known
from ckpt_tools.description.infer import rank_of_file
from ckpt_tools.errors import LimitError, UnreadableError
from ckpt_tools.formats._json import parse_json
from ckpt_tools.formats._torch_file import read_torch_file
from ckpt_tools.formats.contracts import KEY, ZERO_OPTIMIZER, Contract, Need, find_contract
from ckpt_tools.formats.file_names import METADATA_NAME
from ckpt_tools.formats.format import Opened, read_document
from ckpt_tools.formats.manifest import MANIFEST_NAME
from ckpt_tools.formats.step_counts import Mixed, Said, find_mixed, read_counts, read_items
from ckpt_tools.formats.steps import is_part
from ckpt_tools.formats.torch_zip import check_archive
from ckpt_tools.storage.source import Source

PICKLE = re.compile(r".*\.(pt|pth|bin|pkl)", re.ASCII)
"""Names of what `torch.save` writes."""
_NAMED = re.compile(r"(?:.*/)?checkpoint[-_](\d{1,18})/?", re.ASCII)
_STRANGE = re.compile(r"(pytorch_model_fsdp|optimizer)_0\d", re.ASCII)
"""How names begin that only look like those of parts."""
_OTHERS = {MANIFEST_NAME, METADATA_NAME, "adapter_config.json"}
"""Of these none is in a directory that a trainer had only begun to fill, as far as its name tells."""
_ARGUMENTS = "training_args.bin"
_SMALL_BYTES = 1 << 20
"""A pickle that is read whole for a cheap look."""
_MOST_RANKS = 8
"""Ranks of which a cheap look reads files."""
_MAX_DOCUMENT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a trainer would not resume as if nothing had happened."""

    file: str
    what: str
    """What is wrong with it."""
    does: str
    """What the trainer does then."""
    is_sure: bool = True
    """Not so where a save with other settings would be whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVerdict:
    """What is known of a step."""

    trainer: str = ""
    """As contracts have it; "" where nothing tells."""
    title: str = "the trainer"
    resumable: Known = "no"
    """yes, no, or not known: nothing is missed, and what its trainer needs is not known."""
    reasons: tuple[Reason, ...] = ()
    is_weights_only: bool = False
    """It was saved to hold weights alone."""
    has: frozenset[str] = frozenset()
    """What it holds, in words."""
    needed: frozenset[str] = frozenset()
    """Files of it without which the trainer stops with an error."""
    said: tuple[Said, ...] = ()
    mixed: tuple[Mixed, ...] = ()
    """Files that cannot be of one step."""

    @property
    def steps(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Counts of steps, and the files that say them."""
        kinds = ("global", "adam", *(("schedule",) if self.trainer in ("trainer", "torchtitan") else ()))
        found: dict[int, list[str]] = {}
        for each in self.said:
            if each.kind in kinds and isinstance(each.value, int | float):
                found.setdefault(int(each.value), []).append(each.file)
        return tuple((step, tuple(dict.fromkeys(files))) for step, files in sorted(found.items()))


@dataclass(slots=True)
class _Look:
    """What is read of a step."""

    source: Source
    files: Mapping[str, int]
    is_thorough: bool
    names: set[str] = field(default_factory=set)
    said: list[Said] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    """Last keys of items, and of the groups of optimizers."""
    contents: dict[str, Any] = field(default_factory=dict)
    """File → what it holds, of those that are read."""
    opened: list[tuple[str, Opened]] = field(default_factory=list)


def judge_step(
    source: Source,
    files: Mapping[str, int],
    opened: Opened | None = None,
    *,
    thorough: bool = False,
    num_ranks: int | None = None,
) -> StepVerdict:
    """Judge the step that a directory is, or a file in it.

    Args:
        source: The directory.
        files: Relative name → size of what it holds; of a checkpoint that is one file, of that alone.
        opened: The checkpoint, where it is open.
        thorough: Also read the numbers that optimizers count steps by, and the metadata of all parts.
        num_ranks: On so many ranks it is to be resumed; by default on as many as saved it.
    """
    names = {*files, *(name.partition("/")[0] for name in files if "/" in name)}
    look = _Look(source, files, thorough, names={name for name in names if not _STRANGE.match(name)})
    with ExitStack() as stack:
        if opened is not None and METADATA_NAME in files:
            look.opened.append(("", opened))
        elif thorough:
            look.opened += ((name, stack.enter_context(each)) for name, each in _parts(source, files))
        return _verdict(look, opened, num_ranks)


def _verdict(look: _Look, opened: Opened | None, num_ranks: int | None) -> StepVerdict:
    """Return what is known of a step, with what can be opened of it open."""
    source, files, thorough = look.source, look.files, look.is_thorough
    for directory, each in look.opened:
        checkpoint = each.checkpoint
        look.names |= set() if directory else {*_first_keys(each)}
        look.keys |= {blob.fqn.rpartition(".")[2] for blob in checkpoint.blobs}
    if len(files) == 1 and (name := next(iter(files))).endswith(".ckpt"):
        content = _content(look, name)
        look.names |= {f"{KEY}{key}" for key in content} if isinstance(content, dict) else set()
    contract = find_contract(look.names)
    named = _NAMED.fullmatch(source.root)
    if contract is None and named is not None and not _OTHERS & files.keys():  # killed before anything else was saved
        contract = find_contract({*look.names, "trainer_state.json" if "config.json" in files else "optimizer.bin"})
    if contract is None:
        return StepVerdict(is_weights_only=True, has=frozenset({"the model"}))
    reasons = [*_judge(look, contract, num_ranks)]
    for name, what in () if opened is None else opened.missing:
        if not any(each.file == name for each in reasons):
            reasons.append(Reason(file=name, what=what, does=f"{contract.title} stops with an error on resuming"))
    saved = {each.saved_as: directory for directory, each in look.opened if directory and each.saved_as}
    if len(saved) > 1:
        what = "saved in " + " and ".join(f"{name} ({directory})" for name, directory in list(saved.items())[:2])
        reasons.append(Reason(file=METADATA_NAME, what=what, does="its parts may be of two steps", is_sure=False))
    for directory, each in look.opened if thorough else ():
        look.said += read_items(each, directory)
    is_weights_only = _is_weights_only(look, contract, is_named=named is not None)
    mixed = tuple(
        find_mixed(
            sorted(look.said, key=lambda each: each.file), contract.trainer, number=int(named[1]) if named else None
        )
    )
    sure = [each for each in reasons if each.is_sure]
    is_known = contract.trainer not in ("plain", "megatron") and not len(sure) < len(reasons)
    return StepVerdict(
        trainer=contract.trainer,
        title=contract.title,
        resumable="no" if sure or is_weights_only or mixed else "yes" if is_known else "not known",
        reasons=() if is_weights_only else tuple(reasons),
        is_weights_only=is_weights_only,
        has=frozenset(need.what for need in contract.saved if need.find(look.names)),
        needed=frozenset(name for need in contract.saved if need.without == "crash" for name in need.find(look.names)),
        said=tuple(look.said),
        mixed=mixed,
    )


def _first_keys(opened: Opened) -> Iterator[str]:
    if METADATA_NAME in opened.source.list_files(max_depth=0):
        paths = [entry.path or (entry.fqn,) for entry in opened.checkpoint.tensors]
        paths += [blob.path or (blob.fqn,) for blob in opened.checkpoint.blobs]
        yield from (f"{KEY}{path[0]}" for path in paths)


def _parts(source: Source, files: Mapping[str, int]) -> Iterator[tuple[str, Opened]]:
    """Yield the DCP directories in a step, as far as they can be read."""
    from ckpt_tools.formats.opening import open_path

    for name in files:
        directory, slash, base = name.rpartition("/")
        if base == METADATA_NAME and slash and "/" not in directory:
            with suppress(UnreadableError):
                yield directory + slash, open_path(os.path.join(source.root, directory), format="dcp", as_part=True)


def _is_weights_only(look: _Look, contract: Contract, *, is_named: bool) -> bool:
    """Is nothing there but weights, and was nothing else meant to be?"""
    kept = ("the config", "the name of the save to go on from")
    rest = [need for need in contract.saved if need.what not in kept and need.find(look.names) and not need.is_weights]
    if contract.trainer == "lightning" and "meta.pt" in look.files and len(rest) == 1:
        content = _content(look, "meta.pt")
        return isinstance(content, dict) and "loops" not in content
    if contract.trainer in ("megatron", "deepspeed") or any(need.what != "the Trainer's progress" for need in rest):
        return False
    arguments = _content(look, _ARGUMENTS)
    if (wanted := _attribute(arguments, "save_only_model")) is not None:
        return bool(wanted) or not (is_named or rest)
    return bool(rest) or not is_named or MANIFEST_NAME in look.files


def _attribute(value: object, name: str) -> object:
    state = getattr(value, "state", None)
    return state.get(name) if isinstance(state, dict) else None


def _judge(look: _Look, contract: Contract, num_ranks: int | None) -> Iterator[Reason]:
    """Yield what is missing and what cannot be read, in the order of saving."""
    wanted = {
        "the gradient scaler": contract.trainer == "trainer" and _attribute(_content(look, _ARGUMENTS), "fp16") is True,
        "the learning-rate schedule": False,
    }
    checked: list[tuple[Need, dict[str, int | None]]] = [(need, need.find(look.names)) for need in contract.saved]
    for need, found in checked:
        yield from _broken(look, contract, need, found)
    own_ranks, is_sure = _num_ranks(look, contract)
    num_ranks, is_sure = (own_ranks, is_sure) if num_ranks is None else (num_ranks, False)
    wanted["the learning-rate schedule"] = "initial_lr" in look.keys and not _any(look.files, "custom_checkpoint_")
    beside = r"random_states_|scheduler|sampler|dl_state|custom_checkpoint|model"
    has_beside = any(re.match(beside, name) and not is_part(name.partition("/")[0]) for name in look.files)
    is_universal = any(re.match(r"(?:[^/]+/)?zero/", name) for name in look.files)
    has_own = is_universal or any(_dict(content).get("optimizer") is not None for content in look.contents.values())
    has_beside = has_beside or _NAMED.fullmatch(look.source.root) is not None
    for need, found in checked:
        if not found:
            is_own = need.by_rank and contract.trainer == "accelerate" and not has_beside and not need.is_weights
            if need.name == ZERO_OPTIMIZER and has_own:
                continue
            if need.name == "latest" and (is_universal or not any("/" in name for name in look.files)):
                continue  # this is the directory that it would name
            if (need.is_sure or wanted.get(need.what, False)) and contract.trainer != "plain" and not is_own:
                file = need.file(0 if need.by_rank and num_ranks != 1 else None)
                yield Reason(file=file, what="it is missing", does=need.tell(contract.title))
        elif need.by_rank and num_ranks:
            has_lone = None in found.values()  # of the Trainer on one rank, or of all ranks of ZeRO's stages 1 and 2
            is_lone = has_lone and (num_ranks == 1 or need.is_weights)
            missing = [] if is_lone else sorted({*range(num_ranks)} - {*found.values()})
            if num_ranks == 1 and "|" in need.name and not has_lone:
                missing = [-1]
            if missing:
                file = need.file(None if missing == [-1] else missing[0])
                more = f", and those of {len(missing) - 1} more ranks" if len(missing) > 1 else ""
                does = need.tell(contract.title)
                yield Reason(file=file, what=f"it is missing{more}", does=does, is_sure=is_sure)
    yield from _odd_parts(look, contract)


def _odd_parts(look: _Look, contract: Contract) -> Iterator[Reason]:
    """Yield the directories that several models and optimizers lack; a model may well have no optimizer."""
    found: dict[str, set[str]] = {"pytorch_model_fsdp": set(), "optimizer": set()}
    for name in look.names:
        kind, _, number = name.rpartition("_")
        if is_part(name):
            found[kind].add(number)
    models, optimizers = found.values()
    odd = [("pytorch_model_fsdp", optimizers - models, True)] * bool(models)
    odd += [("optimizer", models - optimizers, False)] * bool(optimizers)
    for kind, numbers, is_sure in odd:
        for number in sorted(numbers)[:_MOST_RANKS]:
            does = f"{contract.title} stops with an error on resuming"
            yield Reason(file=f"{kind}_{number}", what="it is missing", does=does, is_sure=is_sure)


def _any(names: Collection[str], start: str) -> bool:
    return any(name.startswith(start) for name in names)


def _num_ranks(look: _Look, contract: Contract) -> tuple[int, bool]:
    """Return how many ranks a step is for, and whether that is what its trainer had."""
    manifests = (each.manifest for _, each in look.opened)
    meshes = [each.mesh.world_size for each in manifests if each is not None and each.mesh is not None]
    if meshes:
        return max(meshes), False
    state = _attribute(_content(look, _ARGUMENTS), "distributed_state")
    if type(number := _attribute(state, "num_processes")) is int and number > 0:
        return min(number, 1 << 20), True
    ranks = {rank for name in look.files if (rank := rank_of_file(name)) is not None}
    found = [need.find(look.names) for need in contract.saved if need.by_rank]
    ranks |= {rank for each in found for rank in each.values() if rank is not None}
    sizes = [int(size[1]) for name in look.files if (size := re.search(r"world_size_(\d{1,6})_", name))]
    said = [_dict(content).get("dp_world_size") for content in look.contents.values()]
    sizes += [each for each in said if type(each) is int]
    is_several = "rng_state_0.pth" in look.files
    return max([1 + max(ranks, default=-1), *sizes, 2 * is_several]), True


def _dict(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _broken(look: _Look, contract: Contract, need: Need, found: Mapping[str, int | None]) -> Iterator[Reason]:
    """Yield the files of a need that cannot be read, and keep what the others say."""
    for count, name in enumerate(found):
        if name.startswith(KEY):
            continue
        what = ""
        if name not in look.files:  # a directory of a part
            what = "" if f"{name}/{METADATA_NAME}" in look.files else f"it has no {METADATA_NAME}: its save did not end"
        elif not look.files[name]:
            what = "it is empty"
        elif name.endswith(".json") and not need.is_weights:
            try:
                document = parse_json(
                    read_document(look.source, name, _MAX_DOCUMENT_BYTES), what="it", where=name, infinite=True
                )
                step = _dict(document).get("global_step")
                look.said += [Said(kind="global", value=step, file=name)] if type(step) is int else []
                what = "" if isinstance(document, dict) else "it is not an object of JSON"
            except UnreadableError as error:
                what = error.what
        elif PICKLE.fullmatch(name) and (count < _MOST_RANKS or look.is_thorough):
            is_ours = not need.is_weights or "model_states" in name
            what = _check_pickle(look, name, is_read=is_ours and (look.is_thorough or look.files[name] <= _SMALL_BYTES))
        if what:
            yield Reason(
                file=name.removesuffix(f"/{METADATA_NAME}"), what=what, does=need.tell(contract.title, is_broken=True)
            )


def _check_pickle(look: _Look, name: str, *, is_read: bool) -> str:
    """Say what is wrong with what `torch.save` should have written; keep what it says."""
    read: Callable[[int, int], bytes] = partial(look.source.read, name)
    try:
        is_zip = check_archive(look.files[name], read, content=False)
    except UnreadableError as error:
        return error.what
    if not is_read and is_zip:
        return ""
    try:
        file = read_torch_file(look.source, name)
    except LimitError:
        return ""
    except UnreadableError as error:
        return "" if is_zip else error.what  # of a zip, something in it may be of an unknown kind
    look.contents[name] = file.value
    with suppress(UnreadableError):
        look.said += read_counts(look.source, file)
    groups = _dict(file.value).get("param_groups")
    look.keys |= (
        {key for group in groups if isinstance(group, dict) for key in group} if isinstance(groups, list) else set()
    )
    return ""


def _content(look: _Look, name: str) -> object:
    """Return what a pickle holds; None where it is not there or not readable."""
    if name not in look.files:
        return None
    if name not in look.contents:
        look.contents[name] = None
        with suppress(UnreadableError):
            look.contents[name] = read_torch_file(look.source, name).value
    return look.contents[name]
