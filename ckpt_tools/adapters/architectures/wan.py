"""Wan 2.1 and 2.2: the authors' names and those of diffusers' WanTransformer3DModel, its VACE and SkyReels V2's.

The two experts of Wan 2.2 (high and low noise) have the same names. Each has an adapter of its own.

Source: github.com/Wan-Video/Wan2.1, wan/modules/model.py and vace_model.py; ComfyUI, comfy/ldm/wan/model.py;
musubi-tuner, networks/lora_wan.py, utils/sai_model_spec.py; diffusers 0.42, loaders/single_file_utils.py
(`convert_wan_transformer_to_diffusers`), loaders/lora_conversion_utils.py
(`_convert_non_diffusers_wan_lora_to_diffusers`, `_convert_musubi_wan_lora_to_diffusers`).
"""

from __future__ import annotations

from dataclasses import replace

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
from ckpt_tools.adapters.architectures.rule import Names, Rule, embedder, rename, same

_SELF = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "norm_q": "norm_q", "norm_k": "norm_k"}
_CROSS = {**_SELF, "k_img": "add_k_proj", "v_img": "add_v_proj", "norm_k_img": "norm_added_k"}
"""With those of the image, in models that begin with one."""


def _block(block: str) -> tuple[Rule, ...]:
    return (
        *(rename(f"{block}.self_attn.{one}", f"{block}.attn1.{other}") for one, other in _SELF.items()),
        *(rename(f"{block}.cross_attn.{one}", f"{block}.attn2.{other}") for one, other in _CROSS.items()),
        rename(f"{block}.ffn.0", f"{block}.ffn.net.0.proj"),
        rename(f"{block}.ffn.2", f"{block}.ffn.net.2"),
        rename(f"{block}.norm3", f"{block}.norm2"),
    )


_NAMES = Names(
    (
        *same("patch_embedding", "vace_patch_embedding", "pose_patch_embedding"),
        *embedder("time_embedding", "condition_embedder.time_embedder", "0", "2"),
        *embedder("text_embedding", "condition_embedder.text_embedder", "0", "2"),
        rename("time_projection.1", "condition_embedder.time_proj"),
        rename("img_emb.proj.0", "condition_embedder.image_embedder.norm1"),
        rename("img_emb.proj.4", "condition_embedder.image_embedder.norm2"),
        rename("img_emb.proj.1", "condition_embedder.image_embedder.ff.net.0.proj"),
        rename("img_emb.proj.3", "condition_embedder.image_embedder.ff.net.2"),
        *_block("blocks.{i}"),
        rename("head.head", "proj_out"),
        *_block("vace_blocks.{i}"),
        rename("vace_blocks.{i}.before_proj", "vace_blocks.{i}.proj_in"),
        rename("vace_blocks.{i}.after_proj", "vace_blocks.{i}.proj_out"),
    )
)
"""Linear layers, patch embeddings and norms with weights of all but Animate's encoders of faces and motion."""
_MAIN = transformer(_NAMES)
"""VideoX-Fun, which trains the Fun models, writes `lora_unet__blocks_…` with two underscores."""
_WITHOUT_ALPHA = r"(?:head|img_emb|(?:text|time)_(?:embedding|projection))\..*\.alpha"

WAN = Architecture(
    name="wan",
    title="Wan",
    parts=(replace(_MAIN, kohya=(*_MAIN.kohya, "lora_unet_")),),
    classes=tuple(f"{kind}Transformer3DModel" for kind in ("Wan", "WanVACE", "WanAnimate", "SkyReelsV2")),
    # Source: config.json of Wan 2.1 T2V 1.3B and 14B, and of Wan 2.2 TI2V 5B; 2.2's 14B is as large as 2.1's.
    sizes=(
        Size(columns={".attn1.to_q": 1536}, last={"blocks": 29}),
        Size(columns={".attn1.to_q": 5120}, last={"blocks": 39}),
        Size(columns={".attn1.to_q": 3072}, last={"blocks": 29}),
    ),
    rivals={"Helios, ChronoEdit, AnyFlow, Hunyuan-DiT": r"vace_.*"},
    conversions=(
        Conversion(
            when=r"^diffusion_model\.",
            prefixes=("diffusion_model.",),
            suffixes=(*PEFT_PAIR, *KOHYA_PAIR, "diff_b", "alpha"),
            lacks=rf"(?:vace_)?patch_embedding|vace_blocks\..*|{_WITHOUT_ALPHA}",
            together=("k_img", "v_img"),
            ignores=r".*norm.*\.diff_b|.*\.diff",
            others="raise",
            needs=r"blocks\.",
        ),
        Conversion(
            when="^lora_unet_",
            prefixes=("lora_unet_",),
            suffixes=(*KOHYA_PAIR, "alpha"),
            lacks=r"(?!blocks\.).*",
            others="raise",
            needs_blocks=True,
            optional=r".*(?:_img|norm.*)",
            together=("k_img", "v_img"),
        ),
    ),
    comfyui=ComfyUI(flat_native=("lora_unet_", "lora_unet__")),
    kohya=Kohya(tool="musubi-tuner", blocks=("blocks.",)),
    model_spec="wan2.1/lora",
    base_version="wan",
    implementation="https://github.com/Wan-Video/Wan2.1",
    resolution="1280x720",
)
