"""Tensor parallelism before FSDP: styles by module, as transformers and PyTorch name them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate as TorchReplicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ckpt_tools.checkpoint.layout import Placement, Shard
from ckpt_tools.checkpoint.transform import strip_wrappers
from ckpt_tools.errors import UsageError
from ckpt_tools.fsdp2.ties import Ties, owner_of, tied_groups
from ckpt_tools.transfer.placement.rule import STYLES

TpPlan = Mapping[str, str | ParallelStyle]
"""Module FQN (`*` is one component) → style, by transformers' name or as PyTorch's object."""

_MEANT = (nn.Linear, nn.Embedding)


def find_styles(model: nn.Module, plan: TpPlan | str) -> dict[str, str | ParallelStyle]:
    """Return module FQN → style for every module that `plan` names; "auto" takes the plan of the model itself."""
    if isinstance(plan, str):
        if plan != "auto":
            raise UsageError(f"{plan!r} is not a plan", hint='use "auto", or a mapping of module names to styles')
        own = getattr(model, "tp_plan", None)
        if not isinstance(own, Mapping) or not own:
            raise UsageError(
                f"{type(model).__name__} has no tensor-parallel plan of its own",
                where="tp_plan",
                hint='pass one: {"layers.*.q_proj": "colwise", "layers.*.o_proj": "rowwise"}',
            )
        found = _expand(model, own, optional=True)
        if not found:
            raise UsageError(
                f"the tensor-parallel plan of {type(model).__name__} names none of its modules",
                where="tp_plan",
                hint="adapters change the names of modules: pass a plan with the names of model.named_modules()",
            )
        return found
    return _expand(model, plan, optional=False)


def _expand(model: nn.Module, plan: TpPlan, *, optional: bool) -> dict[str, str | ParallelStyle]:
    modules = dict(model.named_modules())
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found: dict[str, str | ParallelStyle] = {}
    for key, style in plan.items():
        pattern = re.compile(r"\.".join("[^.]+" if part == "*" else re.escape(part) for part in key.split(".")))
        matches = [name for name in modules if pattern.fullmatch(name) or pattern.fullmatch(strip_wrappers(name))]
        is_parameter = any(pattern.fullmatch(name) or pattern.fullmatch(strip_wrappers(name)) for name in parameters)
        if not matches and not is_parameter and optional:
            continue
        if not matches and not is_parameter:
            raise UsageError(f"the plan's {key!r} matches no module", where="tp_plan")
        if isinstance(style, str):
            if style in ("", "replicate") or (not matches and STYLES.get(style) == "whole"):
                continue
            if is_parameter or style not in _BUILD:
                raise UsageError(
                    f"the style {style!r} of {key!r} is not supported on live models",
                    where="tp_plan",
                    hint=f"supported are {', '.join(_BUILD)}; leave the module out to keep it whole",
                )
        found |= dict.fromkeys(matches, style)
    return found


_BUILD: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=TorchReplicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=TorchReplicate()),
    "rowwise": RowwiseParallel,
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=TorchReplicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=TorchReplicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=TorchReplicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=TorchReplicate()),
}


def apply_styles(model: nn.Module, styles: Mapping[str, str | ParallelStyle], mesh: DeviceMesh) -> None:
    """Cut the modules along `mesh`, and share again what was shared; refuse uneven cuts and torn attention heads."""
    ties = tied_groups(model)
    for name, style in styles.items():  # all of them first: a model that is cut in part is of no use
        if isinstance(style, str):
            _check(model, name, model.get_submodule(name), style, mesh.size())
    for name, style in styles.items():
        parallelize_module(model.get_submodule(name), mesh, _BUILD[style]() if isinstance(style, str) else style)
    _tie_again(model, ties)


def _check(model: nn.Module, name: str, module: nn.Module, style: str, size: int) -> None:
    if not isinstance(module, _MEANT):
        raise UsageError(
            f"{style} cuts linear layers and embeddings, but this is a {type(module).__name__}", where=name
        )
    dim = _weight_dim(module, style)
    length = module.weight.shape[dim]
    if length % size:
        raise UsageError(
            f"{style} cuts dim {dim} of the weight, and its {length} elements are not divisible by tp={size}",
            where=name,
            hint="leave the module out of the plan, or choose a size that divides it",
        )
    head_dim = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
    if isinstance(head_dim, int) and head_dim > 0 and isinstance(module, nn.Linear) and (length // size) % head_dim:
        raise UsageError(
            f"tp={size} would tear attention heads apart: {length // head_dim} heads of {head_dim} features",
            where=name,
            hint="choose a tp that divides the number of (key-value) heads",
        )


def _weight_dim(module: nn.Module, style: str) -> int:
    colwise = style.startswith(("colwise", "embedding_colwise"))
    if isinstance(module, nn.Embedding):
        return 1 if colwise else 0
    return 0 if colwise else 1


def cuts_of(model: nn.Module) -> dict[str, Placement]:
    """Return FQN → how the tp axis cuts it, for the parameters that are DTensors by now (before FSDP)."""
    found: dict[str, Placement] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, DTensor) and parameter.placements[0].is_shard():
            found[fqn] = Shard(parameter.placements[0].dim)  # type: ignore[attr-defined]
    return found


def _tie_again(model: nn.Module, ties: Ties) -> None:
    """Share the parameters of each group again; cutting one of them has made it a parameter of its own."""
    for group in ties:
        owners = [owner_of(model, fqn) for fqn in group]
        parameters = [module._parameters[name] for module, name in owners]  # noqa: SLF001
        kinds = {tuple(p.placements) if isinstance(p, DTensor) else None for p in parameters}
        if len(kinds) > 1:
            raise UsageError(
                f"tied parameters must be cut the same way: {', '.join(group)}",
                where="tp_plan",
                hint="use the same dim for all of them (colwise for a head, embedding_rowwise for its embedding)",
            )
        for module, name in owners:
            module._parameters[name] = parameters[0]  # noqa: SLF001
