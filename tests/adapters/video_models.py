"""Toy models of diffusers' own classes for video, with every optional layer that adapters are trained for."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

_WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 2,
}
_HUNYUAN = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 10,
    "num_layers": 1,
    "num_refiner_layers": 1,
    "text_embed_dim": 16,
    "rope_axes_dim": (2, 4, 4),
}
_LTX = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "cross_attention_dim": 16,
    "num_layers": 2,
    "caption_channels": 16,
}


def _of(kind: str, **config: object) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import diffusers

        return getattr(diffusers, kind)(**config).eval()

    return make


MODELS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "wan": ("wan", _of("WanTransformer3DModel", **_WAN, image_dim=8, added_kv_proj_dim=24)),
    "wan-vace": ("wan", _of("WanVACETransformer3DModel", **_WAN, vace_layers=[0, 1], vace_in_channels=4)),
    "wan-skyreels": ("wan", _of("SkyReelsV2Transformer3DModel", **_WAN)),
    "hunyuan_video": (
        "hunyuan_video",
        _of(
            "HunyuanVideoTransformer3DModel",
            **_HUNYUAN,
            num_single_layers=1,
            patch_size=1,
            patch_size_t=1,
            guidance_embeds=True,
            pooled_projection_dim=8,
        ),
    ),
    "hunyuan_video_1_5": (
        "hunyuan_video_1_5",
        _of("HunyuanVideo15Transformer3DModel", **_HUNYUAN, text_embed_2_dim=8, image_embed_dim=8, use_meanflow=True),
    ),
    "ltx": ("ltx", _of("LTXVideoTransformer3DModel", **_LTX)),
    "ltx2": (  # with what 2.3 adds
        "ltx2",
        _of(
            "LTX2VideoTransformer3DModel",
            **_LTX,
            audio_in_channels=4,
            audio_out_channels=4,
            audio_num_attention_heads=2,
            audio_attention_head_dim=4,
            audio_cross_attention_dim=8,
            gated_attn=True,
            audio_gated_attn=True,
            cross_attn_mod=True,
            audio_cross_attn_mod=True,
        ),
    ),
    "cogvideox": (
        "cogvideox",
        _of(
            "CogVideoXTransformer3DModel",
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
            ofs_embed_dim=4,
        ),
    ),
}
"""Model → (the family that it is of, its maker)."""
