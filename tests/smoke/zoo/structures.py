"""Models whose structure, and not whose layers, is what a smoke run has to follow."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn import functional as talk
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, ROWS = 16, 6


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def mean_over_ranks(value):
    """Differentiable; by itself in one process."""
    return talk.all_reduce(value) / world() if world() > 1 else value


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + self.down(self.act(self.up(self.norm(hidden))))

    def act(self, hidden):
        return functional.gelu(hidden)


class Net(nn.Module):
    """Regression; what others change is a method."""

    layer = Layer

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(self.layer() for _ in range(2))

    def example_batch(self, batch_size, seq_len):
        return {"x": torch.randn(ROWS, 8), "y": torch.randn(ROWS, 4)}

    def body(self, x):
        hidden = self.stem(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def forward(self, x, y):
        return functional.mse_loss(self.head(self.body(x)), y)


# Forward communicates


class Logs(Net):
    def forward(self, x, y):
        loss = super().forward(x, y)
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
        self.last = mean.item() / world()
        return loss


class Clip(Net):
    """Both sides are gathered with gradients; every rank computes the loss of all pairs."""

    def sides(self, x, y):
        return functional.normalize(self.head(self.body(x)), dim=-1), functional.normalize(y, dim=-1)

    def forward(self, x, y):
        one, two = self.sides(x, y)
        if world() > 1:
            one, two = (torch.cat(talk.all_gather(side.contiguous())) for side in (one, two))
        logits = 10 * one @ two.T
        labels = torch.arange(len(logits), device=x.device)
        return (functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.T, labels)) / 2


class ClipLocal(Clip):
    """The others' rows are gathered without gradients, and every rank has the loss of its own rows."""

    def __init__(self):
        super().__init__()
        self.world = world()

    def forward(self, x, y):
        one, two = self.sides(x, y)
        others = [torch.empty_like(two) for _ in range(self.world)]
        if self.world > 1:
            dist.all_gather(others, two)
        every = torch.cat(others) if self.world > 1 else two
        start = dist.get_rank() * len(x) if self.world > 1 else 0
        return functional.cross_entropy(10 * one @ every.T, torch.arange(len(x), device=x.device) + start)


class Dino(Net):
    """A frozen teacher, whose centre is the mean over all ranks of what it says."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(nn.Sequential(self.stem, *self.layers, self.head)).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x, y):
        student = self.head(self.body(x + 0.1 * torch.randn_like(x)))
        with torch.no_grad():
            told = self.teacher(x)
            target = ((told - self.centre) / 0.1).softmax(-1)
            if self.training:
                self.centre.lerp_(mean_over_ranks(told.mean(0)), 0.1)
        return -(target * (student / 0.2).log_softmax(-1)).sum(-1).mean()


class BarlowTwins(Net):
    def forward(self, x, y):
        one, two = (self.head(self.body(x + 0.1 * torch.randn_like(x))) for _ in range(2))
        matrix = mean_over_ranks(one.T @ two / len(x))
        return (torch.diagonal(matrix) - 1).square().sum() + 0.01 * matrix.square().sum()


class SyncNorm(Net):
    """Batch norm over all ranks, by hand: PyTorch's own wants GPUs."""

    def body(self, x):
        hidden = super().body(x)
        mean = mean_over_ranks(hidden.mean(0))
        return (hidden - mean) / (mean_over_ranks((hidden - mean).square().mean(0)) + 1e-5).sqrt()


class Experts(Layer):
    """Top-1 of four; the share of every expert is that of all ranks, in its loss and in a bias that balances."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(4))
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, hidden):
        odds = self.router(hidden).softmax(-1)
        chosen = functional.one_hot((odds + self.bias).argmax(-1), 4).to(odds.dtype)
        share = mean_over_ranks(chosen.mean(0).detach())
        if self.training:
            with torch.no_grad():
                self.bias.add_(0.01 * (share.mean() - share).sign())
        self.balance = 4 * (share * mean_over_ranks(odds.mean(0))).sum()
        weights = odds * chosen
        inside = sum(weights[:, i, None] * up(hidden) for i, up in enumerate(self.up))
        return hidden + self.down(self.act(inside))


class Balanced(Net):
    layer = Experts

    def forward(self, x, y):
        return super().forward(x, y) + 0.01 * sum(layer.balance for layer in self.layers)


# What the meta device cannot build


class Orthogonal(Net):
    def __init__(self):
        super().__init__()
        self.head = nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, 4))


class Measured(Net):
    """Reads a number off a weight that it has just drawn."""

    def __init__(self):
        super().__init__()
        self.scale = self.stem.weight.abs().max().item()

    def body(self, x):
        return super().body(x) * self.scale


class ByNumpy(Net):
    def __init__(self):
        super().__init__()
        left, *_ = np.linalg.svd(self.stem.weight.detach().numpy())
        self.stem.weight.data = torch.from_numpy(left[:, :8].copy())


# Compiled, mapped, cast, recomputed, of custom functions


@torch.compile(backend="aot_eager")
def softcap(x):
    return 4 * torch.tanh(x / 4)


@torch.compile(backend="eager", dynamic=True)
def rotate(x):
    angle = torch.arange(x.shape[0], device=x.device)[:, None] * torch.linspace(0.1, 1, x.shape[1] // 2)
    one, two = x.chunk(2, -1)
    return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], -1)


class CompiledFunctions(Net):
    class layer(Layer):  # noqa: N801
        def act(self, hidden):
            return softcap(rotate(hidden)) * torch.sigmoid(hidden)


class Mapped(Net):
    class layer(Layer):  # noqa: N801
        def act(self, hidden):
            return torch.vmap(lambda row: torch.tanh(row) * row.sum())(hidden)


class Cast(Net):
    class layer(Layer):  # noqa: N801
        def act(self, hidden):
            with torch.autocast(hidden.device.type, torch.bfloat16):
                return (hidden @ hidden.T @ hidden).float().tanh()


class Recomputed(Net):
    class layer(Layer):  # noqa: N801
        def act(self, hidden):
            return checkpoint(lambda x: functional.dropout(functional.gelu(x), 0.1), hidden, use_reentrant=False)


class Steps(torch.autograd.Function):
    """Rounds, and passes the gradient on."""

    @staticmethod
    def forward(ctx, x):
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Rounded(Net):
    class layer(Layer):  # noqa: N801
        def act(self, hidden):
            return Steps.apply(functional.silu(hidden))


class Energy(Net):
    """Every layer goes down the slope of an energy, which it takes itself."""

    class layer(Layer):  # noqa: N801
        def forward(self, hidden):
            hidden = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
            energy = self.down(torch.tanh(self.up(self.norm(hidden)))).logsumexp(-1).sum()
            return hidden - torch.autograd.grad(energy, hidden, create_graph=True)[0]


# What modules share, and what hangs on them


class Shared(Net):
    """One projection in two blocks."""

    class layer(Layer):  # noqa: N801
        def forward(self, hidden):
            return super().forward(hidden) + self.both(hidden)

    def __init__(self):
        super().__init__()
        both = nn.Linear(WIDTH, WIDTH)
        for layer in self.layers:
            layer.both = both


class SharedNorm(Net):
    """The first block's norm is also the last one of the model."""

    def body(self, x):
        return self.layers[0].norm(super().body(x))

    def __init__(self):
        super().__init__()
        self.norm = self.layers[0].norm


class Repeated(Net):
    """One layer three times, as ALBERT has it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.layers[0]] * 3)


class Hooked(Net):
    def __init__(self):
        super().__init__()
        self.seen = []
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda module, args: (args[0] * 1.1,))
            layer.up.register_forward_hook(lambda module, args, output: output.clamp(-3, 3))
            layer.register_full_backward_hook(lambda module, grads, _: self.seen.append(len(grads)))


class MultiTask(Net):
    """Two heads, weighted by an uncertainty that is learned."""

    def __init__(self):
        super().__init__()
        self.other, self.doubt = nn.Linear(WIDTH, 3), nn.Parameter(torch.zeros(2))

    def forward(self, x, y):
        hidden = self.body(x)
        losses = torch.stack(
            [
                functional.mse_loss(self.head(hidden), y),
                functional.cross_entropy(self.other(hidden), y[:, :3].argmax(-1)),
            ]
        )
        return {"loss": (losses * torch.exp(-self.doubt) + self.doubt).sum(), "parts": losses.detach()}


class Supervised(Net):
    """Every depth has a loss of the same head."""

    def forward(self, x, y):
        hidden, losses = self.stem(x), []
        for layer in self.layers:
            hidden = layer(hidden)
            losses.append(functional.mse_loss(self.head(hidden), y))
        return torch.stack(losses).mean()


class Fourier(nn.Module):
    """Weights of frequencies, as a real tensor of two parts."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, 3, 2) / WIDTH)
        self.skip = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, field):
        waves = torch.fft.rfft(field)
        kept = torch.einsum("bik,iok->bok", waves[..., :3], torch.view_as_complex(self.weight))
        padded = functional.pad(kept, (0, waves.shape[-1] - 3))
        return functional.gelu(torch.fft.irfft(padded, n=field.shape[-1]) + self.skip(field))


class Fno(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.project = nn.Conv1d(2, WIDTH, 1), nn.Conv1d(WIDTH, 1, 1)
        self.layers = nn.ModuleList(Fourier() for _ in range(2))

    def example_batch(self, batch_size, seq_len):
        return {"field": torch.randn(batch_size, 2, 12), "target": torch.randn(batch_size, 1, 12)}

    def forward(self, field, target):
        hidden = self.lift(field)
        for layer in self.layers:
            hidden = layer(hidden)
        return functional.mse_loss(self.project(hidden), target)


class Tagger(nn.Module):
    """A bidirectional LSTM over packed rows of different lengths."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, WIDTH, padding_idx=0)
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, 5)

    def example_batch(self, batch_size, seq_len):
        return {"ids": torch.randint(1, 30, (3, 7)), "lengths": torch.tensor([7, 4, 2]), "tags": torch.arange(21) % 5}

    def forward(self, ids, lengths, tags):
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(ids), lengths.cpu(), batch_first=True)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=7)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), tags)


class Velocity(Net):
    """Diffusion that predicts a velocity; the schedule is a buffer that nobody saves."""

    def __init__(self):
        super().__init__()
        self.time, self.head = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 8)
        self.register_buffer("angles", torch.linspace(0.01, math.pi / 2 - 0.01, 20), persistent=False)

    def forward(self, x, y):
        angle = self.angles[torch.randint(0, 20, (len(x),), device=x.device)][:, None]
        noise = torch.randn_like(x)
        hidden = self.stem(angle.cos() * x + angle.sin() * noise) + self.time(torch.cat([angle.cos(), angle.sin()], -1))
        for layer in self.layers:
            hidden = layer(hidden)
        return functional.mse_loss(self.head(hidden), angle.cos() * noise - angle.sin() * x)


class Copier(nn.Module):
    """Encoder and decoder with one embedding, which is the output layer as well."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(30, WIDTH), nn.Linear(WIDTH, 30, bias=False)
        self.out.weight = self.embed.weight
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.1, batch_first=True) for _ in range(2))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(WIDTH, 2, 32, 0.1, batch_first=True) for _ in range(2))

    def example_batch(self, batch_size, seq_len):
        return {"source": torch.randint(0, 30, (2, 9)), "target": torch.randint(0, 30, (2, 6))}

    def forward(self, source, target):
        memory, hidden = self.embed(source), self.embed(target[:, :-1])
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            hidden = layer(hidden, memory)
        return functional.cross_entropy(self.out(hidden).flatten(0, 1), target[:, 1:].flatten())
