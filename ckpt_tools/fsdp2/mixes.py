"""Errors of parameters in the wrong form: sharded where whole ones are needed, freed, or met by plain tensors."""

from __future__ import annotations

import os
import re

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ckpt_tools.fsdp2.audit import find_double_wraps
from ckpt_tools.fsdp2.cases import Case, Diagnosis
from ckpt_tools.fsdp2.internals import Group, registered_methods, shown
from ckpt_tools.fsdp2.stacks import Call, named_tensors, written_tensor
from ckpt_tools.fsdp2.watch import find_parameter


def check_freed(case: Case) -> Diagnosis | None:
    """Backward met parameters that were not gathered."""
    is_freed = "storage of size 0" in case.text
    is_state = bool(re.search(r"Expects to be in one of.*UNSHARDED", case.text))
    if not (is_freed or is_state):
        return None
    wrapped = _double_wrapped(case)
    if wrapped is not None and is_state:
        return wrapped
    if is_state and (case.phase == "forward" or case.stack.passes("post_forward", "_post_forward")):
        return _resharded(case, _group_of(case, case.stack.entered[-1]) if case.stack.entered else None)
    if (seen := case.watched("opaque-output")) is not None:
        return seen
    views = () if case.seen is None else case.seen.changed_views()
    if views:
        return case.build("opaque-output", views[0], f"the output of {views[0]} is a view and was changed in place")
    left = [group.fqn for group in case.groups() if group.sharding == "SHARDED" and group.training == "IDLE"]
    likely = shown(left[-1]) if left else ""
    return case.build("opaque-output", likely)


def _double_wrapped(case: Case, only: Group | None = None) -> Diagnosis | None:
    for group in case.groups() if only is None else (only,):
        for module in group.modules:
            paths = find_double_wraps(module, keeps=group.expected_after_forward == "UNSHARDED")
            if paths:
                way = " → ".join(paths[0])
                cause = f"{way}: {paths[0][-1]} is registered as an entry point and runs inside {paths[0][0]}"
                return case.build("double-wrap", case.name(module), cause)
    return None


def check_mixes(case: Case) -> Diagnosis | None:
    """A sharded parameter met a plain tensor in a forward pass."""
    is_mixed = "mixed torch.Tensor and DTensor" in case.text or "no _spec" in case.text
    # In place, DTensor's own code stops at an assertion without words.
    last = case.stack.lines[-1].file if case.stack.lines else ""
    is_mute = isinstance(case.error, AssertionError) and not case.text and os.path.join("distributed", "tensor") in last
    if not is_mixed and not is_mute:
        return None
    calls = case.stack.calls
    if (outside := _outside(case)) is not None:
        return outside
    if not calls or is_mute:
        return None
    if (plain := _plain_model(case)) is not None:
        return plain
    fqn, group = _culprit(case)
    if group is None:
        return None
    owners = group.modules
    inside = [call for call in calls if any(call.module is owner for owner in owners)]
    if any(module is owner for module in case.stack.entered for owner in owners):
        return _double_wrapped(case, group) or _entered_twice(case, group) or _resharded(case, group)
    if inside:
        first = inside[0]
        where = case.name(first.module)
        call = str(first.caller or first.line)
        if first.method == "forward":
            return case.build("dot-forward", where, f"{where}.forward(...) was called; {fqn} is still sharded", call)
        cause = f"{where}.{first.method}(...) was called, which gathers nothing; {fqn} is still sharded"
        fix = f'call it as {where}(...), or `register_fsdp_forward_method(module, "{first.method}")` after sharding'
        return Diagnosis(id="custom-method", cause=cause, fix=fix, module=where, call=call)
    return _from_outside(case, fqn, group)


def _outside(case: Case) -> Diagnosis | None:
    """Sharded parameters met plain tensors in the user's own arithmetic: copies, averages, penalties."""
    line = next((line for line in reversed(case.stack.lines) if not line.is_library), None)
    if line is None:
        return None
    if any(each.file.endswith("swa_utils.py") and each.code.co_name != "forward" for each in case.stack.lines):
        return case.build("ema-plain")
    named = [tensor for tensor in named_tensors(line) if isinstance(tensor, DTensor)]
    names = [fqn for tensor in named if case.model is not None and (fqn := find_parameter(case.model, tensor))]
    if any(tensor.ndim == 0 for tensor in named) and not names:
        return case.build("dtensor-in-loss")
    target = written_tensor(line)
    if target is not None:
        if isinstance(target, DTensor):
            fqn = (case.model is not None and find_parameter(case.model, target)) or ""
            return case.build(
                "load-plain", fqn, f"{fqn or 'a sharded parameter'} is a DTensor, and was given a plain one"
            )
        # Lists of parameters are named by no line.
        return case.build("ema-plain", *names[:1]) if names or "_foreach_" in case.text else None
    if names and not case.stack.calls:
        return case.build("foreign-param", names[0], f"{names[0]} was used outside of every forward pass")
    return None


def _plain_model(case: Case) -> Diagnosis | None:
    """DTensors in a model that nobody sharded, which a load with `assign=True` leaves."""
    root = case.stack.calls[0].module
    held = next(((fqn, p) for fqn, p in root.named_parameters() if isinstance(p, DTensor)), None)
    is_parallel = any(
        isinstance(module, FSDPModule) or getattr(module, "_distribute_module_applied", False)
        for module in root.modules()
    )
    inside = case.model is not None and any(module is root for module in case.model.modules())
    if held is None or is_parallel or (inside and case.groups()):
        return None
    caller = case.stack.calls[0].caller
    cause = f"{held[0]} of {type(root).__name__} is a DTensor, and nothing shards that model"
    return case.build("load-sharded", held[0], cause, str(caller or case.stack.calls[0].line))


def _culprit(case: Case) -> tuple[str, Group | None]:
    """Return the sharded parameter that was used, and its group: as watched, as written, or the module's own."""
    groups = case.groups()
    model = case.model
    by_name = {param.fqn: group for group in groups for param in group.params}
    if model is None:
        return "", None
    if case.seen is not None and case.seen.mixed in by_name:
        return case.seen.mixed, by_name[case.seen.mixed]
    last = case.stack.calls[-1]
    for line in [line for line in case.stack.lines if line.frame is last.line.frame or not line.is_library][-1:]:
        for tensor in named_tensors(line):
            fqn = find_parameter(model, tensor) if isinstance(tensor, DTensor) else None
            if fqn in by_name:
                return fqn, by_name[fqn]
    for call in reversed(case.stack.calls):
        for parameter in call.module.parameters(recurse=False):
            fqn = find_parameter(model, parameter) if isinstance(parameter, DTensor) else None
            if fqn in by_name:
                return fqn, by_name[fqn]
    return "", None


def _from_outside(case: Case, fqn: str, group: Group) -> Diagnosis:
    """A parameter was used while its owner was not running at all."""
    below = {module for owner in group.modules for module in owner.modules()}
    user: Call | None = None
    for call in case.stack.calls:
        if call.module in below:
            # The call went from above into the middle of the owner, or from somewhere else altogether.
            if user is None or any(owner in set(user.module.modules()) for owner in group.modules):
                part = case.name(call.module)
                cause = f"{part} was entered without {shown(group.fqn)}, which gathers {fqn}"
                return case.build("partial-root", part, cause, str(call.caller or call.line))
            break
        user = call
    last = user or case.stack.calls[-1]
    cause = f"{case.name(last.module)} uses {fqn}, which only {shown(group.fqn)} gathers"
    return case.build("foreign-param", fqn, cause, str(last.line))


def _entered_twice(case: Case, group: Group) -> Diagnosis | None:
    """Blame a dispatch that no static analysis sees, `getattr(self, name)(x)`: seen, or else the likeliest."""
    if (seen := case.watched("double-wrap", shown(group.fqn))) is not None:
        return seen
    methods = [name for module in group.modules for name in registered_methods(module)]
    if not methods or case.watched("mid-forward-reshard") is not None:
        return None
    cause = f"{shown(group.fqn)} was sharded again inside its own forward, probably by a registered method that was "
    return case.build("double-wrap", shown(group.fqn), f"{cause}called there ({', '.join(methods)})")


def _resharded(case: Case, group: Group | None) -> Diagnosis:
    if (seen := case.watched("mid-forward-reshard")) is not None:
        return seen
    where = shown(group.fqn) if group is not None else ""
    return case.build("mid-forward-reshard", where, f"{where or 'a module'} was sharded again inside its own forward")


def _group_of(case: Case, module: nn.Module) -> Group | None:
    return next((group for group in case.groups() if any(each is module for each in group.modules)), None)
