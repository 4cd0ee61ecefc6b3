"""Every way in which FSDP2 is known to break: how it shows, why, and what to change.

Pure data. `diagnose` turns exceptions into these, `audit` and `compare_ranks` find the silent ones,
docs/reference/diagnoses.md shows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ckpt_tools.description.checkpoint import Finding

Found = Literal["exception", "audit", "ranks", "watch"]
"""Where a diagnosis comes from: an error's text and frames, `audit`, comparing ranks, or what `watch` saw."""

_MIXED = "`got mixed torch.Tensor and DTensor`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One row of the table."""

    id: str
    """Stable kebab-case identifier; the code of findings."""
    symptom: str
    cause: str
    fix: str
    found_by: tuple[Found, ...]
    silent: bool = False
    """Training goes on, with wrong numbers."""


_ENTRIES = (
    Entry(
        id="custom-method",
        symptom=f"{_MIXED} below a method other than `forward`",
        cause="a method of a wrapped module was called; only `__call__` gathers its parameters",
        fix='call `module(...)`, or `register_fsdp_forward_method(module, "method")` once after sharding',
        found_by=("exception",),
    ),
    Entry(
        id="dot-forward",
        symptom=f"{_MIXED} below `.forward(...)`",
        cause="`module.forward(x)` was called, which skips the hooks that gather the parameters",
        fix="call `module(x)`",
        found_by=("exception",),
    ),
    Entry(
        id="partial-root",
        symptom=f"{_MIXED} after `model.part(...)`",
        cause="a part was entered whose parameters belong to a wrapped module above it, which did not run",
        fix="enter through the wrapped module, or wrap that part on its own",
        found_by=("exception", "audit"),
    ),
    Entry(
        id="foreign-param",
        symptom=f"{_MIXED} where a module uses another module's parameter",
        cause="a parameter was used outside the forward pass of the module that gathers it",
        fix="move the use into the owner's forward, or gather both together: `fully_shard([a, b])`",
        found_by=("exception", "watch"),
    ),
    Entry(
        id="mid-forward-reshard",
        symptom=f"{_MIXED}, or `Expects to be in one of (UNSHARDED)`, inside a module's own forward",
        cause="the parameters were sharded again while the module's forward was still running",
        fix="no `state_dict()`, `load_state_dict()` or `reshard()` inside forward",
        found_by=("exception", "watch"),
    ),
    Entry(
        id="double-wrap",
        symptom=f"`Expects to be in one of (UNSHARDED), not SHARDED` in backward (torch ≤ 2.5), later {_MIXED}",
        cause="a registered method runs inside another entry point of its module: the inner one releases the "
        "parameters",
        fix="drop either the registration or the dispatch, so that every call enters the module once",
        found_by=("exception", "audit", "watch"),
    ),
    Entry(
        id="opaque-output",
        symptom="`setStorage … out of bounds for storage of size 0` in backward",
        cause="a wrapped module's output hides its tensors from FSDP2, or was changed in place as a view, so that "
        "backward does not gather the parameters",
        fix="return tensors, tuples, dicts or dataclasses; `.clone()` views before in-place changes",
        found_by=("exception", "watch"),
    ),
    Entry(
        id="root-not-first",
        symptom="`FSDP state has already been lazily initialized`",
        cause="a wrapped part ran a forward pass before its root did, and became the root itself",
        fix="run the first forward pass through the root",
        found_by=("exception", "audit"),
    ),
    Entry(
        id="outer-first",
        symptom="`Cannot concatenate overlapping meshes`, or `Invariant encountered`, from `fully_shard`",
        cause="a module was wrapped after a module that contains it, whose group has its parameters already",
        fix="wrap children before parents: `for name in reversed(names)`, the root last",
        found_by=("exception",),
    ),
    Entry(
        id="shared-group",
        symptom="`Parameter … is shared with a parameter already managed by another FSDP group`",
        cause="tied parameters are in two groups",
        fix="put the modules that share it into one call: `fully_shard([embed, head])`, or leave both to the root",
        found_by=("exception", "audit"),
    ),
    Entry(
        id="untied",
        symptom="`KeyError: <int>` when the optimizer's state is saved; two weights that should be one drift apart",
        cause="`load_state_dict(assign=True)` or a conversion gave each of the tied names a parameter of its own",
        fix="tie again after the load (`model.tie_weights()`), before the optimizer is created",
        found_by=("exception", "audit"),
        silent=True,
    ),
    Entry(
        id="stale-optimizer",
        symptom="the loss does not move",
        cause="the optimizer holds parameters that no longer belong to the model",
        fix="create the optimizer after `fully_shard` and after a load with `assign=True`",
        found_by=("exception", "audit"),
        silent=True,
    ),
    Entry(
        id="meta-param",
        symptom="`FSDP parameters should be materialized from meta device`",
        cause="parameters never received data",
        fix="load a checkpoint with `assign=True` that has them, or `to_empty()` and initialise",
        found_by=("exception", "audit"),
    ),
    Entry(
        id="meta-buffer",
        symptom="`Tensor on device meta is not on the expected device`, or outputs on the meta device",
        cause="non-persistent buffers are in no checkpoint and were never computed",
        fix="`materialise_buffers(model, device)` after the load",
        found_by=("exception", "audit"),
    ),
    Entry(
        id="garbage-buffer",
        symptom="NaN, or a loss that is plausible and wrong",
        cause="`to_empty()` left buffers with whatever the memory held",
        fix="`materialise_buffers(model, device)` after the load",
        found_by=("audit", "ranks"),
        silent=True,
    ),
    Entry(
        id="load-plain",
        symptom="`'Parameter' object has no attribute '_local_tensor'`, or `aten.copy_ got mixed …` from a load",
        cause="plain tensors were loaded into a model of DTensors",
        fix="`distribute_tensor(t, p.device_mesh, p.placements)` first, or `load_checkpoint`",
        found_by=("exception", "audit"),
    ),
    Entry(
        id="load-placement",
        symptom="`start … + length … exceeds dimension size` from a load",
        cause="DTensors were loaded whose mesh or placements are not the model's",
        fix="distribute on the parameter's own mesh and placements: `p.device_mesh, p.placements`",
        found_by=("exception", "audit"),
    ),
    Entry(
        id="load-dtype",
        symptom="`Expected out tensor to have dtype …` in the all-gather, or an integer tensor in a load",
        cause="a load gave parameters a dtype other than the one that they were gathered in",
        fix="cast before the load: `t.to(p.dtype)`",
        found_by=("exception", "audit"),
    ),
    Entry(
        id="dtype-mix",
        symptom="`FSDP expects uniform original parameter dtype`",
        cause="trainable parameters of one group have different dtypes",
        fix="cast them to one dtype, or wrap the differing modules apart",
        found_by=("exception", "audit"),
    ),
    Entry(
        id="unmanaged",
        symptom="ranks drift apart; `_foreach … got mixed` from an optimizer",
        cause="a trainable parameter belongs to no group, so its gradient is never averaged",
        fix="add it before `fully_shard` (PEFT adapters too), or freeze it",
        found_by=("exception", "audit"),
        silent=True,
    ),
    Entry(
        id="rank-init",
        symptom="a loss that is worse than on one device",
        cause="ranks started from different weights; FSDP2 does not broadcast",
        fix="use the same seed on every rank before building, or load a checkpoint",
        found_by=("ranks",),
        silent=True,
    ),
    Entry(
        id="param-order",
        symptom="shards of different parameters are gathered into one",
        cause="ranks do not have the same parameters in the same order, shape, dtype and requires_grad",
        fix="build and freeze the model alike on every rank",
        found_by=("ranks",),
        silent=True,
    ),
    Entry(
        id="rank-structure",
        symptom="a timeout or an abort in the first collective",
        cause="ranks wrapped different modules",
        fix="call `fully_shard` on the same modules with the same mesh and policy on every rank",
        found_by=("exception", "ranks"),
    ),
    Entry(
        id="rank-skip",
        symptom="a timeout, an abort, or `Connection closed by peer`",
        cause="a rank did not run a wrapped module that the others ran, or stopped earlier",
        fix="run every wrapped module on every rank: a dummy forward pass whose result is multiplied by zero, and the "
        "same number of steps",
        found_by=("exception", "ranks"),
    ),
    Entry(
        id="rank-unused",
        symptom="wrong gradients, or an abort in the reduce-scatter",
        cause="ranks used different parameters of a group, and their gradients are reduced as if they were the same",
        fix="`set_reduce_scatter_unused_params(True)`, or use the same parameters on every rank",
        found_by=("exception", "ranks"),
        silent=True,
    ),
    Entry(
        id="mixed-clip",
        symptom="`_foreach_norm got mixed …`, or `aten.stack … must have the same mesh`, from `clip_grad_norm_`",
        cause="the gradients are not all DTensors on one mesh",
        fix="`ckpt_tools.fsdp2.clip_grad_norm`, which computes the norm mesh by mesh",
        found_by=("exception",),
    ),
    Entry(
        id="sharding-state",
        symptom="memory that stays high, or a later failure",
        cause="a group is not in the state that its strategy leads to after this phase",
        fix="check which module it is; `reset_iter_state()` on the root after a failed iteration",
        found_by=("audit",),
    ),
    Entry(
        id="unknown",
        symptom="anything else",
        cause="none of the known failures of FSDP2",
        fix="read the error itself: ckpt knows no more than its message and traceback",
        found_by=("exception",),
    ),
)

CATALOGUE: Mapping[str, Entry] = MappingProxyType({entry.id: entry for entry in _ENTRIES})
"""Diagnosis id → entry."""


def build_finding(code: str, where: str, what: str) -> Finding:
    """Return an error with the hint that the catalogue has for it."""
    return Finding.error(code, where, what, CATALOGUE[code].fix)


def render_catalogue(entries: Iterable[Entry] = _ENTRIES) -> str:
    """Return the table as a page of documentation."""
    lines = [
        "# Diagnoses",
        "",
        "<!-- Written by bin/docs from ckpt_tools/fsdp2/catalogue.py. Do not edit. -->",
        "",
        "How FSDP2 training breaks, by the id that `ckpt smoke`, `audit`, `compare_ranks`, `watch` and `diagnose`",
        "give.",
        "*Silent* failures raise nothing at first; only an audit or a comparison of ranks finds them.",
        "",
    ]
    for entry in entries:
        lines += [
            f"## {entry.id}",
            "",
            f"- **Symptom**: {entry.symptom}.{' Silent.' if entry.silent else ''}",
            f"- **Cause**: {entry.cause}.",
            f"- **Fix**: {entry.fix}.",
            f"- **Found by**: {', '.join(entry.found_by)}.",
            "",
        ]
    return "\n".join(lines)
