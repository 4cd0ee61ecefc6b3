"""From an exception to why it was raised, in which module and call, and what to change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.fsdp2.audit import audit, find_double_wraps
from ckpt_tools.fsdp2.catalogue import CATALOGUE
from ckpt_tools.fsdp2.compare import compare_traces
from ckpt_tools.fsdp2.internals import Group, owner_of_frame, read_groups, registered_methods, shown
from ckpt_tools.fsdp2.stacks import Call, Stack, named_tensors, read_stack
from ckpt_tools.fsdp2.watch import Watch, find_parameter, last_watch

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Why something failed."""

    id: str
    """Row of the catalogue; "unknown" when it is none of them."""
    cause: str
    """What happened, with the names concerned."""
    fix: str
    module: str
    """FQN of the module or parameter concerned; "" when no one knows."""
    call: str
    """File, line and code of the call to look at; "" when no one knows."""

    def to_finding(self) -> Finding:
        """Return it as an error for a report."""
        where = self.module or self.call or "?"
        at = f" (at {self.call})" if self.call and self.module else ""
        return Finding.error(code=self.id, where=where, what=f"{self.cause}{at}", hint=self.fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """All that is known about one exception."""

    error: BaseException
    text: str
    phase: str
    model: nn.Module | None
    stack: Stack
    seen: Watch | None

    def name(self, module: nn.Module) -> str:
        """FQN of a module, or its class when it is in no known model."""
        if self.model is not None:
            for fqn, each in self.model.named_modules():
                if each is module:
                    return shown(fqn)
        return type(module).__name__.removeprefix("FSDP").removeprefix("Replicate")

    def groups(self) -> tuple[Group, ...]:
        return () if self.model is None else read_groups(self.model)

    def build(self, code: str, module: str = "", cause: str = "", call: str | None = None) -> Diagnosis:
        entry = CATALOGUE[code]
        return Diagnosis(
            id=code,
            cause=cause or entry.cause,
            fix=entry.fix,
            module=module,
            call=self.stack.site if call is None else call,
        )

    def audited(self, *codes: str) -> Diagnosis | None:
        """Return the first finding with one of these codes that an audit of the model has now."""
        if self.model is None:
            return None
        optimizer = next(_locals(self.stack, torch.optim.Optimizer), None)
        for finding in audit(self.model, phase="loaded", optimizer=optimizer):
            if finding.code in codes:
                return self.build(finding.code, finding.where, finding.what)
        return None

    def watched(self, code: str, where: str | None = None) -> Diagnosis | None:
        """Return the first finding with this code (there) that the watch has."""
        for finding in () if self.seen is None else self.seen.findings:
            if finding.code == code and where in (None, finding.where):
                return self.build(code, finding.where, finding.what)
        return None


def diagnose(error: BaseException, *, model: nn.Module | None = None, phase: str = "") -> Diagnosis:
    """Say why an FSDP2 model failed.

    Call it where the exception was caught, while its traceback is there. Knows more about models that ran under
    `watch`, and most about ranks whose watches shared a directory of traces.

    Args:
        error: As caught; its causes and contexts are looked at too.
        model: The root; by default the outermost module in the traceback.
        phase: What was going on ("forward", "backward", …), for errors whose text does not say.

    Returns:
        A diagnosis; its id is "unknown" when the failure is none of the known ones. Never raises for a strange error.
    """
    case = _open_case(error, model, phase)
    for rule in _RULES:
        found = rule(case)
        if found is not None:
            return found
    inner = error.__cause__ or error.__context__
    if inner is not None:
        found = diagnose(inner, model=model, phase=phase)
        if found.id != "unknown":
            return found
    first_line = next(iter(case.text.splitlines()), "")
    return case.build("unknown", cause=f"{type(error).__name__}: {first_line}")


def _open_case(error: BaseException, model: nn.Module | None, phase: str) -> _Case:
    stack = read_stack(error)
    if model is None:
        modules = [call.module for call in stack.calls]
        model = next(iter([*stack.entered[:1], *modules[:1]]), None)
        if model is not None and modules and any(module is model for module in modules[0].modules()):
            model = modules[0]
    seen = last_watch(model)
    return _Case(error=error, text=str(error), phase=phase, model=model, stack=stack, seen=seen)


def _locals(stack: Stack, kind: type[_T]) -> Iterator[_T]:
    """Yield the local variables of one type, innermost first."""
    for line in reversed(stack.lines):
        for value in line.frame.f_locals.values():
            for each in value if isinstance(value, list | tuple) else (value,):
                if isinstance(each, kind):
                    yield each


# Rules. Each looks at one kind of error and returns None when it is another.


def _texts(case: _Case) -> Diagnosis | None:
    """Errors whose own text says enough."""
    if match := re.search(r"already been lazily initialized for (\S+)", case.text):
        return case.build("root-not-first", match[1], f"{match[1]} ran a forward pass before its root did")
    if "overlapping meshes" in case.text or ("Invariant encountered" in case.text and case.stack.passes("fully_shard")):
        owner = _owner(case)
        return case.build(
            "outer-first", owner, f"{owner or 'the module'} is in the group of a module around it already"
        )
    if match := re.search(r"Parameter '(.+?)' is shared with|Parameter is shared", case.text):
        return case.build("shared-group", match[1] or "")
    if "materialized from meta device" in case.text:
        names = re.search(r"\[(.+?)\]", case.text)
        first = names[1].split(",")[0].strip("' ") if names else ""
        return case.build("meta-param", first, f"no data on {names[1] if names else 'some parameters'}")
    if "uniform original parameter dtype" in case.text or "uniform reduce dtype" in case.text:
        return case.audited("dtype-mix") or case.build("dtype-mix", _owner(case))
    return None


def _owner(case: _Case) -> str:
    """Name what FSDP2's own innermost frame works on: a parameter, or a group."""
    for line in reversed(case.stack.lines):
        found = owner_of_frame(line.frame, case.model)
        if found is not None:
            modules, parameter = found
            return parameter or "+".join(case.name(module) for module in modules)
    return ""


def _loads(case: _Case) -> Diagnosis | None:
    """Errors of `load_state_dict`, and what a wrong load leads to."""
    if "_local_tensor" in case.text and isinstance(case.error, AttributeError):
        return case.build("load-plain", _owner(case))
    if "loading state_dict" in case.text and (match := re.search(r'parameter named "(.+?)"', case.text)):
        if "got mixed torch.Tensor and DTensor" in case.text:
            return case.build("load-plain", match[1])
        if "can require gradients" in case.text:
            return case.build("load-dtype", match[1], f"{match[1]} requires gradients but was given integers")
    if "exceeds dimension size" in case.text and case.stack.passes("reset_sharded_param", "load_state_dict"):
        return case.build("load-placement", _owner(case))
    if re.search(r"out tensor to have dtype", case.text) and case.stack.passes("wait_for_unshard"):
        return case.audited("load-dtype") or case.build("load-dtype", _owner(case))
    return None


def _meta(case: _Case) -> Diagnosis | None:
    """Computing with what has no data."""
    if re.search(r"device meta|meta tensor|meta device|'meta'", case.text):
        return case.audited("meta-buffer") or case.audited("meta-param")
    return None


def _optimizers(case: _Case) -> Diagnosis | None:
    """Optimizers and clipping."""
    is_mixed = "mixed torch.Tensor and DTensor" in case.text or "must have the same mesh" in case.text
    if is_mixed and (
        case.stack.passes("clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm", "_get_total_norm")
    ):
        return case.build("mixed-clip", _odd_one(case))
    in_optimizer = any(isinstance(line.frame.f_locals.get("self"), torch.optim.Optimizer) for line in case.stack.lines)
    if is_mixed and in_optimizer:
        return case.audited("unmanaged", "stale-optimizer")
    if isinstance(case.error, KeyError) and case.error.args and isinstance(case.error.args[0], int):
        return case.audited("untied", "stale-optimizer")
    return None


def _odd_one(case: _Case) -> str:
    """Name a trainable parameter that is not on the mesh of the first one."""
    if case.model is None:
        return ""
    trainable = [(fqn, p) for fqn, p in case.model.named_parameters() if p.requires_grad]
    meshes = [(fqn, p.device_mesh if isinstance(p, DTensor) else None) for fqn, p in trainable]
    return next((fqn for fqn, mesh in meshes if mesh != meshes[0][1]), "")


def _freed(case: _Case) -> Diagnosis | None:
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


def _double_wrapped(case: _Case, only: Group | None = None) -> Diagnosis | None:
    for group in case.groups() if only is None else (only,):
        for module in group.modules:
            paths = find_double_wraps(module)
            if paths:
                way = " → ".join(paths[0])
                cause = f"{way}: {paths[0][-1]} is registered as an entry point and runs inside {paths[0][0]}"
                return case.build("double-wrap", case.name(module), cause)
    return None


def _mixes(case: _Case) -> Diagnosis | None:
    """A sharded parameter met a plain tensor in a forward pass."""
    if "mixed torch.Tensor and DTensor" not in case.text and "no _spec" not in case.text:
        return None
    calls = case.stack.calls
    if not calls:
        return None
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


def _culprit(case: _Case) -> tuple[str, Group | None]:
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


def _from_outside(case: _Case, fqn: str, group: Group) -> Diagnosis:
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


def _entered_twice(case: _Case, group: Group) -> Diagnosis | None:
    """Blame a dispatch that no static analysis sees, `getattr(self, name)(x)`: seen, or else the likeliest."""
    if (seen := case.watched("double-wrap", shown(group.fqn))) is not None:
        return seen
    methods = [name for module in group.modules for name in registered_methods(module)]
    if not methods or case.watched("mid-forward-reshard") is not None:
        return None
    cause = f"{shown(group.fqn)} was sharded again inside its own forward, probably by a registered method that was "
    return case.build("double-wrap", shown(group.fqn), f"{cause}called there ({', '.join(methods)})")


def _resharded(case: _Case, group: Group | None) -> Diagnosis:
    if (seen := case.watched("mid-forward-reshard")) is not None:
        return seen
    where = shown(group.fqn) if group is not None else ""
    return case.build("mid-forward-reshard", where, f"{where or 'a module'} was sharded again inside its own forward")


def _group_of(case: _Case, module: nn.Module) -> Group | None:
    return next((group for group in case.groups() if any(each is module for each in group.modules)), None)


_RANK_ERRORS = (
    r"Timed out waiting|Connection (closed|reset) by peer|Read error|enforce fail|Watchdog caught|"
    r"collective mismatch|Application timeout|wait timeout|NCCL communicator was aborted"
)


def _ranks(case: _Case) -> Diagnosis | None:
    """A collective failed: the ranks did not do the same."""
    if not re.search(_RANK_ERRORS, case.text, re.IGNORECASE):
        return None
    findings = [] if case.seen is None else compare_traces(case.seen.settled_traces())
    where = _owner(case)
    if findings:
        first = findings[0]
        return case.build(first.code, first.where, first.what)
    waits = f"this rank waited for the others in {where or 'a collective'}, which never arrived"
    return case.build("rank-skip", where, f"{waits}; run all ranks under watch(model, traces=DIR) to see what each did")


_RULES: tuple[Callable[[_Case], Diagnosis | None], ...] = (_texts, _loads, _optimizers, _freed, _meta, _mixes, _ranks)
