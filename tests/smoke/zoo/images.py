"""Models of images and sound: statistics that run, noise that is drawn, norms that iterate."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

SIZE = 16


class Images(nn.Module):
    """What takes images, and labels of five kinds."""

    def example_batch(self, batch_size, seq_len):
        return {"images": torch.randn(batch_size, 3, SIZE, SIZE), "labels": torch.randint(0, 5, (batch_size,))}


class Residual(nn.Module):
    def __init__(self, width, norm=nn.BatchNorm2d):
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.first, self.second = norm(width), norm(width)

    def forward(self, hidden):
        return (hidden + self.second(self.two(self.first(self.one(hidden)).relu()))).relu()


class ResNet(Images):
    """Batch norm in training: its statistics run away from each other on every rank."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks = nn.ModuleList(Residual(8) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, images, labels):
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(hidden.mean((2, 3))), labels)


class FrozenNorm(ResNet):
    """A detector's backbone: batch norm stays in evaluation, and its weights frozen."""

    def __init__(self):
        super().__init__()
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


class Averaging(Images):
    """Batch norm over vectors with a cumulative average, and one without statistics."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3 * SIZE * SIZE, 16), nn.Linear(16, 5)
        self.norm = nn.BatchNorm1d(16, momentum=None)
        self.other = nn.BatchNorm1d(16, track_running_stats=False)

    def forward(self, images, labels):
        return functional.cross_entropy(self.two(self.other(self.norm(self.one(images.flatten(1))))), labels)


class Segmenter(Images):
    """A fully convolutional network with spatial dropout."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.3))
        self.up = nn.ConvTranspose2d(8, 5, 4, 2, 1)

    def forward(self, images, labels):
        return functional.cross_entropy(self.up(self.down(images)), labels[:, None, None].expand(-1, SIZE, SIZE))


class Patches(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.project = nn.Conv2d(3, width, 4, 4)

    def forward(self, images):
        return self.project(images).flatten(2).transpose(1, 2)


class DropPath(nn.Module):
    """Stochastic depth, one decision per sample."""

    def forward(self, hidden):
        if not self.training:
            return hidden
        return hidden * torch.empty(len(hidden), 1, 1, device=hidden.device).bernoulli_(0.8) / 0.8


class VitBlock(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, 0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
        self.drop, self.scale = DropPath(), nn.Parameter(1e-1 * torch.ones(width))

    def forward(self, hidden):
        normed = self.norm(hidden)
        hidden = hidden + self.drop(self.scale * self.attention(normed, normed, normed, need_weights=False)[0])
        return hidden + self.drop(self.mlp(hidden))


class Vit(Images):
    def __init__(self):
        super().__init__()
        self.patches, self.cls = Patches(), nn.Parameter(torch.zeros(1, 1, 32))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, 32))
        self.blocks = nn.ModuleList(VitBlock() for _ in range(2))
        self.head = nn.Linear(32, 5)

    def forward(self, images, labels):
        hidden = torch.cat([self.cls.expand(len(images), -1, -1), self.patches(images)], 1) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden[:, 0])
        return {"logits": logits, "loss": functional.cross_entropy(logits, labels)}


class Masked(Vit):
    """MAE: most patches, drawn anew each time, are left out."""

    def __init__(self):
        super().__init__()
        self.out, self.mask = nn.Linear(32, 48), nn.Parameter(torch.zeros(1, 1, 32))

    def example_batch(self, batch_size, seq_len):
        return {"images": torch.randn(batch_size, 3, SIZE, SIZE)}

    def forward(self, images):
        hidden = self.patches(images)
        order = torch.rand(hidden.shape[:2], device=hidden.device).argsort(1)
        kept = (order < 4)[..., None]
        hidden = torch.where(kept, hidden, self.mask) + self.positions[:, 1:] + 0 * self.cls
        for block in self.blocks:
            hidden = block(hidden)
        wanted = functional.pixel_shuffle(hidden.new_zeros(1, 16, 1, 1), 4).sum() + functional.unfold(
            images, 4, stride=4
        )
        return ((self.out(hidden) - wanted.transpose(1, 2)).square() * ~kept).mean() + 0 * self.head(hidden).sum()


class Mixer(Images):
    def __init__(self):
        super().__init__()
        self.patches, self.head = Patches(), nn.Linear(32, 5)
        self.across = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.within = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, images, labels):
        hidden = self.patches(images)
        for across, within in zip(self.across, self.within, strict=True):
            hidden = hidden + across(hidden.transpose(1, 2)).transpose(1, 2).relu()
            hidden = hidden + within(hidden).relu()
        return functional.cross_entropy(self.head(hidden.mean(1)), labels)


class UNet(nn.Module):
    """A denoiser with group norm, a way down and up, and the time in every level."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(16, 3, 3, 1, 1)
        self.down, self.up = nn.Conv2d(8, 8, 3, 2, 1), nn.ConvTranspose2d(8, 8, 4, 2, 1)
        self.middle = Residual(8, lambda width: nn.GroupNorm(2, width))
        self.time = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8))

    def forward(self, noisy, when):
        angles = when[:, None].float() * torch.exp(-torch.arange(4, device=when.device))
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))[:, :, None, None]
        high = self.into(noisy)
        return self.out(torch.cat([high, self.up(self.middle(self.down(high) + time))], 1))


class Diffusion(nn.Module):
    """DDPM: timesteps and noise are drawn in forward, the schedule is computed in `__init__`."""

    def __init__(self):
        super().__init__()
        self.unet = UNet()
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0), persistent=False)

    def example_batch(self, batch_size, seq_len):
        return {"images": torch.randn(batch_size, 3, SIZE, SIZE)}

    def forward(self, images):
        when = torch.randint(0, 100, (len(images),), device=images.device)
        noise = torch.randn_like(images)
        kept = self.kept[when][:, None, None, None]
        return functional.mse_loss(self.unet(kept.sqrt() * images + (1 - kept).sqrt() * noise, when), noise)


class DitBlock(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation, self.mlp = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, hidden, time):
        shift, scale, gate = self.modulation(time)[:, None].chunk(3, -1)
        return hidden + gate * self.mlp(self.norm(hidden) * (1 + scale) + shift)


class FlowMatching(nn.Module):
    """A DiT whose times come from a logit-normal; labels are dropped for guidance."""

    def __init__(self):
        super().__init__()
        self.patches, self.out = Patches(), nn.Linear(32, 48)
        self.labels, self.time = nn.Embedding(6, 32), nn.Linear(1, 32)
        self.blocks = nn.ModuleList(DitBlock() for _ in range(2))

    example_batch = Images.example_batch

    def forward(self, images, labels):
        noise = torch.randn_like(images)
        when = torch.randn(len(images), device=images.device).sigmoid()
        labels = torch.where(torch.rand(len(labels), device=labels.device) < 0.3, 5, labels)
        mixed = torch.lerp(images, noise, when[:, None, None, None])
        hidden, time = self.patches(mixed), self.time(when[:, None]) + self.labels(labels)
        for block in self.blocks:
            hidden = block(hidden, time)
        wanted = functional.unfold(noise - images, 4, stride=4).transpose(1, 2)
        return functional.mse_loss(self.out(hidden), wanted), hidden.detach()


class Vae(nn.Module):
    """Returns reconstruction, mean and log-variance, and leaves the loss to the trainer."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(48, 16), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 48))

    def example_batch(self, batch_size, seq_len):
        return {"x": torch.rand(batch_size, 48)}

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, -1)
        return self.decode(mean + torch.randn_like(mean) * (log_variance / 2).exp()), mean, log_variance


class VqVae(Vae):
    """A codebook that every rank's data moves, in buffers."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(48, 8)
        self.register_buffer("codes", torch.randn(6, 8))
        self.register_buffer("counts", torch.ones(6))

    def forward(self, x):
        found = self.encode(x)
        index = torch.cdist(found, self.codes).argmin(1)
        quantised = self.codes[index]
        if self.training:
            with torch.no_grad():
                chosen = functional.one_hot(index, 6).float()
                self.counts.mul_(0.9).add_(0.1 * chosen.sum(0))
                self.codes.lerp_(chosen.T @ found / self.counts[:, None], 0.1)
        loss = functional.mse_loss(self.decode(found + (quantised - found).detach()), x)
        return loss + functional.mse_loss(found, quantised.detach()), index


class Critic(Images):
    """Spectral norm: every forward pass in training takes a step of a power iteration."""

    def __init__(self):
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.body = nn.Sequential(norm(nn.Conv2d(3, 8, 3, 2, 1)), nn.LeakyReLU(0.2), nn.Flatten())
        self.head = norm(nn.Linear(8 * 64, 1))

    def forward(self, images, labels):
        return functional.softplus(self.head(self.body(images)).squeeze(1) * (2.0 * (labels > 2) - 1)).mean()


class OldSpectral(Critic):
    """The older way, by hooks."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.LeakyReLU(0.2), nn.Flatten())
        self.head = nn.utils.spectral_norm(nn.Linear(8 * 64, 1))


class Normed(Critic):
    """Weight norm, by parametrization."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.LeakyReLU(0.2), nn.Flatten())
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(8 * 64, 1))


class Contrastive(Images):
    """SimCLR: two augmentations of every image, drawn in forward with torch and with numpy."""

    def __init__(self):
        super().__init__()
        self.body, self.project = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Flatten()), nn.Linear(512, 8)
        self.scale = nn.Parameter(torch.full((1,), math.log(10)))

    def augment(self, images):
        import numpy

        shift = int(numpy.random.randint(0, 4))
        return images.roll(shift, -1) * (0.8 + 0.4 * torch.rand(len(images), 1, 1, 1, device=images.device))

    def forward(self, images, labels):
        one, two = (functional.normalize(self.project(self.body(self.augment(images)))) for _ in range(2))
        logits = one @ two.T * self.scale.exp()
        return functional.cross_entropy(logits, torch.arange(len(images), device=images.device))


class Sound(nn.Module):
    """wav2vec's shape: convolutions, a Gumbel choice of codes, dropout."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv1d(1, 8, 5, 2), nn.GELU(), nn.Conv1d(8, 16, 3, 2), nn.GELU())
        self.choice, self.codes = nn.Linear(16, 6), nn.Parameter(torch.randn(6, 16))
        self.context, self.dropout = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Dropout(0.1)

    def example_batch(self, batch_size, seq_len):
        return {"wave": torch.randn(batch_size, 1, 4 * seq_len)}

    def forward(self, wave):
        hidden = self.convolutions(wave).transpose(1, 2)
        wanted = functional.gumbel_softmax(self.choice(hidden), hard=True) @ self.codes
        return 1 - functional.cosine_similarity(self.context(self.dropout(hidden)), wanted, -1).mean()


class Flow(nn.Module):
    """RealNVP: coupling layers with masks in buffers."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 12)) for _ in range(3))
        self.register_buffer("mask", torch.arange(6) % 2 == 0)

    def example_batch(self, batch_size, seq_len):
        return {"x": torch.randn(batch_size * seq_len, 6)}

    def forward(self, x):
        x, total = x + 0.01 * torch.rand_like(x), 0.0
        for number, net in enumerate(self.nets):
            mask = self.mask if number % 2 else ~self.mask
            shift, scale = net(x * mask).chunk(2, -1)
            x = torch.where(mask, x, x * scale.tanh().exp() + shift)
            total = total + (scale.tanh() * ~mask).sum(-1)
        return (0.5 * x.square().sum(-1) - total).mean()


class Radiance(nn.Module):
    """NeRF's shape: points drawn along rays, encoded and composed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 4)])
        self.frequencies = [2.0**power for power in range(4)]

    def example_batch(self, batch_size, seq_len):
        return {"rays": torch.randn(batch_size * seq_len, 6), "colours": torch.rand(batch_size * seq_len, 3)}

    def forward(self, rays, colours):
        depth = (torch.arange(8, device=rays.device) + torch.rand(len(rays), 8, device=rays.device)) / 8
        points = rays[:, None, :3] + depth[..., None] * rays[:, None, 3:]
        hidden = torch.cat([fn(points * f) for f in self.frequencies for fn in (torch.sin, torch.cos)], -1)
        for layer in self.layers[:-1]:
            hidden = layer(hidden).relu()
        found = self.layers[-1](hidden)
        opaque = 1 - torch.exp(-found[..., 3].relu() / 8)
        clear = torch.cumprod(torch.cat([torch.ones_like(opaque[:, :1]), 1 - opaque[:, :-1]], 1), 1)
        return functional.mse_loss(((opaque * clear)[..., None] * found[..., :3].sigmoid()).sum(1), colours)
