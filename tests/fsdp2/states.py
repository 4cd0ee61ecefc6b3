"""Loads, optimizers and casts that break sharded models, each with the fix that `diagnose` names. As in `breakages`.

A function that takes `fixed` is called twice: broken, and with the fix, after which nothing may be said.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp2 import breakages, models
from fsdp2.breakages import Net, breaks, full_state, shard, silently, step, tokens
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

from ckpt_tools.fsdp2 import (
    RngState,
    add_lora,
    audit,
    load_base,
    load_checkpoint,
    load_optimizer,
    parameter_groups,
    save_checkpoint,
    shard_model,
)

_SAVED = set()


def saved(state, name):
    """Save it with DCP where every rank finds it, and return where."""
    path = os.path.join(breakages.PLACE, name)
    if path not in _SAVED:
        _SAVED.add(path)
        dcp.save(state, checkpoint_id=path)
    return path


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def load_state(model, optimizer, path, fixed):
    """Load by ckpt, or as DCP's documentation does."""
    if fixed:
        return load_optimizer(model, optimizer, path)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    return dcp.load(state, checkpoint_id=path)


def trained(model, optimizer):
    step(model)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


# Names in dcp.load.


def _loads(mesh, path, keys, fixed, net=Net):
    """Load into what `keys` makes of the state, or as ckpt does."""
    model = shard(net(), mesh)

    def run(model):
        load_checkpoint(model, path) if fixed else dcp.load(keys(model.state_dict()), checkpoint_id=path)
        step(model)

    return model, run


_LOADS = "load_checkpoint(model, '"


@breaks("other-names", "emb.weight", "dcp.load(", fix=_LOADS, thread="JinjieNi/dlms-are-super-data-learners#4")
def state_without_its_key(mesh, fixed=False):
    path = saved({"model": shard(Net(), mesh).state_dict()}, "nested")
    return _loads(mesh, path, lambda state: state, fixed)


@breaks("other-names", "model.emb.weight", "dcp.load(", fix=_LOADS)
def state_under_a_key_of_its_own(mesh, fixed=False):
    path = saved(shard(Net(), mesh).state_dict(), "bare")
    return _loads(mesh, path, lambda state: {"model": state}, fixed)


@breaks("wrapped-names", "model.emb.weight", "dcp.load(", fix=_LOADS)
def saved_from_a_compiled_model(mesh, fixed=False):
    state = {f"_orig_mod.{name}": tensor for name, tensor in shard(Net(), mesh).state_dict().items()}
    return _loads(mesh, saved({"model": state}, "compiled"), lambda state: {"model": state}, fixed)


@breaks("wrapped-names", "model.emb.weight", "dcp.load(", fix=_LOADS)
def saved_from_ddp(mesh, fixed=False):
    state = {f"module.{name}": tensor for name, tensor in full_state(Net()).items()}
    return _loads(mesh, saved({"model": state}, "ddp"), lambda state: {"model": state}, fixed)


@breaks("other-names", "model.layers.0.mlp.experts.", "dcp.load(", fix=_LOADS)
def names_of_the_hub(mesh, fixed=False):
    model = models.build("qwen3-moe", "cpu")
    if dist.get_rank() == 0:
        model.save_pretrained(os.path.join(breakages.PLACE, "hub"))
    dist.barrier()
    from safetensors.torch import load_file

    path = saved(load_file(os.path.join(breakages.PLACE, "hub", "model.safetensors")), "hub-dcp")
    shard_model(model, mesh)

    def run(model):
        load_checkpoint(model, path) if fixed else dcp.load(model.state_dict(), checkpoint_id=path)
        model(**models.batch_of("qwen3-moe", 0, dist.get_rank())).loss.backward()

    return model, run


class Headed(Net):
    def __init__(self):
        super().__init__()
        self.value = nn.Linear(16, 1)

    def forward(self, ids):
        return self.value(super().forward(ids))


@breaks("missing-keys", "model.value.weight", "dcp.load(", fix="strict=False")
def head_that_is_new(mesh, fixed=False):
    path = saved({"model": shard(Net(), mesh).state_dict()}, "nested")
    model = shard(Headed(), mesh)

    def run(model):
        if fixed:
            assert load_checkpoint(model, path, strict=False).missing == ("value.weight", "value.bias")
        else:
            dcp.load({"model": model.state_dict()}, checkpoint_id=path)
        step(model)

    return model, run


@breaks(
    "other-shape", "model.emb.weight", "dcp.load(", fix="with the sizes of the checkpoint", thread="RLinf/RLinf#655"
)
def narrower_model(mesh, fixed=False):
    path = saved({"model": shard(Net(), mesh).state_dict()}, "nested")
    net = Net if fixed else lambda: Net(width=4)
    model = shard(net(), mesh)
    return model, lambda model: dcp.load({"model": model.state_dict()}, checkpoint_id=path)


@breaks("no-metadata", "", "dcp.load(", fix="load_checkpoint(model, PATH)", thread="huggingface/accelerate#3010")
def directory_of_the_hub(mesh, fixed=False):
    from safetensors.torch import save_file

    path = os.path.join(breakages.PLACE, "of-the-hub")
    if dist.get_rank() == 0 and not os.path.exists(path):
        os.mkdir(path)
        save_file(full_state(Net()), os.path.join(path, "model.safetensors"))
    dist.barrier()
    return _loads(mesh, path, lambda state: state, fixed)


@breaks("per-rank-state", "rng.", "dcp.load(", fix="RngState", thread="pytorch/torchtitan#811")
def generators_of_fewer_ranks(mesh, fixed=False):
    path = os.path.join(breakages.PLACE, "one-rank")
    states = {"rng": {"7": {"torch": torch.get_rng_state()}}}
    saved({"model": shard(Net(), mesh).state_dict(), **states}, "one-rank")
    model = shard(Net(), mesh)

    def run(model):
        if fixed:
            load_checkpoint(model, other, state={"rng": RngState()})
        else:
            state = {"model": model.state_dict(), "rng": {str(dist.get_rank()): {"torch": torch.get_rng_state()}}}
            dcp.load(state, checkpoint_id=path)

    other = os.path.join(breakages.PLACE, "with-rng")
    save_checkpoint(model, None, other, state={"rng": RngState()}, overwrite=True)
    return model, run


# Names in load_state_dict and set_model_state_dict.


@breaks("other-names", "emb.weight", "model.load_state_dict(", fix="load_checkpoint(model, PATH)")
def prefix_in_load_state_dict(mesh, fixed=False):
    path = saved({"model": shard(Net(), mesh).state_dict()}, "nested")

    def run(model):
        given = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        load_checkpoint(model, path) if fixed else model.load_state_dict(given)
        step(model)

    return shard(Net(), mesh), run


@breaks("other-names", "emb.weight", "set_model_state_dict(", fix="load_checkpoint(model, PATH)")
def prefix_in_set_model_state_dict(mesh, fixed=False):
    path = saved({"model": shard(Net(), mesh).state_dict()}, "nested")

    def run(model):
        given = {f"model.{name}": tensor for name, tensor in get_model_state_dict(model).items()}
        load_checkpoint(model, path) if fixed else set_model_state_dict(model, given)
        step(model)

    return shard(Net(), mesh), run


@breaks("other-shape", "emb.weight", "model.load_state_dict(", fix="with the sizes of the checkpoint")
def larger_vocabulary(mesh, fixed=False):
    given = shard(Net() if fixed else Net(width=4), mesh).state_dict()
    return shard(Net(), mesh), lambda model: model.load_state_dict(given)


@breaks("missing-keys", "head.weight", "model.load_state_dict(", fix="strict=False")
def state_without_a_head(mesh, fixed=False):
    def run(model):
        given = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
        model.load_state_dict(given, strict=not fixed)
        step(model)

    return shard(Net(), mesh), run


@breaks("unexpected-keys", "extra", "model.load_state_dict(", fix="strict=False")
def state_with_more_than_the_model(mesh, fixed=False):
    def run(model):
        model.load_state_dict({**model.state_dict(), "extra": torch.ones(2)}, strict=not fixed)

    return shard(Net(), mesh), run


@breaks("missing-keys", "step", "dcp.load(")
def number_that_was_not_saved(mesh):
    path = saved({"model": shard(Net(), mesh).state_dict()}, "nested")
    return shard(Net(), mesh), lambda model: dcp.load({"model": model.state_dict(), "step": 0}, checkpoint_id=path)


@breaks("other-names", "model.base_model.model.emb.weight", "dcp.load(", fix="load_base(model, '")
def base_into_a_model_with_adapters(mesh, fixed=False):
    path = saved({"model": shard(Net(), mesh).state_dict()}, "nested")
    model = add_lora(Net(), {"peft_type": "LORA", "r": 2, "target_modules": ["up"]})
    shard_model(model, mesh)

    def run(model):
        load_base(model, path) if fixed else dcp.load({"model": model.state_dict()}, checkpoint_id=path)
        step(model)

    return model, run


# Optimizers.


@breaks("optimizer-state", "optimizer.state.emb.weight", "dcp.load(", fix="start with a new optimizer")
def checkpoint_without_an_optimizer(mesh, fixed=False):
    path = saved({"model": shard(Net(), mesh).state_dict()}, "nested")

    def run(model):
        optimizer = adam(model)
        if fixed:
            load_checkpoint(model, path)
            optimizer = adam(model)
        else:
            state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.load(state, checkpoint_id=path)
        trained(model, optimizer)

    return shard(Net(), mesh), run


@breaks("optimizer-state", "optimizer.state.emb.weight.", "dcp.load(", fix="create the optimizer as it was")
def checkpoint_of_another_optimizer(mesh, fixed=False):
    model = shard(Net(), mesh)
    optimizer = trained(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    path = saved(state, "sgd")

    def run(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9) if fixed else adam(model)
        load_state(model, optimizer, path, fixed)
        trained(model, optimizer)

    return model, run


@breaks("optimizer-state", "optimizer.state.emb.weight.", "dcp.load(", fix="load_optimizer(model, optimizer, '")
def optimizer_under_another_key(mesh, fixed=False):
    model = shard(Net(), mesh)
    optimizer = trained(model, adam(model))
    path = saved({"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}, "optim")

    def run(model):
        load_state(model, optimizer, path, fixed)
        trained(model, optimizer)

    return model, run


@breaks("optimizer-groups", "", "load_state_dict(", fix="load_optimizer(model, optimizer, PATH)")
def other_parameter_groups(mesh, fixed=False):
    model = shard(Net(), mesh)
    optimizer = trained(model, adam(model))
    path = saved({"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}, "adam")

    def run(model):
        other = torch.optim.AdamW(parameter_groups(model, 0.1))
        load_optimizer(model, other, path) if fixed else other.load_state_dict(optimizer.state_dict())
        trained(model, other)

    return model, run


def _plain_state():
    net = Net()
    return trained(net, adam(net)), net


@breaks(
    "plain-optimizer-state",
    "emb.weight",
    "optimizer.step()",
    fix="full_state_dict=True",
    thread="pytorch/torchtitan#765",
)
def state_of_an_unsharded_optimizer(mesh, fixed=False):
    def run(model):
        plain, net = _plain_state()
        optimizer = adam(model)
        if fixed:
            options = StateDictOptions(full_state_dict=True)
            set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(net, plain), options=options)
        else:
            optimizer.load_state_dict(plain.state_dict())
        trained(model, optimizer)

    return shard(Net(), mesh), run


@breaks("plain-gradient", "emb.weight", "optimizer.step()", fix="distribute_tensor(gradient, ")
def gradients_set_by_hand(mesh, fixed=False):
    def run(model):
        optimizer = adam(model)
        for parameter in model.parameters():
            gradient = torch.ones(parameter.shape)
            places = parameter.device_mesh, parameter.placements
            parameter.grad = distribute_tensor(gradient, *places) if fixed else gradient
        optimizer.step()

    return shard(Net(), mesh), run


@breaks("plain-gradient", "", "parameter.grad = ", fix="distribute_tensor(gradient, ")
def local_gradients_set_by_hand(mesh, fixed=False):
    def run(model):
        for parameter in model.parameters():
            local = torch.ones_like(parameter.to_local())
            places = parameter.device_mesh, parameter.placements
            parameter.grad = distribute_tensor(torch.ones(parameter.shape), *places) if fixed else local
        adam(model).step()

    return shard(Net(), mesh), run


# Casts, moves and strides.


@breaks("load-dtype", "emb.weight", "", fix="MixedPrecisionPolicy(param_dtype=", thread="pytorch/pytorch#137522")
def cast_after_a_step(mesh, fixed=False):
    def run(model):
        step(model)
        if not fixed:
            model.to(torch.bfloat16)
        step(model)

    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if fixed else {}
    return shard(Net(), mesh, **options), run


@breaks("meta-param", "emb.weight", "", fix="load it again")
def moved_to_meta(mesh, fixed=False):
    path = saved({"model": shard(Net(), mesh).state_dict()}, "nested")

    def run(model):
        model.to("meta")
        if fixed:
            load_checkpoint(model, path)
        step(model)

    return shard(Net(), mesh), run


@breaks("non-contiguous", "", "fully_shard(model", fix="contiguous()", thread="pytorch/torchtitan#1180")
def transposed_parameter(mesh, fixed=False):
    net = Net()
    net.head.weight = nn.Parameter(torch.ones(8, 16).t())
    if fixed:
        net.head.weight = nn.Parameter(net.head.weight.detach().contiguous())

    def run(model):
        fully_shard(model, mesh=mesh)
        step(model)

    return net, run


@breaks("dtensor-in-loss", "", "loss.backward()", fix="full_tensor()")
def penalty_in_one_expression(mesh, fixed=False):
    def run(model):
        if fixed:
            penalty = sum(p.square().sum() for p in model.parameters()).full_tensor()
            loss = model(tokens()).square().mean() + 0.01 * penalty
        else:
            loss = model(tokens()).square().mean() + 0.01 * sum(p.square().sum() for p in model.parameters())
        loss.backward()

    return shard(Net(), mesh), run


class Energy(Net):
    """Forces are gradients of the energy, and are trained on."""

    def forward(self, ids):
        h = x = self.emb(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        energy = self.head(x).square().sum()
        (force,) = torch.autograd.grad(energy, h, create_graph=True)
        return energy + force.square().sum()


@breaks("grad-in-forward", "(root)", "", fix="one unit")
def forces_across_units(mesh, fixed=False):
    return fully_shard(Energy(), mesh=mesh) if fixed else shard(Energy(), mesh), step


@silently("lost-write", "emb.weight")
def embedding_with_a_largest_norm(mesh, fixed=False):
    net = Net()
    net.emb = nn.Embedding(16, 8, max_norm=None if fixed else 0.5)
    shard(net, mesh)
    if fixed:
        trained(net, adam(net))
        with torch.no_grad():
            net.emb.weight.mul_((0.5 / net.emb.weight.norm(dim=1, keepdim=True)).clamp(max=1.0))
        assert net.emb.weight.full_tensor().norm(dim=1).max() < 0.51
    return audit(net, phase="sharded")
