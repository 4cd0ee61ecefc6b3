"""Z-Image: the fused NextDiT that ComfyUI has, and diffusers' ZImageTransformer2DModel.

musubi-tuner trains it under diffusers' names. ComfyUI maps these too, but not behind lora_unet_.

Source: ComfyUI, comfy/ldm/lumina/model.py, comfy/utils.py (`z_image_to_diffusers`); musubi-tuner,
zimage/zimage_model.py; diffusers, models/transformers/transformer_z_image.py, loaders/single_file_utils.py
(`convert_z_image_transformer_checkpoint_to_diffusers`) and loaders/lora_conversion_utils.py.
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
from ckpt_tools.adapters.architectures.lumina2 import BLOCKS
from ckpt_tools.adapters.architectures.rule import Names, Rule, rename, same

_FINAL = "all_final_layer.2-1"
_OMNI = "siglip_refiner"
"""Of Z-Image-Omni alone."""


def _block(block: str) -> tuple[Rule, ...]:
    attention = f"{block}.{{i}}.attention"
    names = tuple(f"{attention}.{name}" for name in ("to_q", "to_k", "to_v"))
    return (
        Rule(native=f"{attention}.qkv", diffusers=names, step="stacked", ratio=3),
        rename(f"{attention}.out", f"{attention}.to_out.0"),
        *same(*(f"{block}.{{i}}.feed_forward.w{number}" for number in (1, 2, 3))),
        *(() if block in ("context_refiner", _OMNI) else same(f"{block}.{{i}}.adaLN_modulation.0")),
    )


_NAMES = Names(
    (
        rename("x_embedder", "all_x_embedder.2-1"),
        *same("t_embedder.mlp.0", "t_embedder.mlp.2", "cap_embedder.1", "siglip_embedder.1"),
        *(rule for block in (*BLOCKS, _OMNI) for rule in _block(block)),
        rename("final_layer.linear", f"{_FINAL}.linear"),
        rename("final_layer.adaLN_modulation.1", f"{_FINAL}.adaLN_modulation.1"),
    )
)
_OUTSIDE = r"final_layer\..*|x_embedder"

Z_IMAGE = Architecture(
    name="z_image",
    title="Z-Image",
    parts=(transformer(_NAMES),),
    classes=("ZImageTransformer2DModel",),
    # Source: its config.json.
    sizes=(Size(columns={".attention.to_q": 3840}, last={"layers": 29}),),
    rivals={"language models": r"(?!.*\.feed_forward\.).*"},
    conversions=(
        Conversion(
            when="^lora_unet_",
            prefixes=("lora_unet_",),
            spellings=("native", "diffusers"),
            suffixes=(*KOHYA_PAIR, "alpha"),
            lacks=rf"{_OUTSIDE}|siglip_.*",
        ),
        Conversion(
            when=r"^diffusion_model\..*\.lora_(?:down|up)\.",
            prefixes=("diffusion_model.", ""),
            spellings=("native", "diffusers"),
            suffixes=(*KOHYA_PAIR, "alpha"),
            lacks=rf"{_OUTSIDE}|.*\.qkv",
        ),
        Conversion(
            when=r"^diffusion_model\.|\.alpha$|default\.",
            prefixes=("diffusion_model.", ""),
            spellings=("diffusers",),
            suffixes=(*PEFT_PAIR, *KOHYA_PAIR, "alpha"),
            refuses=r".*\.attention\.out\.alpha",  # it renames this one, and not the factors beside it
        ),
    ),
    lokr=("diffusers",),
    comfyui=ComfyUI(dotted=("diffusion_model.", "transformer.", ""), flat=("lycoris_",), lacks=("siglip_",)),
    kohya=Kohya(tool="musubi-tuner", spelling="diffusers", blocks=tuple(f"{block}." for block in BLOCKS)),
    implementation="https://github.com/Tongyi-MAI/Z-Image",
)
