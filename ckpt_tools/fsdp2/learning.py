"""Does training train? Parameters without gradient, and optimizers and schedulers that miss what they should move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checkpoint.names import folded
from ckpt_tools.fsdp2.catalogue import build_finding, build_warning
from ckpt_tools.fsdp2.internals import Group, ManagedParam, shown
from ckpt_tools.fsdp2.watch import last_watch
from ckpt_tools.text import first_few

Optimizers = Sequence[torch.optim.Optimizer]


def held_by(optimizers: Optimizers) -> list[torch.Tensor]:
    """Return the parameters that optimizers move."""
    return [tensor for optimizer in optimizers for group in optimizer.param_groups for tensor in group["params"]]


def _list(names: Sequence[str]) -> tuple[str, str]:
    """Return the first name, layers folded, and what to say of all of them."""
    kinds = folded(names, None)
    return kinds[0], first_few(kinds, 4)


def check_optimizers(model: nn.Module, groups: Sequence[Group], optimizers: Optimizers) -> Iterator[Finding]:
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
                what = f"the optimizer has a parameter of its own for it: it was not tied to {name} when it was created"
                yield build_finding("untied", fqn, what)
        elif stale:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in stale[:3])
            more = ", …" * (len(stale) > 3)
            what = f"{len(stale)} of {len(held)} parameters are not the model's (shapes {shapes}{more})"
            yield build_finding("stale-optimizer", type(optimizer).__name__, what)
    moved = {id(tensor) for tensor in held_by(optimizers)}
    trainable = _trainable(model, params)
    missed = [(fqn, tensor) for fqn, tensor in trainable if id(tensor) not in moved]
    if is_stale or not missed:
        return
    if len(missed) == len(trainable):
        what = f"it holds none of the {len(trainable)} trainable parameters ({_list([fqn for fqn, _ in missed])[1]})"
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
            what = "it sets the learning rate of another optimizer, which does not move this model"
            yield build_finding("stale-scheduler", type(inner).__name__, what)


def check_gradients(model: nn.Module, groups: Sequence[Group], optimizers: Optimizers) -> Iterator[Finding]:
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
                build = build_finding if mode == "reentrant" else build_warning
                yield build(code, where, f"{len(lost)} of {len(trainable)} trainable parameters: {names}")
    if len(without) == len(trainable) and not told:
        code = "reentrant-checkpoint" if is_reentrant(model) else "no-gradient"
        yield build_finding(code, "(root)", f"none of the {len(trainable)} trainable parameters has a gradient")


def _idle(group: Group, without: set[str]) -> list[str]:
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


def check_reduced(groups: Sequence[Group]) -> Iterator[Finding]:
    """Yield `unreduced` when a step was taken while gradients were still this rank's own."""
    lost = [group for group in groups if any(p.has_unreduced and p.sharded.grad is None for p in group.params)]
    if lost:
        what = (
            f"{len(lost)} of {len(groups)} units hold whole gradients that were never averaged: the step left them out"
        )
        yield build_finding("unreduced", shown(lost[0].fqn), what)
