"""The model of one case, on the meta device: built from its config, cast, with adapters, sharded. Imports torch."""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ckpt_tools.errors import UsageError
from ckpt_tools.estimate.case import Case
from ckpt_tools.estimate.model_sizes import NF4_SCALE_BYTES, Block, Figures, block_of
from ckpt_tools.estimate.report import UntrackedError
from ckpt_tools.fsdp2 import Policy, Precision, add_lora, find_blocks, parse_policy, shard_model
from ckpt_tools.fsdp2.internals import checkpoint_activations
from ckpt_tools.fsdp2.lora import linear_layers
from ckpt_tools.fsdp2.mesh import TP_AXIS, fsdp_mesh
from ckpt_tools.fsdp2.ties import input_layer, output_layer, tie, tied_groups
from ckpt_tools.fsdp2.wrap import apply_policy
from ckpt_tools.models.hf_recipe import max_positions
from ckpt_tools.models.recipe import BATCH_SIZE, Batch, Recipe
from ckpt_tools.models.replace_parameters import DTYPES, replace_parameters


def build(recipe: Recipe, case: Case, prepare: Callable[[nn.Module], None] | None = None) -> nn.Module:
    """Return the model on meta, in its dtypes between steps, with adapters; `prepare` runs before these are added."""
    with torch.device("meta"):
        model = recipe.build()
    if prepare is not None:
        prepare(model)
    cast(model, DTYPES[case.master_dtype if case.lora is None else case.frozen_dtype])
    if case.lora is None:
        return model
    config = {"peft_type": "LORA", "r": case.lora, "lora_alpha": 2 * case.lora, "target_modules": linear_layers(model)}
    adapted: nn.Module = add_lora(model, config)
    cast(adapted, DTYPES[case.master_dtype], trained=True)
    if case.quantize is not None:
        pack_linears(adapted, DTYPES[case.param_dtype])
    return adapted.train()


def shard(model: nn.Module, mesh: DeviceMesh, recipe: Recipe, case: Case) -> tuple[str, ...]:
    """Shard `model` as ckpt's own runs do; return its blocks."""
    precision = Precision(param_dtype=DTYPES[case.param_dtype], reduce_dtype=DTYPES[case.reduce_dtype])
    policy = parse_policy(case.strategy, precision=precision, cpu_offload=case.offload)
    names = find_blocks(model, recipe.blocks(model))
    if case.selective_checkpointing:
        for name in names:
            checkpoint_selectively(model.get_submodule(name))
    if needs_own_plan(model, case):
        return _shard_by_own_plan(model, mesh, names, case, policy)
    plan = shard_model(
        model,
        mesh,
        policy,
        blocks=recipe.blocks(model),
        forward_methods=recipe.forward_methods(model),
        tp_plan=recipe.tp_plan(model) if case.mesh.size(TP_AXIS) > 1 else None,
        activation_checkpointing=case.activation_checkpointing,
    )
    return plan.blocks


def _shard_by_own_plan(
    model: nn.Module, mesh: DeviceMesh, names: tuple[str, ...], case: Case, policy: Policy
) -> tuple[str, ...]:
    if case.mesh.size(TP_AXIS) > 1:
        cut_layers(model, mesh, case)
    cut_experts(model, mesh, case, policy)
    dp = fsdp_mesh(mesh)
    for name in names:
        unit = model.get_submodule(name)
        if case.activation_checkpointing:
            checkpoint_activations(unit)
        apply_policy(unit, policy, dp)
    apply_policy(model, policy, dp, root=True)
    return names


def cast(model: nn.Module, dtype: torch.dtype, *, trained: bool = False) -> None:
    """Give the floating-point parameters of `model` (only the trained ones, if so) this dtype; ties stay."""

    def make(parameter: nn.Parameter) -> torch.Tensor | None:
        is_meant = parameter.is_floating_point() and (parameter.requires_grad or not trained)
        return parameter.detach().to(dtype) if is_meant and parameter.dtype != dtype else None

    replace_parameters(model, make)


def figures_of(recipe: Recipe) -> Figures:
    """Return the figures of a recipe's model."""
    with torch.device("meta"):
        model = recipe.build()
    kinds: Counter[Block] = Counter()
    for name in find_blocks(model, recipe.blocks(model)):
        block = model.get_submodule(name)
        matrices = [sides for module in block.modules() if (sides := _sides(module)) is not None]
        experts = sum(p.numel() for _, each in experts_of(block) for p in each.parameters(recurse=False))
        kinds[replace(block_of((tuple(p.shape) for p in block.parameters()), 1, matrices), experts=experts)] += 1
    blocks = tuple(replace(kind, count=count) for kind, count in kinds.items())
    output = output_layer(model)
    weight = getattr(output, "weight", None)
    vocab = int(weight.shape[0]) if isinstance(weight, torch.Tensor) else 0
    hidden = blocks[0].hidden if blocks else 0
    params = sum(p.numel() for p in model.parameters())
    return Figures(params=params, blocks=blocks, hidden=hidden, vocab=vocab, tokens=_patches(model))


def _patches(model: nn.Module) -> int | None:
    """Return how many tokens an image makes for a model that takes nothing else."""
    if "input_ids" in inspect.signature(type(model).forward).parameters:
        return None
    config = getattr(model, "config", None)
    size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    return (size // patch) ** 2 + 1 if isinstance(size, int) and isinstance(patch, int) and patch else None


def _sides(module: nn.Module) -> tuple[int, int] | None:
    """Return (out, in) of a linear layer."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or isinstance(module, nn.Embedding):
        return None
    out, into = weight.shape
    # GPT-2's keeps its weight the other way round.
    return (into, out) if type(module).__name__ == "Conv1D" else (out, into)


def batch_of(recipe: Recipe, model: nn.Module, case: Case) -> Batch:
    """Return the recipe's batch on meta, of the case's samples and tokens."""
    # Without data: a long sample must not be made to know how long it is.
    with torch.device("meta"):
        sized = recipe.sized_batch(model, samples=case.samples, tokens=case.tokens_per_sample)
    if sized is not None:
        return sized
    batch = {name: tensor.to("meta") for name, tensor in recipe.batch(model, 0).items()}
    # What stands for an image comes first and stays whole; text follows, and is as long as it takes.
    may_cut = "pixel_values" not in batch
    return {name: _grown(tensor, case, may_cut=may_cut) for name, tensor in batch.items()}


def _grown(tensor: torch.Tensor, case: Case, *, may_cut: bool) -> torch.Tensor:
    if tensor.dim() and tensor.shape[0] == BATCH_SIZE:
        tensor = tensor[:1].expand(case.samples, *tensor.shape[1:])
    if tensor.dim() == 2 and not tensor.is_floating_point():
        missing = case.tokens_per_sample - tensor.shape[1]
        if missing > 0:
            tensor = torch.cat([tensor, tensor[:, -1:].expand(-1, missing)], dim=1)
        elif may_cut:
            tensor = tensor[:, : case.tokens_per_sample]
    return tensor.contiguous()


def notes_of(recipe: Recipe, seq_len: int) -> tuple[str, ...]:
    """Return what an estimate of this model, with samples of so many tokens, leaves out."""
    with torch.device("meta"):
        model = recipe.build()
        batch = recipe.sized_batch(model, samples=1, tokens=seq_len)
    if batch is not None:
        shapes = {name: value.shape for name, value in batch.items() if isinstance(value, torch.Tensor)}
        shown = ", ".join(f"{name} {'×'.join(map(str, dims))}" for name, dims in shapes.items() if len(dims) > 2)
        return (f"{seq_len} tokens per sample, text included: {shown}",)
    notes = list(recipe.notes_on(recipe.batch(model, 0)))
    positions = max_positions(getattr(model, "config", None))
    if positions is not None and positions < seq_len:
        notes.append(f"the config has {positions} positions, fewer than the {seq_len} tokens of a sample")
    return tuple(notes)


# Selective activation checkpointing, per operation, as torchtitan does it


def _kept_operations() -> set[Any]:
    """Return what is never computed twice: attention, and what other ranks sent.

    Source: `torchtitan/distributed/activation_checkpoint.py`.
    """
    aten, comm = torch.ops.aten, torch.ops._c10d_functional  # noqa: SLF001 - where collectives live
    return {
        aten._scaled_dot_product_efficient_attention.default,  # noqa: SLF001
        aten._scaled_dot_product_flash_attention.default,  # noqa: SLF001
        aten._scaled_dot_product_cudnn_attention.default,  # noqa: SLF001
        aten._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001
        aten._scaled_dot_product_attention_math.default,  # noqa: SLF001
        comm.reduce_scatter_tensor.default,
        comm.all_to_all_single.default,
    }


def checkpoint_selectively(unit: nn.Module) -> None:
    """Keep what `_kept_operations` names and every second matrix product of `unit`; compute the rest again."""
    kept = _kept_operations()
    products = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}

    def contexts() -> Any:  # noqa: ANN401 - a pair of context managers
        seen: Counter[bool] = Counter()

        def policy(context: Any, function: Any, *args: object, **kwargs: object) -> CheckpointPolicy:  # noqa: ANN401, ARG001
            if function in products:
                seen[context.is_recompute] += 1
                is_kept = seen[context.is_recompute] % 2 == 1
            else:
                is_kept = function in kept
            return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]

    inner = unit.forward

    def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the block takes
        # Around forward and not around the call: what is computed again must not gather parameters again.
        return checkpoint(inner, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    unit.forward = forward


# What tensor, sequence, loss and expert parallelism leave of a model on one rank
# Sequence parallelism cuts what passes between blocks: a module with column-wise layers gathers its input, and what a
# row-wise layer puts out is reduced and cut again. Source: `torch.distributed.tensor.parallel`, and how torchtitan's
# models use it (`parallelize.py`).

_SEQUENCE = Shard(1)
_LATENT_ATTENTION = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.q_b_proj": "colwise",
    "model.layers.*.self_attn.kv_b_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
}
"""How torchtitan cuts the attention of DeepSeek-V3 (`models/deepseek_v3/infra/parallelize.py`); transformers' plan
leaves it whole."""


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
        raise UntrackedError(f"{type(model).__name__} defines no tensor-parallel plan")
    if any(hasattr(module, "kv_b_proj") for module in model.modules()):
        plan = _LATENT_ATTENTION | dict(plan)
    ties = tied_groups(model)
    output, embedding = output_layer(model), input_layer(model)
    regions: dict[int, nn.Module] = {}
    layouts = _SEQUENCE if case.sequence_parallel else Replicate()
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
            parallelize_module(module, tp, RowwiseParallel(output_layouts=layouts))
    if case.sequence_parallel:
        for region in regions.values():
            region.register_forward_pre_hook(_gather_input(tp), with_kwargs=True)
    if isinstance(embedding, nn.Embedding):
        style_of_embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=layouts)
        parallelize_module(embedding, tp, style_of_embedding)
    if isinstance(output, nn.Linear):
        style_of_output = ColwiseParallel(
            input_layouts=layouts,
            output_layouts=Shard(-1) if case.loss_parallel else Replicate(),
            use_local_output=not case.loss_parallel,
        )
        parallelize_module(output, tp, style_of_output)
    tie(model, ties, ())


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

    Without expert parallelism tp cuts every expert, and its tokens are gathered.
    """
    ranks, tp = case.num_expert_ranks, case.mesh.size("tp")
    if ranks * tp == 1:
        return
    for name, module in list(experts_of(model)):
        num = int(module.num_experts)  # type: ignore[arg-type]
        if num % ranks:
            raise UsageError(f"{num} experts are not divisible by {ranks} ranks", where=name)
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
            raise UntrackedError(f"how tp={tp} shards {name} is not known; its shape is {tuple(parameter.shape)}")
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


class _Unpacked(torch.autograd.Function):
    """x · Wᵀ with a weight that exists only while it is used: once in forward, once more in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, out: int) -> torch.Tensor:  # noqa: ANN401
        ctx.save_for_backward(packed)
        ctx.out = out
        return x @ x.new_empty((out, x.shape[-1])).t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ANN401
        (packed,) = ctx.saved_tensors
        (grad,) = grads
        into = packed.numel() * packed.element_size() * 2 // ctx.out
        return grad @ grad.new_empty((ctx.out, into)), None, None


class PackedLinear(nn.Module):
    """A frozen linear layer of 4-bit weights, kept in a parameter of the compute dtype (`bnb_4bit_quant_storage`)."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        rows = math.ceil(linear.weight.numel() / 2 / dtype.itemsize)
        packed = torch.empty((rows, 1), dtype=dtype, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)
        scales = math.ceil(linear.weight.numel() * NF4_SCALE_BYTES)
        self.register_buffer("scales", torch.empty(scales, dtype=torch.uint8, device="meta"))
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., out] of [..., in]."""
        found: torch.Tensor = _Unpacked.apply(  # type: ignore[no-untyped-call]
            x.to(self.weight.dtype), self.weight, self.out_features
        )
        return found if self.bias is None else found + self.bias


def pack_linears(model: nn.Module, dtype: torch.dtype) -> None:
    """Pack the frozen layers under adapters."""
    for module in model.modules():
        base = module._modules.get("base_layer")  # noqa: SLF001 - PEFT's name for it
        if isinstance(base, nn.Linear):
            module._modules["base_layer"] = PackedLinear(base, dtype)  # noqa: SLF001


class _Chunked(torch.autograd.Function):
    """Cross-entropy of x · Wᵀ, chunk by chunk, gradients computed in forward (as Liger's kernel does)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        rows, width = x.shape
        # Liger's choice: as many values in a chunk's logits as in x.
        chunk = min(rows, 1 << max(0, math.ceil(math.log2(max(1, rows * width / weight.shape[0])))))
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        logits = x[:chunk] @ weight.t()
        grad_x[:chunk] = logits @ weight
        if grad_weight is not None:
            grad_weight += logits.t() @ x[:chunk]
        ctx.save_for_backward(grad_x, grad_weight)
        return x.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:  # noqa: ANN401, ARG004
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x, grad_weight


def fuse_loss(output: nn.Module) -> None:
    """Let an output layer return the loss in place of logits."""

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Chunked.apply(hidden.flatten(0, -2), output.weight)  # type: ignore[no-untyped-call]
        return found

    output.forward = forward
