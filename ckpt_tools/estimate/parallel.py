"""What tensor, sequence, loss and expert parallelism leave of a model on one rank. Imports torch.

Sequence parallelism cuts what passes between blocks: a module with column-wise layers gathers its input, and what a
row-wise layer puts out is reduced and cut again. Source: `torch.distributed.tensor.parallel`, and how torchtitan's
models use it (`parallelize.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ckpt_tools.errors import UsageError
from ckpt_tools.estimate.case import Case
from ckpt_tools.estimate.report import UntrackedError
from ckpt_tools.fsdp2 import Policy
from ckpt_tools.fsdp2.internals import replicate_function
from ckpt_tools.fsdp2.mesh import TP_AXIS, fsdp_mesh
from ckpt_tools.fsdp2.ties import output_layer, tie, tied_groups

_SEQUENCE = Shard(1)
_LATENT_ATTENTION = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.q_b_proj": "colwise",
    "model.layers.*.self_attn.kv_b_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
}
"""How torchtitan cuts the attention of DeepSeek-V3 (`models/deepseek_v3/infra/parallelize.py`); transformers' plan
leaves it whole."""


def apply_policy(unit: nn.Module, policy: Policy, dp: DeviceMesh, *, root: bool = False) -> None:
    """Make a module a unit of FSDP."""
    apply: Any = fully_shard if policy.strategy != "no_shard" else replicate_function()
    apply(unit, **policy.kwargs(dp, root=root))


def needs_own_plan(model: nn.Module, case: Case) -> bool:
    """Can the plan for live models not say what this case cuts?"""
    tp = case.mesh.size("tp")
    has_experts = next(experts_of(model), None) is not None
    return case.sequence_parallel or case.loss_parallel or (has_experts and max(tp, case.num_expert_ranks) > 1)


def cut_layers(model: nn.Module, mesh: DeviceMesh, case: Case) -> None:
    """Cut linear layers, embeddings and what passes between them along tp; raise UntrackedError without a tp plan."""
    tp = mesh[TP_AXIS]
    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise UntrackedError(f"{type(model).__name__} has no tensor-parallel plan of its own")
    if any(hasattr(module, "kv_b_proj") for module in model.modules()):
        plan = _LATENT_ATTENTION | dict(plan)
    ties = tied_groups(model)
    output, embedding = output_layer(model), _embedding(model)
    regions: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        style = _style_of(name, plan)
        if not isinstance(module, (nn.Linear, nn.Embedding)) or module is output or module is embedding:
            continue
        if style is not None and module.weight.shape[0 if style == "colwise" else 1] % tp.size():
            raise UsageError(f"tp={tp.size()} does not divide the {style} weight", where=name)
        if style == "colwise":
            parallelize_module(module, tp, ColwiseParallel())
            parent = model.get_submodule(name.rpartition(".")[0])
            regions[id(parent)] = parent
        elif style == "rowwise":
            layouts = _SEQUENCE if case.sequence_parallel else Replicate()
            parallelize_module(module, tp, RowwiseParallel(output_layouts=layouts))
    if case.sequence_parallel:
        for region in regions.values():
            region.register_forward_pre_hook(_gather_input(tp), with_kwargs=True)
    if isinstance(embedding, nn.Embedding):
        layouts = _SEQUENCE if case.sequence_parallel else Replicate()
        style_of_embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=layouts)
        parallelize_module(embedding, tp, style_of_embedding)
    if isinstance(output, nn.Linear):
        parallelize_module(output, tp, _output_style(case))
    tie(model, ties, ())


def _output_style(case: Case) -> ParallelStyle:
    return ColwiseParallel(
        input_layouts=_SEQUENCE if case.sequence_parallel else Replicate(),
        output_layouts=Shard(-1) if case.loss_parallel else Replicate(),
        use_local_output=not case.loss_parallel,
    )


def _embedding(model: nn.Module) -> nn.Module | None:
    get = getattr(model, "get_input_embeddings", None)
    found = get() if callable(get) else None
    return found if isinstance(found, nn.Module) else None


def _style_of(name: str, plan: Mapping[str, str]) -> str | None:
    """Return "colwise" or "rowwise" for a module that a plan cuts."""
    plain = name.removesuffix(".base_layer").removeprefix("base_model.model.")
    for key, style in plan.items():
        pattern = r"\.".join("[^.]+" if part == "*" else re.escape(part) for part in key.split("."))
        if re.fullmatch(pattern, plain):
            return next((kind for kind in ("colwise", "rowwise") if kind in style and "packed" not in style), None)
    return None


def _gather_input(tp: DeviceMesh) -> Any:  # noqa: ANN401 - a hook
    def gather(
        module: nn.Module,  # noqa: ARG001 - a hook's signature
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = list(args)
        for position, value in enumerate(given):
            if _is_cut(value):
                given[position] = whole_of(value, tp)
                return tuple(given), kwargs
        for key, value in kwargs.items():
            if _is_cut(value):
                return args, kwargs | {key: whole_of(value, tp)}
        return args, kwargs

    return gather


def _is_cut(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 3 and value.is_floating_point()


def whole_of(cut: torch.Tensor, tp: DeviceMesh) -> torch.Tensor:
    """Return [B, S, h] of every rank's [B, S / tp, h]."""
    whole = DTensor.from_local(cut, tp, (_SEQUENCE,), run_check=False).redistribute(placements=(Replicate(),))
    return whole.to_local(grad_placements=(torch.distributed.tensor.Partial(),))


def experts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules whose parameters have one row per expert, by name."""
    for name, module in model.named_modules():
        num = getattr(module, "num_experts", None)
        own = list(module.parameters(recurse=False))
        if isinstance(num, int) and any(p.dim() == 3 and p.shape[0] == num for p in own):
            yield name, module


def cut_experts(model: nn.Module, mesh: DeviceMesh, case: Case, policy: Policy) -> None:
    """Leave each rank its experts, and make them units of their own over the ranks that have the same ones.

    Without expert parallelism tp cuts every expert, and its tokens are gathered. Raise UntrackedError for experts of an
    unknown form.
    """
    ranks, tp = case.num_expert_ranks, case.mesh.size("tp")
    if ranks * tp == 1:
        return
    for name, module in list(experts_of(model)):
        num = int(module.num_experts)  # type: ignore[arg-type]
        if num % ranks:
            raise UsageError(f"{ranks} ranks do not divide {num} experts", where=name)
        if ranks == 1:
            block = model.get_submodule(name.rpartition(".")[0])
            _cut_inner(module, tp, name)
            if case.sequence_parallel:
                block.register_forward_pre_hook(_gather_input(mesh[TP_AXIS]), with_kwargs=True)
                block.register_forward_hook(_cut_output(mesh[TP_AXIS]))
            continue
        module.num_experts = num // ranks  # type: ignore[assignment]
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter.shape[:1] == (num,):
                rest = parameter.detach()[: num // ranks].contiguous()
                setattr(module, key, nn.Parameter(rest, requires_grad=parameter.requires_grad))
        module.register_forward_pre_hook(_take_buffers)
        module.register_forward_hook(_drop_buffers)
        world = mesh.size()
        same = case.live_mesh.size("dp_shard") * tp // ranks
        own = init_device_mesh("cpu", (world // same, same), mesh_dim_names=("other", "dp_shard"))["dp_shard"]
        fully_shard(module, **(policy.kwargs(fsdp_mesh(mesh)) | {"mesh": own}))  # type: ignore[call-overload]


def _cut_inner(module: nn.Module, tp: int, name: str) -> None:
    """Cut every expert's inner width, the one of its two sides that is not the stream's."""
    hidden = getattr(module, "hidden_dim", None) or getattr(module, "hidden_size", None)
    for key, parameter in list(module.named_parameters(recurse=False)):
        if parameter.dim() != 3:
            continue
        dims = [dim for dim in (1, 2) if parameter.shape[dim] != hidden]
        if hidden is None or len(dims) != 1 or parameter.shape[dims[0]] % tp:
            raise UntrackedError(f"it is not known how tp={tp} cuts {name} of shape {tuple(parameter.shape)}")
        rest = parameter.detach().narrow(dims[0], 0, parameter.shape[dims[0]] // tp).contiguous()
        setattr(module, key, nn.Parameter(rest, requires_grad=parameter.requires_grad))


def _cut_output(tp: DeviceMesh) -> Any:  # noqa: ANN401 - a hook
    def cut(module: nn.Module, args: object, output: Any) -> Any:  # noqa: ANN401, ARG001 - a hook's signature
        first = output[0] if isinstance(output, tuple) else output
        part = DTensor.from_local(first, tp, (torch.distributed.tensor.Partial(),), run_check=False)
        found = part.redistribute(placements=(_SEQUENCE,)).to_local()
        return (found, *output[1:]) if isinstance(output, tuple) else found

    return cut


def _take_buffers(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Take what tokens are sent and received in, on their way to their experts: one row per token and expert of it."""
    hidden, index = args[0], args[1]
    rows = index.numel() if isinstance(index, torch.Tensor) else hidden.shape[0]
    module.__dict__["_ckpt_buffers"] = [hidden.new_empty((rows, hidden.shape[-1])) for _ in range(2)]


def _drop_buffers(module: nn.Module, args: object, output: object) -> None:  # noqa: ARG001 - a hook's signature
    module.__dict__.pop("_ckpt_buffers", None)
