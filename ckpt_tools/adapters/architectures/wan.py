"""Wan 2.1 and 2.2: the authors' names and those of diffusers' WanTransformer3DModel, its VACE and SkyReels V2's.

The two experts of Wan 2.2 (high and low noise) have the same names. Each has an adapter of its own.

Source: github.com/Wan-Video/Wan2.1, wan/modules/model.py and vace_model.py; diffusers 0.42, `loaders/single_file_utils.py`
(`convert_wan_transformer_to_diffusers`); ComfyUI, comfy/ldm/wan/model.py.
"""

from __future__ import annotations

from ckpt_tools.adapters.architectures.architecture import Architecture, transformer
from ckpt_tools.adapters.architectures.rule import Names, Rule, embedder, rename

_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"}
_IMAGE = {"k_img": "add_k_proj", "v_img": "add_v_proj"}
"""Keys and values of the image, in models that begin with one."""


def _block(block: str) -> tuple[Rule, ...]:
    crossing = {**_ATTENTION, **_IMAGE}
    return (
        *(rename(f"{block}.self_attn.{one}", f"{block}.attn1.{other}") for one, other in _ATTENTION.items()),
        *(rename(f"{block}.cross_attn.{one}", f"{block}.attn2.{other}") for one, other in crossing.items()),
        rename(f"{block}.ffn.0", f"{block}.ffn.net.0.proj"),
        rename(f"{block}.ffn.2", f"{block}.ffn.net.2"),
    )


_NAMES = Names(
    (
        rename("patch_embedding", "patch_embedding"),
        *embedder("time_embedding", "condition_embedder.time_embedder", "0", "2"),
        *embedder("text_embedding", "condition_embedder.text_embedder", "0", "2"),
        rename("time_projection.1", "condition_embedder.time_proj"),
        rename("img_emb.proj.1", "condition_embedder.image_embedder.ff.net.0.proj"),
        rename("img_emb.proj.3", "condition_embedder.image_embedder.ff.net.2"),
        *_block("blocks.{i}"),
        rename("head.head", "proj_out"),
        # VACE
        rename("vace_patch_embedding", "vace_patch_embedding"),
        *_block("vace_blocks.{i}"),
        rename("vace_blocks.{i}.before_proj", "vace_blocks.{i}.proj_in"),
        rename("vace_blocks.{i}.after_proj", "vace_blocks.{i}.proj_out"),
    )
)
"""Every linear layer and patch embedding of the text, image and VACE models."""
