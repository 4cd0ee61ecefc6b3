"""Tiny models of many kinds, built as users have them: a directory of config.json and safetensors, and an input."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

Inputs = dict[str, torch.Tensor]
IDS = torch.arange(1, 9)[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A model that adapters are made for."""

    build: Callable[[], nn.Module]
    """With random weights."""
    inputs: Callable[[], Inputs]
    """Of its forward."""
    published: str = ""
    """The part of it that its base directory holds; all of it by default."""

    def save(self, directory: Path) -> None:
        """Write it as `save_pretrained` does."""
        model = self.build()
        part = getattr(model, self.published) if self.published else model
        part.save_pretrained(directory)

    def outputs(self, model: nn.Module) -> torch.Tensor:
        """Return what the model computes."""
        with torch.no_grad():
            found = model.eval()(**self.inputs())
        first = found[0] if isinstance(found, tuple) else next(v for v in found.values() if v is not None)
        return first if isinstance(first, torch.Tensor) else first[0]


def _ids() -> Inputs:
    return {"input_ids": IDS.clone()}


def _pairs() -> Inputs:
    return {"input_ids": IDS.clone(), "decoder_input_ids": IDS[:, :4].clone()}


def _pixels() -> Inputs:
    torch.manual_seed(3)
    return {"pixel_values": torch.randn(1, 3, 16, 16)}


def _speech() -> Inputs:
    torch.manual_seed(3)
    return {"input_features": torch.randn(1, 8, 20), "decoder_input_ids": IDS[:, :4].clone()}


def _sound() -> Inputs:
    return {"input_values": torch.randn(1, 400, generator=torch.Generator().manual_seed(0))}


def _both() -> Inputs:
    return _ids() | _pixels()


_LLM = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 40, "max_position_embeddings": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_ENCODER = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40,
    "max_position_embeddings": 32,
}  # fmt: skip
_IMAGE = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
_SPEECH = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


def _of(architecture: str, config: str, /, inputs: Callable[[], Inputs] = _ids, **settings: object) -> World:
    def build() -> nn.Module:
        import transformers

        torch.manual_seed(0)
        model = getattr(transformers, architecture)(getattr(transformers, config)(**settings))
        with torch.no_grad():  # what is as small as at first would hide what is lost
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        return model

    return World(build=build, inputs=inputs)


_WHOLE: dict[str, World] = {
    "phi3": _of("Phi3ForCausalLM", "Phi3Config", **_LLM | {"rope_scaling": None}),
    "gemma2": _of("Gemma2ForCausalLM", "Gemma2Config", **_LLM),
    "gemma3": _of("Gemma3ForCausalLM", "Gemma3TextConfig", **_LLM),
    "mistral": _of("MistralForCausalLM", "MistralConfig", **_LLM),
    "mixtral": _of("MixtralForCausalLM", "MixtralConfig", **_LLM, num_local_experts=3),
    "qwen3": _of("Qwen3ForCausalLM", "Qwen3Config", **_LLM),
    "qwen3-moe": _of(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **_LLM, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=12,
    ),
    "gpt-oss": _of("GptOssForCausalLM", "GptOssConfig", **_LLM, num_local_experts=3, num_experts_per_tok=2),
    "gpt2": _of("GPT2LMHeadModel", "GPT2Config", n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=32),
    "gpt-neox": _of("GPTNeoXForCausalLM", "GPTNeoXConfig", **_ENCODER),
    "falcon": _of(
        "FalconForCausalLM", "FalconConfig", hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=40,
    ),
    "opt": _of(
        "OPTForCausalLM", "OPTConfig", hidden_size=16, word_embed_proj_dim=16, ffn_dim=24, num_hidden_layers=2,
        num_attention_heads=2, vocab_size=40, max_position_embeddings=32,
    ),
    "bloom": _of("BloomForCausalLM", "BloomConfig", hidden_size=16, n_layer=2, n_head=2, vocab_size=40),
    "olmo2": _of("Olmo2ForCausalLM", "Olmo2Config", **_LLM),
    "mamba": _of("MambaForCausalLM", "MambaConfig", hidden_size=16, state_size=4, num_hidden_layers=2, vocab_size=40),
    "t5": _of(
        "T5ForConditionalGeneration", "T5Config", _pairs, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
        vocab_size=40,
    ),
    "bart": _of("BartForConditionalGeneration", "BartConfig", _pairs, **_SPEECH, max_position_embeddings=32),
    "whisper": _of(
        "WhisperForConditionalGeneration", "WhisperConfig", _speech, **_SPEECH, num_mel_bins=8, max_source_positions=10,
        max_target_positions=16, suppress_tokens=None, begin_suppress_tokens=None,
    ),
    "bert": _of("BertForSequenceClassification", "BertConfig", **_ENCODER),
    "deberta": _of("DebertaV2ForTokenClassification", "DebertaV2Config", **_ENCODER),
    "wav2vec2": _of(
        "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", _sound, hidden_size=16, intermediate_size=24,
        num_hidden_layers=1, num_attention_heads=2, vocab_size=8, conv_dim=(8, 8), conv_kernel=(4, 4),
        conv_stride=(2, 2), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, num_feat_extract_layers=2,
        feat_extract_norm="layer",
    ),
    "vit": _of("ViTForImageClassification", "ViTConfig", _pixels, **_IMAGE),
    "siglip": _of("SiglipVisionModel", "SiglipVisionConfig", _pixels, **_IMAGE),
    "dinov2": _of("Dinov2ForImageClassification", "Dinov2Config", _pixels, **_IMAGE),
    "clip": _of(
        "CLIPModel", "CLIPConfig", _both, text_config=_ENCODER | {"eos_token_id": 8}, vision_config=_IMAGE,
        projection_dim=8,
    ),
}  # fmt: skip
_CLIP = _IMAGE | {"model_type": "clip_vision_model"}
_SIGLIP = _IMAGE | {"model_type": "siglip_vision_model", "projection_dim": 16}
_MROPE = _LLM | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}}
_QWEN_IMAGE = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "out_hidden_size": 16,
}  # fmt: skip
_MLLAMA_IMAGE = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2,
    "image_size": 16, "patch_size": 8, "vision_output_dim": 32, "max_num_tiles": 1, "intermediate_layers_indices": [0],
    "supported_aspect_ratios": [[1, 1]],
}  # fmt: skip


def _two(kind: str, text: str, image: Mapping[str, object], **settings: object) -> World:
    """Return a model with a language model inside, whose names on disk are not those of the live model."""
    settings = {"image_token_index": 39, "text_config": _LLM | {"model_type": text}, "vision_config": image} | settings
    return _of(f"{kind}ForConditionalGeneration", f"{kind}Config", **settings)


_IMAGE_TEXT: dict[str, World] = {
    "llava": _two("Llava", "llama", _CLIP),
    "paligemma": _two("PaliGemma", "gemma", _SIGLIP, projection_dim=16, hidden_size=16),
    "gemma3-images": _two("Gemma3", "gemma3_text", _SIGLIP, mm_tokens_per_image=4),
    "mistral3": _two("Mistral3", "mistral", _IMAGE | {"model_type": "pixtral", "head_dim": 8}),
    "internvl": _two("InternVL", "qwen2", _IMAGE | {"image_size": [16, 16], "patch_size": [8, 8]}),
    "mllama": _two("Mllama", "mllama_text_model", _MLLAMA_IMAGE, text_config=_LLM | {"cross_attention_layers": [1]}),
    "qwen2.5-vl": _two("Qwen2_5_VL", "", _QWEN_IMAGE | {"fullatt_block_indexes": [0]}, text_config=_MROPE),
    "qwen3-vl": _two(
        "Qwen3VL",
        "",
        _QWEN_IMAGE | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        text_config=_MROPE,
    ),
}
LANGUAGE: Mapping[str, World] = (
    _WHOLE
    | _IMAGE_TEXT
    | {
        "gpt2-published": replace(_WHOLE["gpt2"], published="transformer"),
        "bert-published": replace(_WHOLE["bert"], published="bert"),
        "qwen3-moe-mixed": _of(
            "Qwen3MoeForCausalLM",
            "Qwen3MoeConfig",
            **_LLM,
            num_experts=3,
            num_experts_per_tok=2,
            moe_intermediate_size=12,
            mlp_only_layers=[0],
        ),
    }
)
"""Models of transformers; "published" ones lie without their heads on the disk, as on the hub."""


# Image and video models of diffusers', of families that ckpt has no tables of names for

_MODELS = tomllib.loads((Path(__file__).parent / "world_models.toml").read_text())


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _picture(*shape: int, text: int) -> Inputs:
    return {
        "hidden_states": _random(*shape),
        "encoder_hidden_states": _random(1, 4, text),
        "timestep": torch.tensor([5]),
    }


_INPUTS: Mapping[str, Callable[[], Inputs]] = {
    "sd15": lambda: {
        "sample": _random(1, 4, 8, 8), "timestep": torch.tensor([5]), "encoder_hidden_states": _random(1, 4, 16),
    },
    "sana": lambda: _picture(1, 4, 8, 8, text=8),
    "wan": lambda: _picture(1, 4, 2, 8, 8, text=16),
    "ltx": lambda: _picture(1, 8, 4, text=16) | {
        "encoder_attention_mask": torch.ones(1, 4), "num_frames": 2, "height": 2, "width": 2,
    },
    "cogvideox": lambda: _picture(1, 2, 4, 8, 8, text=8),
    "hunyuan-video": lambda: _picture(1, 4, 2, 4, 4, text=16) | {
        "encoder_attention_mask": torch.ones(1, 4), "pooled_projections": _random(1, 8),
        "guidance": torch.tensor([1000.0]),
    },
    "lumina2": lambda: _picture(1, 4, 8, 8, text=16) | {"encoder_attention_mask": torch.ones(1, 4, dtype=torch.bool)},
    "qwen-image": lambda: _picture(1, 16, 16, text=16) | {
        "encoder_hidden_states_mask": torch.ones(1, 4), "timestep": torch.tensor([0.5]), "img_shapes": [(1, 4, 4)],
    },
    "z-image": lambda: {"x": [_random(4, 1, 4, 4)], "t": torch.tensor([0.5]), "cap_feats": [_random(4, 16)]},
    "hidream": lambda: {
        "hidden_states": _random(1, 4, 8, 8), "encoder_hidden_states_t5": _random(1, 4, 16),
        "encoder_hidden_states_llama3": _random(4, 1, 4, 16), "pooled_embeds": _random(1, 8),
        "timesteps": torch.tensor([5]),
    },
}  # fmt: skip
_MIXINS = {
    "sd15": "StableDiffusion", "ltx": "LTXVideo", "cogvideox": "CogVideoX", "hunyuan-video": "HunyuanVideo",
    "qwen-image": "QwenImage", "z-image": "ZImage", "hidream": "HiDreamImage",
}  # fmt: skip


def _of_diffusers(name: str) -> World:
    def build() -> nn.Module:
        import diffusers

        torch.manual_seed(0)
        settings = dict(_MODELS[name])
        return getattr(diffusers, settings.pop("class"))(**settings)

    return World(build=build, inputs=_INPUTS[name])


IMAGE: Mapping[str, tuple[str, World]] = {
    name: (f"{_MIXINS.get(name, name.title())}LoraLoaderMixin", _of_diffusers(name)) for name in _MODELS
}
"""Family → (the mixin of its pipelines, its model)."""
