"""SD3 and SD3.5: Stability's MMDiT names and those of diffusers' SD3Transformer2DModel.

The context stream of the last block ends early: its modulation has two parts (shift, scale) instead of six, and
diffusers has them the other way round.

Source: github.com/Stability-AI/sd3.5, mmditx.py; diffusers, models/transformers/transformer_sd3.py.
"""

from __future__ import annotations

from ckpt_tools.adapters.architectures.architecture import (
    CLIP,
    T5,
    Architecture,
    ComfyUI,
    Kohya,
    Size,
    encoder,
    transformer,
)
from ckpt_tools.adapters.architectures.rule import Names, Rule, attention, embedder, rename

_JOINT = "joint_blocks.{i}"
_BLOCK = "transformer_blocks.{i}"


_NAMES = Names(
    (
        rename("x_embedder.proj", "pos_embed.proj"),
        rename("context_embedder", "context_embedder"),
        *embedder("t_embedder.mlp", "time_text_embed.timestep_embedder", "0", "2"),
        *embedder("y_embedder.mlp", "time_text_embed.text_embedder", "0", "2"),
        attention(f"{_JOINT}.x_block.attn.qkv", f"{_BLOCK}.attn"),
        attention(f"{_JOINT}.context_block.attn.qkv", f"{_BLOCK}.attn", added=True),
        attention(f"{_JOINT}.x_block.attn2.qkv", f"{_BLOCK}.attn2"),
        rename(f"{_JOINT}.x_block.attn.proj", f"{_BLOCK}.attn.to_out.0"),
        rename(f"{_JOINT}.context_block.attn.proj", f"{_BLOCK}.attn.to_add_out"),
        rename(f"{_JOINT}.x_block.attn2.proj", f"{_BLOCK}.attn2.to_out.0"),
        rename(f"{_JOINT}.x_block.adaLN_modulation.1", f"{_BLOCK}.norm1.linear"),
        Rule(
            native=f"{_JOINT}.context_block.adaLN_modulation.1",
            diffusers=(f"{_BLOCK}.norm1_context.linear",),
            step="swap_if_two",
        ),
        rename(f"{_JOINT}.x_block.mlp.fc1", f"{_BLOCK}.ff.net.0.proj"),
        rename(f"{_JOINT}.x_block.mlp.fc2", f"{_BLOCK}.ff.net.2"),
        rename(f"{_JOINT}.context_block.mlp.fc1", f"{_BLOCK}.ff_context.net.0.proj"),
        rename(f"{_JOINT}.context_block.mlp.fc2", f"{_BLOCK}.ff_context.net.2"),
        rename("final_layer.linear", "proj_out"),
        Rule(native="final_layer.adaLN_modulation.1", diffusers=("norm_out.linear",), step="swap"),
    )
)
"""Every linear layer and the patch embedding of SD3 and SD3.5."""

SD3 = Architecture(
    name="sd3",
    title="SD3",
    parts=(
        transformer(_NAMES),
        encoder("text_encoder", CLIP, "clip_l", "lora_te1"),
        encoder("text_encoder_2", CLIP, "clip_g", "lora_te2"),
        encoder("text_encoder_3", T5, "t5xxl", "lora_te3", is_in_diffusers=False),
    ),
    classes=("SD3Transformer2DModel",),
    # Source: config.json of SD 3 medium and 3.5 large.
    sizes=(
        Size(columns={".attn.to_q": 1536}, last={"transformer_blocks": 23}),
        Size(columns={".attn.to_q": 2432}, last={"transformer_blocks": 37}),
    ),
    rivals={
        "Bria, LongCat-Image, Ovis-Image": r"pos_embed\.proj|.*\.attn2\..*",
        "PixArt, Allegro, AuraFlow, DiT": r".*\.(?:attn\.(?:to|add)_.*|norm1_context\.linear|ff_context\..*)",
    },
    comfyui=ComfyUI(dotted=("transformer.", "base_model.model."), flat=("lycoris_", "lora_transformer_")),
    kohya=Kohya(blocks=("joint_blocks.",)),
    model_spec="stable-diffusion-3/lora",
    base_version="sd3",
    implementation="https://github.com/Stability-AI/sd3.5",
)
