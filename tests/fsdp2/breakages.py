"""Small models, each broken in exactly one way, and what must be said about it.

A breakage is built anew for every run: `BREAKAGES[name].build(mesh)` gives a model and what to do with it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ckpt_tools.fsdp2.audit import audit
from ckpt_tools.fsdp2.compare_ranks import compare_ranks
from ckpt_tools.fsdp2.diagnose import diagnose
from ckpt_tools.fsdp2.watch import watch


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

    def encode(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    block = Block

    def __init__(self, width=8, depth=2):
        super().__init__()
        self.emb = nn.Embedding(16, width)
        self.layers = nn.ModuleList(self.block(width) for _ in range(depth))
        self.head = nn.Linear(width, 16, bias=False)

    def forward(self, ids):
        return self.head(self.body(ids))

    def body(self, ids):
        h = self.emb(ids)
        for index, layer in enumerate(self.layers):
            h = self.enter(index, layer, h)
        return h

    def enter(self, index, layer, h):
        return layer(h)


class Headless(Net):
    def forward(self, ids):
        return self.body(ids)


def with_block(block_class):
    return type("Net", (Net,), {"block": block_class})


def tokens():
    return torch.arange(8).reshape(2, 4)


def shard(model, mesh, **options):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def step(model):
    model(tokens()).float().square().sum().backward()


def distributed(model, full, **changes):
    """The full state dict as DTensors like the model's own."""
    places = {fqn: (p.device_mesh, p.placements) for fqn, p in model.state_dict().items() if hasattr(p, "placements")}
    return {
        fqn: nn.Parameter(distribute_tensor(changes.get(fqn, tensor), *places[fqn])) if fqn in places else tensor
        for fqn, tensor in full.items()
    }


def full_state(model):
    return {fqn: tensor.detach().clone() for fqn, tensor in model.state_dict().items()}


@dataclass(frozen=True)
class Breakage:
    id: str
    build: object
    module: str
    call: str
    thread: str = ""
    """Public issue or pull request that shows it."""
    bare: str = ""
    """Id without a watch, where only a watch sees the cause."""
    fix: str = ""
    """What the advice says, which `build(mesh, fixed=True)` follows."""


PLACE = ""
"""A directory that all ranks have for their checkpoints."""

BREAKAGES: dict[str, Breakage] = {}
"""Raise an error."""
SILENT: dict[str, tuple[str, str, object]] = {}
"""Raise nothing: id, where, and a function that returns findings."""
THREADS: dict[str, str] = {}
"""Silent one → public issue or pull request that shows it."""


def breaks(code, module, call="", thread="", bare="", fix=""):
    def add(function):
        BREAKAGES[function.__name__] = Breakage(code, function, module, call, thread, bare, fix)
        return function

    return add


def fails(code, module, call="", thread=""):
    """The same for what is done to a healthy model."""

    def add(function):
        BREAKAGES[function.__name__] = Breakage(code, lambda mesh: (shard(Net(), mesh), function), module, call, thread)
        return function

    return add


def silently(code, where, thread=""):
    def add(function):
        SILENT[function.__name__] = (code, where, function)
        THREADS[function.__name__] = thread
        return function

    return add


# Errors.


class Encoding(Net):
    def enter(self, index, layer, h):
        return layer.encode(h)


@breaks("custom-method", "layers.0", "return layer.encode(h)", thread="pytorch/pytorch#109385")
def custom_method(mesh):
    return shard(Encoding(), mesh), step


@breaks("custom-method", "(root)", "model.generate(tokens())", thread="huggingface/trl#2796")
def custom_method_of_the_root(mesh):
    class Broken(Net):
        def generate(self, ids):
            return self.emb(ids)

    return shard(Broken(), mesh), lambda model: model.generate(tokens())


@breaks("dot-forward", "layers.0", "return layer.forward(h)")
def dot_forward(mesh):
    class Broken(Net):
        def enter(self, index, layer, h):
            return layer.forward(h)

    return shard(Broken(), mesh), step


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Net()
        self.lm_head = nn.Linear(16, 4)

    def forward(self, ids):
        return self.lm_head(self.model(ids))


def _sharded_outer(mesh):
    outer = Outer()
    for layer in outer.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(outer, mesh=mesh)


@breaks("partial-root", "model", "outer.model(tokens())")
def partial_root(mesh):
    return _sharded_outer(mesh), lambda outer: outer.model(tokens())


@breaks("partial-root", "layers.1.up", "self.layers[1].up(h)")
def partial_block(mesh):
    class Broken(Net):
        def forward(self, ids):
            h = self.layers[0](self.emb(ids))
            return self.head(self.layers[1].up(h))

    return shard(Broken(), mesh), step


class Peeking(Block):
    def forward(self, x):
        return nn.functional.linear(x, self.other[0].up.weight)


def _with_others(net_class, mesh):
    net = net_class()
    net.layers[0].other = [net.layers[1]]  # in a list, so that it is no submodule
    net.layers[1].other = [net.layers[0]]
    return shard(net, mesh)


@breaks("foreign-param", "layers.1.up.weight", "self.other[0].up.weight", thread="apple/ml-cross-entropy#31")
def foreign_param(mesh):
    return _with_others(with_block(Peeking), mesh), step


@breaks("foreign-param", "layers.1.up.bias", "self.other[0].up.bias")
def foreign_param_in_arithmetic(mesh):
    class Adding(Block):
        def forward(self, x):
            return x * self.other[0].up.bias

    return _with_others(with_block(Adding), mesh), step


@breaks("foreign-param", "layers.1.up.weight", "self.other[0].up(x)")
def foreign_module(mesh):
    class Borrowing(Block):
        def forward(self, x):
            return self.other[0].up(x)

    return _with_others(with_block(Borrowing), mesh), step


@breaks("mid-forward-reshard", "layers.0", "")
def mid_forward_reshard(mesh):
    class Saving(Block):
        def forward(self, x):
            x = self.up(x)
            self.state_dict()
            return self.down(x)

    return shard(with_block(Saving)(), mesh), step


class Dispatching(Block):
    """The language model's layers of BAGEL: forward chooses a method that is registered as well."""

    def forward(self, x):
        x = self.forward_train(x) if self.training else self.forward_inference(x)
        return self.down(x)

    def forward_train(self, x):
        return torch.relu(self.up(x))

    def forward_inference(self, x):
        return self.up(x)


def sharded_bagel(mesh):
    net = shard(with_block(Dispatching)(), mesh)
    for layer in net.layers:
        register_fsdp_forward_method(layer, "forward_train")
        register_fsdp_forward_method(layer, "forward_inference")
    return net


@breaks("double-wrap", "layers.0", "", thread="pytorch/pytorch#137922")
def double_wrap(mesh):
    return sharded_bagel(mesh), step


@breaks("double-wrap", "layers.0", "")
def double_wrap_by_name(mesh):
    class Naming(Dispatching):
        def forward(self, x):
            return self.down(getattr(self, "forward_" + "train")(x))

    net = shard(with_block(Naming)(), mesh)
    for layer in net.layers:
        register_fsdp_forward_method(layer, "forward_train")
    return net, step


class Box:
    def __init__(self, x):
        self.x = x


class Boxing(Block):
    def forward(self, x):
        return Box(super().forward(x.x if isinstance(x, Box) else x))


class Unboxing(Net):
    block = Boxing

    def forward(self, ids):
        return self.head(self.body(ids).x)


@breaks("opaque-output", "layers.", "", thread="pytorch/pytorch#183702")
def opaque_output(mesh):
    return shard(Unboxing(), mesh), step


@breaks("opaque-output", "layers.", "")
def view_changed_in_place(mesh):
    class Viewing(Block):
        def forward(self, x):
            return super().forward(x).view(2, 4, 8)

    class Broken(Net):
        block = Viewing

        def enter(self, index, layer, h):
            h = layer(h)
            h += 1
            return h

    return shard(Broken(), mesh), step


@fails("root-not-first", "layers.0", "model(tokens())", thread="huggingface/trl#3582")
def root_not_first(model):
    model.layers[0](torch.ones(2, 8))
    model(tokens())


@breaks("outer-first", "layers.0", "fully_shard(model.layers[0]")
def outer_first(mesh):
    return fully_shard(Net(), mesh=mesh), lambda model: fully_shard(model.layers[0], mesh=mesh)


@breaks("shared-group", "head.weight", thread="huggingface/accelerate#4171")
def shared_group(mesh):
    net = Net()
    net.head.weight = net.emb.weight
    fully_shard(net.head, mesh=mesh)
    return shard(net, mesh), step


@breaks("untied", "head.weight", "get_state_dict(model, optimizer)", thread="verl-project/verl#7834")
def untied(mesh):
    def run(model):
        optimizer = torch.optim.AdamW(model.parameters())
        step(model)
        optimizer.step()
        get_state_dict(model, optimizer)

    return _untied(mesh), run


def _untied(mesh):
    net = Net()
    net.head.weight = net.emb.weight
    full = full_state(net)
    shard(net, mesh)
    net.load_state_dict(distributed(net, full), assign=True)
    return net


@breaks("stale-optimizer", "AdamW", "get_state_dict(model, optimizer)", thread="huggingface/accelerate#3256")
def stale_optimizer_saved(mesh):
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())

    def run(model):
        step(model)
        optimizer.step()
        get_state_dict(model, optimizer)

    return shard(net, mesh), run


def filled(net):
    """A net on meta after a load of 0.1 everywhere."""
    full = {fqn: torch.full(p.shape, 0.1) for fqn, p in net.state_dict().items()}
    net.load_state_dict(distributed(net, full), assign=True)
    return net


@breaks("meta-param", "emb.weight", "model(tokens())")
def meta_param(mesh):
    with torch.device("meta"):
        net = Net()
    return shard(net, mesh), step


class Scaled(Block):
    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("scale", torch.ones(width), persistent=False)

    def forward(self, x):
        return super().forward(x * self.scale)


def _meta_buffer(mesh):
    with torch.device("meta"):
        net = with_block(Scaled)()
    return filled(shard(net, mesh))


@breaks("meta-buffer", "layers.0.scale", "x * self.scale", thread="pytorch/torchtitan#110")
def meta_buffer(mesh):
    return _meta_buffer(mesh), step


def _load(mesh, make):
    """Shard a net, then load what `make(full)` says, and run."""
    net = Net()
    full = full_state(net)

    def run(model):
        model.load_state_dict(make(full), assign=True)
        step(model)

    return shard(net, mesh), run


@breaks("load-plain", "emb.weight", "load_state_dict", thread="nvidia-cosmos/cosmos-transfer2.5#206")
def load_plain(mesh):
    return _load(mesh, lambda full: full)


@breaks("load-plain", "emb.weight", "load_state_dict", thread="pytorch/pytorch#136336")
def load_plain_by_copy(mesh):
    net = Net()
    full = full_state(net)
    return shard(net, mesh), lambda model: model.load_state_dict(full)


@breaks("load-placement", "emb.weight", "load_state_dict")
def load_placement(mesh):
    def make(full):
        return {fqn: nn.Parameter(distribute_tensor(t, mesh, [Replicate()])) for fqn, t in full.items()}

    return _load(mesh, make)


@breaks("load-dtype", "emb.weight", "", thread="huggingface/accelerate#4021")
def load_dtype(mesh):
    net = Net()
    full = full_state(net)

    def run(model):
        step(model)
        half = {fqn: t.bfloat16() for fqn, t in full.items()}
        model.load_state_dict(distributed(model, half), assign=True)
        step(model)

    return shard(net, mesh), run


@breaks("load-dtype", "emb.weight", "load_state_dict")
def load_integers(mesh):
    def make(full):
        cut = {fqn: distribute_tensor(t.to(torch.int8), mesh, [Shard(0)]) for fqn, t in full.items()}
        return {fqn: nn.Parameter(t, requires_grad=False) for fqn, t in cut.items()}

    return _load(mesh, make)


@breaks("dtype-mix", "layers.0", "model(tokens())", thread="huggingface/accelerate#3985")
def dtype_mix(mesh):
    net = Net()
    net.layers[0].up.bfloat16()
    return shard(net, mesh), step


class Extended(Net):
    def forward(self, ids):
        return self.extra(super().forward(ids))


def _extended(mesh):
    net = shard(Extended(), mesh)
    torch.manual_seed(1)
    net.extra = nn.Linear(16, 16)
    return net


@breaks("unmanaged", "extra.weight", "optimizer.step()", thread="allenai/molmoact2#35")
def unmanaged_stepped(mesh):
    def run(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        step(model)
        optimizer.step()

    return _extended(mesh), run


@breaks("mixed-clip", "layers.0.up.weight", "clip_grad_norm_", thread="pytorch/pytorch#180346")
def mixed_clip(mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    net = Net()
    for layer in net.layers:
        parallelize_module(layer, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def run(model):
        step(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return shard(net, both["dp_shard"]), run


# Silent ones.


@silently("double-wrap", "layers.0")
def double_wrap_without_error(mesh):
    class Tail(Block):
        def forward(self, x):
            return self.forward_train(x)

        def forward_train(self, x):
            return super().forward(x)

    net = shard(with_block(Tail)(), mesh)
    register_fsdp_forward_method(net.layers[0], "forward_train")
    return audit(net, phase="sharded")


@silently("mid-forward-reshard", "layers.0")
def mid_forward_reshard_without_error(mesh):
    class Saving(Block):
        def forward(self, x):
            x = super().forward(x)
            self.state_dict()
            return x

    net = Net()
    net.layers[0].__class__ = Saving
    shard(net, mesh)
    with watch(net) as seen:
        step(net)
    return seen.findings


@silently("opaque-output", "layers.1")
def opaque_output_without_error(mesh):
    net = Unboxing()
    net.layers[0].__class__ = Block
    shard(net, mesh)
    with watch(net) as seen:
        net(tokens())
    return seen.findings


@silently("root-not-first", "layers.0")
def root_bypassed(mesh):
    net = shard(Net(), mesh)
    net.layers[0](torch.ones(2, 8)).sum()
    return audit(net, phase="forward")


@silently("partial-root", "(root)")
def root_never_called(mesh):
    net = fully_shard(Net(), mesh=mesh)
    return audit(net, phase="forward")


@silently("shared-group", "head.weight", thread="NVIDIA/Model-Optimizer#2059")
def shared_group_before_the_first_forward(mesh):
    return audit(shared_group(mesh)[0], phase="loaded")


@silently("untied", "head.weight", thread="meta-pytorch/torchtune#616")
def untied_before_the_optimizer(mesh):
    return audit(_untied(mesh), phase="loaded")


@silently("stale-optimizer", "AdamW", thread="huggingface/accelerate#3209")
def stale_optimizer(mesh):
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    shard(net, mesh)
    step(net)
    return audit(net, phase="backward", optimizer=optimizer)


@silently("stale-optimizer", "AdamW")
def stale_optimizer_after_a_load(mesh):
    net = Net()
    full = full_state(net)
    shard(net, mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    net.load_state_dict(distributed(net, full), assign=True)
    return audit(net, phase="loaded", optimizer=optimizer)


@silently("meta-param", "emb.weight")
def meta_param_before_the_first_forward(mesh):
    return audit(meta_param(mesh)[0], phase="loaded")


@silently("meta-buffer", "layers.0.scale")
def meta_buffer_before_the_first_forward(mesh):
    return audit(_meta_buffer(mesh), phase="loaded")


@silently("garbage-buffer", "model.rotary_emb.inv_freq", thread="huggingface/transformers#45902")
def garbage_buffer(mesh):
    net = _llama()
    net.model.rotary_emb.inv_freq = net.model.rotary_emb.inv_freq * 3
    fully_shard(net, mesh=mesh)
    return audit(net, phase="loaded")


@silently("garbage-buffer", "layers.0.scale", thread="EvolvingLMMs-Lab/lmms-engine#185")
def poisoned_buffer(mesh):
    net = _meta_buffer(mesh)
    for layer in net.layers:
        layer.scale = torch.ones(8)
    net.layers[0].scale[3] = torch.nan
    return audit(net, phase="loaded")


@silently("garbage-buffer", "layers.0.scale", thread="NovaSky-AI/SkyRL#1709")
def garbage_that_differs_by_rank(mesh):
    net = shard(with_block(Scaled)(), mesh)
    net.layers[0].scale.fill_(1.0 + dist.get_rank())
    return compare_ranks(net)


def _llama(**options):
    import toys

    return toys.build("llama", **{"hidden_size": 16, "vocab_size": 32, "num_key_value_heads": 4} | options).train()


@silently("load-plain", "head.weight")
def load_plain_by_attribute(mesh):
    net = shard(Net(), mesh)
    net.head.weight = nn.Parameter(torch.ones(16, 8), requires_grad=False)
    return audit(net, phase="loaded")


@silently("load-placement", "layers.0.up.weight")
def load_placement_without_error(mesh):
    net = shard(Net(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard")))
    old = net.layers[0].up.weight
    moved = distribute_tensor(old.full_tensor().detach(), old.device_mesh, [Replicate(), Replicate()])
    net.load_state_dict({"layers.0.up.weight": nn.Parameter(moved)}, assign=True, strict=False)
    return audit(net, phase="loaded")


@silently("load-dtype", "layers.0.up.weight")
def load_dtype_before_the_next_forward(mesh):
    net = shard(Net(), mesh)
    full = {fqn: p.detach() for fqn, p in net.layers[0].state_dict().items()}
    step(net)
    net.layers[0].load_state_dict({fqn: nn.Parameter(p.bfloat16()) for fqn, p in full.items()}, assign=True)
    return audit(net, phase="loaded")


@silently("dtype-mix", "layers.0", thread="vllm-project/speculators#668")
def dtype_mix_before_the_first_forward(mesh):
    return audit(dtype_mix(mesh)[0], phase="loaded")


@silently("unmanaged", "extra.weight")
def unmanaged(mesh):
    net = _extended(mesh)
    step(net)
    return audit(net, phase="backward")


def _with_embeddings_by_rank():
    torch.manual_seed(100 + dist.get_rank())
    net = Net()
    with torch.no_grad():
        for parameter in (*net.layers.parameters(), *net.head.parameters()):
            parameter.fill_(0.1)
    return net


@silently("rank-init", "emb.weight", thread="huggingface/transformers#45662")
def rank_init(mesh):
    return compare_ranks(_with_embeddings_by_rank())


@silently("rank-init", "emb.weight at dp_shard=0")
def rank_init_of_replicas(mesh):
    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    return compare_ranks(shard(_with_embeddings_by_rank(), both))


@silently("param-order", "layers.0.up.weight")
def param_order(mesh):
    net = Net()
    if dist.get_rank() == 1:
        block = net.layers[0]
        up = block.up
        del block.up
        block.up = up
    return compare_ranks(net)


@silently("param-order", "head.weight")
def param_frozen_on_one_rank(mesh):
    net = shard(Net(), mesh)
    net.head.weight.requires_grad_(dist.get_rank() == 0)
    return compare_ranks(net)


def _wrapped_by_rank(mesh):
    net = Net()
    for index, layer in enumerate(net.layers):
        if index == 0 or dist.get_rank() == 0:
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


@silently("rank-structure", "layers.1")
def rank_structure(mesh):
    return compare_ranks(_wrapped_by_rank(mesh))


@silently("rank-unused", "layers.0.up.weight")
def rank_unused(mesh):
    net = shard(with_block(Choosing)(depth=1), mesh)
    step(net)
    return compare_ranks(net)


class Choosing(Block):
    def forward(self, x):
        return x + (self.up(x) if dist.get_rank() == 0 else self.down(x))


@silently("sharding-state", "layers.0")
def gathered_and_forgotten(mesh):
    net = shard(Net(), mesh)
    step(net)
    net.layers[0].unshard()
    return audit(net, phase="stepped")


# Ranks that do not do the same: gloo aborts one of them, or both wait until time is up.


def _rank_skips_a_block(mesh):
    class Skipping(Net):
        def enter(self, index, layer, h):
            return layer(h) if index == 0 or dist.get_rank() == 0 else h

    return shard(Skipping(), mesh), step


def _rank_stops_early(model):
    for _ in range(2 if dist.get_rank() == 0 else 1):
        step(model)


class Lopsided(Block):
    def __init__(self, width):
        super().__init__(width)
        self.narrow = nn.Linear(width, 2)

    def forward(self, x):
        return x + (self.up(x) if dist.get_rank() == 0 else self.narrow(x).sum(-1, keepdim=True))


def _barrier_of_rank_0(model):
    step(model)
    if dist.get_rank() == 0:
        dist.barrier()


THREADS["rank-skip"] = "pytorch/pytorch#126616"
DISAGREEMENTS = {
    "rank-structure": (lambda mesh: (_wrapped_by_rank(mesh), step), "layers.1"),
    "rank-skip": (_rank_skips_a_block, "layers.1"),
    "rank-skip-steps": (lambda mesh: (shard(Net(), mesh), _rank_stops_early), "(root)"),
    "rank-unused": (lambda mesh: (shard(with_block(Lopsided)(), mesh), step), "layers.1"),
    "rank-alone": (lambda mesh: (shard(Net(), mesh), _barrier_of_rank_0), ""),
}


def run_disagreement(rank, world_size, name, traces, port_file):
    """Fail as one disagreement does; the diagnosis of this rank, where it lived to say it."""
    dist.init_process_group(
        "gloo", init_method=f"file://{port_file}", rank=rank, world_size=world_size, timeout=timedelta(seconds=2)
    )
    build, _ = DISAGREEMENTS[name]
    model, run = build(init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",)))
    try:
        with watch(model, traces=traces):
            run(model)
    except RuntimeError as error:
        return diagnose(error, model=model)
    return None


def run_breakages(mesh, names):
    """Breakages with and without a watch: name → what was said."""
    said = {}
    for name, breakage in BREAKAGES.items():
        if name not in names:
            continue
        for watched in (False, True):
            dist.barrier()
            torch.manual_seed(0)
            said[name, watched] = _run_one(breakage, mesh, watched)
    return said


def _run_one(breakage, mesh, watched):
    model, run = breakage.build(mesh)
    before = [found.code for found in audit(model, phase="sharded")]
    codes = []
    try:
        if watched:
            with watch(model) as seen:
                try:
                    run(model)
                finally:
                    codes = [found.code for found in seen.findings]
        else:
            run(model)
    except (Exception, CheckpointException) as error:
        found = diagnose(error, model=model)
        return found.id, found.module, found.call, before + codes, f"{type(error).__name__}: {error}", found.fix
    return "no error", "", "", before + codes, "", ""


def run_silent(mesh, names):
    """Silent breakages: name → findings."""
    said = {}
    for name, (_, _, function) in SILENT.items():
        if name not in names:
            continue
        dist.barrier()
        torch.manual_seed(0)
        said[name] = function(mesh)
    return said


def is_fixable(name):
    """Does its function take `fixed`?"""
    build = BREAKAGES[name].build if name in BREAKAGES else SILENT[name][2]
    return "fixed" in inspect.signature(build).parameters


def run_fixed(mesh, names):
    """Breakages with their fix applied: name → codes of what is said nevertheless; an error is raised."""
    said = {}
    for name in filter(is_fixable, (*BREAKAGES, *SILENT)):
        if name not in names:
            continue
        dist.barrier()
        torch.manual_seed(0)
        if name in SILENT:
            said[name] = [found.code for found in SILENT[name][2](mesh, fixed=True)]
            continue
        model, run = BREAKAGES[name].build(mesh, fixed=True)
        with watch(model) as seen:
            run(model)
        said[name] = [found.code for found in (*audit(model, phase="loaded"), *seen.findings)]
    return said
