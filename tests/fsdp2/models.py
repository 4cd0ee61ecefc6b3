"""Toy models as they are trained on ranks, and one training loop for all of them."""

from __future__ import annotations

import torch
import toys

# 61 and 63 rows: an uneven cut on two ranks and on four.
KINDS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"vocab_size": 63, "tie_word_embeddings": True}),
    "llama-one-head": ("llama", {"num_key_value_heads": 1}),
    "qwen3-moe": ("qwen3-moe", {"vocab_size": 61}),
    "llava": ("llava", {"text_config": toys.KINDS["llava"][2]["text_config"] | {"vocab_size": 61}}),
    "bert": ("bert", {"vocab_size": 61, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "t5": ("t5", {"vocab_size": 61, "dropout_rate": 0.0}),
}
"""Kind of toy, and what is other than there: no dropout."""


def build(kind, device="meta"):
    """A model of an architecture; on the CPU with the same random weights every time."""
    name, settings = KINDS[kind]
    with torch.device(device):
        return toys.build(name, **settings, attn_implementation="eager").train()


def batch_of(kind, step, rank=0, size=2):
    """The inputs of a step for one data-parallel rank; labels included."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(1, 59, (size, 8), generator=draw)
    if kind == "llava":
        tokens[:, 1:5] = 60
        pixels = torch.randn(size, 3, 8, 8, generator=draw)
        return {"input_ids": tokens, "pixel_values": pixels, "labels": tokens.clone()}
    return {"input_ids": tokens, "labels": tokens.clone()}


def reference(kind, num_steps, num_ranks, lr=1e-2):
    """Losses (by step and rank), gradients of the first step, and the weights after the last, unsharded."""
    model = build(kind, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses, gradients = [], {}
    for step in range(num_steps):
        row = []
        for rank in range(num_ranks):
            loss = model(**batch_of(kind, step, rank)).loss
            (loss / num_ranks).backward()
            row.append(loss.item())
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(row)
    return losses, gradients, {name: p.detach().clone() for name, p in model.named_parameters()}
