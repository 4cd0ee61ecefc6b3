"""Tiny image and video models of diffusers, of families that ckpt has no tables of names for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from adapters.world_models import Inputs, World
from torch import nn


def _of(name: str, inputs: Callable[[], Inputs], **settings: object) -> World:
    def build() -> nn.Module:
        import diffusers

        torch.manual_seed(0)
        return getattr(diffusers, name)(**settings)

    return World(build=build, inputs=inputs)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _picture(*shape: int, text: int, more: Callable[[], Inputs] = dict) -> Callable[[], Inputs]:
    return lambda: {
        "hidden_states": _random(*shape),
        "encoder_hidden_states": _random(1, 4, text),
        "timestep": torch.tensor([5]),
        **more(),
    }


IMAGE: Mapping[str, tuple[str, World]] = {
    "sd15": (
        "StableDiffusionLoraLoaderMixin",
        _of(
            "UNet2DConditionModel",
            lambda: {
                "sample": _random(1, 4, 8, 8),
                "timestep": torch.tensor([5]),
                "encoder_hidden_states": _random(1, 4, 16),
            },
            block_out_channels=(8, 16),
            layers_per_block=1,
            sample_size=8,
            norm_num_groups=2,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=16,
            attention_head_dim=4,
        ),
    ),
    "sana": (
        "SanaLoraLoaderMixin",
        _of(
            "SanaTransformer2DModel",
            _picture(1, 4, 8, 8, text=8),
            in_channels=4,
            out_channels=4,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=4,
            num_cross_attention_heads=2,
            cross_attention_head_dim=4,
            cross_attention_dim=8,
            caption_channels=8,
            sample_size=8,
        ),
    ),
    "wan": (
        "WanLoraLoaderMixin",
        _of(
            "WanTransformer3DModel",
            _picture(1, 4, 2, 8, 8, text=16),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=16,
            freq_dim=16,
            ffn_dim=32,
            num_layers=2,
        ),
    ),
    "ltx": (
        "LTXVideoLoraLoaderMixin",
        _of(
            "LTXVideoTransformer3DModel",
            lambda: {
                "hidden_states": _random(1, 8, 4),
                "encoder_hidden_states": _random(1, 4, 16),
                "timestep": torch.tensor([5]),
                "encoder_attention_mask": torch.ones(1, 4),
                "num_frames": 2,
                "height": 2,
                "width": 2,
            },
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            cross_attention_dim=16,
            num_layers=2,
            caption_channels=16,
        ),
    ),
    "cogvideox": (
        "CogVideoXLoraLoaderMixin",
        _of(
            "CogVideoXTransformer3DModel",
            _picture(1, 2, 4, 8, 8, text=8),
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=4,
            time_embed_dim=4,
            text_embed_dim=8,
            num_layers=2,
            sample_width=8,
            sample_height=8,
            sample_frames=5,
            max_text_seq_length=4,
        ),
    ),
    "hunyuan-video": (
        "HunyuanVideoLoraLoaderMixin",
        _of(
            "HunyuanVideoTransformer3DModel",
            _picture(
                1,
                4,
                2,
                4,
                4,
                text=16,
                more=lambda: {
                    "encoder_attention_mask": torch.ones(1, 4),
                    "pooled_projections": _random(1, 8),
                    "guidance": torch.tensor([1000.0]),
                },
            ),
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=10,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            patch_size=1,
            patch_size_t=1,
            guidance_embeds=True,
            text_embed_dim=16,
            pooled_projection_dim=8,
            rope_axes_dim=(2, 4, 4),
        ),
    ),
    "lumina2": (
        "Lumina2LoraLoaderMixin",
        _of(
            "Lumina2Transformer2DModel",
            _picture(1, 4, 8, 8, text=16, more=lambda: {"encoder_attention_mask": torch.ones(1, 4, dtype=torch.bool)}),
            sample_size=8,
            patch_size=2,
            in_channels=4,
            hidden_size=24,
            num_layers=2,
            num_refiner_layers=1,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=2,
            norm_eps=1e-5,
            scaling_factor=1.0,
            axes_dim_rope=(4, 4, 4),
            axes_lens=(32, 32, 32),
            cap_feat_dim=16,
        ),
    ),
    "qwen-image": (
        "QwenImageLoraLoaderMixin",
        _of(
            "QwenImageTransformer2DModel",
            lambda: {
                "hidden_states": _random(1, 16, 16),
                "encoder_hidden_states": _random(1, 4, 16),
                "encoder_hidden_states_mask": torch.ones(1, 4),
                "timestep": torch.tensor([0.5]),
                "img_shapes": [(1, 4, 4)],
            },
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=3,
            joint_attention_dim=16,
            axes_dims_rope=(8, 4, 4),
        ),
    ),
    "z-image": (
        "ZImageLoraLoaderMixin",
        _of(
            "ZImageTransformer2DModel",
            lambda: {"x": [_random(4, 1, 4, 4)], "t": torch.tensor([0.5]), "cap_feats": [_random(4, 16)]},
            all_patch_size=(2,),
            all_f_patch_size=(1,),
            in_channels=4,
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=16,
            axes_dims=[8, 4, 4],
            axes_lens=[256, 32, 32],
        ),
    ),
    "hidream": (
        "HiDreamImageLoraLoaderMixin",
        _of(
            "HiDreamImageTransformer2DModel",
            lambda: {
                "hidden_states": _random(1, 4, 8, 8),
                "encoder_hidden_states_t5": _random(1, 4, 16),
                "encoder_hidden_states_llama3": _random(4, 1, 4, 16),
                "pooled_embeds": _random(1, 8),
                "timesteps": torch.tensor([5]),
            },
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            caption_channels=[16, 16],
            text_emb_dim=8,
            num_routed_experts=2,
            num_activated_experts=1,
            axes_dims_rope=(4, 2, 2),
            max_resolution=(8, 8),
            llama_layers=(0, 1),
        ),
    ),
}
"""Family → (the mixin of its pipelines, its model)."""
