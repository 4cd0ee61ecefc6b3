"""Models with nothing wrong, in every configuration that people use: audits, watches and comparisons say nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from fsdp2 import models
from fsdp2.breakages import Block, Net, full_state, shard, tokens, with_block
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckpt_tools.fsdp2.audit import audit
from ckpt_tools.fsdp2.compare_ranks import compare_ranks
from ckpt_tools.fsdp2.load import load_checkpoint
from ckpt_tools.fsdp2.train import clip_grad_norm
from ckpt_tools.fsdp2.watch import watch
from ckpt_tools.fsdp2.wrap import shard_model


@dataclass
class Healthy:
    """A sharded and loaded model, and how to get a loss from it."""

    model: nn.Module
    loss: object
    plan: object = None
    num_forwards: int = 1


def _mean(model):
    return model(tokens()).float().square().mean()


def _mesh(*shape):
    names = {(4,): ("dp_shard",), (2, 2): ("dp_replicate", "dp_shard")}[shape]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def full_shard(path):
    return Healthy(shard(Net(), _mesh(4)), _mean)


def shard_grad_op(path):
    return Healthy(shard(Net(), _mesh(4), reshard_after_forward=False), _mean)


def reshard_to_two(path):
    return Healthy(shard(Net(), _mesh(4), reshard_after_forward=2), _mean)


def hybrid_shard(path):
    return Healthy(shard(Net(), _mesh(2, 2)), _mean)


def no_shard(path):
    net = Net()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_replicate",))
    for layer in net.layers:
        replicate(layer, mesh=mesh)
    return Healthy(replicate(net, mesh=mesh), _mean)


def tensor_parallel(path):
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    net = Net()
    for layer in net.layers:
        parallelize_module(layer, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return Healthy(shard(net, both["dp_shard"]), _mean)


def mixed_precision_and_offload(path):
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    offload = CPUOffloadPolicy(pin_memory=False)
    return Healthy(shard(Net(), _mesh(4), mp_policy=precision, offload_policy=offload), _mean)


def frozen_base_and_checkpointing(path):
    net = Net()
    net.requires_grad_(False)
    for layer in net.layers:
        layer.up.weight.requires_grad_(True)
        checkpoint(layer)
    return Healthy(shard(net, _mesh(4)), _mean)


class Registered(Block):
    def forward_train(self, x):
        return super().forward(x)


class Bagel(Net):
    """BAGEL's layers as they should be: callers use the registered method, and forward does not."""

    block = Registered

    def enter(self, index, layer, h):
        return layer.forward_train(h)

    def generate(self, ids):
        return self(ids)


def registered_methods(path):
    net = shard(Bagel(), _mesh(4))
    for layer in net.layers:
        register_fsdp_forward_method(layer, "forward_train")
    register_fsdp_forward_method(net, "generate")
    return Healthy(net, lambda model: model.generate(tokens()).square().mean())


@dataclass
class Output:
    hidden: torch.Tensor
    extra: dict


class Grouped(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.head.weight = self.emb.weight

    def forward(self, ids):
        h = self.body(ids)
        return Output(hidden=self.head(self.norm(h)), extra={"last": h})


def grouped_and_tied(path):
    net = Grouped()
    mesh = _mesh(4)
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard([net.emb, net.norm, net.head], mesh=mesh)
    return Healthy(fully_shard(net, mesh=mesh), lambda model: model(tokens()).hidden.square().mean())


def two_forwards(path):
    return Healthy(shard(Net(), _mesh(4)), lambda model: _mean(model) + _mean(model), num_forwards=2)


def buffers_and_views(path):
    class Viewing(Block):
        def __init__(self, width):
            super().__init__(width)
            self.register_buffer("mask", torch.full((4,), -torch.inf), persistent=False)

        def forward(self, x):
            return super().forward(x).view(2, 4, 8)

    return Healthy(shard(with_block(Viewing)(), _mesh(4)), _mean)


def reloaded(path):
    net = shard(Net(), _mesh(4))
    state = full_state(net)
    net.load_state_dict({fqn: nn.Parameter(t) for fqn, t in state.items()}, assign=True)
    return Healthy(net, _mean)


def _transformer(kind, path):
    model = models.build(kind)
    plan = shard_model(model, init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",)))
    load_checkpoint(model, path / kind)
    return Healthy(model, lambda m: m(**models.batch_of(kind, 0, dist.get_rank())).loss, plan)


def llama_with_ties(path):
    return _transformer("llama-tied", path)


def bert(path):
    return _transformer("bert", path)


def mixture_of_experts(path):
    return _transformer("qwen3-moe", path)


PLAIN = (
    full_shard, shard_grad_op, reshard_to_two, hybrid_shard, no_shard, tensor_parallel, mixed_precision_and_offload,
    frozen_base_and_checkpointing, registered_methods, grouped_and_tied, two_forwards, buffers_and_views, reloaded,
)  # fmt: skip
"""For four ranks."""
TRANSFORMERS = (llama_with_ties, bert, mixture_of_experts)
"""For two: importing transformers on four takes as long as everything else."""
KINDS = ("llama-tied", "bert", "qwen3-moe")


def run_healthy(rank, world_size, path):
    """Two training steps of each: name → phase → findings."""
    said = {}
    for build in TRANSFORMERS if world_size == 2 else PLAIN:
        dist.barrier()
        torch.manual_seed(0)
        said[build.__name__] = _train(build(path))
    return said


def _train(healthy):
    model, plan = healthy.model, healthy.plan
    said = {"loaded": audit(model, phase="loaded", plan=plan), "ranks": compare_ranks(model)}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
    with watch(model) as seen:
        for step in range(2):
            loss = healthy.loss(model)
            said[f"forward {step}"] = audit(model, phase="forward", plan=plan, optimizer=optimizer)
            loss.backward()
            said[f"backward {step}"] = audit(model, phase="backward", plan=plan, optimizer=optimizer)
            said[f"ranks {step}"] = compare_ranks(model)
            clip_grad_norm(model.parameters(), 1.0)
            optimizer.step()
            said[f"stepped {step}"] = audit(model, phase="stepped", plan=plan, optimizer=optimizer)
            optimizer.zero_grad()
    with torch.no_grad():
        healthy.loss(model)
    said["evaluated"] = audit(model, phase="forward", plan=plan, optimizer=optimizer)
    said["watched"] = list(seen.findings)
    said["views"] = list(seen.changed_views())
    assert [event for event in seen.events if event.startswith("post_backward")]
    return said
