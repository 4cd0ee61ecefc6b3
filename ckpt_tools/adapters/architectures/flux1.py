"""FLUX.1: BFL's names and those of diffusers' FluxTransformer2DModel.

Source: github.com/black-forest-labs/flux, src/flux/model.py; diffusers, models/transformers/transformer_flux.py.
"""

from __future__ import annotations

from ckpt_tools.adapters.architectures.architecture import CLIP, T5, Architecture, encoder, transformer
from ckpt_tools.adapters.architectures.rule import Names, Rule, embedder, rename

_DOUBLE = "double_blocks.{i}"
_BLOCK = "transformer_blocks.{i}"
_SINGLE = "single_blocks.{i}"
_SINGLE_BLOCK = "single_transformer_blocks.{i}"


def _stream(native: str, *, attention: tuple[str, ...], out: str, feed_forward: str, norm: str) -> tuple[Rule, ...]:
    block = f"{_DOUBLE}.{native}"
    return (
        Rule(native=f"{block}_attn.qkv", diffusers=tuple(f"{_BLOCK}.attn.{name}" for name in attention), step="qkv"),
        rename(f"{block}_attn.proj", f"{_BLOCK}.attn.{out}"),
        rename(f"{block}_mlp.0", f"{_BLOCK}.{feed_forward}.net.0.proj", ratio=4),
        rename(f"{block}_mlp.2", f"{_BLOCK}.{feed_forward}.net.2", ratio=1 / 4),
        rename(f"{block}_mod.lin", f"{_BLOCK}.{norm}.linear"),
    )


_NAMES = Names(
    (
        rename("img_in", "x_embedder"),
        rename("txt_in", "context_embedder"),
        *embedder("time_in", "time_text_embed.timestep_embedder"),
        *embedder("vector_in", "time_text_embed.text_embedder"),
        *embedder("guidance_in", "time_text_embed.guidance_embedder"),
        *_stream("img", attention=("to_q", "to_k", "to_v"), out="to_out.0", feed_forward="ff", norm="norm1"),
        *_stream(
            "txt",
            attention=("add_q_proj", "add_k_proj", "add_v_proj"),
            out="to_add_out",
            feed_forward="ff_context",
            norm="norm1_context",
        ),
        Rule(
            native=f"{_SINGLE}.linear1",
            diffusers=(
                f"{_SINGLE_BLOCK}.attn.to_q",
                f"{_SINGLE_BLOCK}.attn.to_k",
                f"{_SINGLE_BLOCK}.attn.to_v",
                f"{_SINGLE_BLOCK}.proj_mlp",
            ),
            step="qkv_mlp",
            ratio=7,
        ),
        rename(f"{_SINGLE}.linear2", f"{_SINGLE_BLOCK}.proj_out", ratio=1 / 5),
        rename(f"{_SINGLE}.modulation.lin", f"{_SINGLE_BLOCK}.norm.linear"),
        rename("final_layer.linear", "proj_out"),
        Rule(native="final_layer.adaLN_modulation.1", diffusers=("norm_out.linear",), step="swap"),
    )
)
"""Every linear layer of FLUX.1, ControlNets apart."""

FLUX1 = Architecture(
    name="flux1",
    title="FLUX.1",
    parts=(
        transformer(_NAMES),
        encoder("text_encoder", CLIP, "clip_l", "lora_te1", "lora_te"),
        encoder("text_encoder_2", T5, "t5xxl", "lora_te3", "lora_te2", is_in_diffusers=False),
    ),
    diffusers_class="FluxTransformer2DModel",
    model_spec="flux-1/lora",
    base_version="flux1",
    implementation="https://github.com/black-forest-labs/flux",
)
