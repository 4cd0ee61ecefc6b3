"""The parts of a training step that sharded parameters change: groups, freezing, accumulation, clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ckpt_tools.checkpoint.globs import compile_glob
from ckpt_tools.errors import UsageError
from ckpt_tools.fsdp2.internals import restored_settings
from ckpt_tools.fsdp2.ties import find_parameters


def parameter_groups(
    model: nn.Module, weight_decay: float, no_decay: Sequence[str] = ("bias", "norm")
) -> list[dict[str, Any]]:
    """Return the groups for an optimizer: the trainable parameters with and without weight decay.

    Args:
        model: After `shard_model` and the load, which both replace parameters.
        weight_decay: Of the first group; the second has 0.
        no_decay: A parameter is in the second group when its FQN, or the class of the module that holds it,
            contains one of these (case does not matter), or when its FQN matches one that is a glob.

    Returns:
        At most two groups, empty ones left out, every parameter once.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        kind = type(module).__name__
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            fqn = f"{prefix}.{name}" if prefix else name
            (plain if _is_named(fqn, kind, no_decay) else decayed).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _is_named(fqn: str, kind: str, patterns: Sequence[str]) -> bool:
    for pattern in patterns:
        if set("*?{") & set(pattern):
            if compile_glob(pattern).fullmatch(fqn):
                return True
        elif pattern.lower() in fqn.lower() or pattern.lower() in kind.lower():
            return True
    return False


def frozen(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Freeze the parameters whose FQN matches a glob, or lies in a module that does; return their FQNs.

    Call it before `shard_model`: the parameters of one unit are reduced together.

    Raises:
        UsageError: A glob that matches nothing, or a model that is sharded already.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise UsageError("the model is already sharded", hint="freeze before shard_model")
    names = find_parameters(model, patterns, "frozen")
    for fqn in names:
        model.get_parameter(fqn).requires_grad_(False)
    return names


@contextmanager
def accumulate(model: nn.Module, is_last: bool, *, keep_unsharded: bool = False) -> Iterator[None]:
    """Run one micro-batch of several: gradients stay local until the last one, which averages them over ranks.

        for number, batch in enumerate(batches):
            with accumulate(model, number == len(batches) - 1):
                (model(**batch).loss / len(batches)).backward()

    Until then every rank holds whole gradients: memory for less communication. Divide the loss by the number of
    micro-batches.

    Args:
        model: Sharded.
        is_last: This is the last micro-batch of the step.
        keep_unsharded: Do not cut parameters again between micro-batches: more memory, less communication.

    Raises:
        UsageError: The model is not sharded.
    """
    units = outermost_units(model)
    if not units:
        raise UsageError("the model has no FSDP units", hint="call shard_model first")

    with restored_settings(model):
        for unit in units:
            unit.set_requires_gradient_sync(is_last)
            unit.set_is_last_backward(is_last)
            if keep_unsharded and not is_last:
                unit.set_reshard_after_backward(False)
        yield


def outermost_units(model: nn.Module) -> list[FSDPModule]:
    """Return the FSDP units of `model` that lie in no other one."""
    found: list[FSDPModule] = []
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule) and id(module) not in inside:
            found.append(module)
            inside |= {id(child) for child in module.modules()}
    return found


def clip_grad_norm(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients so that their common norm is at most `max_norm`; return the norm before.

    As `torch.nn.utils.clip_grad_norm_`, which refuses gradients on different meshes (FSDP×TP). Collective: every
    rank passes the same parameters. Gradients that are no DTensors count once: they are equal on all ranks, or
    nobody has averaged them (see the finding `unmanaged`).

    Args:
        parameters: A model, or its parameters.
        max_norm: Upper bound of the norm.
        norm_type: p of the p-norm; inf is the largest absolute value.
        error_if_nonfinite: Raise when the norm is NaN or infinite.

    Returns:
        The norm of all gradients as one vector, a plain 0-d tensor, equal on all ranks.

    Raises:
        RuntimeError: With `error_if_nonfinite`, the norm is not finite.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    groups: dict[tuple[DeviceMesh | None, torch.device], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            groups.setdefault((mesh, parameter.grad.device), []).append(parameter)
    if not groups:
        return torch.tensor(0.0)
    norms = []
    for group in groups.values():
        norm = torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None], norm_type)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    device = norms[0].device
    stacked = torch.stack([norm.to(device) for norm in norms])
    total = stacked[0]
    if len(norms) > 1:
        total = stacked.max() if math.isinf(norm_type) else torch.linalg.vector_norm(stacked, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"the norm of the gradients is {total.item()}, so they cannot be clipped")
    for group in groups.values():
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, decay: float) -> None:
    """Move an average of weights (EMA) towards `model`, shard by shard: decay · average + (1 - decay) · model.

    Call it after the optimizer's step. `average` is a second model, frozen, sharded alike and loaded like the first;
    buffers are copied. Save both: `save_checkpoint(model, optimizer, path, state={"ema": average})`. Raise UsageError
    for models that differ in shape or sharding.
    """
    ours, theirs = (dict(each.named_parameters()) for each in (average, model))
    if wrong := [name for name in ours | theirs if _layout(ours.get(name)) != _layout(theirs.get(name))]:
        what = "the average and the model differ in shape or sharding"
        raise UsageError(what, where=wrong[0], hint="build both from one config, and shard both alike")
    pairs = [(_local(ours[name]), _local(theirs[name]).to(ours[name].dtype)) for name in ours]
    torch._foreach_lerp_([one for one, _ in pairs], [other for _, other in pairs], 1.0 - decay)
    for one, other in zip(average.buffers(), model.buffers(), strict=True):
        one.copy_(other)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _layout(tensor: torch.Tensor | None) -> tuple[object, ...]:
    return tuple(getattr(tensor, name, None) for name in ("shape", "device_mesh", "placements"))


def offload_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Keep the optimizer's state in host memory between steps: less memory on the GPU, time for two copies per step.

    Parameters stay where they are (`Policy(cpu_offload=True)` moves them as well). Saving and loading go on as before.
    """

    def move(device: torch.device | None) -> None:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    state[key] = value.to(parameter.device if device is None else device)

    optimizer.register_step_pre_hook(lambda *_: move(None))
    optimizer.register_step_post_hook(lambda *_: move(torch.device("cpu")))
