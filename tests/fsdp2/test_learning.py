"""Training that looks odd and is healthy: accumulation, several optimizers, unused parts, recomputation."""

from __future__ import annotations

import copy

import pytest
import torch
from fsdp2.breakages import Block, Headless, Net, shard, step, tokens, with_block
from fsdp2.ranks import run_ranks
from fsdp2.threads import Frozen
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Partial
from torch.optim.lr_scheduler import ConstantLR, LinearLR, ReduceLROnPlateau, SequentialLR
from torch.utils.checkpoint import checkpoint

from ckpt_tools.fsdp2 import accumulate, audit, materialise_buffers, watch


def _train(net, optimizers=None, run=step, scheduler=None):
    """Two steps, audited wherever it is possible; by default with AdamW for all that is trained."""
    found, optimizers = [], optimizers or [_adam(net.parameters())]
    with watch(net) as seen:
        for _ in range(2):
            run(net)
            found += audit(net, phase="backward", optimizer=optimizers, scheduler=scheduler)
            for optimizer in optimizers:
                optimizer.step()
            found += audit(net, phase="stepped", optimizer=optimizers, scheduler=scheduler)
            for optimizer in optimizers:
                optimizer.zero_grad()
    return [*found, *seen.findings]


def _adam(parameters, **options):
    return torch.optim.AdamW([parameter for parameter in parameters if parameter.requires_grad], **options)


def accumulated(mesh):
    net = shard(Net(), mesh)

    def run(net):
        found = []
        for number in range(3):
            with accumulate(net, number == 2):
                step(net)
                found += audit(net, phase="backward", optimizer=optimizer)
        assert found == []

    optimizer = _adam(net.parameters())
    return _train(net, [optimizer], run)


def settings_come_back_after_accumulation(mesh):
    net = shard(Net(), mesh)
    net.set_reshard_after_backward(False)
    net.set_requires_all_reduce(False)

    def settings():
        states = [module._get_fsdp_state() for module in net.modules() if isinstance(module, FSDPModule)]
        groups = [group for state in states for group in state._fsdp_param_groups]
        return [(g.reshard_after_backward, g.reduce_grads, g.all_reduce_grads) for g in groups]

    for number in range(2):
        with accumulate(net, number == 1, keep_unsharded=True):
            assert {each[0] for each in settings()} == {False}
            step(net)
        assert set(settings()) == {(False, True, False)}
    return []


def two_optimizers(mesh):
    net = shard(Net(), mesh)
    matrices = torch.optim.SGD([p for p in net.parameters() if p.ndim == 2], lr=0.1)
    return _train(net, [matrices, _adam(p for p in net.parameters() if p.ndim < 2)])


def optimizer_in_backward(mesh):
    net = shard(Net(), mesh)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in net.parameters()}

    def hook(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    with watch(net) as seen:
        step(net)
        return [*audit(net, phase="backward", optimizer=list(optimizers.values())), *seen.findings]


class Experts(Net):
    """The second expert never gets a token, the extra head no loss."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(8, 2)

    def forward(self, ids):
        h = self.layers[0](self.emb(ids))
        self.seen = self.extra(h)
        return self.head(h)


def unused_parts(mesh):
    return _train(shard(Experts(), mesh))


def target_network(mesh):
    """Trainable by name, in no optimizer, run without gradients: averaged from the other one."""

    class Pair(Net):
        def forward(self, ids):
            h = self.emb(ids)
            with torch.no_grad():
                target = self.layers[1](h)
            return self.head(self.layers[0](h) - target)

    net = shard(Pair(), mesh)
    optimizer = _adam([*net.emb.parameters(), *net.layers[0].parameters(), *net.head.parameters()])

    def run(net):
        step(net)
        with torch.no_grad():
            for average, parameter in zip(net.layers[1].parameters(), net.layers[0].parameters(), strict=True):
                average.lerp_(parameter, 0.1)

    return _train(net, [optimizer], run)


class Recomputed(Net):
    def enter(self, index, layer, h):
        return checkpoint(layer, h, use_reentrant=True)


def reentrant_from_trained_embeddings(mesh):
    return _train(shard(Recomputed(), mesh))


def reentrant_with_inputs_that_require_gradients(mesh):
    net = Frozen()
    net.emb.register_forward_hook(lambda module, args, output: output.requires_grad_())
    return _train(shard(net, mesh))


def evaluated_in_between(mesh):
    def run(net):
        step(net)
        with torch.no_grad():
            net(tokens())
            net.reshard()
            for layer in net.layers:
                layer.reshard()

    return _train(shard(Net(), mesh, reshard_after_forward=False), run=run)


def thawed_later(mesh):
    net = Net()
    net.layers[0].requires_grad_(False)
    shard(net, mesh)
    step(net)
    net.layers[0].requires_grad_(True)
    net.zero_grad()
    return _train(net)


def schedulers_of_all_kinds(mesh):
    net = shard(Net(), mesh)
    optimizer = _adam(net.parameters(), lr=0.1)
    schedulers = [
        ReduceLROnPlateau(optimizer),
        SequentialLR(optimizer, [LinearLR(optimizer), ConstantLR(optimizer)], [1]),
    ]
    return _train(net, [optimizer], scheduler=schedulers)


def first_step_of_a_warm_up(mesh):
    net = shard(Net(), mesh)
    optimizer = _adam(net.parameters(), lr=1e-3)
    return _train(net, [optimizer], scheduler=LinearLR(optimizer, start_factor=1e-9))


def bf16_that_moves(mesh):
    net = shard(Net(), mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return _train(net, [_adam(net.parameters(), lr=1e-6)])


def writes_in_forward_that_are_nobodys_weights(mesh):
    class Writing(Block):
        def __init__(self, width):
            super().__init__(width)
            self.register_buffer("mask", torch.ones(width, width))

        def forward(self, x):
            self.mask.fill_(1.0)
            copy = self.up.weight.detach().clone().mul_(2.0)
            return super().forward(x) * self.mask[0] + copy.sum() * 0

    return _train(shard(with_block(Writing)(), mesh))


def initialised_by_its_own_recipe(mesh):
    class Tabled(Block):
        def __init__(self, width):
            super().__init__(width)
            self.register_buffer("table", torch.empty(width), persistent=False)

        def init_buffers(self):
            self.table.copy_(torch.arange(8))

    net = shard(with_block(Tabled)(), mesh)
    for layer in net.layers:
        layer.table = layer.table.to("meta")
    materialise_buffers(net, "cpu")
    return audit(net, phase="loaded")


def two_meshes_named_well(mesh):
    return _train(shard(Net(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))))


def all_reduce_left_to_the_last_micro_batch(mesh):
    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    net = shard(Net(), both)
    optimizer = _adam(net.parameters())

    def run(net):
        for is_last in (False, True):
            net.set_requires_all_reduce(is_last)
            step(net)
            assert audit(net, phase="backward", optimizer=optimizer) == []

    return _train(net, [optimizer], run)


def another_models_optimizer_stands_still(mesh):
    net, other = shard(Net(), mesh), shard(Net(), mesh).bfloat16()
    frozen = torch.optim.SGD(other.parameters(), lr=1e-30)
    with watch(net) as seen:
        step(other)
        frozen.step()
    return seen.findings


HEALTHY = (
    all_reduce_left_to_the_last_micro_batch, another_models_optimizer_stands_still, accumulated,
    settings_come_back_after_accumulation, two_optimizers, optimizer_in_backward, unused_parts, target_network,
    reentrant_from_trained_embeddings, reentrant_with_inputs_that_require_gradients, evaluated_in_between, thawed_later,
    schedulers_of_all_kinds, first_step_of_a_warm_up, bf16_that_moves, writes_in_forward_that_are_nobodys_weights,
    initialised_by_its_own_recipe, two_meshes_named_well,
)  # fmt: skip


def _said(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    said = {}
    for build in HEALTHY:
        torch.manual_seed(0)
        said[build.__name__] = build(mesh)
    return said


pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def said():
    return run_ranks(2, _said)


@pytest.mark.parametrize("build", HEALTHY, ids=lambda build: build.__name__)
def test_audit_odd_but_healthy_training_finds_nothing(said, build):
    for found in said:
        assert [(each.code, each.where, each.what) for each in found[build.__name__]] == []


def _fixed(rank, world_size):
    """How far gradients are from one process when a loss uses weights as the catalogue says, and as it warns of."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    batches = [torch.randint(0, 16, (2, 4), generator=torch.Generator().manual_seed(index)) for index in range(2)]
    off = {}
    for how in ("averaged", "own", "penalty"):
        torch.manual_seed(0)
        whole = Headless()
        model = shard(copy.deepcopy(whole), mesh, reshard_after_forward=True)

        def loss(net, batch, head, penalty, how=how):
            value = nn.functional.linear(net(batch), head(net)).square().mean()
            return value + penalty(sum(p.square().sum() for p in net.parameters())) if how == "penalty" else value

        def gathered(net, how=how):
            return net.head.weight.full_tensor(grad_placements=None if how == "own" else [Partial("avg")])

        for batch in batches:
            (loss(whole, batch, lambda net: net.head.weight, lambda value: value) / 2).backward()
        loss(model, batches[rank], gathered, lambda value: value.full_tensor()).backward()
        pairs = zip(whole.parameters(), model.parameters(), strict=True)
        off[how] = max(float((a.grad - b.grad.full_tensor()).norm() / a.grad.norm()) for a, b in pairs)
    return off


def test_catalogue_advice_on_weights_in_a_loss_gives_the_gradients_of_one_process():
    for off in run_ranks(2, _fixed):
        assert off["averaged"] < 1e-6
        assert off["penalty"] < 1e-6
        assert off["own"] > 0.1  # what the catalogue warns of
