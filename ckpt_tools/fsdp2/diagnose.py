"""From an exception to why it was raised, in which module and call, and what to change."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckpt_tools.description.transform import strip_wrappers
from ckpt_tools.fsdp2.cases import Case, Diagnosis, open_case
from ckpt_tools.fsdp2.catalogue import CATALOGUE
from ckpt_tools.fsdp2.compare import compare_traces
from ckpt_tools.fsdp2.internals import owner_of_frame, shown
from ckpt_tools.fsdp2.learning import is_reentrant
from ckpt_tools.fsdp2.mixes import check_freed, check_mixes
from ckpt_tools.fsdp2.stacks import named_tensors
from ckpt_tools.maps import folded


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
    return case.build("unknown", cause=f"{type(error).__name__}: {first_line}")


# Rules. Each looks at one kind of error and returns None when it is another.


def _texts(case: Case) -> Diagnosis | None:
    """Errors whose own text says enough."""
    for entry in CATALOGUE.values():
        match = re.search(entry.text, case.text, re.DOTALL) if entry.text else None
        if match is not None and (not entry.inside or case.stack.passes(*entry.inside)):
            return case.build(entry.id, match.groupdict().get("where") or "")
    if "overlapping meshes" in case.text or ("Invariant encountered" in case.text and case.stack.passes("fully_shard")):
        owner = _owner(case)
        return case.build(
            "outer-first", owner, f"{owner or 'the module'} is in the group of a module around it already"
        )
    if "uniform original parameter dtype" in case.text or "uniform reduce dtype" in case.text:
        return case.audited("dtype-mix") or case.build("dtype-mix", _owner(case))
    return None


def _owner(case: Case) -> str:
    """Name what FSDP2's own innermost frame works on: a parameter, or a group."""
    for line in reversed(case.stack.lines):
        found = owner_of_frame(line.frame, case.model)
        if found is not None:
            modules, parameter = found
            return parameter or "+".join(case.name(module) for module in modules)
    return ""


def _loads(case: Case) -> Diagnosis | None:
    """Errors of `load_state_dict`, and what a wrong load leads to."""
    if "_local_tensor" in case.text and isinstance(case.error, AttributeError):
        return case.build("load-plain", _owner(case))
    if "loading state_dict" in case.text and (match := re.search(r'parameter named "(.+?)"', case.text)):
        if "got mixed torch.Tensor and DTensor" in case.text:
            return case.build("load-plain" if _is_sharded(case, match[1]) else "load-sharded", match[1])
        if "can require gradients" in case.text:
            return case.build("load-dtype", match[1], f"{match[1]} requires gradients but was given integers")
    missing, _, unexpected = case.text.partition("Unexpected key(s) in state_dict")
    if "Missing key(s) in state_dict" in missing and unexpected:
        lost, found = (
            {strip_wrappers(key).removeprefix("module."): key for key in re.findall(r'"(.+?)"', part)}
            for part in (missing, unexpected)
        )
        if same := [plain for plain in lost if plain in found]:
            one, other = lost[same[0]], found[same[0]]
            return case.build("wrapped-names", one, f"{len(same)} names differ by wrappers: {one} is {other}")
    if "exceeds dimension size" in case.text and case.stack.passes("reset_sharded_param", "load_state_dict"):
        return case.build("load-placement", _owner(case))
    if re.search(r"out tensor to have dtype", case.text) and case.stack.passes("wait_for_unshard"):
        return case.audited("load-dtype") or case.build("load-dtype", _owner(case))
    return None


def _is_sharded(case: Case, fqn: str) -> bool:
    """Is this a DTensor in the module that is being loaded?"""
    for line in case.stack.lines:
        module = line.frame.f_locals.get("self")
        if line.code.co_name == "load_state_dict" and isinstance(module, nn.Module):
            return any(isinstance(p, DTensor) for name, p in module.named_parameters() if name == fqn)
    return True


_DTYPES = r"(must|to) have the same dtype|Input type .* should be the same|expected scalar type \w+ but found \w+"


def _dtypes(case: Case) -> Diagnosis | None:
    """An input in another dtype than a unit computes in."""
    if not case.stack.calls or not re.search(_DTYPES, case.text):
        return None
    module = case.stack.calls[-1].module
    owner = next((group for group in case.groups() if any(param.module is module for param in group.params)), None)
    if owner is None or owner.compute_dtype is None:
        return None
    where = case.name(module)
    dtype = str(owner.compute_dtype).removeprefix("torch.")
    cause = f"{where} computes in {dtype} in {shown(owner.fqn)}, and its input is not {dtype}"
    used = [tensor for line in case.stack.lines[-1:-12:-1] if not line.is_library for tensor in named_tensors(line)]
    for fqn, buffer in case.model.named_buffers() if case.model is not None else ():
        if buffer.is_floating_point() and buffer.dtype != owner.compute_dtype and any(t is buffer for t in used):
            kept = str(buffer.dtype).removeprefix("torch.")
            cause += f": the buffer {fqn} is {kept}, and FSDP2 casts no buffers"
            break
    return case.build("compute-dtype", where, cause)


def _graphs(case: Case) -> Diagnosis | None:
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
        return case.build("reentrant-checkpoint", folded(reentrant or trainable, None)[0])
    if names and all(mode == "no_grad" for mode, _ in names):
        return case.build("grad-disabled", folded([fqn for _, fqn in names], None)[0])
    return case.build(
        "no-gradient", "", "the loss was cut off from all parameters: nothing that led to it keeps a graph"
    )


def _meta(case: Case) -> Diagnosis | None:
    """Computing with what has no data."""
    if re.search(r"device meta|meta tensor|meta device|'meta'", case.text):
        return case.audited("meta-buffer") or case.audited("meta-param") or case.audited("meta-attribute")
    return None


def _optimizers(case: Case) -> Diagnosis | None:
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


def _odd_one(case: Case) -> str:
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


def _ranks(case: Case) -> Diagnosis | None:
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


_RULES: tuple[Callable[[Case], Diagnosis | None], ...] = (
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
