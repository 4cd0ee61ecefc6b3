"""From an exception to why it was raised, in which module and call, and what to change."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checkpoint.names import group_names
from ckpt_tools.fsdp2.audit import audit, find_double_wraps, is_reentrant
from ckpt_tools.fsdp2.catalogue import CATALOGUE
from ckpt_tools.fsdp2.compare_ranks import compare_traces
from ckpt_tools.fsdp2.diagnose_load import explain_load, explain_optimizer, failure_of
from ckpt_tools.fsdp2.internals import FsdpGroup, owner_of_frame, read_groups, registered_methods, shown
from ckpt_tools.fsdp2.stack_trace import MethodCall, Stack, named_tensors, read_stack, written_tensor
from ckpt_tools.fsdp2.watch import Watch, find_parameter, last_watch


def check_freed(case: DiagnosedCase) -> Diagnosis | None:
    """Backward met parameters that were not gathered."""
    is_freed = "storage of size 0" in case.text
    is_state = bool(re.search(r"Expects to be in one of.*UNSHARDED", case.text))
    if not (is_freed or is_state):
        return None
    wrapped = _double_wrapped(case)
    if wrapped is not None and is_state:
        return wrapped
    if is_state and (case.phase == "forward" or case.stack.passes("post_forward", "_post_forward")):
        last = case.stack.entered[-1:]
        return _resharded(case, next((group for group in case.groups() if set(last) & set(group.modules)), None))
    if (seen := case.watched("opaque-output")) is not None:
        return seen
    if name := _differentiates(case):
        return case.build("grad-in-forward", name, f"{name} calls autograd.grad in its forward")
    views = () if case.seen is None else case.seen.changed_views()
    if views:
        return case.build("opaque-output", views[0], f"the output of {views[0]} is a view that was modified in place")
    left = [group.fqn for group in case.groups() if group.sharding == "SHARDED" and group.training == "IDLE"]
    likely = shown(left[-1]) if left else ""
    return case.build("opaque-output", likely)


def _differentiates(case: DiagnosedCase) -> str:
    """Return the module around other units whose forward takes gradients: they are freed before the second pass."""
    for module in () if case.model is None else case.model.modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is not None and {"autograd", "grad"} <= set(code.co_names):
            return case.name(module)
    return ""


def _double_wrapped(case: DiagnosedCase, only: FsdpGroup | None = None) -> Diagnosis | None:
    for group in case.groups() if only is None else (only,):
        for module in group.modules:
            paths = find_double_wraps(module, keeps=group.expected_after_forward == "UNSHARDED")
            if paths:
                way = " → ".join(paths[0])
                cause = f"{way}: {paths[0][-1]} is registered as an entry point and runs inside {paths[0][0]}"
                return case.build("double-wrap", case.name(module), cause)
    return None


def check_mixes(case: DiagnosedCase) -> Diagnosis | None:
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
        cause = f"{where}.{first.method}(...) was called, which does not gather parameters; {fqn} is still sharded"
        fix = f'call it as {where}(...), or `register_fsdp_forward_method(module, "{first.method}")` after sharding'
        return Diagnosis(id="custom-method", cause=cause, fix=fix, module=where, call=call)
    return _from_outside(case, fqn, group)


def _outside(case: DiagnosedCase) -> Diagnosis | None:
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
                "load-plain", fqn, f"{fqn or 'a sharded parameter'} is a DTensor, but was given a plain tensor"
            )
        # Lists of parameters are named by no line.
        return case.build("ema-plain", *names[:1]) if names or "_foreach_" in case.text else None
    if names and not case.stack.calls:
        return case.build("foreign-param", names[0], f"{names[0]} was used outside any forward pass")
    return None


def _plain_model(case: DiagnosedCase) -> Diagnosis | None:
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
    cause = f"{held[0]} of {type(root).__name__} is a DTensor, but that model is not sharded"
    return case.build("load-sharded", held[0], cause, str(caller or case.stack.calls[0].line))


def _culprit(case: DiagnosedCase) -> tuple[str, FsdpGroup | None]:
    """Return the sharded parameter that was used, and its group: as watched, as written, or the module's own."""
    groups = case.groups()
    model = case.model
    by_name = {param.fqn: group for group in groups for param in group.params}
    if model is None:
        return "", None
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


def _from_outside(case: DiagnosedCase, fqn: str, group: FsdpGroup) -> Diagnosis:
    """A parameter was used while its owner was not running at all."""
    below = {module for owner in group.modules for module in owner.modules()}
    user: MethodCall | None = None
    for call in case.stack.calls:
        if call.module in below:
            # The call went from above into the middle of the owner, or from somewhere else altogether.
            if user is None or any(owner in set(user.module.modules()) for owner in group.modules):
                part = case.name(call.module)
                cause = f"{part} was called without going through {shown(group.fqn)}, which gathers {fqn}"
                return case.build("partial-root", part, cause, str(call.caller or call.line))
            break
        user = call
    last = user or case.stack.calls[-1]
    cause = f"{case.name(last.module)} uses {fqn}, which only {shown(group.fqn)} gathers"
    return case.build("foreign-param", fqn, cause, str(last.line))


def _entered_twice(case: DiagnosedCase, group: FsdpGroup) -> Diagnosis | None:
    """Blame a dispatch that no static analysis sees, `getattr(self, name)(x)`: seen, or else the likeliest."""
    if (seen := case.watched("double-wrap", shown(group.fqn))) is not None:
        return seen
    methods = [name for module in group.modules for name in registered_methods(module)]
    if not methods or case.watched("mid-forward-reshard") is not None:
        return None
    cause = f"{shown(group.fqn)} was sharded again inside its own forward, probably by a registered method that was "
    return case.build("double-wrap", shown(group.fqn), f"{cause}called there ({', '.join(methods)})")


def _resharded(case: DiagnosedCase, group: FsdpGroup | None) -> Diagnosis:
    if (seen := case.watched("mid-forward-reshard")) is not None:
        return seen
    where = shown(group.fqn) if group is not None else ""
    return case.build("mid-forward-reshard", where, f"{where or 'a module'} was sharded again inside its own forward")


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
    case = open_case(error, model, phase)
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
    return case.build("unknown", cause=f"{type(case.error).__name__}: {first_line}")


# Rules. Each looks at one kind of error and returns None when it is another.


def _texts(case: DiagnosedCase) -> Diagnosis | None:
    """Errors whose own text says enough."""
    for entry in CATALOGUE.values():
        match = re.search(entry.text, case.text, re.DOTALL) if entry.text else None
        if match is not None and (not entry.inside or case.stack.passes(*entry.inside)):
            return case.build(entry.id, match.groupdict().get("where") or "")
    if "overlapping meshes" in case.text or ("Invariant encountered" in case.text and case.stack.passes("fully_shard")):
        owner = _owner(case)
        return case.build(
            "outer-first", owner, f"{owner or 'the module'} already belongs to the group of an enclosing module"
        )
    if "uniform original parameter dtype" in case.text or "uniform reduce dtype" in case.text:
        return case.audited("dtype-mix") or case.build("dtype-mix", _owner(case))
    return None


def _owner(case: DiagnosedCase) -> str:
    """Name what FSDP2's own innermost frame works on: a parameter, or a group."""
    for line in reversed(case.stack.lines):
        found = owner_of_frame(line.frame, case.model)
        if found is not None:
            modules, parameter = found
            return parameter or "+".join(case.name(module) for module in modules)
    return ""


def _loads(case: DiagnosedCase) -> Diagnosis | None:
    """Errors of `load_state_dict`, and what a wrong load leads to."""
    if "_local_tensor" in case.text and isinstance(case.error, AttributeError):
        return case.build("load-plain", _owner(case))
    if "loading state_dict" in case.text and (match := re.search(r'parameter named "(.+?)"', case.text)):
        if "got mixed torch.Tensor and DTensor" in case.text:
            return case.build("load-plain" if _is_sharded(case, match[1]) else "load-sharded", match[1])
        if "can require gradients" in case.text:
            return case.build("load-dtype", match[1], f"{match[1]} requires gradients but was given integers")
    if "exceeds dimension size" in case.text and case.stack.passes("reset_sharded_param", "load_state_dict"):
        return case.build("load-placement", _owner(case))
    if re.search(r"out tensor to have dtype", case.text) and case.stack.passes("wait_for_unshard"):
        return case.audited("load-dtype") or case.build("load-dtype", _owner(case))
    return None


def _is_sharded(case: DiagnosedCase, fqn: str) -> bool:
    """Is this a DTensor in the module that is being loaded?"""
    for line in case.stack.lines:
        module = line.frame.f_locals.get("self")
        if line.code.co_name == "load_state_dict" and isinstance(module, nn.Module):
            return any(isinstance(p, DTensor) for name, p in module.named_parameters() if name == fqn)
    return True


_DTYPES = r"(must|to) have the same dtype|Input type .* should be the same|expected scalar type \w+ but found \w+"


def _dtypes(case: DiagnosedCase) -> Diagnosis | None:
    """An input in another dtype than a unit computes in."""
    if not case.stack.calls or not re.search(_DTYPES, case.text):
        return None
    module = case.stack.calls[-1].module
    owner = next((group for group in case.groups() if any(param.module is module for param in group.params)), None)
    if owner is None or owner.compute_dtype is None:
        return None
    where = case.name(module)
    dtype = str(owner.compute_dtype).removeprefix("torch.")
    cause = f"{where} computes in {dtype} in {shown(owner.fqn)}, but its input is not {dtype}"
    used = [tensor for line in case.stack.lines[-1:-12:-1] if not line.is_library for tensor in named_tensors(line)]
    for fqn, buffer in case.model.named_buffers() if case.model is not None else ():
        if buffer.is_floating_point() and buffer.dtype != owner.compute_dtype and any(t is buffer for t in used):
            kept = str(buffer.dtype).removeprefix("torch.")
            cause += f": the buffer {fqn} is {kept}, and FSDP2 does not cast buffers"
            break
    return case.build("compute-dtype", where, cause)


def _graphs(case: DiagnosedCase) -> Diagnosis | None:
    """Backward from a loss that nothing trainable leads to."""
    if "does not require grad and does not have a grad_fn" not in case.text or case.model is None:
        return None
    trainable = [fqn for fqn, parameter in case.model.named_parameters() if parameter.requires_grad]
    if not trainable:
        return case.build("all-frozen", "(root)")
    modes = {} if case.seen is None else case.seen.modes
    names = [
        (mode, param.fqn)
        for group in case.groups()
        for param in group.params
        if param.sharded.requires_grad and (mode := modes.get(id(group.modules[0]), ""))
    ]
    reentrant = [fqn for mode, fqn in names if mode == "reentrant"]
    if reentrant or is_reentrant(case.model):
        return case.build("reentrant-checkpoint", group_names(reentrant or trainable, None)[0])
    if names and all(mode == "no_grad" for mode, _ in names):
        return case.build("grad-disabled", group_names([fqn for _, fqn in names], None)[0])
    return case.build(
        "no-gradient", "", "the loss is detached from all parameters: no operation before it recorded a graph"
    )


def _meta(case: DiagnosedCase) -> Diagnosis | None:
    """Computing with what has no data."""
    if re.search(r"device meta|meta tensor|meta device|'meta'", case.text):
        return case.audited("meta-buffer") or case.audited("meta-param") or case.audited("meta-attribute")
    return None


def _optimizers(case: DiagnosedCase) -> Diagnosis | None:
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


def _odd_one(case: DiagnosedCase) -> str:
    """Name a trainable parameter that is not on the mesh of the first one."""
    if case.model is None:
        return ""
    trainable = [(fqn, p) for fqn, p in case.model.named_parameters() if p.requires_grad]
    meshes = [(fqn, p.device_mesh if isinstance(p, DTensor) else None) for fqn, p in trainable]
    return next((fqn for fqn, mesh in meshes if mesh != meshes[0][1]), "")


_RANK_ERRORS = (
    r"Timed out waiting|Connection (closed|reset) by peer|Read error|enforce fail|Watchdog caught|"
    r"collective mismatch|Application timeout|wait timeout|NCCL communicator was aborted"
)


def _ranks(case: DiagnosedCase) -> Diagnosis | None:
    """A collective failed: the ranks did not do the same."""
    if not re.search(_RANK_ERRORS, case.text, re.IGNORECASE):
        return None
    findings = [] if case.seen is None else compare_traces(case.seen.settled_traces())
    where = _owner(case)
    if findings:
        first = findings[0]
        return case.build(first.code, first.where, first.what)
    call = next((line.code.co_name for line in case.stack.lines if line.file.endswith("distributed_c10d.py")), "")
    if call and not where and not case.stack.entered:
        return case.build("rank-alone", "", f"this rank waited in `{call}` for ranks that did not call it")
    waits = f"this rank waited in {where or 'a collective'} for other ranks, which never reached it"
    return case.build("rank-skip", where, f"{waits}; run all ranks under watch(model, traces=DIR) to see what each did")


_RULES: tuple[Callable[[DiagnosedCase], Diagnosis | None], ...] = (
    explain_load,
    explain_optimizer,
    _loads,
    _optimizers,
    _texts,
    _dtypes,
    _graphs,
    check_freed,
    _meta,
    check_mixes,
    _ranks,
)


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
class DiagnosedCase:
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

    def groups(self) -> tuple[FsdpGroup, ...]:
        """Return the model's parameter groups."""
        return () if self.model is None else read_groups(self.model)

    def build(
        self, code: str, module: str = "", cause: str = "", call: str | None = None, *, fix: str = ""
    ) -> Diagnosis:
        """Return a diagnosis; cause, fix and call are the catalogue's and the stack's unless given."""
        entry = CATALOGUE[code]
        return Diagnosis(
            id=code,
            cause=cause or entry.cause,
            fix=fix or entry.fix,
            module=module,
            call=self.stack.site if call is None else call,
        )

    def audited(self, *codes: str) -> Diagnosis | None:
        """Return the first finding with one of these codes that an audit of the model has now."""
        if self.model is None:
            return None
        optimizer = next(locals_of(self.stack, torch.optim.Optimizer), None)
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


def open_case(error: BaseException, model: nn.Module | None, phase: str) -> DiagnosedCase:
    """Gather it; without a model, the outermost one in the traceback, or one with FSDP units among local variables."""
    stack = read_stack(error)
    if model is None:
        modules = [call.module for call in stack.calls]
        model = next(iter([*stack.entered[:1], *modules[:1]]), None)
        if model is not None and modules and any(module is model for module in modules[0].modules()):
            model = modules[0]
        roots = (each for each in locals_of(stack, nn.Module) if any(isinstance(m, FSDPModule) for m in each.modules()))
        model = next((root for root in roots if model is None or model in set(root.modules())), model)
    seen = last_watch(model)
    error = failure_of(error)
    return DiagnosedCase(error=error, text=str(error), phase=phase, model=model, stack=stack, seen=seen)


def locals_of(stack: Stack, kind: type[_T]) -> Iterator[_T]:
    """Yield the local variables of one type, innermost first."""
    for line in reversed(stack.lines):
        for value in line.frame.f_locals.values():
            for each in value if isinstance(value, list | tuple) else (value,):
                if isinstance(each, kind):
                    yield each
