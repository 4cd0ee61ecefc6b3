"""Pieces for authors of trainers, each against one process that has everything: losses, gradients, norm, reload."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
import torch.distributed as dist
from fsdp2.breakages import Net
from fsdp2.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt_tools.checkpoint.layout import Shard as Cut
from ckpt_tools.errors import UsageError
from ckpt_tools.fsdp2 import (
    async_save_checkpoint,
    audit,
    clip_grad_norm,
    load_checkpoint,
    load_optimizer,
    save_checkpoint,
    shard_model,
    step_on_whole,
    switch_optimizer,
    update_average,
)

pytestmark = pytest.mark.full

RANKS = 4
STEPS = 3


def batch(step, rank):
    return torch.randint(0, 16, (2, 4), generator=torch.Generator().manual_seed(10 * step + rank))


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def alone(net, make=adam, advance=None):
    """Losses by step and rank, norms, first gradients and last weights of one process."""
    torch.manual_seed(0)
    model = net()
    optimizer = make(model)
    rows, norms, gradients = [], [], {}
    for step in range(STEPS):
        losses = [model(batch(step, rank)).square().mean() for rank in range(RANKS)]
        (sum(losses) / RANKS).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
        optimizer.step()
        optimizer.zero_grad()
        rows.append([float(loss.detach()) for loss in losses])
        if advance is not None:
            advance(model)
    return rows, norms, gradients, {name: p.detach().clone() for name, p in model.named_parameters()}


def trained(model, plan, optimizer, step=None, average=lambda: None, advance=None, enter=lambda x: x):
    """The same of this rank, and what audits say."""
    losses, norms, gradients, said = [], [], {}, [found.code for found in audit(model, phase="sharded", plan=plan)]
    for number in range(STEPS):
        loss = model(enter(batch(number, dist.get_rank()))).square().mean()
        (loss.full_tensor() if isinstance(loss, DTensor) else loss).backward()
        average()
        norms.append(float(clip_grad_norm(model, 1e9)))
        gradients = gradients or {name: whole(p.grad) for name, p in model.named_parameters() if p.requires_grad}
        said += [found.code for found in audit(model, phase="backward", plan=plan, optimizer=optimizer)]
        (step or type(optimizer).step)(optimizer)
        optimizer.zero_grad()
        losses.append(float(whole(loss)))
        if advance is not None:
            advance(model)
    return losses, norms, gradients, {name: whole(p) for name, p in model.named_parameters()}, said


def build(net=Net):
    torch.manual_seed(0)
    return net()


def flat_mesh():
    return init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp_shard",))


def _reloaded(make, model, optimizer, path):
    """Is what a second model has after a load, and its optimizer's state, bitwise the first one's?"""
    save_checkpoint(model, optimizer, path)
    other, second = make()
    load_checkpoint(other, path)
    second = adam(other)
    load_optimizer(other, second, path)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(
        torch.equal(whole(a), whole(b))
        and torch.equal(whole(optimizer.state[a]["exp_avg"]), whole(second.state[b]["exp_avg"]))
        for a, b in pairs
    )


def cut_along_the_second_dim(path):
    def make():
        model = build()
        plan = shard_model(model, flat_mesh(), shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)
        assert plan.placements["head.weight"] == {"dp_shard": Cut(1)}
        return model, plan

    model, plan = make()
    assert model.layers[0].up.weight.to_local().shape == (8, 2)
    optimizer = adam(model)
    result = trained(model, plan, optimizer)
    assert _reloaded(make, model, optimizer, path)
    return result


def ignored_and_averaged_by_hand(path):
    model = build()
    plan = shard_model(model, flat_mesh(), ignored_params={model.head.weight})
    assert plan.ignored == ("head.weight",)
    assert not isinstance(model.head.weight, DTensor)

    def average():
        dist.all_reduce(model.head.weight.grad)
        model.head.weight.grad /= RANKS

    return trained(model, plan, adam(model), average=average)


class Experts(nn.Module):
    """Every expert sees all tokens; along `ep` every rank has some of the experts."""

    ep = None

    def __init__(self, width=8):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, width, width) / 4)

    def forward(self, x, gates):
        if self.ep is None:
            return torch.einsum("bsd,edf,bse->bsf", x, self.weight, gates)
        group, rank, size = self.ep.get_group(), self.ep.get_local_rank(), self.ep.size()
        own = self.weight.to_local()
        everyones = ([t if other == rank else torch.zeros_like(t) for other in range(size)] for t in (x, gates))
        tokens, shares = (all_reduce(torch.cat(parts), group=group) for parts in everyones)
        mine = shares[..., rank * len(own) : (rank + 1) * len(own)]
        out = all_reduce(torch.einsum("bsd,edf,bse->bsf", tokens, own, mine), group=group)
        return out.chunk(size)[rank]


class MoeBlock(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = Experts(width)

    def forward(self, x):
        return x + self.experts(x, self.router(x).softmax(-1))


class Moe(Net):
    block = MoeBlock


def experts_along_their_own_axis(path):
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rest", "ep"))
    dense = both["rest", "ep"]._flatten("dp_shard")

    def make():
        model = build(Moe)
        for layer in model.layers:
            experts = layer.experts
            experts.ep = both["ep"]
            experts.weight = nn.Parameter(distribute_tensor(experts.weight.detach(), both["ep"], [Shard(0)]))
        plan = shard_model(
            model,
            dense,
            meshes={"layers.*.experts": both["rest"]},
            shard_placement_fn=lambda p: Shard(1) if p.ndim == 3 else None,
        )
        assert plan.placements["layers.0.experts.weight"] == {"ep": Cut(0), "rest": Cut(1)}
        return model, plan

    model, plan = make()
    assert model.layers[0].experts.weight.to_local().shape == (2, 4, 8)
    optimizer = adam(model)
    result = trained(model, plan, optimizer)
    assert _reloaded(make, model, optimizer, path)
    return result


def whole_mesh(path):
    from torch.distributed.fsdp import DataParallelMeshDims

    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("data", "tp"))
    model = build()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(
                name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()] * 2))
            )
    plan = shard_model(model, mesh, dp_mesh_dims=DataParallelMeshDims(shard="data"))
    assert plan.placements["head.weight"] == {"data": Cut(0)}

    def enter(ids):
        return DTensor.from_local(ids, mesh, [Replicate()] * 2, run_check=False)

    return trained(model, plan, adam(model), enter=enter)


def optimizer_from_before(path):
    model = build()
    groups = [
        {"params": [model.head.weight], "lr": 1e-2},
        {"params": [p for n, p in model.named_parameters() if n != "head.weight"]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=False)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with switch_optimizer(model, optimizer):
        plan = shard_model(model, flat_mesh())
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 9]
    assert audit(model, phase="loaded", plan=plan, optimizer=optimizer, scheduler=scheduler) == []
    return trained(model, plan, optimizer)


def optimizer_with_state_from_before(path):
    """Two of the three steps are done by the optimizer before, with all batches; the last one after."""
    model = build()
    optimizer = adam(model)
    rows = []
    for number in range(STEPS - 1):
        losses = [model(batch(number, rank)).square().mean() for rank in range(RANKS)]
        (sum(losses) / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
        rows.append(float(losses[dist.get_rank()].detach()))
    with switch_optimizer(model, optimizer):
        shard_model(model, flat_mesh())
    loss = model(batch(STEPS - 1, dist.get_rank())).square().mean()
    loss.backward()
    optimizer.step()
    assert len(optimizer.state) == 10
    return [*rows, float(loss.detach())], None, None, {name: whole(p) for name, p in model.named_parameters()}, []


def muon(model):
    return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-2)


def matrices_stepped_whole(path):
    model = build(Matrices)
    plan = shard_model(model, flat_mesh())
    optimizer = muon(model)
    losses, norms, _, weights, said = trained(model, plan, optimizer, step=step_on_whole)
    assert all(isinstance(state["momentum_buffer"], DTensor) for state in optimizer.state.values())
    save_checkpoint(model, optimizer, path)
    again = muon(model)
    load_optimizer(model, again, path)
    assert all(
        torch.equal(whole(again.state[p]["momentum_buffer"]), whole(s["momentum_buffer"]))
        for p, s in optimizer.state.items()
    )
    return losses, norms, None, weights, said


def average_of_weights(path):
    model, average = build(), build().requires_grad_(False)
    plan = shard_model(model, flat_mesh())
    shard_model(average, flat_mesh())
    result = trained(model, plan, adam(model), advance=lambda model: update_average(average, model, 0.9))
    save_checkpoint(model, None, path, state={"ema": average})
    copied = build().requires_grad_(False)
    shard_model(copied, flat_mesh())
    load_checkpoint(model, path, state={"ema": copied})
    assert all(torch.equal(whole(a), whole(b)) for a, b in zip(average.parameters(), copied.parameters(), strict=True))
    other = build()
    shard_model(other, flat_mesh(), shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)
    with pytest.raises(UsageError, match="differ in shape or sharding"):
        update_average(other, model, 0.9)
    losses, norms, gradients, _, said = result
    return losses, norms, gradients, {name: whole(p) for name, p in average.named_parameters()}, said


def saves_at_once(path):
    """Three saves run beside the training, and what they hold is of the moment when they were asked for."""
    model = build()
    plan = shard_model(model, flat_mesh())
    optimizer = adam(model)
    saves, kept = [], []

    def advance(model):
        saves.append(async_save_checkpoint(model, optimizer, f"{path}-{len(saves)}", at_once=3))
        kept.append({name: whole(p) for name, p in model.named_parameters()})

    result = trained(model, plan, optimizer, advance=advance)
    assert len({id(save) for save in saves}) == len({save.slot for save in saves}) == STEPS
    for number, save in enumerate(saves):
        save.result()
        load_checkpoint(model, f"{path}-{number}")
        assert all(torch.equal(whole(p), kept[number][name]) for name, p in model.named_parameters())
    save_checkpoint(model, None, f"{path}-last")
    return result


CASES = (
    cut_along_the_second_dim, ignored_and_averaged_by_hand, experts_along_their_own_axis, whole_mesh,
    optimizer_from_before, optimizer_with_state_from_before, matrices_stepped_whole, average_of_weights, saves_at_once,
)  # fmt: skip


def run(rank, world_size, path):
    return {case.__name__: case(path / case.__name__) for case in CASES}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(RANKS, run, tmp_path_factory.mktemp("pieces"), timeout=100)


class Matrices(Net):
    """Only matrices are trained."""

    def __init__(self):
        super().__init__()
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.ndim == 2)


def _expected(name):
    if name == "experts_along_their_own_axis":
        return alone(Moe)
    if name == "matrices_stepped_whole":
        return alone(Matrices, muon)
    if name != "average_of_weights":
        return alone(Net)
    torch.manual_seed(0)
    average = torch.optim.swa_utils.AveragedModel(Net(), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    average.update_parameters(copy.deepcopy(average.module))  # the first update copies
    rows, norms, gradients, _ = alone(Net, advance=average.update_parameters)
    kept = {name: p.detach().clone() for name, p in average.module.named_parameters()}
    return rows, norms, gradients, kept


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_piece_equals_one_process(ranks, case):
    rows, norms, gradients, weights = _expected(case.__name__)
    for rank, results in enumerate(ranks):
        losses, own_norms, own_gradients, own_weights, said = results[case.__name__]
        assert said == []
        assert losses == pytest.approx([row[rank] for row in rows], rel=1e-5)
        assert own_norms is None or own_norms == pytest.approx(norms, rel=1e-5)
        for name, gradient in (own_gradients or {}).items():
            assert (gradient - gradients[name]).norm() <= 1e-5 * gradients[name].norm(), name
        for name, weight in own_weights.items():
            assert (weight - weights[name]).norm() <= 1e-4 * weights[name].norm(), name


def test_sharding_of_a_config_is_found_where_the_pieces_are():
    import ckpt_tools.fsdp2
    from ckpt_tools.preflight.policy import read_sharding

    assert ckpt_tools.fsdp2.read_sharding is read_sharding
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ckpt_tools.fsdp2.nothing  # noqa: B018


def test_pieces_that_exclude_each_other_are_refused():
    from ckpt_tools.fsdp2 import Policy

    for options in (
        {"policy": Policy(strategy="no_shard"), "shard_placement_fn": lambda p: None},
        {"dp_mesh_dims": object(), "meshes": {"layers.*": None}},
    ):
        with pytest.raises(UsageError, match="excludes"):
            shard_model(Net(), None, **options)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
def test_float8_linears_equal_one_process():
    for off, said in run_ranks(2, _float8):
        assert off == 0.0
        assert said == []


def _float8(rank, world_size):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def make():
        torch.manual_seed(0)
        config = Float8LinearConfig(emulate=True)  # no card
        return convert_to_float8_training(Net(width=16), config=config, module_filter_fn=lambda m, fqn: "layers" in fqn)

    one, model = make(), make()
    plan = shard_model(model, init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",)))
    for net in (one, model):
        net(torch.arange(16).reshape(2, 8)).square().mean().backward()
    pairs = zip(one.parameters(), model.parameters(), strict=True)
    off = max(float((a.grad - whole(b.grad)).norm()) for a, b in pairs)
    return off, [found.code for found in audit(model, phase="backward", plan=plan)]


def test_switch_refuses_an_optimizer_of_another_model():
    with pytest.raises(UsageError, match="does not belong to the model"), switch_optimizer(Net(), adam(Net())):
        pass
