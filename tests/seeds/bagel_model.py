"""BAGEL in small: a language model with two forms of forward, a vision tower, and a frozen image autoencoder."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, HEADS, VOCAB, PATCH, IMAGE = 16, 2, 32, 4, 8


class Rotary(nn.Module):
    """Angles of the positions: a buffer that no checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(WIDTH // HEADS // 2), persistent=False)
        self.init_buffers()

    def init_buffers(self):
        self.inv_freq.copy_(1.0 / 100.0 ** (torch.arange(len(self.inv_freq)) / len(self.inv_freq)))

    def forward(self, x):
        angles = torch.arange(x.shape[-2])[:, None] * self.inv_freq
        one, two = x.chunk(2, -1)
        return torch.cat([one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()], -1)


class DecoderLayer(nn.Module):
    """A layer that is entered by forward, which chooses."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, h, rotary, **options):
        if self.training:
            return self.forward_train(h, rotary, **options)
        return self.forward_inference(h, rotary, **options)

    def forward_train(self, h, rotary):
        return self.attend(h, rotary, causal=True)

    def forward_inference(self, h, rotary, causal=True):
        return self.attend(h, rotary, causal=causal)

    def attend(self, h, rotary, causal):
        x = self.norm(h)
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        mixed = nn.functional.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=causal)
        h = h + self.o_proj(mixed.transpose(1, 2).flatten(2))
        return h + self.mlp(h)


class Decoder(nn.Module):
    def __init__(self, layer=DecoderLayer):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.rotary = Rotary()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, h, **options):
        for layer in self.layers:
            h = layer(h, self.rotary, **options)
        return self.norm(h)


class LanguageModel(nn.Module):
    def __init__(self, decoder):
        super().__init__()
        self.model = decoder
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)


class VisionBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class VisionTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.blocks = nn.ModuleList(VisionBlock() for _ in range(2))

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return x


class Autoencoder(nn.Module):
    """Images to latents and back; frozen."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.decoder = nn.ConvTranspose2d(WIDTH, 3, PATCH, PATCH)

    def encode(self, images):
        return self.encoder(images).flatten(2).transpose(1, 2)

    def decode(self, latents):
        side = IMAGE // PATCH
        return self.decoder(latents.transpose(1, 2).unflatten(2, (side, side)))


class Bagel(nn.Module):
    """Text and images in one sequence; a loss on the text, and one on the latents."""

    decoder = Decoder
    layer = DecoderLayer

    def __init__(self):
        super().__init__()
        self.language_model = LanguageModel(self.decoder(self.layer))
        self.vit_model = VisionTower()
        self.connector = nn.Linear(WIDTH, WIDTH)
        self.vae = Autoencoder()
        self.llm2vae = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens, images):
        text = self.language_model.model.embed_tokens(tokens)
        seen = self.connector(self.vit_model(images))
        h = self.language_model.model(torch.cat([seen, text], 1))
        count = seen.shape[1]
        logits = self.language_model.lm_head(h[:, count:-1])
        text_loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        with torch.no_grad():
            latents = self.vae.encode(images)
        return text_loss + (self.llm2vae(h[:, :count]) - latents).square().mean()

    def forward_cache_update_text(self, tokens):
        return self.language_model.model(self.language_model.model.embed_tokens(tokens))

    def generate_image(self, context, steps=2):
        count = (IMAGE // PATCH) ** 2
        latents = torch.zeros(context.shape[0], count, WIDTH)
        for _ in range(steps):
            h = self.language_model.model(torch.cat([context, latents], 1), causal=False)
            latents = latents + self.llm2vae(h[:, -count:])
        return self.vae.decode(latents)


def batch(step, rank=0):
    """Inputs of a step for one rank."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return {
        "tokens": torch.randint(0, VOCAB, (2, 6), generator=draw),
        "images": torch.randn(2, 3, IMAGE, IMAGE, generator=draw),
    }


def build(kind=Bagel, device="meta"):
    """The model; on the CPU with the same random weights every time."""
    torch.manual_seed(0)
    with torch.device(device):
        return kind()
