"""A model that LyCORIS itself has adapted, with values that change something."""

from __future__ import annotations

import logging

import torch


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q = torch.nn.Linear(16, 32)
        self.c = torch.nn.Conv2d(8, 16, 3)

    def forward(self, x, image):
        return self.q(x), self.c(image)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.b = Block()

    def forward(self, x, image):
        return self.b(x, image)


def build():
    torch.manual_seed(3)
    return Model().eval()


def inputs():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 16, generator=generator), torch.randn(2, 8, 5, 5, generator=generator)


def adapt(algorithm, **options):
    """Return the model, which answers as adapted, and the network that a trainer would save."""
    from lycoris import LycorisNetwork, create_lycoris

    logging.disable(logging.INFO)
    try:
        LycorisNetwork.apply_preset({"target_module": ["Block"]})
        model = build()
        options = {"linear_dim": 4, "linear_alpha": 2, "conv_dim": 3, "conv_alpha": 1} | options
        network = create_lycoris(model, 1.0, algo=algorithm, **options)
        network.apply_to()
    finally:
        logging.disable(logging.NOTSET)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model, network.eval()
