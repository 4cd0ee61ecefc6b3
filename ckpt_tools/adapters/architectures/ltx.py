"""LTX-Video, and LTX-2 (2.0 and 2.3) with audio: Lightricks' names, which are ComfyUI's, and those of diffusers.

Source: github.com/Lightricks/LTX-Video, ltx_video/models/transformers; github.com/Lightricks/LTX-2, ltx-core; ComfyUI,
comfy/ldm/lightricks/{model,av_model}.py; diffusers 0.42, loaders/single_file_utils.py
(`convert_ltx_transformer_checkpoint_to_diffusers`, `convert_ltx2_transformer_to_diffusers`) and
loaders/lora_conversion_utils.py (`_convert_non_diffusers_ltx2_lora_to_diffusers`, which has 2.3's names).
"""

from __future__ import annotations

from ckpt_tools.adapters.architectures.architecture import (
    PEFT_PAIR,
    Architecture,
    ComfyUI,
    Conversion,
    Size,
    transformer,
)
from ckpt_tools.adapters.architectures.rule import Names, Rule, rename, same


def modulation(native: str, diffusers: str) -> tuple[Rule, ...]:
    """Return the rules for an embedding of the timestep with its projection."""
    layers = ("emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2", "linear")
    return tuple(rename(f"{native}.{layer}", f"{diffusers}.{layer}") for layer in layers)


def attention(name: str) -> tuple[Rule, ...]:
    """Return the rules for an attention of a block."""
    return same(*(f"transformer_blocks.{{i}}.{name}.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")))


def feed_forward(name: str) -> tuple[Rule, ...]:
    """Return the rules for the MLP of a block."""
    return same(*(f"transformer_blocks.{{i}}.{name}.net.{layer}" for layer in ("0.proj", "2")))


_NAMES = Names(
    (
        rename("patchify_proj", "proj_in"),
        *modulation("adaln_single", "time_embed"),
        *same("caption_projection.linear_1", "caption_projection.linear_2", "proj_out"),
        *attention("attn1"),
        *attention("attn2"),
        *feed_forward("ff"),
    )
)
"""Every linear layer of LTX-Video."""

LTX = Architecture(
    name="ltx",
    title="LTX-Video",
    parts=(transformer(_NAMES),),
    classes=("LTXVideoTransformer3DModel",),
    # Source: config.json of LTX-Video 0.9 (2B) and 0.9.7 (13B).
    sizes=(
        Size(columns={".attn1.to_q": 2048}, last={"transformer_blocks": 27}),
        Size(columns={".attn1.to_q": 4096}, last={"transformer_blocks": 47}),
    ),
    rivals={"PixArt, Cosmos, Allegro, Latte": r"proj_in|time_embed\..*"},
    # It takes the prefix off, and leaves Lightricks' names as they are.
    conversions=(
        Conversion(
            when=r"^diffusion_model\.", prefixes=("diffusion_model.",), spellings=("diffusers",), suffixes=PEFT_PAIR
        ),
    ),
    comfyui=ComfyUI(),
    kohya=None,
)

_ATTENTIONS = ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
_MODULATIONS = {
    **{f"{side}adaln_single": f"{side}time_embed" for side in ("", "audio_")},
    **{f"{side}prompt_adaln_single": f"{side}prompt_adaln" for side in ("", "audio_")},
    "av_ca_video_scale_shift_adaln_single": "av_cross_attn_video_scale_shift",
    "av_ca_audio_scale_shift_adaln_single": "av_cross_attn_audio_scale_shift",
    "av_ca_a2v_gate_adaln_single": "av_cross_attn_video_a2v_gate",
    "av_ca_v2a_gate_adaln_single": "av_cross_attn_audio_v2a_gate",
}

_NAMES_2 = Names(
    (
        rename("patchify_proj", "proj_in"),
        rename("audio_patchify_proj", "audio_proj_in"),
        *(rule for native, diffusers in _MODULATIONS.items() for rule in modulation(native, diffusers)),
        *same(*(f"{side}caption_projection.linear_{n}" for side in ("", "audio_") for n in (1, 2))),
        *same("proj_out", "audio_proj_out"),
        *(rule for name in _ATTENTIONS for rule in attention(name)),
        *same(*(f"transformer_blocks.{{i}}.{name}.to_gate_logits" for name in _ATTENTIONS)),
        *feed_forward("ff"),
        *feed_forward("audio_ff"),
    )
)
"""Every linear layer of LTX-2's transformer; its connectors of the text are another model."""

LTX2 = Architecture(
    name="ltx2",
    title="LTX-2",
    parts=(transformer(_NAMES_2),),
    classes=("LTX2VideoTransformer3DModel",),
    sizes=(Size(columns={".attn1.to_q": 4096, ".audio_attn1.to_q": 2048}, last={"transformer_blocks": 47}),),
    rivals={"LTX-Video and others": r".*audio.*|av_.*"},
    conversions=(Conversion(when=r"^diffusion_model\.", prefixes=("diffusion_model.",), suffixes=PEFT_PAIR),),
    comfyui=ComfyUI(),
    kohya=None,
    base_version="ltx2",
)
