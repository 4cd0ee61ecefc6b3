"""The model of one case, on the meta device: built from its config, cast, with adapters, sharded. Imports torch."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ckpt_tools.estimate.case import Case
from ckpt_tools.estimate.figures import Block, Figures, block_of
from ckpt_tools.estimate.packed import pack_linears
from ckpt_tools.estimate.parallel import apply_policy, cut_experts, cut_layers, experts_of, needs_own_plan
from ckpt_tools.estimate.selective import checkpoint_selectively
from ckpt_tools.fsdp2 import Policy, Precision, add_lora, find_blocks, parse_policy, shard_model
from ckpt_tools.fsdp2.internals import checkpoint_activations
from ckpt_tools.fsdp2.lora import linear_layers
from ckpt_tools.fsdp2.mesh import TP_AXIS, fsdp_mesh
from ckpt_tools.fsdp2.ties import output_layer
from ckpt_tools.models.hf_recipe import max_positions
from ckpt_tools.models.parameters import DTYPES, replace_parameters
from ckpt_tools.models.recipe import BATCH_SIZE, Batch, Recipe


def build(recipe: Recipe, case: Case, prepare: Callable[[nn.Module], None] | None = None) -> nn.Module:
    """Return the model on meta, in its dtypes between steps, with adapters; `prepare` runs before these are added."""
    with torch.device("meta"):
        model = recipe.build()
    if prepare is not None:
        prepare(model)
    cast(model, DTYPES[case.master_dtype if case.lora is None else case.frozen_dtype])
    if case.lora is None:
        return model
    config = {
        "peft_type": "LORA",
        "r": case.lora,
        "lora_alpha": 2 * case.lora,
        "target_modules": linear_layers(model),
    }
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
        return (f"{seq_len} tokens a sample, text included: {shown}",)
    notes = list(recipe.notes_on(recipe.batch(model, 0)))
    positions = max_positions(getattr(model, "config", None))
    if positions is not None and positions < seq_len:
        notes.append(f"the config has only {positions} positions for {seq_len} tokens")
    return tuple(notes)
