"""CogVideoX 1.0 and 1.5: all tools that train it and load its adapters have the names of diffusers.

Source: diffusers 0.42, models/transformers/cogvideox_transformer_3d.py.
"""

from __future__ import annotations

from ckpt_tools.adapters.architectures.architecture import Architecture, transformer
from ckpt_tools.adapters.architectures.ltx import attention, feed_forward, same
from ckpt_tools.adapters.architectures.rule import Names

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
