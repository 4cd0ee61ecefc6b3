"""LTX-Video: Lightricks' names and those of diffusers' LTXVideoTransformer3DModel; ComfyUI has Lightricks'.

Source: github.com/Lightricks/LTX-Video, ltx_video/models/transformers; ComfyUI, comfy/ldm/lightricks/model.py;
diffusers 0.42, loaders/single_file_utils.py (`convert_ltx_transformer_checkpoint_to_diffusers`).
"""

from __future__ import annotations

from ckpt_tools.adapters.architectures.architecture import Architecture, transformer
from ckpt_tools.adapters.architectures.rule import Names, Rule, rename


def modulation(native: str, diffusers: str) -> tuple[Rule, ...]:
    """Return the rules for an embedding of the timestep with its projection."""
    layers = ("emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2", "linear")
    return tuple(rename(f"{native}.{layer}", f"{diffusers}.{layer}") for layer in layers)


def same(*paths: str) -> tuple[Rule, ...]:
    """Return the rules for modules that have one name everywhere."""
    return tuple(rename(path, path) for path in paths)


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
