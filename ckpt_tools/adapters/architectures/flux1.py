"""FLUX.1: BFL's names and those of diffusers' FluxTransformer2DModel.

Source: github.com/black-forest-labs/flux, src/flux/model.py; diffusers, models/transformers/transformer_flux.py.
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

_DOUBLE = "double_blocks.{i}"
_BLOCK = "transformer_blocks.{i}"
_SINGLE = "single_blocks.{i}"
_SINGLE_BLOCK = "single_transformer_blocks.{i}"


def _stream(native: str, *, added: bool = False) -> tuple[Rule, ...]:
    block, context = f"{_DOUBLE}.{native}", "_context" if added else ""
    return (
        attention(f"{block}_attn.qkv", f"{_BLOCK}.attn", added=added),
        rename(f"{block}_attn.proj", f"{_BLOCK}.attn.{'to_add_out' if added else 'to_out.0'}"),
        rename(f"{block}_mlp.0", f"{_BLOCK}.ff{context}.net.0.proj", ratio=4),
        rename(f"{block}_mlp.2", f"{_BLOCK}.ff{context}.net.2", ratio=1 / 4),
    )


SHARED = (
    rename("img_in", "x_embedder"),
    rename("txt_in", "context_embedder"),
    *_stream("img"),
    *_stream("txt", added=True),
    Rule(
        native=f"{_SINGLE}.linear1",
        diffusers=(
            f"{_SINGLE_BLOCK}.attn.to_q",
            f"{_SINGLE_BLOCK}.attn.to_k",
            f"{_SINGLE_BLOCK}.attn.to_v",
            f"{_SINGLE_BLOCK}.proj_mlp",
        ),
        step="stacked",
        heights=(1, 1, 1, None),
        rest=4,
        ratio=7,
    ),
    rename(f"{_SINGLE}.linear2", f"{_SINGLE_BLOCK}.proj_out", ratio=1 / 5),
    rename("final_layer.linear", "proj_out"),
)
"""What Chroma has as well."""

_NAMES = Names(
    (
        *SHARED,
        *embedder("time_in", "time_text_embed.timestep_embedder"),
        *embedder("vector_in", "time_text_embed.text_embedder"),
        *embedder("guidance_in", "time_text_embed.guidance_embedder"),
        rename(f"{_DOUBLE}.img_mod.lin", f"{_BLOCK}.norm1.linear"),
        rename(f"{_DOUBLE}.txt_mod.lin", f"{_BLOCK}.norm1_context.linear"),
        rename(f"{_SINGLE}.modulation.lin", f"{_SINGLE_BLOCK}.norm.linear"),
        Rule(native="final_layer.adaLN_modulation.1", diffusers=("norm_out.linear",), step="swap"),
    )
)
"""Every linear layer of FLUX.1, ControlNets apart."""

SIZE = Size(columns={".attn.to_q": 3072}, last={"transformer_blocks": 18, "single_transformer_blocks": 37})
"""Source: config.json of FLUX.1-dev. Chroma is as large."""
COMFYUI = ComfyUI(dotted=("transformer.", ""), flat=("lycoris_", "lora_transformer_"))

FLUX1 = Architecture(
    name="flux1",
    title="FLUX.1",
    parts=(
        transformer(_NAMES),
        encoder("text_encoder", CLIP, "clip_l", "lora_te1", "lora_te"),
        encoder("text_encoder_2", T5, "t5xxl", "lora_te3", "lora_te2", is_in_diffusers=False),
    ),
    classes=("FluxTransformer2DModel",),
    sizes=(SIZE,),
    rivals={"Bria, LongCat-Image, Ovis-Image": r"time_text_embed\..*"},
    reader="flux1",
    comfyui=COMFYUI,
    kohya=Kohya(blocks=("double_blocks.", "single_blocks.")),
    model_spec="flux-1/lora",
    base_version="flux1",
    implementation="https://github.com/black-forest-labs/flux",
)
