"""Sana and Sana-Sprint: NVIDIA's names and those of diffusers' SanaTransformer2DModel.

Source: github.com/NVlabs/Sana, diffusion/model/nets/sana.py; diffusers, models/transformers/sana_transformer.py and
loaders/single_file_utils.py (`convert_sana_transformer_to_diffusers`).
"""

from __future__ import annotations

from ckpt_tools.adapters.architectures.architecture import Architecture, transformer
from ckpt_tools.adapters.architectures.rule import Names, attention, embedder, rename, stacked

_NATIVE = "blocks.{i}"
_BLOCK = "transformer_blocks.{i}"
_NAMES = Names(
    (
        rename("x_embedder.proj", "patch_embed.proj"),
        *embedder("t_embedder.mlp", "time_embed.emb.timestep_embedder", "0", "2"),
        rename("t_block.1", "time_embed.linear"),
        *embedder("y_embedder.y_proj", "caption_projection", "fc1", "fc2"),
        attention(f"{_NATIVE}.attn.qkv", f"{_BLOCK}.attn1"),
        rename(f"{_NATIVE}.attn.proj", f"{_BLOCK}.attn1.to_out.0"),
        rename(f"{_NATIVE}.cross_attn.q_linear", f"{_BLOCK}.attn2.to_q"),
        stacked(f"{_NATIVE}.cross_attn.kv_linear", f"{_BLOCK}.attn2.to_k", f"{_BLOCK}.attn2.to_v"),
        rename(f"{_NATIVE}.cross_attn.proj", f"{_BLOCK}.attn2.to_out.0"),
        rename(f"{_NATIVE}.mlp.inverted_conv.conv", f"{_BLOCK}.ff.conv_inverted"),
        rename(f"{_NATIVE}.mlp.depth_conv.conv", f"{_BLOCK}.ff.conv_depth"),
        rename(f"{_NATIVE}.mlp.point_conv.conv", f"{_BLOCK}.ff.conv_point"),
        rename("final_layer.linear", "proj_out"),
    )
)

SANA = Architecture(
    name="sana",
    title="Sana",
    parts=(transformer(_NAMES),),
    classes=("SanaTransformer2DModel",),
    rivals={"PixArt, Allegro and others": r".*\.ff\.conv_\w+|time_embed\..*|patch_embed\.proj"},
    comfyui=None,
    kohya=None,
    implementation="https://github.com/NVlabs/Sana",
)
