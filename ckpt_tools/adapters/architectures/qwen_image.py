"""Qwen-Image and Qwen-Image-Edit (also Plus and Layered): everybody has the names of diffusers.

Source: ComfyUI, comfy/ldm/qwen_image/model.py; musubi-tuner, qwen_image/qwen_image_model.py; diffusers,
models/transformers/transformer_qwenimage.py and loaders/lora_conversion_utils.py.
"""

from __future__ import annotations

from ckpt_tools.adapters.architectures.architecture import (
    KOHYA_PAIR,
    PEFT_PAIR,
    Architecture,
    ComfyUI,
    Conversion,
    Kohya,
    Size,
    transformer,
)
from ckpt_tools.adapters.architectures.rule import Names, same

_BLOCK = "transformer_blocks.{i}"
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
_STREAM = ("mod.1", "mlp.net.0.proj", "mlp.net.2")
_NAMES = Names(
    same(
        "img_in",
        "txt_in",
        "time_text_embed.timestep_embedder.linear_1",
        "time_text_embed.timestep_embedder.linear_2",
        *(f"{_BLOCK}.attn.{name}" for name in _ATTENTION),
        *(f"{_BLOCK}.{stream}_{name}" for stream in ("img", "txt") for name in _STREAM),
        "norm_out.linear",
        "proj_out",
    )
)

QWEN_IMAGE = Architecture(
    name="qwen_image",
    title="Qwen-Image",
    parts=(transformer(_NAMES),),
    classes=("QwenImageTransformer2DModel",),
    # Source: config.json of Qwen-Image.
    sizes=(Size(columns={".attn.to_q": 3072}, last={"transformer_blocks": 59}),),
    rivals={"Bria, LongCat-Image, Ovis-Image": r"img_in|txt_in|.*\.(?:img|txt)_(?:mod|mlp)\..*"},
    conversions=(
        Conversion(
            when=r"^lora_unet_|^diffusion_model\.|\.alpha$|default\.",
            prefixes=("diffusion_model.", "lora_unet_", ""),
            suffixes=(*PEFT_PAIR, *KOHYA_PAIR, "alpha"),
        ),
    ),
    comfyui=ComfyUI(dotted=("", "transformer."), flat=("lycoris_",)),
    kohya=Kohya(tool="musubi-tuner", blocks=("transformer_blocks.",)),
    implementation="https://github.com/QwenLM/Qwen-Image",
)
