"""Adapters of language models, as PEFT saves them and as tools spoil them, for vLLM."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Damage = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]
_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "tie_word_embeddings": False,
}
_QV = {"r": 4, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]}
_EXPERT = ["experts.down_proj", "experts.gate_up_proj"]
_EXPERTS = {"r": 4, "lora_alpha": 3, "target_modules": []}
_PATTERNS = {"rank_pattern": {"layers.1.self_attn.q_proj": 8}, "alpha_pattern": {"v_proj": 5}}


def _renamed(old: str, new: str) -> Damage:
    def damage(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace(old, new)] = tensors.pop(name)

    return damage


def _said(**settings: Any) -> Damage:
    return lambda config, _: config.update(settings)


ADAPTERS: Mapping[str, tuple[str, str, dict[str, Any], Damage | None]] = {
    "LoRA of q and v": ("Llama", "Lora", _QV, None),
    "LoRA of every linear layer": ("Llama", "Lora", {"r": 4, "lora_alpha": 3, "target_modules": "all-linear"}, None),
    "rsLoRA": ("Llama", "Lora", _QV | {"use_rslora": True}, None),
    "gaussian start": ("Llama", "Lora", _QV | {"init_lora_weights": "gaussian"}, None),
    "rank_pattern": ("Llama", "Lora", _QV | {"rank_pattern": _PATTERNS["rank_pattern"]}, None),
    "rank_pattern, alpha_pattern, rsLoRA": ("Llama", "Lora", _QV | _PATTERNS | {"use_rslora": True}, None),
    "rank 24": ("Llama", "Lora", _QV | {"r": 24}, None),
    "embed_tokens and lm_head": ("Llama", "Lora", _QV | {"target_modules": ["embed_tokens", "lm_head"]}, None),
    "attention of a MoE": ("Qwen3Moe", "Lora", _QV, None),
    "fused experts of a MoE, one parameter": ("Qwen3Moe", "Lora", _EXPERTS | {"target_parameters": _EXPERT[:1]}, None),
    "fused experts of a MoE": ("Qwen3Moe", "Lora", _EXPERTS | {"target_parameters": _EXPERT}, None),
    "modules_to_save: lm_head": ("Llama", "Lora", _QV | {"modules_to_save": ["lm_head"]}, None),
    "trainable_token_indices": ("Llama", "Lora", _QV | {"trainable_token_indices": [3, 5]}, None),
    "DoRA": ("Llama", "Lora", _QV | {"use_dora": True}, None),
    "lora_bias": ("Llama", "Lora", _QV | {"lora_bias": True}, None),
    "PiSSA": ("Llama", "Lora", _QV | {"init_lora_weights": "pissa"}, None),
    "layer_replication": ("Llama", "Lora", _QV | {"layer_replication": [[0, 2], [1, 2]]}, None),
    "LoHa": ("Llama", "LoHa", {"r": 2, "alpha": 3, "target_modules": ["q_proj"]}, None),
    "bias: null": ("Llama", "Lora", _QV, _said(bias=None)),
    "lora_alpha: 0": ("Llama", "Lora", _QV, _said(lora_alpha=0)),
    "names of another class": ("Llama", "Lora", _QV, _renamed("model.model.", "model.language_model.model.")),
    "prefix lost": ("Llama", "Lora", _QV, _renamed("base_model.model.", "")),
    "prefix lost to the layers": ("Llama", "Lora", _QV, _renamed("base_model.model.model.", "")),
    "names of a live model": ("Llama", "Lora", _QV, _renamed("lora_A.weight", "lora_A.default.weight")),
    "a rank that is too small": ("Llama", "Lora", _QV, _said(r=2)),
}
"""Name → model, PEFT's type, its settings, and what happened to the directory on its way."""


def make(name: str, root: Path) -> tuple[Path, Path, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Save a base and an adapter; returns both directories, the base's weights and the trained ones."""
    import peft

    kind, family, settings, damage = ADAPTERS[name]
    base, directory = root / f"{kind}-{'experts' if kind == 'Qwen3Moe' else 'base'}", root / name.replace(" ", "-")
    if not base.exists():
        model(kind).save_pretrained(base)
    plain = type(model(kind)).from_pretrained(base)
    weights = {each: tensor.clone() for each, tensor in plain.state_dict().items()}
    with warnings.catch_warnings(action="ignore"):
        adapted = peft.get_peft_model(plain, getattr(peft, f"{family}Config")(**settings))
        torch.manual_seed(1)
        with torch.no_grad():
            for factor in adapted.parameters():
                if factor.requires_grad:
                    factor.add_(torch.randn_like(factor), alpha=0.2)
        adapted.save_pretrained(directory)
        try:
            meant = dict(adapted.merge_and_unload().state_dict())
        except (RuntimeError, ValueError):  # it has no place in the weights of the plain base: none are right
            meant = {each: tensor + 1 for each, tensor in weights.items()}
    if damage is not None:
        config, file = directory / "adapter_config.json", directory / "adapter_model.safetensors"
        said, tensors = json.loads(config.read_text()), load_file(file)
        damage(said, tensors)
        config.write_text(json.dumps(said))
        save_file(tensors, file)
    return base, directory, weights, meant


def model(kind: str) -> Any:
    """Return a toy language model."""
    import transformers

    more = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12} if kind == "Qwen3Moe" else {}
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**_SIZES, **more))
