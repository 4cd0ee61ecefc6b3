"""FLUX.2: BFL's names and those of diffusers' Flux2Transformer2DModel.

The single blocks keep their fused projection in diffusers. `norm_out.linear` swaps its halves there, as in FLUX.1.

Source: diffusers, models/transformers/transformer_flux2.py and loaders/single_file_utils.py.
"""

from __future__ import annotations

from ckpt_tools.adapters.architectures.architecture import Architecture, transformer
from ckpt_tools.adapters.architectures.rule import Names, Rule, embedder, rename

_DOUBLE = "double_blocks.{i}"
_BLOCK = "transformer_blocks.{i}"


def _stream(native: str, *, attention: tuple[str, ...], out: str, feed_forward: str) -> tuple[Rule, ...]:
    block = f"{_DOUBLE}.{native}"
    return (
        Rule(native=f"{block}_attn.qkv", diffusers=tuple(f"{_BLOCK}.attn.{name}" for name in attention), step="qkv"),
        rename(f"{block}_attn.proj", f"{_BLOCK}.attn.{out}"),
        rename(f"{block}_mlp.0", f"{_BLOCK}.{feed_forward}.linear_in", ratio=6),
        rename(f"{block}_mlp.2", f"{_BLOCK}.{feed_forward}.linear_out", ratio=1 / 3),
    )


_NAMES = Names(
    (
        rename("img_in", "x_embedder"),
        rename("txt_in", "context_embedder"),
        *embedder("time_in", "time_guidance_embed.timestep_embedder"),
        *embedder("guidance_in", "time_guidance_embed.guidance_embedder"),
        rename("double_stream_modulation_img.lin", "double_stream_modulation_img.linear"),
        rename("double_stream_modulation_txt.lin", "double_stream_modulation_txt.linear"),
        rename("single_stream_modulation.lin", "single_stream_modulation.linear"),
        *_stream("img", attention=("to_q", "to_k", "to_v"), out="to_out.0", feed_forward="ff"),
        *_stream(
            "txt", attention=("add_q_proj", "add_k_proj", "add_v_proj"), out="to_add_out", feed_forward="ff_context"
        ),
        rename("single_blocks.{i}.linear1", "single_transformer_blocks.{i}.attn.to_qkv_mlp_proj", ratio=9),
        rename("single_blocks.{i}.linear2", "single_transformer_blocks.{i}.attn.to_out", ratio=1 / 4),
        rename("final_layer.linear", "proj_out"),
        Rule(native="final_layer.adaLN_modulation.1", diffusers=("norm_out.linear",), step="swap"),
    )
)
"""Every linear layer of FLUX.2 (dev and klein)."""

FLUX2 = Architecture(
    name="flux2",
    title="FLUX.2",
    parts=(transformer(_NAMES),),
    diffusers_class="Flux2Transformer2DModel",
    model_spec="flux-2/lora",
    base_version="flux2",
    implementation="https://github.com/black-forest-labs/flux2",
)
