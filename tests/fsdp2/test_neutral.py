"""Looking changes nothing: losses, gradients, weights and random states are the same bits under a watch and audits."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext

import pytest
import torch
from fsdp2.ranks import run_ranks
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ckpt_tools.errors import UsageError
from ckpt_tools.fsdp2 import audit, shard_model, watch

WIDTH = 8


def softcap(x):
    return 5 * torch.tanh(x / 5)


def gate(x):
    return functional.gelu(x) * torch.sigmoid(x.roll(1, -1))


def norm(x):
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)


def rope(x):
    angle = torch.arange(x.shape[-2])[:, None] * torch.linspace(0.1, 1, x.shape[-1] // 2)
    one, other = x.chunk(2, -1)
    return torch.cat([one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()], -1)


def noise(x):
    return functional.dropout(x, 0.3) + 0.1 * torch.randn_like(x)


def mapped(x):
    return torch.vmap(lambda row: torch.tanh(row) * row.sum())(x)


def graded(x):
    return x + torch.func.grad(lambda y: (y.sin() ** 2).sum())(x)


def cast(x):
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ x.transpose(-1, -2) @ x).float().tanh()


def recomputed(x):
    return checkpoint(noise, x, use_reentrant=False)


def in_place(x):
    return (x + 1).mul_(2).clamp_(-1, 1)


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (8 * x).round() / 8

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1, 1)


class Tagged(torch.Tensor):
    """A subclass that stays one through every function."""


def tagged(x):
    return torch.tanh(x.as_subclass(Tagged)).sigmoid().as_subclass(torch.Tensor)


def chain(x):
    return noise(softcap(gate(x)))


FUNCTIONS = (
    chain, softcap, gate, norm, rope, noise, mapped, graded, cast, recomputed, in_place, Rounded.apply, tagged,
)  # fmt: skip
NAMES = [getattr(each, "__name__", "").replace("apply", "custom") for each in FUNCTIONS]
BACKENDS = (None, "eager", "aot_eager", "inductor")


class Layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.up, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x):
        return x + self.function(self.up(x))


def _model(function, compiled, how):
    """Two layers of a compiled function, compiled themselves, or in a model that is."""
    layers = [Layer(compiled(function) if how == "function" else function) for _ in range(2)]
    model = nn.Sequential(*(compiled(each) if how == "module" else each for each in layers))
    return model, compiled(model) if how == "model" else model


def _train(function, backend, how, *, is_watched, is_warm):
    """Everything that two steps leave behind, on two shapes; `is_warm`: what is compiled was used before the watch."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    compiled = (lambda f: f) if backend is None else (lambda f: torch.compile(f, backend=backend))
    model, entry = _model(function, compiled, how)
    shard_model(model, torch.distributed.init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",)), blocks="*")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    if how == "optimizer":
        optimizer.step = compiled(optimizer.step)
    if is_warm:
        entry(torch.randn(2, 3, WIDTH)).square().mean().backward()
    left = []
    with watch(model) if is_watched else nullcontext() as seen:
        for tokens in (3, 5):
            loss = entry(torch.randn(2, tokens, WIDTH)).square().mean()
            _look(model, "forward", optimizer, is_watched)
            loss.backward()
            _look(model, "backward", optimizer, is_watched)
            left += [loss, *(p.grad for p in model.parameters())]
            optimizer.step()
            _look(model, "stepped", optimizer, is_watched)
            optimizer.zero_grad()
    assert not is_watched or not seen.findings
    left += [*model.parameters(), torch.get_rng_state()]
    return [getattr(tensor.detach(), "_local_tensor", tensor.detach()) for tensor in left]


def _look(model, phase, optimizer, is_watched):
    if is_watched:
        assert not audit(model, phase=phase, optimizer=optimizer)


def walk(rank, world_size, cache, names, backend, how):
    """Name → what differs."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)  # in the common one killed runs leave halves of libraries
    wrong = {}
    for name in names:
        function = FUNCTIONS[NAMES.index(name)]
        for is_warm in (False, True):
            bare, seen = (
                _train(function, backend, how, is_watched=is_watched, is_warm=is_warm) for is_watched in (False, True)
            )
            same = [torch.equal(one, other) for one, other in zip(bare, seen, strict=True)]
            wrong |= {} if all(same) else {(name, is_warm): same}
    return wrong


@pytest.mark.full
@pytest.mark.parametrize(
    ("backend", "how"),
    [*((each, "function") for each in BACKENDS), *(("eager", how) for how in ("module", "model", "optimizer"))],
)
def test_a_watch_and_audits_change_no_bit(tmp_path, backend, how):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("needs a compiler")
    (wrong,) = run_ranks(1, walk, tmp_path, NAMES, backend, how, timeout=600)
    assert not wrong


@pytest.mark.full
def test_a_watch_changes_no_bit_of_compiled_functions(tmp_path):
    (wrong,) = run_ranks(1, walk, tmp_path, ["chain"], "eager", "function")
    assert not wrong


def _looking(model):
    with watch(model):
        return model(torch.ones(1, WIDTH))


@pytest.mark.parametrize(
    "run",
    [
        lambda model: torch.compile(lambda: _looking(model), backend="eager")(),
        lambda model: torch.vmap(lambda x: _looking(model) * x)(torch.ones(2)),
        lambda model: torch.func.grad(lambda x: _looking(model).sum() * x)(torch.ones(())),
        lambda model: torch.compile(lambda: audit(model, phase="forward"), backend="eager")(),
    ],
)
def test_what_could_not_be_neutral_is_refused_by_name(run):
    with pytest.raises(UsageError, match=r"(watch|audit) cannot be used inside a compiled or transformed function"):
        run(nn.Linear(WIDTH, WIDTH))
