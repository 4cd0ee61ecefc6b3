"""The model of a smoke run that names none: a small transformer, and the shape of what a factory returns.

A factory is called without arguments, on the meta device or on the CPU, and returns a module. Its forward takes a
batch (as keyword arguments, or as one dict) and returns a loss, or something that has one. The module may have

- `example_batch(batch_size, seq_len)`: a dict of tensors, the same for the same random seed;
- `fsdp_loss`: where the loss is in what forward returns, when that is neither `.loss` nor the only scalar;
- `fsdp_blocks`: what `shard_model` takes as `blocks`;
- `fsdp_forward_methods`: methods to register, as `shard_model` takes them;
- `fsdp_tp_plan`: module names → tensor-parallel styles.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256  # Tokens that the built-in model knows
_WIDTH = 64
_HEADS = 4
_LAYERS = 3


class Layer(nn.Module):
    """Attention and a feed-forward network, each behind a norm. Shapes: B batch, S tokens, D width."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(_WIDTH)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)
        self.mlp_norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [B, S, D] for [B, S, D]."""
        batch, tokens, _ = hidden.shape
        heads = self.qkv(self.attention_norm(hidden)).view(batch, tokens, 3, _HEADS, _WIDTH // _HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, tokens, _WIDTH))
        output: torch.Tensor = hidden + self.down(functional.gelu(self.up(self.mlp_norm(hidden))))
        return output


class SmallTransformer(nn.Module):
    """A causal language model of some 0.2 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, _WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(_LAYERS))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting each token from those before it; `input_ids` is [B, S]."""
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), input_ids[:, 1:].flatten())

    def example_batch(self, batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
        """Return random tokens."""
        return {"input_ids": torch.randint(0, VOCABULARY, (batch_size, seq_len))}
