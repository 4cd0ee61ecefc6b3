"""Loads that fail: which names, shapes and optimizer state a load wanted, and what the checkpoint has instead."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt_tools.checkpoint.dtypes import BY_TORCH_NAME
from ckpt_tools.checkpoint.entries import Checkpoint, TensorEntry
from ckpt_tools.checkpoint.transform import is_optimizer, strip_wrappers
from ckpt_tools.errors import CkptError
from ckpt_tools.fsdp2.collective import this_rank
from ckpt_tools.fsdp2.names import match_names, shapes_of
from ckpt_tools.text import first_few

if TYPE_CHECKING:
    from ckpt_tools.fsdp2.diagnose import DiagnosedCase, Diagnosis

_LOADS = "`ckpt_tools.fsdp2.load_checkpoint(model, PATH)`, which finds the names"
_LOADS_BASE = "`ckpt_tools.fsdp2.load_base(model, PATH)`, which loads what adapters are around"
_LOADS_STATE = "`ckpt_tools.fsdp2.load_optimizer(model, optimizer, PATH)`, which goes by the parameters' names"
_NO_STATE = "start with a new optimizer: load the model alone, `load_checkpoint(model, PATH)`"


def failure_of(error: BaseException) -> BaseException:
    """Return what a DCP exception reports: this rank's failure, or else that of the first rank."""
    if not isinstance(error, CheckpointException) or not error.failures:
        return error
    return error.failures.get(this_rank(), error.failures[min(error.failures)])[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """What was to be loaded, and from what."""

    wanted: Mapping[str, Any]  # Key → tensor, or anything else
    held: Mapping[str, TensorEntry | None]  # Key → tensor; None for what is no tensor
    path: str = "PATH"  # Of a DCP checkpoint, as one writes it in Python


def explain_load(case: DiagnosedCase) -> Diagnosis | None:
    """Errors of `dcp.load`, `load_state_dict` and `set_state_dict` about what is not there, or of another shape."""
    if "metadata is None" in case.text:
        return case.build("no-metadata", next(iter(re.findall(r"directory: '([^']*?)/?\.metadata'", case.text)), ""))
    load = _dcp_load(case) or _module_load(case)
    if load is None:
        return None
    lost = [key for key in load.wanted if key not in load.held]
    if not lost:
        return _other_shape(case, load)
    if ranked := [key for key in lost if _is_of_rank(key, load)]:
        return case.build("per-rank-state", ranked[0], f"the checkpoint has no {ranked[0]}: fewer ranks saved it")
    weights = [key for key in lost if not _is_state(key)]
    return _other_names(case, weights, load) if weights else _no_state(case, lost, load)


def _dcp_load(case: DiagnosedCase) -> _Load | None:
    if not re.search(r"Missing key in checkpoint|Size mismatch between saved", case.text):
        return None
    for line in case.stack.lines:
        planner = line.frame.f_locals.get("planner")
        metadata, wanted = getattr(planner, "metadata", None), getattr(planner, "state_dict", None)
        if isinstance(metadata, Metadata) and isinstance(wanted, Mapping):
            nested = metadata.planner_data or {}
            held: dict[str, TensorEntry | None] = dict.fromkeys(metadata.state_dict_metadata)
            for key, md in metadata.state_dict_metadata.items():
                if isinstance(md, TensorStorageMetadata):
                    held[key] = _entry(key, md.size, md.properties.dtype, nested.get(key, ()))
            path = getattr(line.frame.f_locals.get("storage_reader"), "path", None)
            return _Load(wanted=wanted, held=held, path=repr(str(path)) if path else "PATH")
    return None


def _module_load(case: DiagnosedCase) -> _Load | None:
    if not re.search(r"(Missing|Unexpected) key\(s\)|size mismatch for", case.text):
        return None
    for line in case.stack.lines:
        module, given = (line.frame.f_locals.get(name) for name in ("self", "state_dict"))
        if line.code.co_name == "load_state_dict" and isinstance(module, nn.Module) and isinstance(given, Mapping):
            held = {key: _entry(key, v.shape, v.dtype) for key, v in given.items() if isinstance(v, torch.Tensor)}
            return _Load(wanted=module.state_dict(), held=held)
    return None


def _entry(key: str, shape: Iterable[int], dtype: torch.dtype, path: Iterable[str | int] = ()) -> TensorEntry | None:
    known = BY_TORCH_NAME.get(str(dtype).removeprefix("torch."))
    return None if known is None else TensorEntry(fqn=key, dtype=known, shape=tuple(shape), chunks=(), path=tuple(path))


def _is_state(key: str) -> bool:
    return is_optimizer(TensorEntry(fqn=key, dtype=BY_TORCH_NAME["uint8"], shape=(), chunks=()))


def _is_of_rank(key: str, load: _Load) -> bool:
    """Is this rank's number in the key, the only one that is wanted there, and has the checkpoint others alone?"""
    for number in re.finditer(rf"(?<=[._]){this_rank()}(?=\.|$)", key):
        place = re.compile(re.escape(key[: number.start()]) + r"(\d+)(?=\.|$)")
        asked, kept = ({match[1] for each in keys if (match := place.match(each))} for keys in (load.wanted, load.held))
        if asked == {number[0]} and kept and number[0] not in kept:
            return True
    return False


def _no_state(case: DiagnosedCase, lost: list[str], load: _Load) -> Diagnosis:
    kept = [key for key in load.held if _is_state(key)]
    owners = {key.rpartition(".")[0] for key in kept}
    is_other = any(key.rpartition(".")[0] in owners for key in lost)  # these parameters have state, of other names
    holds = first_few(kept, 2) if kept else "no optimizer state"
    cause = f"{len(lost)} keys of the optimizer are not in the checkpoint ({first_few(lost, 2)}), which holds {holds}"
    fix = "" if is_other else _LOADS_STATE.replace("PATH", load.path) if kept else _NO_STATE
    return case.build("optimizer-state", lost[0], cause, fix=fix)


def _other_names(case: DiagnosedCase, lost: list[str], load: _Load) -> Diagnosis:
    """Find the names that the checkpoint has for what was asked for, as a load by ckpt does."""
    for names in ({} if case.model is None else case.model.state_dict(), load.wanted):
        found = _find(case, load, {k: v for k, v in names.items() if isinstance(v, torch.Tensor) and not _is_state(k)})
        if found:
            one = next((key for key in found if lost[0].endswith(key) or key.endswith(lost[0])), "")
            if not one or found[one] == lost[0]:
                continue
            code = "wrapped-names" if _bare(found[one]) == _bare(lost[0]) else "other-names"
            cause = f"{lost[0]} is called {found[one]} in the checkpoint (names that differ: {len(lost)})"
            return case.build(code, lost[0], cause, fix=_LOADS.replace("PATH", load.path))
    spare = _spare(load)
    other = f"; it holds {first_few(spare, 3)}, which the model lacks" if spare else ""
    cause = f"not in the checkpoint: {first_few(lost, 3)}{other}"
    if spare and any(re.search(r"(^|\.)(base_layer|base_model\.model)\.", key) for key in lost):
        return case.build("other-names", lost[0], cause, fix=_LOADS_BASE.replace("PATH", load.path))
    return case.build("missing-keys", lost[0], cause)


def _spare(load: _Load) -> list[str]:
    return [key for key, entry in load.held.items() if entry and key not in load.wanted and not _is_state(key)]


def _bare(key: str) -> str:
    return re.sub(r"(^|\.)module\.", r"\1", strip_wrappers(key))


def _find(case: DiagnosedCase, load: _Load, names: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return name of the model → name in the checkpoint; empty unless all are found."""
    checkpoint = Checkpoint(root=load.path, format="dcp", tensors=tuple(filter(None, load.held.values())))
    try:
        found = match_names(checkpoint, case.model or nn.Module(), shapes_of(names), "auto").found
    except CkptError:
        return {}
    if any(name not in found or found[name].shape != tuple(tensor.shape) for name, tensor in names.items()):
        return {}
    return {name: found[name].mosaic.sources[0] for name in names if found[name].mosaic.sources}


def _other_shape(case: DiagnosedCase, load: _Load) -> Diagnosis | None:
    for key, value in load.wanted.items():
        entry = load.held.get(key)
        if entry is not None and isinstance(value, torch.Tensor) and entry.shape != tuple(value.shape):
            cause = f"{key} is {list(value.shape)} in the model and {list(entry.shape)} in the checkpoint"
            return case.build("other-shape", key, cause)
    if "Unexpected key" in case.text and (spare := _spare(load)):
        return case.build("unexpected-keys", spare[0], f"the model lacks {first_few(spare, 3)}")
    return None


def explain_optimizer(case: DiagnosedCase) -> Diagnosis | None:
    """Optimizer state and gradients that are plain tensors beside sharded parameters."""
    optimizer = next(
        (o for line in case.stack.lines if isinstance(o := line.frame.f_locals.get("self"), Optimizer)), None
    )
    if optimizer is None or "mixed torch.Tensor and DTensor" not in case.text:
        return None
    names = {} if case.model is None else {id(p): fqn for fqn, p in case.model.named_parameters()}
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)):
        fqn = names.get(id(parameter), "a sharded parameter")
        if _is_plain(parameter.grad):
            return case.build("plain-gradient", fqn)
        for name in (name for name, value in optimizer.state.get(parameter, {}).items() if _is_plain(value)):
            return case.build("plain-optimizer-state", fqn, f"{name} of {fqn} is a plain tensor")
    return None


def _is_plain(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and not isinstance(value, DTensor)
