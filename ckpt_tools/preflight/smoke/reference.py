"""The same model, unsharded, in one process: what losses and gradients must be."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.errors import UsageError
from ckpt_tools.fsdp2 import parameter_groups
from ckpt_tools.fsdp2.buffers import place
from ckpt_tools.fsdp2.collective import gather
from ckpt_tools.fsdp2.load import assign, complete, read_state
from ckpt_tools.models.config_recipe import FEEDS_ITSELF, ConfigRecipe, stopped
from ckpt_tools.models.recipe import Batch, Recipe, call, find_loss, loss_of
from ckpt_tools.preflight.smoke import rng
from ckpt_tools.preflight.smoke.blueprint import SEED, Blueprint

LEARNING_RATE = 1e-3  # Of every smoke run
WEIGHT_DECAY = 0.01  # Of every smoke run


def make_optimizer(model: nn.Module, *, foreach: bool | None = None) -> torch.optim.Optimizer:
    """Return the optimizer that the sharded model and the reference both use."""
    return torch.optim.AdamW(parameter_groups(model, WEIGHT_DECAY), lr=LEARNING_RATE, foreach=foreach)


class Reference:
    """The unsharded model on one rank, which computes the batches of all; or on every rank, `together`.

    Together each computes its own batch, as in plain data parallelism, and gradients are averaged: for models whose
    forward talks to the other ranks. Then it is collective, else not.

    Mixed precision is imitated: a copy of the model computes with cast parameters, and its gradients are averaged over
    the ranks' batches in float32 and cast to the parameters' own dtype. Every rank's batch meets the buffers that this
    rank has by then (running statistics, power iterations), and draws the random numbers that the rank draws.
    """

    def __init__(self, blueprint: Blueprint, device: torch.device, loss_at: str | None, *, together: bool) -> None:
        base = blueprint.build_base()
        _load(base, blueprint.source, device)
        self.model = blueprint.adapted(base).to(device)
        self.optimizer = make_optimizer(self.model)
        self._device = device
        self._loss_at = loss_at
        self._together = together
        self._buffers: dict[int, rng.Buffers] = {}
        self._dtype = blueprint.setting.policy.precision.param_dtype
        self._computing = self.model
        if self._dtype is not None:
            self._computing = copy.deepcopy(self.model)
        self._loaded = rng.take_buffers(self._computing)

    def mean_loss(self, batches: Mapping[int, Batch], step: int) -> float:
        """Return the mean loss of these ranks' batches, and give every parameter its mean gradient over them."""
        self._refresh()
        found = []
        sums: dict[str, torch.Tensor] = {}
        for index, batch in batches.items():
            self._computing.zero_grad(set_to_none=True)
            rng.put_buffers(self._computing, self._buffers.get(index, self._loaded))
            rng.seed(index, step)
            loss = loss_of(call(self._computing, on_device(batch, self._device, self._dtype)), self._loss_at)
            rng.seed(index, step)
            loss.backward()  # type: ignore[no-untyped-call]
            self._buffers[index] = rng.take_buffers(self._computing)
            found.append(float(loss.detach()))
            for name, parameter in self._computing.named_parameters():
                if parameter.grad is not None:
                    gradient = parameter.grad.float()
                    sums[name] = sums[name] + gradient if name in sums else gradient
        size = len(batches)
        if self._together:
            found = [value for values in gather(found) for value in values]
            size = len(found)
            self._add_up(sums)
        for name, parameter in self.model.named_parameters():
            parameter.grad = (sums[name] / size).to(parameter.dtype) if name in sums else None
        return sum(found) / size

    def _add_up(self, sums: dict[str, torch.Tensor]) -> None:
        """Add what all ranks have; one that lacks a gradient adds nothing to it."""
        wanted = {name for names in gather(list(sums)) for name in names}
        for name, parameter in self.model.named_parameters():
            if name in wanted:
                sums[name] = sums.get(name, torch.zeros_like(parameter, dtype=torch.float32))
                dist.all_reduce(sums[name])

    def gradient_norm(self, batch: Batch) -> float:
        """Return the norm of the gradients of the first step when every rank has this batch."""
        self.forget()
        self.mean_loss({0: batch}, 0)
        self.forget()
        return float(nn.utils.get_total_norm(self.gradients().values()))

    def needs_gradients(self, batch: Batch) -> bool:
        """Does forward fail where gradients are off? It takes some itself then."""
        try:
            with torch.no_grad():
                call(self._computing, on_device(batch, self._device, self._dtype))
        except RuntimeError:
            return True
        return False

    def forget(self) -> None:
        """Go back to the buffers that were loaded, for every rank."""
        self._buffers.clear()

    def _refresh(self) -> None:
        """Give the copy that computes the present parameters."""
        if self._computing is not self.model:
            for own, parameter in zip(self._computing.parameters(), self.model.parameters(), strict=True):
                own.data = parameter.detach().to(self._dtype if parameter.is_floating_point() else None)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradient of every parameter that has one."""
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def clip(self, max_norm: float) -> float:
        """Clip as the sharded model does; return the norm before."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        return float(nn.utils.clip_grad_norm_(parameters, max_norm))

    def step(self) -> None:
        """Take one step of the optimizer."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def failure_alone(recipe: Recipe, seed: int) -> UsageError | None:
    """Return what is wrong when one unsharded copy of a config's model fails, too: then FSDP2 has no part in it."""
    if not isinstance(recipe, ConfigRecipe):
        return None
    try:
        torch.manual_seed(seed)
        model = recipe.build()
        output = call(model, recipe.batch(model, seed))
        loss_of(output, find_loss(output)).backward()  # type: ignore[no-untyped-call]
    except UsageError as error:
        return error
    except Exception as error:  # noqa: BLE001 - whatever a model does
        text = str(error).strip().partition("\n")[0]
        return stopped(error, recipe.title, recipe.where) or UsageError(
            f"a {recipe.title} fails unsharded, without FSDP, on the batch that ckpt generates: "
            f"{type(error).__name__}: {text}",
            where=recipe.where,
            hint=FEEDS_ITSELF,
        )
    return None


def on_device(batch: Batch, device: torch.device, dtype: torch.dtype | None) -> Batch:
    """Return `batch` on `device`; floating-point tensors as FSDP casts the root's inputs."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

    moved: Batch = tree_map_only(torch.Tensor, move, batch)
    return moved


def _load(model: nn.Module, source: str, device: torch.device) -> None:
    """Read a whole checkpoint into an unsharded model, without talking to other ranks."""
    with open_path(source, as_part=True) as opened:
        state, report = read_state(model, opened, strict=False, device=device)
    computed, buffers, _ = complete(model, report, device=device, seed=SEED)
    assign(model, {**state, **computed}, report.tied)
    place(model, buffers, device)
