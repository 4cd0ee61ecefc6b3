"""More broken models: what the issue threads of trainers show, each with its thread. As in `breakages`."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from fsdp2 import breakages
from fsdp2.breakages import (
    Block,
    Box,
    Encoding,
    Headless,
    Net,
    breaks,
    distributed,
    fails,
    filled,
    full_state,
    shard,
    silently,
    step,
    tokens,
    with_block,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ckpt_tools.fsdp2.audit import audit
from ckpt_tools.fsdp2.watch import watch

_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


# Copies, averages and penalties outside of forward.


@breaks("ema-plain", "emb.weight", "average.mul_(0.9).add_(parameter", thread="NCAR/miles-credit#414")
def ema_of_whole_weights(mesh):
    net = Net()
    averages = full_state(net)

    def run(model):
        for name, parameter in model.named_parameters():
            average = averages[name]
            average.mul_(0.9).add_(parameter.detach(), alpha=0.1)

    return shard(net, mesh), run


@breaks("ema-plain", "emb.weight", "average.lerp_(", thread="pytorch/pytorch#144289")
def ema_by_lerp(mesh):
    net = Net()
    averages = copy.deepcopy(net)

    def run(model):
        step(model)
        with torch.no_grad():
            for average, parameter in zip(averages.parameters(), model.parameters(), strict=True):
                average.lerp_(parameter, 0.1)

    return shard(net, mesh), run


@breaks("ema-plain", "", "torch._foreach_lerp_(")
def ema_of_lists(mesh):
    averages = [parameter.detach().clone() for parameter in Net().parameters()]
    return shard(Net(), mesh), lambda model: torch._foreach_lerp_(averages, list(model.parameters()), 0.1)


@fails("load-plain", "head.weight", "model.head.weight[0] = ")
def row_assigned(model):
    with torch.no_grad():
        model.head.weight[0] = torch.ones(8)


@breaks("deepcopy", "", "run(model)", thread="hao-ai-lab/FastVideo#915")
def deepcopy_for_an_average(mesh):
    return shard(Net(), mesh), copy.deepcopy


@breaks("deepcopy", "", "run(model)", thread="pytorch/pytorch#149138")
def averaged_model(mesh):
    return shard(Net(), mesh), torch.optim.swa_utils.AveragedModel


@breaks("ema-plain", "", "averages.update_parameters(model)")
def averaged_model_made_before_sharding(mesh):
    net = Net()
    averages = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn())

    def run(model):
        averages.update_parameters(model)  # copies, the first time
        averages.update_parameters(model)

    return shard(net, mesh), run


@breaks("custom-method", "layers.0", "return layer.encode(h)")
def broken_model_in_a_function_of_a_known_name(mesh):
    def update_parameters(model):
        step(model)

    return shard(Encoding(), mesh), update_parameters


@breaks("load-plain", "emb.weight", "parameter.data.copy_(", thread="pytorch/pytorch#136336")
def data_copied(mesh):
    net = Net()
    full = full_state(net)

    def run(model):
        for name, parameter in model.named_parameters():
            parameter.data.copy_(full[name])

    return shard(net, mesh), run


@fails("load-plain", "head.weight", "model.head.weight.add_(")
def delta_merged(model):
    with torch.no_grad():
        model.head.weight.add_(torch.ones(16, 8))


@fails("dtensor-in-loss", "", "loss + 0.01 * penalty")
def penalty_in_the_loss(model):
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    loss = model(tokens()).square().mean()
    (loss + 0.01 * penalty).backward()


@fails("dtensor-in-loss", "", "loss")
def penalty_added_in_place(model):
    penalty = sum(parameter.abs().sum() for parameter in model.parameters())
    loss = model(tokens()).square().mean()
    loss += 0.01 * penalty
    loss.backward()


@breaks("load-sharded", "emb.weight", "plain.load_state_dict(", thread="pytorch/pytorch#109648")
def sharded_into_plain(mesh):
    net = shard(Net(), mesh)
    plain = Net()
    return net, lambda model: plain.load_state_dict(model.state_dict())


@breaks("load-sharded", "emb.weight", "plain(tokens())", thread="huggingface/accelerate#3487")
def sharded_into_plain_by_assignment(mesh):
    net = shard(Net(), mesh)
    plain = Net()

    def run(model):
        plain.load_state_dict(model.state_dict(), assign=True)
        plain(tokens())

    return net, run


@fails("wrapped-names", "emb.weight", "model.load_state_dict(")
def names_of_a_compiled_model(model):
    model.load_state_dict({f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()})


@breaks("plain-in-state", "", "tensor.full_tensor()", thread="huggingface/trl#6622")
def full_tensor_of_a_buffer(mesh):
    net = Net()
    net.register_buffer("scale", torch.ones(1))

    def run(model):
        return {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}

    return shard(net, mesh), run


@fails("dtensor-collective", "", "dist.broadcast(", thread="pytorch/pytorch#117126")
def broadcast_after_sharding(model):
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)


@fails("dtensor-collective", "", "dist.all_reduce(")
def gradients_reduced_by_hand(model):
    step(model)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


@fails("unsupported-op", "", "torch.linalg.lstsq(", thread="pytorch/pytorch#147724")
def operation_without_a_strategy(model):
    step(model)
    torch.linalg.lstsq(model.head.weight.grad, model.head.weight.grad)


@breaks("foreign-param", "head.weight", "nn.functional.linear(h, model.head.weight)", thread="huggingface/trl#6065")
def head_in_the_loss(mesh):
    def run(model):
        h = model(tokens())
        model.reshard()
        nn.functional.linear(h, model.head.weight)

    return shard(Headless(), mesh), run


# Dtypes.


@breaks("compute-dtype", "layers.0.up", "self.up(x.float())")
def float_inside_a_bf16_block(mesh):
    class Upcasting(Block):
        def forward(self, x):
            return x + self.down(torch.relu(self.up(x.float())))

    return shard(with_block(Upcasting)(), mesh, mp_policy=_BF16), step


@breaks("compute-dtype", "layers.0.up", "self.up(box.x)", thread="pytorch/pytorch#153077")
def input_in_an_object(mesh):
    class Unpacking(Block):
        def forward(self, box):
            return self.down(torch.relu(self.up(box.x)))

    class Packing(Net):
        block = Unpacking

        def enter(self, index, layer, h):
            return layer(Box(h.float()))

    return shard(Packing(), mesh, mp_policy=_BF16), step


@breaks("compute-dtype", "layers.0.up", "self.up(x * self.scale)", thread="pytorch/pytorch#143900")
def buffer_in_full_precision(mesh):
    class Scaling(Block):
        def __init__(self, width):
            super().__init__(width)
            self.register_buffer("scale", torch.ones(width))

        def forward(self, x):
            return self.down(self.up(x * self.scale))

    return shard(with_block(Scaling)(), mesh, mp_policy=_BF16), step


@breaks("compute-dtype", "layers.0.conv", "self.conv(", thread="pytorch/pytorch#146114")
def convolution_in_full_precision(mesh):
    class Convolving(Block):
        def __init__(self, width):
            super().__init__(width)
            self.conv = nn.Conv1d(4, 4, 1)

        def forward(self, x):
            return self.conv(x.float())

    return shard(with_block(Convolving)(), mesh, mp_policy=_BF16), step


@breaks("recompute-mismatch", "", "", thread="ByteDance-Seed/VeOmni#104")
def routing_that_differs_in_the_recomputation(mesh):
    class Routing(Block):
        calls = 0

        def forward(self, x):
            Routing.calls += 1
            return self.down(torch.relu(self.up(x[:, : 4 if Routing.calls % 4 in (1, 2) else 3])).mean(1, keepdim=True))

    class Around(Net):
        block = Routing

        def enter(self, index, layer, h):
            return h + checkpoint(layer, h, use_reentrant=False)

    Routing.calls = 0
    return shard(Around(), mesh), step


# Wrapping.


@fails("ddp-around", "", "DistributedDataParallel(model)")
def ddp_around(model):
    step(DistributedDataParallel(model))


@breaks("no-forward", "", "fully_shard(model.layers", thread="pytorch/pytorch#167856")
def list_of_modules(mesh):
    return Net(), lambda model: fully_shard(model.layers, mesh=mesh)


@breaks("scalar-param", "", "fully_shard(model", thread="komikndr/raylight#5")
def scalar_parameter(mesh):
    net = Net()
    net.temperature = nn.Parameter(torch.tensor(1.0))
    return net, lambda model: fully_shard(model, mesh=mesh)


@breaks("applied-twice", "", "fully_shard(model.layers[0]", thread="huggingface/trl#6527")
def sharded_twice(mesh):
    return shard(Net(), mesh), lambda model: fully_shard(model.layers[0], mesh=mesh)


@breaks("tp-after-fsdp", "", "parallelize_module(", thread="pytorch/pytorch#119937")
def tensor_parallel_after_sharding(mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))

    def run(model):
        parallelize_module(model.layers[0], both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        step(model)

    return shard(Net(), both["dp_shard"]), run


@fails("inference-mode", "", "", thread="pytorch/pytorch#113203")
def inference_mode_before_training(model):
    with torch.inference_mode():
        model(tokens())
    step(model)


@breaks("outer-first", "emb.weight", "fully_shard(module", thread="pytorch/pytorch#148504")
def every_module_in_a_loop(mesh):
    def run(model):
        for module in model.modules():
            if not isinstance(module, nn.ModuleList):
                fully_shard(module, mesh=mesh)

    return Net(), run


@breaks("save-sharded", "", "save_file(", thread="huggingface/transformers#36434")
def safetensors_of_a_sharded_model(mesh):
    from safetensors.torch import save_file

    return shard(Net(), mesh), lambda model: save_file(model.state_dict(), "/dev/null")


@silently("mesh-order", "(root)", thread="NVIDIA-NeMo/Automodel#2768")
def context_parallel_mesh(mesh):
    net = shard(Net(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_shard", "cp")))
    return audit(net, phase="sharded")


@breaks("unknown", "", "fully_shard.FSDPModule", thread="verl-project/verl#4996")
def module_that_is_a_function(mesh):
    return shard(Net(), mesh), lambda model: fully_shard.FSDPModule


@fails("unknown", "", "loss.backward()", thread="pytorch/pytorch#136861")
def backward_twice(model):
    loss = model(tokens()).square().sum()
    loss.backward()
    loss.backward()


@breaks("custom-method", "(root)", "model.encode_ids(", thread="sgl-project/sglang#34575")
def encoder_entered_by_a_method(mesh):
    class Encoder(Net):
        def encode_ids(self, ids):
            return self.body(ids)

    return shard(Encoder(), mesh), lambda model: model.encode_ids(tokens())


# Meta.


def _with_mask(mesh):
    class Masked(Block):
        def __init__(self, width):
            super().__init__(width)
            self.mask = torch.ones(width)

        def forward(self, x):
            return super().forward(x * self.mask)

    with torch.device("meta"):
        net = with_block(Masked)()
    return filled(shard(net, mesh))


@breaks("meta-attribute", "layers.0.mask", "x * self.mask")
def attribute_left_on_meta(mesh):
    return _with_mask(mesh), step


@silently("meta-attribute", "layers.0.mask", thread="mindspore-ai/hyper-parallel#306")
def attribute_left_on_meta_before_the_first_forward(mesh):
    return audit(_with_mask(mesh), phase="loaded")


class Tabled(Block):
    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("table", torch.empty(width), persistent=False)
        self.init_buffers()

    def init_buffers(self):
        self.table.copy_(torch.arange(8))


@silently("garbage-buffer", "layers.0.table", thread="hiyouga/LlamaFactory#10820")
def garbage_where_init_buffers_would_help(mesh):
    with torch.device("meta"):
        net = with_block(Tabled)()
    shard(net, mesh)
    net.to_empty(device="cpu")
    for parameter in net.parameters():
        nn.init.constant_(parameter.to_local(), 0.1)
    for layer in net.layers:
        layer.table.fill_(7.0)
    net.layers[1].init_buffers()
    return audit(net, phase="loaded")


# Training that does not train.


class Frozen(Net):
    """Adapters in a frozen model, whose blocks are recomputed."""

    use_reentrant = True

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        for layer in self.layers:
            layer.up.requires_grad_(True)

    def enter(self, index, layer, h):
        return checkpoint(layer, h, use_reentrant=self.use_reentrant)


def _after_backward(net, run=step):
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    with watch(net):
        run(net)
        return audit(net, phase="backward", optimizer=optimizer)


@breaks("reentrant-checkpoint", "layers.*.up.weight", thread="huggingface/peft#1577", bare="no-gradient")
def reentrant_over_frozen_inputs(mesh):
    return shard(Frozen(), mesh), step


@silently("reentrant-checkpoint", "layers.*.up.weight", thread="microsoft/LoRA#120")
def reentrant_with_a_trained_head(mesh):
    net = Frozen()
    net.head.requires_grad_(True)
    return _after_backward(shard(net, mesh))


@silently("grad-disabled", "layers.*.up.weight")
def encoder_in_no_grad(mesh):
    class Halting(Net):
        def forward(self, ids):
            with torch.no_grad():
                h = self.layers[0](self.emb(ids))
            return self.head(self.layers[1](h))

    return _after_backward(shard(Halting(), mesh))


@silently("no-gradient", "layers.*.up.weight", thread="meta-pytorch/torchforge#592")
def detached_between_blocks(mesh):
    class Detaching(Net):
        def forward(self, ids):
            return self.head(self.body(ids).detach())

    return _after_backward(shard(Detaching(), mesh))


@breaks("all-frozen", "(root)", "", thread="huggingface/trl#3926")
def adapters_frozen_by_the_trainer(mesh):
    net = Net().requires_grad_(False)
    return shard(net, mesh), step


@fails("no-gradient", "", "", thread="brian6091/Dreambooth#23")
def loss_without_a_graph(model):
    model(tokens()).detach().square().sum().backward()


@silently("optimizer-misses", "layers.*.up.weight", thread="mosaicml/composer#3493")
def optimizer_of_the_head_alone(mesh):
    net = shard(Net(), mesh)
    optimizer = torch.optim.AdamW([*net.emb.parameters(), *net.head.parameters()])
    step(net)
    return audit(net, phase="backward", optimizer=optimizer)


@silently("stale-optimizer", "AdamW", thread="pytorch/pytorch#149205")
def optimizer_made_while_gathered(mesh):
    net = shard(Net(), mesh)
    net(tokens())
    optimizer = torch.optim.AdamW(net.parameters())
    step(net)
    return audit(net, phase="backward", optimizer=optimizer)


@silently("stale-scheduler", "LambdaLR", thread="RLinf/RLinf#1359")
def scheduler_of_the_old_optimizer(mesh):
    net = Net()
    old = torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(old, lambda step: 1.0)
    shard(net, mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    return audit(net, phase="loaded", optimizer=optimizer, scheduler=scheduler)


@silently("unreduced", "(root)", thread="huggingface/accelerate#3762")
def accumulation_that_never_ends(mesh):
    net = shard(Net(), mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    net.set_requires_gradient_sync(False)
    step(net)
    optimizer.step()
    return audit(net, phase="stepped", optimizer=optimizer)[:1]


@silently("unchanged", "AdamW", thread="meta-pytorch/torchtune#2254")
def steps_that_bf16_rounds_away(mesh):
    net = Net().bfloat16()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(1.0)
    shard(net, mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)
    with watch(net) as seen:
        step(net)
        optimizer.step()
    return seen.findings


@silently("unchanged", "AdamW", thread="vllm-project/speculators#765")
def norms_that_bf16_keeps_at_one(mesh):
    class Normed(Block):
        def __init__(self, width):
            super().__init__(width)
            self.norm = nn.LayerNorm(width)

        def forward(self, x):
            return super().forward(self.norm(x))

    net = shard(with_block(Normed)().bfloat16(), mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.0)
    with watch(net) as seen:
        for _ in range(2):
            step(net)
            optimizer.step()
    assert "layers.*.norm.weight" in seen.findings[0].what
    return seen.findings


@silently("lost-write", "layers.0.up.weight", thread="facebookresearch/fairscale#805")
def weights_clamped_in_forward(mesh):
    class Clamping(Block):
        def forward(self, x):
            self.up.weight.data.clamp_(-0.01, 0.01)
            return super().forward(x)

    net = Net()
    net.layers[0].__class__ = Clamping
    shard(net, mesh)
    with watch(net) as seen:
        step(net)
    return seen.findings


@silently("meta-param", "emb.weight")
def state_set_on_a_meta_model(mesh):
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    with torch.device("meta"):
        net = Net()
    full = {fqn: torch.full(p.shape, 0.1) for fqn, p in net.state_dict().items()}
    shard(net, mesh)
    set_model_state_dict(net, distributed(net, full))
    return audit(net, phase="loaded")[:1]


def run_some(rank, world_size, names, place):
    """What was said of those that raise, of those that do not, and of those that are fixed, of all files."""
    from fsdp2 import states  # noqa: F401 - adds its own

    breakages.PLACE = place
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    found = breakages.run_breakages(mesh, names), breakages.run_silent(mesh, names), breakages.run_fixed(mesh, names)
    dist.barrier()
    return found
