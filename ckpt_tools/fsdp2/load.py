"""Load a checkpoint into a sharded model: every rank reads its own boxes, and nothing else."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import add
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt_tools.checkpoint.entries import KeyPath, TensorEntry
from ckpt_tools.checkpoint.formats.opening import Opened, open_path
from ckpt_tools.checkpoint.formats.step import open_optimizer
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.checkpoint.transform import strip_wrappers
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.fsdp2.buffers import compute, place
from ckpt_tools.fsdp2.collective import share, this_rank, together, world_size
from ckpt_tools.fsdp2.internals import local_of
from ckpt_tools.fsdp2.local import assemble, bytes_of, read_parts
from ckpt_tools.fsdp2.names import describe_misfit, match_names, settle_names, shapes_of
from ckpt_tools.fsdp2.optimizer import Item, names_of, read_item, read_optimizer
from ckpt_tools.fsdp2.read import BoxReader, Whole
from ckpt_tools.fsdp2.state import (
    MODEL_KEY,
    OPTIMIZER_KEY,
    PerRank,
    RngState,
    check_names,
    fill,
    model_of,
    models_of,
    rebuild,
    refuse_shared,
)
from ckpt_tools.fsdp2.ties import declared_ties, plain_fqns, tie, tied_groups
from ckpt_tools.fsdp2.wrap import plan_of
from ckpt_tools.storage.run_leases import leased
from ckpt_tools.text import first_few

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What `load_checkpoint` did on this rank."""

    missing: tuple[str, ...]
    """Names of the model that nothing fills; they keep what they had (nothing, on meta). None with `strict`."""
    unexpected: tuple[str, ...]
    """Tensors of the checkpoint that the model has no name for."""
    tied: tuple[str, ...]
    """Names that share the parameter of another, and were not read on their own."""
    buffers: tuple[str, ...]
    """Buffers that no checkpoint holds and whose modules computed them."""
    computed: tuple[str, ...] = ()
    """Names of the model that the checkpoint lacks, and whose modules computed them, as `from_pretrained` does."""
    ignored: tuple[str, ...] = ()
    """Tensors of the checkpoint that `from_pretrained` leaves out, too."""
    loaded_bytes: int
    """Bytes of tensors that this rank has read."""
    state: Mapping[str, object] = field(default_factory=dict)
    """Train state by name, what is not a module, an optimizer or an object of its own."""
    unread: tuple[str, ...] = ()
    """What else the checkpoint has beside the model, and nobody asked for."""
    notes: tuple[str, ...] = ()
    """What is to be known besides: a head that starts anew, tensors left out, train state not as it was saved."""


def load_checkpoint(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    state: Mapping[str, object] | None = None,
    strict: bool = True,
    prefix: str = "auto",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    names: Callable[[str], str | None] | None = None,
) -> LoadReport:
    """Give every parameter and buffer of `model` its values from a checkpoint of any format.

    Collective: every rank calls it; when it fails on one rank, it fails on all, before any parameter is replaced.
    Parameters are replaced, not filled: an optimizer is built afterwards, or given to this function. Memory: this
    rank's parts, and one buffer.

    Args:
        model: Sharded or not, on meta or not.
        path: A safetensors file, an HF directory, a DCP directory, sharded safetensors, a file of torch.save. Nothing
            is unpickled.
        optimizer: Of this model: its groups get the new parameters, and its state and options are loaded.
        state: As `save_checkpoint` took it, with objects that are there to be loaded. Modules, optimizers and
            objects are loaded in place, and so are tensors, and dicts, whose entries are replaced; whatever is not
            an object is in the report, too. None asks for a value that is nothing but returned.
        strict: Every name of the model and of `state` must be there, and every tensor of a model must be wanted. What
            `from_pretrained` computes or leaves out without harm is allowed: see `computed`, `ignored` and `notes`.
        prefix: What the checkpoint's names have in front of the model's; "auto" finds out.
        dtype: Of floating-point parameters; those of the model by default.
        device: Where to; the mesh's device by default (the CPU for an offloaded model).
        names: From a name of the model to the one it has in the checkpoint (before `prefix`), or to None for what
            is not to be loaded; several names may have one source.

    Raises:
        UnreadableError: Not a complete checkpoint, or with `strict` not one of this model.
        UsageError: Shapes or dtypes that do not fit.
    """
    wanted = dict(state or {})

    def read() -> tuple[dict[str, torch.Tensor], LoadReport, Restored]:
        check_names(wanted)
        with leased(path), open_path(os.fspath(path), as_part=True) as opened:  # what lacks is refused by name
            root = _own_root(opened) if prefix == "auto" else prefix
            found, report = read_state(
                model, opened, strict=strict, prefix=root, dtype=dtype, device=device, names=names
            )
            rest = _read_rest(model, optimizer, wanted, opened, os.fspath(path), strict=strict, device=device)
            return found, report, rest

    found, report, rest = together(read)
    report = install(model, found, report, device=device)
    for name, (module, tensors, theirs) in rest.modules.items():
        report = _join(report, name, install(module, tensors, theirs))
    together(rest.install)
    missing, notes = report.missing + rest.missing, (*report.notes, *rest.notes)
    return replace(report, missing=missing, state=rest.values, unread=rest.unread, notes=notes)


def _join(report: LoadReport, name: str, own: LoadReport) -> LoadReport:
    """Return a report with that of another model, whose names begin with its key."""
    joined: dict[str, Any] = {"loaded_bytes": report.loaded_bytes + own.loaded_bytes}
    for field_name in ("missing", "tied", "buffers", "computed"):
        joined[field_name] = getattr(report, field_name) + tuple(f"{name}.{fqn}" for fqn in getattr(own, field_name))
    for field_name in ("unexpected", "ignored", "notes"):
        joined[field_name] = getattr(report, field_name) + getattr(own, field_name)
    return replace(report, **joined)


def _own_root(opened: Opened) -> str:
    """Return the prefix of the model in a checkpoint that says by its nesting what lies beside it; else "auto"."""
    entries = opened.checkpoint.tensors
    model = [entry for entry in entries if entry.path[:1] == (MODEL_KEY,)]
    is_sure = model and len(model) < len(entries) and all(len(entry.path) == 2 for entry in model)
    return f"{MODEL_KEY}." if is_sure and all(entry.path for entry in entries) else "auto"


def _read_rest(
    model: nn.Module,
    optimizer: Optimizer | None,
    wanted: Mapping[str, object],
    opened: Opened,
    path: str,
    *,
    strict: bool,
    device: torch.device | str | None,
) -> Restored:
    """Read everything but the model; nothing is changed."""
    rest = Restored(opened, wanted)
    models = models_of(model, wanted)
    refuse_shared(models)
    for name, value in wanted.items():
        if isinstance(value, nn.Module) and rest.has(name):
            rest.modules[name] = (value, *read_state(value, opened, strict=strict, prefix=f"{name}."))
        elif isinstance(value, Optimizer) and rest.has(name):
            owner = model_of(value, name, models)
            rest.add_optimizer(value, owner, read_optimizer(owner, value, opened, root=name, device=device_of(owner)))
        else:
            rest.read(name, value)
    if optimizer is not None:
        with open_optimizer(path) as own:
            rest.add_optimizer(optimizer, model, read_optimizer(model, optimizer, own, device=device_of(model, device)))
    if strict and rest.missing:
        raise UnreadableError(
            f"the checkpoint does not contain this train state: {first_few(list(rest.missing), 6)}",
            where=opened.source.root,
            hint="; ".join(rest.notes) or f"it contains {first_few(rest.roots, 8)}; pass strict=False to load anyway",
        )
    return rest


def install(
    model: nn.Module, state: Mapping[str, torch.Tensor], report: LoadReport, *, device: torch.device | str | None = None
) -> LoadReport:
    """Compute what the checkpoint lacks and modules know, replace parameters by all of it, and share again."""
    seed = share(torch.initial_seed())
    computed, buffers, note = together(lambda: complete(model, report, device=device, seed=seed))
    assign(model, {**state, **computed}, report.tied)
    place(model, buffers, device_of(model, device))
    return replace(report, buffers=tuple(buffers), notes=tuple(filter(None, (*report.notes, note))))


def complete(
    model: nn.Module, report: LoadReport, *, seed: int, device: torch.device | str | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    """Compute what the checkpoint lacks: for `assign`, for `place`, and which buffers nobody computes, for people."""
    targets, shared = targets_of(model)
    fqns = plain_fqns(model)
    wanted = {fqns.get(name, name): name for name in report.computed if name not in shared}
    saved = {fqns.get(name, name) for name in targets}
    transient = [name for name, _ in model.named_buffers(remove_duplicate=False) if name not in saved]
    values = compute(model, [*wanted, *transient], seed=seed)
    own = {}
    for fqn, name in wanted.items():
        local = read_parts(targets[name], partial(_cut, values.pop(fqn)))
        own[name] = assemble(local.to(device_of(model, device)), targets[name])
    kept = [name for name in transient if name not in values]
    note = f"buffers that keep their old values, because no module computes them: {first_few(kept, 4)}" if kept else ""
    return own, values, note


def _cut(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(map(slice, box.offsets, map(add, box.offsets, box.sizes)))].clone()


def assign(model: nn.Module, state: Mapping[str, torch.Tensor], tied: Collection[str] = ()) -> None:
    """Replace parameters by `state`, and share again what was shared, or is to be (`tied`)."""
    ties = tied_groups(model)
    model.load_state_dict(dict(state), strict=False, assign=True)
    fqns = plain_fqns(model)
    for group in declared_ties(model):
        loaded = [name for name in group if name in state][:1]
        ties += (tuple(fqns[name] for name in (*loaded, *(name for name in group if name in tied))),)
    tie(model, tuple(filter(None, ties)), [fqns.get(name, name) for name in state])


def device_of(model: nn.Module, device: torch.device | str | None = None) -> torch.device:
    """Return where the model's tensors belong: `device`, or what its mesh or its other tensors say."""
    if device is not None:
        return torch.device(device)
    plan = plan_of(model)
    if plan is not None and plan.policy.cpu_offload:
        return torch.device("cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        kind = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else tensor.device.type
        if kind == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        if kind != "meta":
            return torch.device(kind)
    return torch.device("cpu")


def targets_of(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors to load by their names in a state dict, and name → name of those that share another's."""
    state = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    fqns = plain_fqns(model)
    first: dict[str, str] = {}
    shared: dict[str, str] = {}
    groups = {fqn: group for group in tied_groups(model) for fqn in group}
    for name in state:
        group = groups.get(fqns.get(name, name))
        if group is not None:
            if group[0] in first:
                shared[name] = first[group[0]]
            else:
                first[group[0]] = name
    return state, shared


def read_state(
    model: nn.Module,
    opened: Opened,
    *,
    strict: bool = True,
    prefix: str = "auto",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    names: Callable[[str], str | None] | None = None,
) -> tuple[dict[str, torch.Tensor], LoadReport]:
    """Read what `load_checkpoint` installs, with its arguments; not collective, and the model stays as it is."""
    targets, shared = targets_of(model)
    sources_by_name = {name: name if names is None else names(name) for name in targets}
    known = {name: strip_wrappers(source) for name, source in sources_by_name.items() if source is not None}
    targets = {name: targets[name] for name in known}
    shared = {name: first for name, first in shared.items() if name in targets and first in targets}
    match = match_names(opened.checkpoint, model, {known[n]: s for n, s in shapes_of(targets).items()}, prefix)
    found = {name: match.found[source] for name, source in known.items() if source in match.found}
    for group in declared_ties(model):  # what to_empty has taken apart
        first = next((name for name in group if name in found and name not in shared), None)
        lost = (name for name in group if name in targets and known[name] not in match.found and name not in shared)
        shared |= dict.fromkeys(lost, first) if first is not None else {}
    sources = sources_of(targets, shared, found)
    absent = {known[name]: name for name in targets if shared.get(name, name) not in sources}
    contract = settle_names(model, opened.identity.architecture, match, absent, known.values(), strict=strict)
    missing = tuple(absent[name] for name in contract.missing)
    if strict and (missing or contract.unexpected):
        raise _strict_error(opened, targets, missing, contract.unexpected)
    _check_shapes(opened, targets, sources)
    reader = BoxReader(opened)
    place = device_of(model, device)
    state: dict[str, torch.Tensor] = {}
    for name, whole in sources.items():
        like = targets[name]
        wanted = dtype if dtype is not None and like.is_floating_point() else like.dtype
        local = read_parts(like, partial(reader.read, whole, dtype=wanted))
        state[name] = assemble(local.to(place), like)
    _check_ties(opened, reader, targets, shared, found, state)
    report = LoadReport(
        missing=missing,
        unexpected=contract.unexpected,
        tied=tuple(name for name in shared if shared[name] in sources),
        buffers=(),
        computed=tuple(absent[name] for name in (*contract.computed, *contract.anew)),
        ignored=contract.ignored,
        loaded_bytes=reader.bytes_read,
        notes=contract.notes,
    )
    return state, report


def sources_of(targets: Mapping[str, torch.Tensor], shared: Mapping[str, str], found: Mapping[str, T]) -> dict[str, T]:
    """Return name → what to read; of names that share a parameter the first, from whichever the checkpoint has."""
    sources = {name: found[name] for name in targets if name not in shared and name in found}
    for name, first in shared.items():
        if first not in sources and name in found:
            sources[first] = found[name]
    return sources


def _check_shapes(opened: Opened, targets: Mapping[str, torch.Tensor], sources: Mapping[str, Whole]) -> None:
    wrong = [
        f"{name}: {list(whole.shape)} in the checkpoint, {list(targets[name].shape)} in the model"
        for name, whole in sources.items()
        if whole.shape != tuple(targets[name].shape)
    ]
    if wrong:
        raise UsageError(
            f"shapes differ ({len(wrong)} in all): {'; '.join(wrong[:4])}",
            where=opened.source.root,
            hint="build the model from the config.json that belongs to the checkpoint",
        )


def _check_ties(
    opened: Opened,
    reader: BoxReader,
    targets: Mapping[str, torch.Tensor],
    shared: Mapping[str, str],
    found: Mapping[str, Whole],
    state: Mapping[str, torch.Tensor],
) -> None:
    """Refuse a checkpoint that stores two values for what the model shares."""
    for name, first in shared.items():
        if name not in found or first not in found:
            continue
        if found[name].shape != tuple(targets[name].shape):
            _check_shapes(opened, targets, {name: found[name]})
        tensor = state[first]
        local = local_of(tensor)
        other = read_parts(targets[name], partial(reader.read, found[name], dtype=local.dtype))
        if not torch.equal(bytes_of(other.to("cpu")), bytes_of(local.to("cpu"))):
            raise UsageError(
                f"the model ties {first!r} and {name!r}, but the checkpoint stores two different values",
                where=opened.source.root,
                hint="set tie_word_embeddings to false in the model's config, or leave one of the two out",
            )


def _strict_error(
    opened: Opened, targets: Mapping[str, torch.Tensor], missing: Sequence[str], unexpected: Sequence[str]
) -> UnreadableError:
    hint = "pass strict=False if that is intended"
    if missing and unexpected:
        near = difflib.get_close_matches(missing[0], unexpected, n=1, cutoff=0.4)
        if near:
            hint = (
                f"{missing[0]} may be what the checkpoint calls {near[0]}: pass prefix, or "
                "rename with `ckpt reshard`/`ckpt gather`"
            )
    if missing and len(missing) == len(targets):
        hint = "no name matches: this may be another model's checkpoint: `ckpt inspect --tensors` lists its names"
    return UnreadableError(
        f"the checkpoint does not match the model: {describe_misfit(missing, unexpected)}",
        where=opened.source.root,
        hint=hint,
    )


# Train state on its way back: read as a whole, then installed

_Items = Mapping[KeyPath, Item]


class Restored:
    """What was read of a checkpoint beside the model; `wanted` are the names to load."""

    def __init__(self, opened: Opened, wanted: Mapping[str, object]) -> None:
        self.modules: dict[str, tuple[nn.Module, dict[str, torch.Tensor], Any]] = {}
        """Name → module, and what `read_state` returned for it."""
        self.values: dict[str, object] = {}
        """Name → value that is no object."""
        self.missing: tuple[str, ...] = ()
        """Names, or parts of what they name, that the checkpoint lacks."""
        self.notes: list[str] = []
        self._opened = opened
        self._wanted = wanted
        self._reader = BoxReader(opened)
        self._optimizers: list[tuple[Optimizer, nn.Module, list[list[str]], dict[str, Any]]] = []
        self._objects: dict[str, Any] = {}
        self._items: dict[str | int, dict[KeyPath, Item]] = {}
        every: list[Item] = [*opened.checkpoint.tensors, *opened.checkpoint.blobs]
        for item in every:
            if item.path:
                self._items.setdefault(item.path[0], {})[item.path[1:]] = item
        self.roots = list(map(str, self._items))
        """The keys that the checkpoint has."""

    @property
    def unread(self) -> tuple[str, ...]:
        """The keys beside the model that nobody asked for; of a model without a root, objects alone."""
        asked = {*self._wanted, MODEL_KEY, *([OPTIMIZER_KEY] if self._optimizers else ())}
        blobs = [str((*blob.path, blob.fqn)[0]) for blob in self._opened.checkpoint.blobs]
        names = (*(self.roots if MODEL_KEY in self._items else blobs), *self._opened.checkpoint.sealed)
        return tuple(dict.fromkeys(name for name in names if name not in asked))

    def has(self, name: str) -> bool:
        """Is there anything of this name?"""
        return name in self._items

    def add_optimizer(self, optimizer: Optimizer, model: nn.Module, state: dict[str, Any]) -> None:
        """Remember an optimizer's state, and the names of its parameters, which the load replaces."""
        names = {id(parameter): name for name, parameter in names_of(model).items()}
        groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        self._optimizers.append((optimizer, model, groups, state))

    def read(self, name: str, value: object) -> None:
        """Read an object's state, or a value."""
        items = self._items.get(name)
        if items is None:
            self.missing += (name,)
            return
        if isinstance(value, PerRank):
            self._read_own(name, value, items)
            return
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise UsageError("cannot fill a tensor on meta", where=f"state[{name!r}]", hint="pass None for it")
        if isinstance(value, Stateful):
            self._objects[name] = self._rebuild(items, value.state_dict(), name)
        else:
            self.values[name] = self._rebuild(items, value, name)
            self.missing += tuple(_compare(value, self.values[name], name))

    def _read_own(self, name: str, value: PerRank, items: _Items) -> None:
        ranks = sorted({int(path[0]) for path in items if path and str(path[0]).isdecimal()})
        rank, world = this_rank(), world_size()
        source = rank if rank in ranks else min(ranks, default=-1)
        if ranks != list(range(world)):
            self.notes.append(f"{name}: saved on {len(ranks)} ranks, loaded on {world}")
            if source < 0 or not isinstance(value, RngState):
                self.notes[-1] += "; each rank has its own value, which cannot be mapped to another number of ranks"
                self.missing += (name,)
                return
            self.notes[-1] += (
                f"; ranks {len(ranks)} to {world - 1} start new random streams"
                if len(ranks) < world
                else f"; the streams of ranks {world} to {ranks[-1]} are not continued"
            )
        own = {path[1:]: item for path, item in items.items() if path[0] == str(source)}
        found = self._rebuild(own, value.state_dict()[str(rank)], f"{name}.{source}")
        self._objects[name] = {str(rank): found} if source == rank else found

    def _rebuild(self, items: _Items, like: object, name: str) -> Any:  # noqa: ANN401
        def read(item: Item, like: object) -> object:
            note = f"{name}: tensors stored in parts are loaded whole on every rank: their sharding is not known"
            is_cut = isinstance(item, TensorEntry) and len(item.chunks) > 1
            if is_cut and not isinstance(like, torch.Tensor) and note not in self.notes:
                self.notes.append(note)
            return read_item(item, like, self._reader, self._opened)

        return rebuild(items, like, read, self.notes, name)

    def install(self) -> None:
        """Give everything to its owner; the modules have theirs."""
        for optimizer, model, groups, state in self._optimizers:
            parameters = names_of(model)
            for group, names in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = [parameters[name] for name in names]
            optimizer.load_state_dict(state)
        for name, state in self._objects.items():
            value: Any = self._wanted[name]
            if isinstance(value, RngState) and str(this_rank()) not in state:
                value.start(state)
            else:
                value.load_state_dict(state)
        for name, value in self.values.items():
            fill(self._wanted[name], value)


def _compare(like: object, found: object, name: str) -> list[str]:
    """Return the names that a given value has and the checkpoint's has not; raise UsageError if tensors differ."""
    if isinstance(like, Mapping) and isinstance(found, Mapping):
        lacking = [f"{name}.{key}" for key in like if key not in found]
        both = [key for key in like if key in found]
        return lacking + [fqn for key in both for fqn in _compare(like[key], found[key], f"{name}.{key}")]
    if isinstance(like, torch.Tensor) and isinstance(found, torch.Tensor):
        if like.shape != found.shape or like.is_floating_point() != found.is_floating_point():
            has, wants = (f"{list(tensor.shape)} {tensor.dtype}" for tensor in (found, like))
            raise UsageError(f"the tensor must be {wants}, the checkpoint has {has}", where=f"state: {name}")
        return []
    return [name] if isinstance(like, (Mapping, torch.Tensor)) else []
