"""Numbers that are not finite: in the weights before anything runs, and the first module that makes one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from ckpt_tools.checkpoint.dtypes import BY_TORCH_NAME
from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.checkpoint.transform import strip_wrappers
from ckpt_tools.checks.values import NOT_FINITE, Strange, may_be_infinite, place_of, report_strange
from ckpt_tools.fsdp2.agree import gather
from ckpt_tools.fsdp2.internals import local_of
from ckpt_tools.fsdp2.quant_state import quantised_of
from ckpt_tools.fsdp2.smoke.checks import expected_box
from ckpt_tools.transfer.counts import Counts, count_values
from ckpt_tools.transfer.strides import start_of


def strange_weights(model: nn.Module) -> list[Finding]:
    """Return what is not finite in parameters and saved buffers, the same on every rank. Collective.

    A rank counts in its own part; of a tensor that several ranks hold, or hold parts of, the first one speaks.
    """
    found: dict[str, Strange] = {}
    for rank, mine in enumerate(gather(list(_strange(model)))):
        for each in mine:
            found.setdefault(each.fqn, replace(each, rank=rank))
    return list(
        report_strange(found.values(), hint="the checkpoint holds them: `ckpt verify --level values` lists all")
    )


def _strange(model: nn.Module) -> Iterator[Strange]:
    seen: set[int] = set()
    saved = model.state_dict(keep_vars=True)
    kept = {id(tensor) for tensor in saved.values() if isinstance(tensor, torch.Tensor)}
    for prefix, module in model.named_modules():
        own = [] if quantised_of(module) is not None else [*module.named_parameters(recurse=False)]
        own += [(name, buffer) for name, buffer in module.named_buffers(recurse=False) if id(buffer) in kept]
        for name, tensor in own:
            counts = None if id(tensor) in seen else _count(tensor)
            seen.add(id(tensor))
            fqn = strip_wrappers(f"{prefix}.{name}" if prefix else name)
            is_excused = not isinstance(tensor, nn.Parameter) or may_be_infinite(fqn, is_model=True, shape=tensor.shape)
            if counts is not None and (counts.num_nan or (counts.num_inf and not is_excused)):
                yield Strange(fqn=fqn, shape=tuple(tensor.shape), counts=counts, where=fqn)


def _count(tensor: torch.Tensor) -> Counts | None:
    """Count in this rank's part; the place of the first bad element is in the whole tensor."""
    local = local_of(tensor.detach())
    dtype = BY_TORCH_NAME.get(str(local.dtype).removeprefix("torch."))
    if dtype is None or local.is_meta or not local.numel():
        return None
    content = local.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
    counts = count_values(content, dtype)
    if counts is None or counts.first_bad is None:
        return counts
    box = expected_box(tensor)
    place = (o + at for o, at in zip(box.offsets, place_of(counts.first_bad, box.sizes), strict=True))
    whole = Box((0,) * len(box.sizes), tuple(tensor.shape))
    return replace(counts, first_bad=start_of(Box(tuple(place), (1,) * len(box.sizes)), whole))


# Where a loss that is not finite comes from


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where the first number appeared that is not finite."""

    fqn: str
    what: str
    step: int
    """How many modules had ended, or begun, before."""


def explain_loss(model: nn.Module, what: str, again: Callable[[], object]) -> Finding:
    """Return the finding that a loss is not finite and where that began; `again` recomputes the loss. Collective."""
    mine = _find_origin(model, again)
    origins = [(each, rank) for rank, each in enumerate(gather(mine)) if each is not None]
    if not origins:
        hint = "is the loss divided by a number of tokens that can be 0, or random?"
        return Finding.error(NOT_FINITE, "the loss", f"{what}; once more, every module's output is finite", hint)
    first, rank = min(origins, key=lambda pair: (pair[0].step, pair[1]))
    hint = "are the batch and the learning rate sound, and does the dtype hold such numbers?"
    return Finding.error(NOT_FINITE, first.fqn, f"{what}; {first.what} (rank {rank})", hint)


def _find_origin(model: nn.Module, again: Callable[[], object]) -> Origin | None:
    """Run the model once more, without gradients, and look at what goes into modules and comes out."""
    found: list[Origin] = []
    running: list[str] = []
    steps = 0

    def enter(module: nn.Module, args: object, kwargs: object, *, fqn: str) -> None:
        nonlocal steps
        steps += 1
        if not found and _is_bad((args, kwargs)):
            where = running[-1] if running else "the batch"
            what = f"what {_class_of(module)} {fqn} is given is not finite, and no module before it returned that"
            found.append(Origin(fqn=where, what=what, step=steps))
        running.append(fqn)

    def leave(module: nn.Module, args: object, output: object, *, fqn: str) -> None:  # noqa: ARG001
        nonlocal steps
        steps += 1
        running.pop()
        if not found and _is_bad(output):
            what = f"{_class_of(module)} {fqn} is the first module whose output is not finite"
            found.append(Origin(fqn=fqn, what=f"{what}; {_describe_weights(module)}", step=steps))

    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            fqn = strip_wrappers(name) or "(root)"
            stack.callback(module.register_forward_pre_hook(partial(enter, fqn=fqn), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(partial(leave, fqn=fqn)).remove)
        again()
    return found[0] if found else None


def _class_of(module: nn.Module) -> str:
    """Return the name of the user's class: FSDP2 derives one of its own from it."""
    return type(module).__name__.removeprefix("FSDP")


def _describe_weights(module: nn.Module) -> str:
    bad = [
        name
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        if tensor.is_floating_point() and not bool(local_of(tensor.detach()).isfinite().all())
    ]
    return f"its {' and '.join(bad)} is not either" if bad else "its inputs and its own weights are"


def _is_bad(value: object) -> bool:
    """Is there NaN or +inf in the tensors of a value? -inf is what masks are made of."""
    if isinstance(value, torch.Tensor):
        local = local_of(value.detach())
        if local.is_meta or not (local.is_floating_point() or local.is_complex()):
            return False
        return bool(local.isnan().any()) or (not local.is_complex() and bool((local == math.inf).any()))
    if isinstance(value, dict):
        return any(map(_is_bad, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_bad, value))
    return any(map(_is_bad, vars(value).values())) if hasattr(value, "to_tuple") else False
