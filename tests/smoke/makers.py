"""Small models as `save_pretrained` writes them."""

from __future__ import annotations

import json
from pathlib import Path

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}


def make(directory, *kinds):
    """Write each kind of model into a directory of its name."""
    import torch
    import transformers as t

    builders = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**TEXT, num_key_value_heads=2)),
        # Dropout as the paper has it: a smoke run has to turn it off to compare anything.
        "bert": lambda: t.BertForMaskedLM(t.BertConfig(**TEXT, hidden_dropout_prob=0.1)),
        "t5": lambda: t.T5ForConditionalGeneration(
            t.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64, decoder_start_token_id=0)
        ),
        "moe": lambda: t.Qwen3MoeForCausalLM(
            t.Qwen3MoeConfig(
                **TEXT,
                num_key_value_heads=2,
                moe_intermediate_size=16,
                num_experts=4,
                num_experts_per_tok=2,
                head_dim=8,
            )
        ),
        "classifier": lambda: t.BertForSequenceClassification(t.BertConfig(**TEXT, num_labels=3)),
        "bare": lambda: t.LlamaModel(t.LlamaConfig(**TEXT, num_key_value_heads=2)).to(torch.bfloat16),
        "llava": lambda: t.LlavaForConditionalGeneration(
            t.LlavaConfig(
                text_config=t.LlamaConfig(**TEXT, num_key_value_heads=2),
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
        ),
        "vit": lambda: t.ViTForImageClassification(
            t.ViTConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                image_size=8,
                patch_size=4,
                num_labels=5,
            )
        ),
    }
    for kind in kinds or builders:
        torch.manual_seed(0)
        builders[kind]().save_pretrained(f"{directory}/{kind}")


def load_by_dcp(model, checkpoint, works):
    """Load a checkpoint into a live transformers model as a trainer would: `works` says whether that must succeed."""
    import pytest
    import torch.distributed.checkpoint as dcp
    import transformers
    from torch.distributed.checkpoint.api import CheckpointException

    names = json.loads((Path(model) / "config.json").read_text())["architectures"]
    live = getattr(transformers, names[0]).from_pretrained(model)
    state = live.state_dict()
    if works:
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
        return
    with pytest.raises(CheckpointException, match="Missing key"):
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
