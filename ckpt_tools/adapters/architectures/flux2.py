"""FLUX.2: BFL's names and those of diffusers' Flux2Transformer2DModel.

The single blocks keep their fused projection in diffusers. `norm_out.linear` swaps its halves there, as in FLUX.1.

Source: diffusers, models/transformers/transformer_flux2.py and loaders/single_file_utils.py.
"""

from __future__ import annotations

from ckpt_tools.adapters.architectures.architecture import Architecture, ComfyUI, Kohya, transformer
from ckpt_tools.adapters.architectures.rule import Names, Rule, attention, embedder, rename

_DOUBLE = "double_blocks.{i}"
_BLOCK = "transformer_blocks.{i}"


def _stream(native: str, *, added: bool = False) -> tuple[Rule, ...]:
    block, context = f"{_DOUBLE}.{native}", "_context" if added else ""
    return (
        attention(f"{block}_attn.qkv", f"{_BLOCK}.attn", added=added),
        rename(f"{block}_attn.proj", f"{_BLOCK}.attn.{'to_add_out' if added else 'to_out.0'}"),
        rename(f"{block}_mlp.0", f"{_BLOCK}.ff{context}.linear_in", ratio=6),
        rename(f"{block}_mlp.2", f"{_BLOCK}.ff{context}.linear_out", ratio=1 / 3),
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
        *_stream("img"),
        *_stream("txt", added=True),
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
    classes=("Flux2Transformer2DModel",),
    reader="flux2",
    lokr=("native", "diffusers"),
    comfyui=ComfyUI(
        dotted=("transformer.", ""),
        flat=("lycoris_", "lora_transformer_"),
        lacks=("time_guidance_embed.", "_stream_modulation"),  # its map was made for FLUX.1
    ),
    kohya=Kohya(tool="musubi-tuner", blocks=("double_blocks.", "single_blocks.")),
    model_spec="flux-2/lora",
    base_version="flux2",
    implementation="https://github.com/black-forest-labs/flux2",
)
