"""What is wrong with a sharded model at one moment, found without running it and without talking to other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Literal, TypeVar, cast, get_args

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checkpoint.names import group_names
from ckpt_tools.errors import UsageError
from ckpt_tools.fsdp2.buffers import check_buffers
from ckpt_tools.fsdp2.catalogue import build_finding, build_warning
from ckpt_tools.fsdp2.entry_methods import entry_path
from ckpt_tools.fsdp2.internals import (
    FsdpGroup,
    ManagedParam,
    UnitState,
    mesh_axes,
    read_states,
    refuse_off_limits,
    registered_methods,
    shown,
)
from ckpt_tools.fsdp2.local import cut_dim
from ckpt_tools.fsdp2.ties import wanted_ties
from ckpt_tools.fsdp2.watch import last_watch
from ckpt_tools.text import first_few

if TYPE_CHECKING:
    from ckpt_tools.fsdp2.wrap import ShardedPlan

_T = TypeVar("_T")
Phase = Literal["built", "sharded", "loaded", "forward", "backward", "stepped"]
"""What was done last. "forward" is after a forward pass and before backward."""

PHASES: tuple[str, ...] = get_args(Phase)
"""What `audit` takes for its `phase`, in the order of a training script."""


def audit(
    model: nn.Module,
    *,
    phase: Phase,
    plan: ShardedPlan | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    scheduler: object = None,
) -> list[Finding]:
    """Look for everything that can be seen on this rank alone.

    Works on any model with `fully_shard` or `replicate` in it, whoever called it. Not collective, changes nothing.

    Args:
        model: The root, or what contains the roots.
        phase: What was done last; later phases expect more (no meta tensors once loaded, …).
        plan: What `shard_model` returned, to compare placements with.
        optimizer: Once there is one; all of them, where several share the model.
        scheduler: Of the learning rate; one or several.

    Returns:
        One finding per thing that is wrong, in the order of the model; codes are diagnosis ids.

    Raises:
        UsageError: There is no such phase, or the call is inside a compiled or transformed function.
    """
    refuse_off_limits("audit")
    if phase not in PHASES:
        raise UsageError(f"unknown phase {phase!r}", where="audit", hint=f"one of {', '.join(PHASES)}")
    reached = PHASES.index(phase)
    states = read_states(model)
    groups = tuple(group for state in states for group in state.groups)
    checks: list[Iterator[Finding]] = []
    if reached >= PHASES.index("sharded") and states:
        checks += [
            _check_methods(model, states),
            _check_shared(groups),
            _check_mesh(groups),
            _check_unmanaged(model, groups, () if plan is None else plan.ignored),
            _check_placements(groups, plan),
            _check_renormed(groups),
        ]
    if reached >= PHASES.index("loaded"):
        checks += [
            _check_meta(model),
            check_buffers(model, is_fresh=phase == "loaded"),
            _check_ties(model, groups),
            _check_dtypes(groups),
        ]
    if phase in ("forward", "backward", "stepped") and states:
        checks += [_check_roots(states), _check_states(groups, phase)]
    optimizers = _several(optimizer)
    if phase == "backward" and any(state.is_root for state in states):
        checks.append(check_gradients(model, groups, optimizers))
    if phase == "stepped":
        checks.append(check_reduced(groups))
    if optimizers:
        checks.append(check_optimizers(model, groups, optimizers))
        checks.append(check_schedulers(optimizers, _several(scheduler)))
    return list(chain.from_iterable(checks))


def _several(given: _T | Sequence[_T] | None) -> tuple[_T, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list | tuple) else (cast("_T", given),)


def find_double_wraps(module: nn.Module, *, keeps: bool = False) -> tuple[tuple[str, ...], ...]:
    """Return how a module's entries lead to its registered methods, each as a path of method names.

    An entry is `forward` or another registered method. `forward` itself may not be registered either. `keeps`: its
    parameters stay gathered after forward, where one entry may run inside another.
    """
    registered = registered_methods(module)
    paths: list[tuple[str, ...]] = [("__call__", "forward")] if "forward" in registered else []
    found = (entry_path(type(module), target, registered, keeps=keeps) for target in registered)
    return (*paths, *filter(None, found))


def _check_methods(model: nn.Module, states: tuple[UnitState, ...]) -> Iterator[Finding]:
    names = {module: fqn for fqn, module in model.named_modules()}
    for module, keeps in ((module, state.keeps) for state in states for module in state.modules):
        for path in find_double_wraps(module, keeps=keeps):
            way = " → ".join(path)
            what = f"{way}: {path[-1]} is registered as an entry point, but runs inside {path[0]}, another entry point"
            yield build_finding("double-wrap", shown(names.get(module, "?")), what)


def _check_shared(groups: tuple[FsdpGroup, ...]) -> Iterator[Finding]:
    owners: dict[int, tuple[FsdpGroup, ManagedParam]] = {}
    for group in groups:
        for param in group.params:
            if param.uid is None:
                continue
            first, other = owners.setdefault(param.uid, (group, param))
            if first is not group:
                yield build_finding(
                    "shared-group",
                    param.fqn,
                    f"one parameter is managed twice: as {other.fqn} by {shown(first.fqn)} "
                    f"and as {param.fqn} by {shown(group.fqn)}",
                )


def _check_mesh(groups: tuple[FsdpGroup, ...]) -> Iterator[Finding]:
    for group in groups:
        first = group.mesh.mesh_dim_names[0] if group.mesh.ndim == 2 and group.mesh.mesh_dim_names else ""
        if ("shard" in first or "fsdp" in first) and group.mesh.size(0) > 1:
            axes = ", ".join(f"{name}={size}" for name, size in mesh_axes(group.mesh))
            yield build_warning(
                "mesh-order", shown(group.fqn), f"on ({axes}) its parameters are replicated over {first}"
            )
            return


def _check_unmanaged(model: nn.Module, groups: tuple[FsdpGroup, ...], ignored: Sequence[str]) -> Iterator[Finding]:
    managed = set()
    for param in _params(groups):
        managed |= {id(param.sharded), id(param.registered)} | {id(tensor) for _, tensor in param.shared}
    for fqn, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.numel() and id(parameter) not in managed and fqn not in ignored:
            kind = "DTensor outside of every group" if isinstance(parameter, DTensor) else "plain tensor"
            yield build_finding("unmanaged", fqn, f"a trainable {kind}: its gradient is not averaged over ranks")


def _check_renormed(groups: tuple[FsdpGroup, ...]) -> Iterator[Finding]:
    for param in _params(groups):
        limit = getattr(param.module, "max_norm", None)
        if (
            limit is not None
            and param.sharded.requires_grad
            and isinstance(param.module, nn.Embedding | nn.EmbeddingBag)
        ):
            yield build_finding("lost-write", param.fqn, f"max_norm={limit:g} limits what is gathered, not the shards")


def _params(groups: tuple[FsdpGroup, ...]) -> Iterator[ManagedParam]:
    for group in groups:
        yield from group.params


def _check_placements(groups: tuple[FsdpGroup, ...], plan: ShardedPlan | None) -> Iterator[Finding]:
    for group in groups:
        for param in group.params:
            tensor = param.registered if group.sharding == "SHARDED" else param.sharded
            if tensor is None:
                continue
            if not isinstance(tensor, DTensor):
                yield build_finding("load-plain", param.fqn, f"a plain {tuple(tensor.shape)} tensor, not a DTensor")
                continue
            what = _displaced(tensor, param) or (plan and _differs_from_plan(tensor, param.fqn, plan))
            if what:
                yield build_finding("load-placement", param.fqn, what)


def _displaced(tensor: DTensor, param: ManagedParam) -> str | None:
    if param.placements is not None and tensor.placements != param.placements:
        return f"its placements must be {_show(param.placements)}, got {_show(tensor.placements)}"
    if param.mesh is not None and tensor.device_mesh != param.mesh:
        return f"it is on {tensor.device_mesh}, but was sharded on {param.mesh}"
    return None


def _show(placements: object) -> str:
    return str(placements).replace(" ", "")


def _differs_from_plan(tensor: DTensor, fqn: str, plan: ShardedPlan) -> str | None:
    """Say how the placements differ from the plan's, by axis; an axis that either does not name replicates."""
    expected = plan.placements.get(fqn)
    axes = tensor.device_mesh.mesh_dim_names
    if expected is None or axes is None:
        return None
    dims = {axis: getattr(placement, "dim", None) for axis, placement in expected.items()}
    found = {axis: cut_dim(placement) for axis, placement in zip(axes, tensor.placements, strict=True)}
    wrong = [axis for axis in {**dims, **found} if dims.get(axis) != found.get(axis)]
    if not wrong:
        return None
    return "; ".join(f"{axis}: planned {_cut(dims.get(axis))}, got {_cut(found.get(axis))}" for axis in sorted(wrong))


def _cut(dim: int | None) -> str:
    return "Replicate()" if dim is None else f"Shard({dim})"


def _check_meta(model: nn.Module) -> Iterator[Finding]:
    for fqn, parameter in model.named_parameters():
        if parameter.is_meta:
            yield build_finding("meta-param", fqn, f"{tuple(parameter.shape)} on the meta device: it has no data")
    for fqn, buffer in model.named_buffers():
        if buffer.is_meta:
            yield build_finding("meta-buffer", fqn, f"{tuple(buffer.shape)} on the meta device: it has no data")
    for fqn, module in model.named_modules():
        for name, value in vars(module).items():
            # Spectral norm, the older way, makes its weight anew in every forward pass, of a parameter called so.
            is_made = f"{name}_orig" in module._parameters  # noqa: SLF001 - names without a walk
            if isinstance(value, torch.Tensor) and value.is_meta and not is_made:
                where = f"{fqn}.{name}" if fqn else name
                # It may be there for a reset that never comes.
                what = f"{tuple(value.shape)} on the meta device, and not a buffer: no load fills it"
                yield build_warning("meta-attribute", where, what)


def _check_ties(model: nn.Module, groups: tuple[FsdpGroup, ...]) -> Iterator[Finding]:
    told = set()
    for param in _params(groups):
        for fqn, tensor in param.shared:
            if tensor is not None and tensor is not param.registered:
                told.add(fqn)
                yield build_finding("untied", fqn, f"was tied to {param.fqn}, but is a separate parameter now")
    for fqn, module in model.named_modules():
        for target, source in wanted_ties(module).items():
            name = f"{fqn}.{target}" if fqn else target
            one, other = _get(module, target), _get(module, source)
            if one is not None and other is not None and one is not other and name not in told:
                told.add(name)
                yield build_finding("untied", name, f"the model ties it to {source}, but it is a separate parameter")


def _get(module: nn.Module, fqn: str) -> nn.Parameter | None:
    try:
        return module.get_parameter(fqn)
    except AttributeError:
        return None


def _check_dtypes(groups: tuple[FsdpGroup, ...]) -> Iterator[Finding]:
    for group in groups:
        trainable = [param for param in group.params if param.sharded.requires_grad]
        dtypes: dict[torch.dtype, str] = {}
        for param in trainable:
            dtypes.setdefault(param.sharded.dtype, param.fqn)
        if len(dtypes) > 1:
            parts = ", ".join(f"{dtype} ({fqn}, …)" for dtype, fqn in dtypes.items())
            yield build_finding("dtype-mix", shown(group.fqn), f"trainable parameters of one group are {parts}")
            continue
        for param in group.params:
            if param.first_dtype is not None and param.first_dtype != param.sharded.dtype:
                what = f"the dtype is {param.sharded.dtype}, but was {param.first_dtype} at the first forward pass"
                yield build_finding("load-dtype", param.fqn, what)


def _check_roots(states: tuple[UnitState, ...]) -> Iterator[Finding]:
    if all(state.is_root is None for state in states):
        where = shown(states[0].fqns[0])
        yield build_finding("partial-root", where, "no wrapped module has run forward: the calls bypassed them all")
        return
    for state in states:
        if not state.is_root:
            continue
        for above in states:
            below = {module for outer in above.modules for module in outer.modules()}
            if above is not state and state.modules[0] in below:
                what = f"it became the FSDP root, although {shown(above.fqns[0])} contains it"
                yield build_finding("root-not-first", shown(state.fqns[0]), what)
                break


def _check_states(groups: tuple[FsdpGroup, ...], phase: Phase) -> Iterator[Finding]:
    for group in groups:
        if group.training != "IDLE":
            what = f"{group.training} after the {phase} phase, expected IDLE: its pass did not finish"
            yield build_finding("sharding-state", shown(group.fqn), what)
        allowed = {"SHARDED"}  # what did not run, or was saved since
        if phase == "forward":
            allowed.add(group.expected_after_forward)
        elif not group.reshards_after_backward:
            allowed.add("UNSHARDED")
        if group.sharding not in allowed:
            what = f"{group.sharding} after the {phase} phase, expected {' or '.join(sorted(allowed))}"
            yield build_finding("sharding-state", shown(group.fqn), what)


Optimizers = Sequence[torch.optim.Optimizer]


def held_by(optimizers: Optimizers) -> list[torch.Tensor]:
    """Return the parameters that optimizers move."""
    return [tensor for optimizer in optimizers for group in optimizer.param_groups for tensor in group["params"]]


def _list(names: Sequence[str]) -> tuple[str, str]:
    """Return the first name, layers folded, and what to say of all of them."""
    kinds = group_names(names, None)
    return kinds[0], first_few(kinds, 4)


def check_optimizers(model: nn.Module, groups: Sequence[FsdpGroup], optimizers: Optimizers) -> Iterator[Finding]:
    """Yield `stale-optimizer`, `untied` and `optimizer-misses`."""
    params = [param for group in groups for param in group.params]
    names = {id(parameter): fqn for fqn, parameter in model.named_parameters(remove_duplicate=False)}
    names |= {id(param.sharded): param.fqn for param in params}
    # While a unit is gathered its modules hold what a backward pass gives back: only the shards stay.
    stays = names.keys() - {id(param.registered) for param in params if param.registered is not param.sharded}
    is_stale = False
    for optimizer in optimizers:
        held = held_by([optimizer])
        stale = [tensor for tensor in held if id(tensor) not in stays]
        orphans = _untied_once(params, stale)
        is_stale |= bool(stale)
        if orphans:
            for fqn, name in orphans:
                what = f"the optimizer has a separate parameter for it: it was created before the tie to {name}"
                yield build_finding("untied", fqn, what)
        elif stale:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in stale[:3])
            more = ", …" * (len(stale) > 3)
            what = f"{len(stale)} of {len(held)} parameters do not belong to the model (shapes {shapes}{more})"
            yield build_finding("stale-optimizer", type(optimizer).__name__, what)
    moved = {id(tensor) for tensor in held_by(optimizers)}
    trainable = _trainable(model, params)
    missed = [(fqn, tensor) for fqn, tensor in trainable if id(tensor) not in moved]
    if is_stale or not missed:
        return
    if len(missed) == len(trainable):
        what = f"it contains none of the {len(trainable)} trainable parameters ({_list([fqn for fqn, _ in missed])[1]})"
        yield build_finding("optimizer-misses", type(optimizers[0]).__name__, what)
        return
    lost = [fqn for fqn, tensor in missed if tensor.grad is not None]
    if lost:
        where, names_of = _list(lost)
        what = (
            f"{len(lost)} of {len(trainable)} trainable parameters have a gradient that no optimizer uses: {names_of}"
        )
        yield build_warning("optimizer-misses", where, what)


def _trainable(model: nn.Module, params: Sequence[ManagedParam]) -> list[tuple[str, torch.Tensor]]:
    """Return FQN and tensor of the trainable parameters: the shards, whatever is registered now."""
    sharded = {id(param.registered): param.sharded for param in params}
    found = ((fqn, sharded.get(id(p), p)) for fqn, p in model.named_parameters())
    return [(fqn, tensor) for fqn, tensor in found if tensor.requires_grad]


def _untied_once(params: Sequence[ManagedParam], stale: list[torch.Tensor]) -> list[tuple[str, str]]:
    """Return tied names (and what they are tied to) that explain all stale parameters, or none.

    The first gather puts one parameter under every tied name, so only the optimizer still has one that a load untied.
    """
    explained = []
    left = [(fqn, param) for param in params for fqn, _ in param.shared]
    for tensor in stale:
        match = next(((fqn, param) for fqn, param in left if param.sharded.shape == tensor.shape), None)
        if match is None or not isinstance(tensor, DTensor):
            return []
        left.remove(match)
        explained.append((match[0], match[1].fqn))
    return explained


def check_schedulers(optimizers: Optimizers, schedulers: Sequence[object]) -> Iterator[Finding]:
    """Yield `stale-scheduler` for schedulers that set the learning rate of none of the optimizers."""
    # Wrappers (accelerate's) are other objects with the same groups; torchtitan's container has many schedulers.
    known = {id(optimizer.param_groups) for optimizer in optimizers}
    flat = [each for one in schedulers for each in getattr(one, "schedulers", None) or [one]]
    for scheduler in flat:
        inner = getattr(scheduler, "scheduler", scheduler)
        target = getattr(inner, "optimizer", None)
        if isinstance(target, torch.optim.Optimizer) and id(target.param_groups) not in known:
            what = "it sets the learning rate of an optimizer that does not update this model"
            yield build_finding("stale-scheduler", type(inner).__name__, what)


def check_gradients(model: nn.Module, groups: Sequence[FsdpGroup], optimizers: Optimizers) -> Iterator[Finding]:
    """Yield what has no gradient after a backward pass, as far as that is certain or under a watch.

    An expert without tokens, or a head that the loss does not use, is healthy: without a watch nothing is said unless
    nothing at all is trained, or checkpointing says that it cannot be.
    """
    moved = {id(tensor) for tensor in held_by(optimizers)}
    params = {param.fqn: param for group in groups for param in group.params}
    trainable = [
        (fqn, tensor) for fqn, tensor in _trainable(model, tuple(params.values())) if not moved or id(tensor) in moved
    ]
    without = {fqn for fqn, tensor in trainable if not _has_gradient(tensor, params.get(fqn))}
    if not without:
        return
    seen = last_watch(model)
    told: set[str] = set()
    if seen is not None and seen.is_open:
        for mode, code in (
            ("reentrant", "reentrant-checkpoint"),
            ("no_grad", "grad-disabled"),
            ("grad", "no-gradient"),
        ):
            parts = [_idle(group, without) for group in groups if seen.modes.get(id(group.modules[0])) == mode]
            lost = [fqn for part in parts for fqn in part]
            if lost and (mode != "grad" or len(lost) < len(trainable)):
                told |= set(lost)
                where, names = _list(lost)
                is_most = 2 * len(lost) > len(trainable)
                build = build_finding if mode == "reentrant" or is_most else build_warning
                yield build(code, where, f"{len(lost)} of {len(trainable)} trainable parameters: {names}")
    if len(without) == len(trainable) and not told:
        code = "reentrant-checkpoint" if is_reentrant(model) else "no-gradient"
        yield build_finding(code, "(root)", f"none of the {len(trainable)} trainable parameters has a gradient")


def _idle(group: FsdpGroup, without: set[str]) -> list[str]:
    """Return the trainable parameters of a group of which none has a gradient."""
    trainable = [param.fqn for param in group.params if param.sharded.requires_grad]
    return trainable if trainable and without.issuperset(trainable) else []


def _has_gradient(tensor: torch.Tensor, param: ManagedParam | None) -> bool:
    # An optimizer that runs inside the backward pass consumes gradients as they come.
    steps_at_once = bool(getattr(tensor, "_post_accumulate_grad_hooks", None))
    return tensor.grad is not None or steps_at_once or (param is not None and param.has_unreduced)


def is_reentrant(model: nn.Module) -> bool:
    """Is something checkpointed in the reentrant way, by transformers or by PyTorch's wrapper?"""
    for module in model.modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        is_on = getattr(module, "gradient_checkpointing", False)
        if is_on and isinstance(function, partial) and function.keywords.get("use_reentrant"):
            return True
        if getattr(getattr(module, "checkpoint_impl", None), "name", "") == "REENTRANT":
            return True
    return False


def check_reduced(groups: Sequence[FsdpGroup]) -> Iterator[Finding]:
    """Yield `unreduced` when a step was taken while gradients were still this rank's own."""
    lost = [group for group in groups if any(p.has_unreduced and p.sharded.grad is None for p in group.params)]
    if lost:
        what = (
            f"{len(lost)} of {len(groups)} units have whole gradients that were never averaged: the step ignored them"
        )
        yield build_finding("unreduced", shown(lost[0].fqn), what)
