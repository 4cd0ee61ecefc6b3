"""LTX-Video: Lightricks' names and those of diffusers' LTXVideoTransformer3DModel; ComfyUI has Lightricks'.

Source: github.com/Lightricks/LTX-Video, ltx_video/models/transformers; ComfyUI, comfy/ldm/lightricks/model.py;
diffusers 0.42, loaders/single_file_utils.py (`convert_ltx_transformer_checkpoint_to_diffusers`).
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
    implementation="https://github.com/Lightricks/LTX-Video",
)
