"""Small models of real architectures by short names, with the same random weights every time.

A test that needs other sizes says which: `toys.build("llama", num_hidden_layers=1)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_IMAGE = TEXT | {"image_size": 8, "patch_size": 4}
TEXT |= {"vocab_size": 64, "max_position_embeddings": 64}
_LLAMA = TEXT | {"num_key_value_heads": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
_CLIP = _IMAGE | {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "projection_dim": 16}
KINDS: dict[str, tuple[str, str, Mapping[str, object]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    "llama-bare": ("LlamaModel", "LlamaConfig", _LLAMA),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _LLAMA),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _LLAMA | _EXPERTS),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", _LLAMA | {"num_local_experts": 4}),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}),
    "bert": ("BertForMaskedLM", "BertConfig", TEXT),
    "bert-classifier": ("BertForSequenceClassification", "BertConfig", TEXT | {"num_labels": 3}),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5 | {"decoder_start_token_id": 0}),
    "vit": ("ViTForImageClassification", "ViTConfig", _IMAGE | {"num_labels": 3}),
    "llava": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": _LLAMA | {"model_type": "llama"},
            "vision_config": _CLIP | {"model_type": "clip_vision_model"},
            "image_token_index": 60,
            "image_seq_length": 4,
        },
    ),
}
"""Class, class of its configuration, sizes."""


def config_of(kind: str, **settings: object) -> Any:
    """The configuration of a kind of model, with what `settings` changes."""
    import transformers

    _, name, sizes = KINDS[kind]
    return getattr(transformers, name)(**{**sizes, **settings})


def build(kind: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **settings: object) -> Any:
    """A model of transformers, in evaluation."""
    import transformers

    torch.manual_seed(seed)
    return getattr(transformers, KINDS[kind][0])(config_of(kind, **settings)).to(dtype).eval()


def save(kind: str, directory: Path, **settings: Any) -> Path:
    """Write a model as `save_pretrained` does; return the directory."""
    build(kind, **settings).save_pretrained(directory)
    return directory
