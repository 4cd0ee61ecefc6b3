"""LTX-2 (2.0 and 2.3): Lightricks' names of video and audio, and those of diffusers' LTX2VideoTransformer3DModel.

Source: github.com/Lightricks/LTX-2, ltx-core; ComfyUI, comfy/ldm/lightricks/av_model.py; diffusers 0.42,
loaders/single_file_utils.py (`convert_ltx2_transformer_to_diffusers`) and loaders/lora_conversion_utils.py
(`_convert_non_diffusers_ltx2_lora_to_diffusers`, which has 2.3's names).
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
from ckpt_tools.adapters.architectures.ltx import attention, feed_forward, modulation
from ckpt_tools.adapters.architectures.rule import Names, rename, same

_ATTENTIONS = ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
_MODULATIONS = {
    "adaln_single": "time_embed",
    "audio_adaln_single": "audio_time_embed",
    "prompt_adaln_single": "prompt_adaln",
    "audio_prompt_adaln_single": "audio_prompt_adaln",
    "av_ca_video_scale_shift_adaln_single": "av_cross_attn_video_scale_shift",
    "av_ca_audio_scale_shift_adaln_single": "av_cross_attn_audio_scale_shift",
    "av_ca_a2v_gate_adaln_single": "av_cross_attn_video_a2v_gate",
    "av_ca_v2a_gate_adaln_single": "av_cross_attn_audio_v2a_gate",
}

_NAMES = Names(
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
    parts=(transformer(_NAMES),),
    classes=("LTX2VideoTransformer3DModel",),
    sizes=(Size(columns={".attn1.to_q": 4096, ".audio_attn1.to_q": 2048}, last={"transformer_blocks": 47}),),
    rivals={"LTX-Video and others": r".*audio.*|av_.*"},
    conversions=(Conversion(when=r"^diffusion_model\.", prefixes=("diffusion_model.",), suffixes=PEFT_PAIR),),
    comfyui=ComfyUI(),
    kohya=None,
    base_version="ltx2",
    implementation="https://github.com/Lightricks/LTX-2",
)
