"""HunyuanVideo and HunyuanVideo 1.5: ComfyUI's names, Tencent's as their aliases, and those of diffusers.

ComfyUI calls the blocks as FLUX.1 does (`img_attn.qkv`), Tencent and musubi-tuner otherwise (`img_attn_qkv`; in 1.5
`img_attn_q`, `img_attn_k` and `img_attn_v`).

Source: github.com/Tencent/HunyuanVideo, hyvideo/modules/models.py; github.com/Tencent-Hunyuan/HunyuanVideo-1.5;
ComfyUI, comfy/ldm/hunyuan_video/model.py, comfy/supported_models.py (`process_unet_state_dict`); musubi-tuner,
networks/lora.py, networks/lora_hv_1_5.py, utils/sai_model_spec.py; diffusers 0.42, loaders/lora_conversion_utils.py
(`_convert_hunyuan_video_lora_to_diffusers`), and in its repository scripts/convert_hunyuan_video1_5_to_diffusers.py.
"""

from __future__ import annotations

from dataclasses import replace

from ckpt_tools.adapters.architectures.architecture import (
    PEFT_PAIR,
    Architecture,
    ComfyUI,
    Conversion,
    Kohya,
    Size,
    transformer,
)
from ckpt_tools.adapters.architectures.rule import Names, Rule, attention, embedder, rename

_BLOCK = "transformer_blocks.{i}"
_SINGLE = "single_transformer_blocks.{i}"
_REFINER = "txt_in.individual_token_refiner.blocks.{i}", "context_embedder.token_refiner.refiner_blocks.{i}"


def _layer(stem: str, native: str, alias: str, diffusers: str, ratio: float | None = None) -> Rule:
    return Rule(native=f"{stem}{native}", aliases=(f"{stem}{alias}",), diffusers=(diffusers,), ratio=ratio)


def _embedding(stem: str, diffusers: str, first: str = ".mlp.0", second: str = ".mlp.2") -> tuple[Rule, Rule]:
    one = _layer(stem, ".in_layer", first, f"{diffusers}.linear_1")
    return one, _layer(stem, ".out_layer", second, f"{diffusers}.linear_2")


def _stream(attn: str, mlp: str, block: str, *, added: bool = False, is_split: bool = False) -> tuple[Rule, ...]:
    """Return the rules for an attention and an MLP; `added` are those of the text in a block with both."""
    out, ff = ("to_add_out", "ff_context") if added else ("to_out.0", "ff")
    fused = attention(f"{attn}.qkv", f"{block}.attn", added=added, aliases=() if is_split else (f"{attn}_qkv",))
    return (
        replace(fused, parts=tuple(f"{attn}_{part}" for part in "qkv") if is_split else ()),
        _layer(attn, ".proj", "_proj", f"{block}.attn.{out}"),
        _layer(mlp, ".0", ".fc1", f"{block}.{ff}.net.0.proj", 4),
        _layer(mlp, ".2", ".fc2", f"{block}.{ff}.net.2", 1 / 4),
    )


def _common(*, is_split: bool) -> tuple[Rule, ...]:
    double, text = "double_blocks.{i}", "context_embedder.time_text_embed"
    return (
        rename("img_in.proj", "x_embedder.proj"),
        rename("txt_in.input_embedder", "context_embedder.proj_in"),
        *_embedding("txt_in.t_embedder", f"{text}.timestep_embedder"),
        *_embedding("txt_in.c_embedder", f"{text}.text_embedder", ".linear_1", ".linear_2"),
        *_stream(f"{_REFINER[0]}.self_attn", f"{_REFINER[0]}.mlp", _REFINER[1]),
        rename(f"{_REFINER[0]}.adaLN_modulation.1", f"{_REFINER[1]}.norm_out.linear"),
        *_stream(f"{double}.img_attn", f"{double}.img_mlp", _BLOCK, is_split=is_split),
        *_stream(f"{double}.txt_attn", f"{double}.txt_mlp", _BLOCK, added=True, is_split=is_split),
        _layer(f"{double}.img_mod.", "lin", "linear", f"{_BLOCK}.norm1.linear"),
        _layer(f"{double}.txt_mod.", "lin", "linear", f"{_BLOCK}.norm1_context.linear"),
        rename("final_layer.linear", "proj_out"),
        Rule(native="final_layer.adaLN_modulation.1", diffusers=("norm_out.linear",), step="swap"),
    )


_NAMES = Names(
    (
        *_common(is_split=False),
        *_embedding("time_in", "time_text_embed.timestep_embedder"),
        *_embedding("guidance_in", "time_text_embed.guidance_embedder"),
        *embedder("vector_in", "time_text_embed.text_embedder"),
        Rule(
            native="single_blocks.{i}.linear1",
            diffusers=(*(f"{_SINGLE}.attn.to_{part}" for part in "qkv"), f"{_SINGLE}.proj_mlp"),
            step="stacked",
            heights=(1, 1, 1, None),
            rest=4,
            ratio=7,
        ),
        rename("single_blocks.{i}.linear2", f"{_SINGLE}.proj_out"),
        _layer("single_blocks.{i}.modulation.", "lin", "linear", f"{_SINGLE}.norm.linear"),
    )
)
"""Every linear layer and patch embedding of HunyuanVideo, text and image to video."""
_NAMES_1_5 = Names(
    (
        *_common(is_split=True),
        *_embedding("time_in", "time_embed.timestep_embedder"),
        *_embedding("time_r_in", "time_embed.timestep_embedder_r"),
        *embedder("vision_in.proj", "image_embedder", "1", "3"),
        *(rename(f"byt5_in.fc{n}", f"context_embedder_2.linear_{n}") for n in (1, 2, 3)),
        rename("cond_type_embedding", "cond_type_embed"),
    )
)
"""Every linear layer, embedding and patch embedding of HunyuanVideo 1.5."""
_RIVALS = {"Bria, LongCat-Image, Ovis-Image, HunyuanImage": r"(?!)"}
_COMFYUI = ComfyUI(aliases=("diffusion_model.", "transformer."), lacks=("_in.mlp.", "_embedder."))
"""Of Tencent's names it has those of the blocks."""

HUNYUAN_VIDEO = Architecture(
    name="hunyuan_video",
    title="HunyuanVideo",
    parts=(transformer(_NAMES),),
    classes=("HunyuanVideoTransformer3DModel",),
    sizes=(Size(columns={".attn.to_q": 3072}, last={"transformer_blocks": 19, "single_transformer_blocks": 39}),),
    rivals=_RIVALS,
    conversions=(
        Conversion(
            when="img_attn_qkv",
            prefixes=("transformer.", "diffusion_model.", ""),
            spellings=("alias",),
            suffixes=PEFT_PAIR,
            # It exchanges halves of A, and cuts A of the refiner's qkv in three.
            lacks=r"final_layer\.adaLN_modulation\.1|txt_in\..*self_attn_qkv",
        ),
    ),
    comfyui=_COMFYUI,
    kohya=Kohya(tool="musubi-tuner", spelling="alias", blocks=("double_blocks.", "single_blocks.")),
    model_spec="hunyuan-video/lora",
    base_version="hunyuan_video",
    implementation="https://github.com/Tencent/HunyuanVideo",
    resolution="1280x720",
)
HUNYUAN_VIDEO_1_5 = Architecture(
    name="hunyuan_video_1_5",
    title="HunyuanVideo 1.5",
    parts=(transformer(_NAMES_1_5),),
    classes=("HunyuanVideo15Transformer3DModel",),
    sizes=(Size(columns={".attn.to_q": 2048}, last={"transformer_blocks": 53}),),
    rivals=_RIVALS,
    comfyui=replace(_COMFYUI, lacks=(*_COMFYUI.lacks, "_attn_q", "_attn_k", "_attn_v")),
    kohya=Kohya(tool="musubi-tuner", spelling="alias", blocks=("double_blocks.",)),
    model_spec="hunyuan-video-1.5/lora",
    base_version="hunyuan_video_1_5",
    implementation="https://github.com/Tencent-Hunyuan/HunyuanVideo-1.5",
    resolution="1280x720",
)
