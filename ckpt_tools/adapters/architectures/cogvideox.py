"""CogVideoX 1.0 and 1.5: all tools that train it and load its adapters have the names of diffusers.

Source: diffusers 0.42, models/transformers/cogvideox_transformer_3d.py.
"""

from __future__ import annotations

from ckpt_tools.adapters.architectures.architecture import Architecture, Size, transformer
from ckpt_tools.adapters.architectures.ltx import attention, feed_forward
from ckpt_tools.adapters.architectures.rule import Names, same

_NAMES = Names(
    (
        *same("patch_embed.proj", "patch_embed.text_proj", "norm_out.linear", "proj_out"),
        *same(*(f"{name}_embedding.linear_{n}" for name in ("time", "ofs") for n in (1, 2))),
        *same("transformer_blocks.{i}.norm1.linear", "transformer_blocks.{i}.norm2.linear"),
        *attention("attn1"),
        *feed_forward("ff"),
    )
)
"""Every linear layer and convolution of CogVideoX."""

COGVIDEOX = Architecture(
    name="cogvideox",
    title="CogVideoX",
    parts=(transformer(_NAMES),),
    classes=("CogVideoXTransformer3DModel",),
    # Source: config.json of CogVideoX 2B and 5B; 1.5 5B is as large.
    sizes=(
        Size(columns={".attn1.to_q": 1920}, last={"transformer_blocks": 29}),
        Size(columns={".attn1.to_q": 3072}, last={"transformer_blocks": 41}),
    ),
    rivals={
        "PixArt, Cosmos, Allegro, Latte": r"patch_embed\.text_proj|.*\.norm[12]\.linear",
        "CogView 3 and 4": r".*\.norm2\.linear",
    },
    comfyui=None,
    kohya=None,
)
