"""Residual and transformer blocks, a frozen decoder, and trainable parts in between."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 16


class ResidualBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))


class TransformerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.b = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.b(nn.functional.scaled_dot_product_attention(q, k, v))


class Ditty(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(ResidualBlock() for _ in range(2))
        self.trunk = nn.ModuleList(TransformerBlock() for _ in range(2))
        self.bridge = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.Sequential(ResidualBlock(), nn.Linear(WIDTH, 4))

    def forward(self, x):
        for block in (*self.encoder, *self.trunk):
            x = block(x)
        return self.decoder(self.bridge(x))


def build():
    """On the CPU, with the same random weights every time."""
    torch.manual_seed(0)
    return Ditty()


def batch(step, rank=0):
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, 5, WIDTH, generator=draw)


def loss_of(model, step, rank=0):
    return model(batch(step, rank)).float().square().mean()
