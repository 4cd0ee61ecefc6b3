"""Whose names they are, when they are not those of the architecture.

Sources: state dicts of torchtitan (July 2026), Meta's consolidated files, megatron-core 0.19, nanotron, diffusers 0.42,
PEFT 0.21, GPT-NeoX and llama.cpp as their own code names them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

FACTOR = (
    r"(?:^|[._])(?:lora_|lycoris_|hada_|lokr_|boft_|oft_|dora_scale|vera_|ia3_|randlora_|fourierft_|hra_u|shira_|bone_"
    r"|trainable_tokens_|ln_tuning_|adamss_|beft_|c3a_|deft_|delora_|frod_|glora_|gralora_|hira_|lily_|miss_block|osf_"
    r"|peanut_|poly_lora|poly_router|psoft_|pvera_|road_|supertuning_|tinylora_|unilora_|vblora_|waveft_)"
)
"""Pattern of what stands in the name of a factor: LoRA's family, and kinds that are only recognised."""
_FACTOR = re.compile(FACTOR)


def is_factor(name: str) -> bool:
    """Is this the name of an adapter's own tensor, in the form of any library?"""
    return _FACTOR.search(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class NameOrigin:
    """Something that names tensors its own way."""

    code: str
    names: re.Pattern[str]  # Some of its names match this, and nobody else's
    what: str  # The names are …
    way_on: str  # What to do; {source} and {destination} stand for the paths


def _origin(code: str, names: str, what: str, way_on: str) -> NameOrigin:
    return NameOrigin(code=code, names=re.compile(names), what=what, way_on=way_on)


ADAPTER = "adapter"  # Code of what is an adapter's

FLAT = "FSDP1 flat parameters, whose original names and shapes are not in the files"
FLAT_WAY = "load it with its own FSDP1 code on as many ranks, and save FULL_STATE_DICT or SHARDED_STATE_DICT"

ORIGINS = (
    _origin(
        ADAPTER,
        rf"{FACTOR}|\.base_layer\.|^base_model\.model\.|\.modules_to_save\.|^prompt_(?:encoder|embeddings)\b",
        "those of an adapter (LoRA or its family)",
        "export it: ckpt export-lora {source} DST, or merge it into its base: ckpt merge-lora BASE {source} DST",
    ),
    _origin(
        "optimizer",
        r"(?:^|\.)(?:exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer)(?:\.|$)|^optim(?:izer)?s?\.|^param_groups",
        "those of optimizer state",
        "choose the model's part: `ckpt gather {source} DST --strip-prefix PREFIX`, or with --exclude GLOB",
    ),
    _origin("fsdp1", r"(?:^|\.)_flat_param(?:_\d+)?$|\.flat_param$", "those of FSDP1's flattened parameters", FLAT_WAY),
    _origin(
        "torchtitan",
        r"^layers\.\d+\.(?:attention\.(?:qkv_linear\.)?w[qkvo]\b|attention\.wkv_|feed_forward\.w[123]\b|attention_norm\."
        r"|ffn_norm\.|moe\.(?:experts|router|routed_experts)\b)|^tok_embeddings\.|^mtp_layers\.",
        "torchtitan's or Meta's own",
        "ckpt converts those of Llama, Qwen3, DeepSeek-V3 and gpt-oss where config.json names the model; for others "
        "write a map (--map FILE), torchtitan's convert_to_hf.py or transformers' convert_llama_weights_to_hf.py",
    ),
    _origin(
        "megatron",
        r"(?:^|\.)(?:decoder|encoder)\.layers\.(?:\d+\.)?(?:self_attention\.linear_(?:qkv|proj)"
        r"|mlp\.(?:linear_fc[12]|experts\.(?:linear_fc|local_experts)|router))"
        r"|(?:^|\.)embedding\.word_embeddings\.|language_model\.encoder\.layers\.|(?:^|\.)output_layer\.weight$",
        "Megatron's",
        "ckpt converts those of Llama, Qwen2, Qwen3 and DeepSeek-V3 where config.json names the model; for others use "
        "Megatron-Bridge (AutoBridge.export_ckpt)",
    ),
    _origin(
        "nanotron",
        r"\.pp_block\.",
        "nanotron's",
        "convert them with nanotron (examples/llama/convert_nanotron_to_hf.py)",
    ),
    _origin(
        "gguf",
        r"^blk\.\d+\.(?:attn|ffn)_|^token_embd\.",
        "llama.cpp's (GGUF)",
        "load it with transformers (gguf_file=…) and save it again",
    ),
    _origin(
        "original-diffusion",
        r"(?:^|\.)(?:double_blocks|single_blocks|input_blocks|output_blocks|joint_blocks)\.\d+\.",
        "those of an original diffusion model (ComfyUI's form)",
        "use the assets of that model, or load it with diffusers (from_single_file) and save it again",
    ),
    _origin(
        "diffusers",
        r"(?:^|\.)(?:transformer_blocks|single_transformer_blocks|down_blocks|up_blocks|mid_block)\.",
        "those of a diffusers model",
        "use the assets of that model: --assets DIR with its own config.json",
    ),
    _origin(
        "trl",
        r"^v_head\.|^pretrained_model\.|^value_head\.",
        "those of a model with a value head",
        "leave out the head and strip the prefix of the names: `ckpt gather {source} DST --exclude 'v_head.**' "
        "--strip-prefix PREFIX`",
    ),
    _origin(
        "wrapper",
        r"(?:^|\.)(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\.",
        "those of a wrapped model",
        "strip the wrappers: `ckpt gather {source} DST --strip-prefix auto`, or PREFIX for auto",
    ),
)


def origins_of(names: Collection[str]) -> tuple[NameOrigin, ...]:
    """Return whose names they are, those with most names first; empty when nobody's that is known."""
    counts = {origin.code: sum(1 for name in names if origin.names.search(name)) for origin in ORIGINS}
    found = [origin for origin in ORIGINS if counts[origin.code]]
    return tuple(sorted(found, key=lambda origin: -counts[origin.code]))


def is_adapter(names: Collection[str]) -> bool:
    """Do all names belong to an adapter?"""
    adapter = next(origin for origin in ORIGINS if origin.code == ADAPTER)
    return bool(names) and all(adapter.names.search(name) for name in names)


def common_prefix(names: Collection[str]) -> tuple[str, ...]:
    """Return what may stand before all names, with its dot: the longest first."""
    split = [name.split(".")[:-1] for name in names]
    shared: list[str] = []
    for components in zip(*split, strict=False):
        if len(set(components)) > 1:
            break
        shared.append(components[0])
    return tuple(".".join(shared[:end]) + "." for end in range(len(shared), 0, -1))
