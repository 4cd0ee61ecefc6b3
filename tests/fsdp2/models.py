"""Small models of real architectures, with random weights, and one training loop for all of them."""

from __future__ import annotations

import torch


def config_of(kind):
    """A tiny config of an architecture; imports transformers."""
    import transformers as t

    text = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 61,
        "max_position_embeddings": 64,
    }
    if kind in ("llama", "llama-tied"):
        # 63 rows: an uneven cut on two ranks and on four.
        return t.LlamaConfig(
            **text | {"vocab_size": 64 if kind == "llama" else 63},
            num_key_value_heads=2,
            tie_word_embeddings=kind == "llama-tied",
        )
    if kind == "llama-one-head":
        return t.LlamaConfig(**text | {"vocab_size": 64}, num_key_value_heads=1)
    if kind == "qwen3-moe":
        return t.Qwen3MoeConfig(
            **text, num_key_value_heads=2, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=8
        )
    if kind == "llava":
        return t.LlavaConfig(
            text_config=t.LlamaConfig(**text, num_key_value_heads=2),
            vision_config=t.CLIPVisionConfig(
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=8,
                patch_size=4,
                projection_dim=16,
            ),
            image_token_index=60,
            image_seq_length=4,
        )
    if kind == "bert":
        return t.BertConfig(**text)
    if kind == "t5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 61}
        return t.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    raise ValueError(kind)


def class_of(kind):
    """The model class of an architecture."""
    import transformers as t

    name = {
        "llama": "LlamaForCausalLM",
        "llama-tied": "LlamaForCausalLM",
        "llama-one-head": "LlamaForCausalLM",
        "qwen3-moe": "Qwen3MoeForCausalLM",
        "llava": "LlavaForConditionalGeneration",
        "bert": "BertForMaskedLM",
        "t5": "T5ForConditionalGeneration",
    }[kind]
    return getattr(t, name)


def build(kind, device="meta"):
    """A model of an architecture; on the CPU with the same random weights every time."""
    config = config_of(kind)
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    with torch.device(device):
        model = class_of(kind)(config)
    return model.train()


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
