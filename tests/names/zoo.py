"""Small models of every architecture of transformers that builds small: by what configs commonly call their sizes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers

from ckpt_tools.checkpoint.formats._json import parse_json
from ckpt_tools.preflight.shrink_run import cut_depth

_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForImageClassification")
_MOST_PARAMETERS = 6_000_000
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "n_embed", "embedding_size", "lru_width", "emb_dim")
_INNER = ("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "projection_dim")
_HEAD_COUNTS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
    *("num_experts", "num_local_experts", "n_routed_experts", "linear_num_value_heads"),
)
_SIZES: dict[str, object] = {
    **dict.fromkeys(_WIDTHS, 32),
    **dict.fromkeys(_INNER, 64),
    **dict.fromkeys(_HEAD_COUNTS, 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "top_k", "linear_num_key_heads"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("head_dim", "d_kv", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "state_size"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "patch_size", "laurel_rank"), 8),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "bos_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 99),
    "hidden_size_per_layer_input": 16,
    "image_size": 32,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "sliding_window": 16,
}


def names() -> list[str]:
    """Return the classes with a head."""
    return [name for name in all_names() if name.endswith(_HEADS)]


def all_names() -> list[str]:
    """Return every model class."""
    found = [name for name in sorted(dir(transformers)) if not name.startswith(("Auto", "Rag", "PreTrained"))]
    kinds = {name: getattr(transformers, name, None) for name in found}
    return [
        name
        for name, kind in kinds.items()
        if isinstance(kind, type)
        and issubclass(kind, transformers.PreTrainedModel)
        and kind.config_class is not None
        and not name.endswith("PreTrainedModel")
    ]


def part(at: int, slices: int, *, whole: bool, of: int) -> list[str]:
    """Return the classes of one of `slices`: all, or without `whole` one `of` so many."""
    return names()[at::slices] if whole else names()[at :: slices * of]


def small_config(name: str) -> dict[str, Any] | None:
    """Return the content of a config.json, None where nothing small builds."""
    try:
        shrunk, cut = _default(name), _default(name, shrink=False)
    except Exception:  # every class checks its config in its own way
        return None
    for candidate in (shrunk, cut):
        try:
            model = build(name, candidate, "meta")
        except Exception:
            continue
        if sum(one.numel() for one in model.parameters()) <= _MOST_PARAMETERS:
            return candidate | {"architectures": [name]}
    return None


def _default(name: str, *, shrink: bool = True) -> dict[str, Any]:
    """Return a class's default config, cut to a few layers and small sizes."""
    text = getattr(transformers, name).config_class().to_json_string(use_diff=False)
    cut = cut_depth(parse_json(text.encode(), what="the config", where=None, infinite=True))
    return _shrunk(cut) if shrink else cut


def build(name: str, config: dict[str, Any], device: str) -> transformers.PreTrainedModel:
    """Build a model, with weights by `init_weights` where the device is no meta one."""
    kind = getattr(transformers, name)
    with torch.device(device):
        return kind(kind.config_class.from_dict(copy.deepcopy(config)))


def save(name: str, directory: Path, values: dict[str, Any] | None = None) -> transformers.PreTrainedModel | None:
    """Build a model with random weights and save it as the hub has it; None where a class cannot be built or saved."""
    config = small_config(name) if values is None else _default(name) | values | {"architectures": [name]}
    try:
        model = None if config is None else build(name, config, "cpu")
        if model is not None:
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.is_floating_point():
                        parameter.normal_()
            model.save_pretrained(directory)
    except Exception:  # every class refuses in its own way
        return None
    return model


def _shrunk(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _shrunk(value)
        if isinstance(value, dict)
        else _SIZES[key]
        if key in _SIZES and type(value) is type(_SIZES[key])
        else value
        for key, value in values.items()
    }
