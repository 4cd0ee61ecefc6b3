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
from ckpt_tools.adapters.architectures.rule import Names, Rule, attention, rename

_BLOCK = "transformer_blocks.{i}"
_SINGLE = "single_transformer_blocks.{i}"
_REFINER = "context_embedder.token_refiner.refiner_blocks.{i}"


def _both(rule: Rule, alias: str) -> Rule:
    return replace(rule, aliases=(alias,))


def _pair(native: str, diffusers: str, names: tuple[str, str], *aliases: str) -> tuple[Rule, ...]:
    """Return the rules for two layers; `names` are the native ones."""
    rules = (rename(f"{native}.{name}", f"{diffusers}.linear_{n}") for n, name in enumerate(names, 1))
    return tuple(_both(rule, f"{native}.{alias}") for rule, alias in zip(rules, aliases or names, strict=True))


def _time(native: str, diffusers: str) -> tuple[Rule, ...]:
    return _pair(native, diffusers, ("in_layer", "out_layer"), "mlp.0", "mlp.2")


def _feed_forward(native: str, diffusers: str) -> tuple[Rule, ...]:
    first = rename(f"{native}.0", f"{diffusers}.net.0.proj", ratio=4)
    second = rename(f"{native}.2", f"{diffusers}.net.2", ratio=1 / 4)
    return _both(first, f"{native}.fc1"), _both(second, f"{native}.fc2")


def _attention(
    native: str, diffusers: str, out: str, *, added: bool = False, is_split: bool = False
) -> tuple[Rule, ...]:
    fused = attention(f"{native}.qkv", diffusers, added=added)
    parts = tuple(f"{native}_{part}" for part in "qkv")
    return (
        replace(fused, parts=parts) if is_split else _both(fused, f"{native}_qkv"),
        _both(rename(f"{native}.proj", f"{diffusers}.{out}"), f"{native}_proj"),
    )


def _stream(native: str, *, is_split: bool) -> tuple[Rule, ...]:
    """Return the rules for the image's or the text's side of a block with both."""
    block, added = f"double_blocks.{{i}}.{native}", native == "txt"
    context, out = ("_context", "to_add_out") if added else ("", "to_out.0")
    return (
        *_attention(f"{block}_attn", f"{_BLOCK}.attn", out, added=added, is_split=is_split),
        *_feed_forward(f"{block}_mlp", f"{_BLOCK}.ff{context}"),
        _both(rename(f"{block}_mod.lin", f"{_BLOCK}.norm1{context}.linear"), f"{block}_mod.linear"),
    )


def _common(*, is_split: bool) -> tuple[Rule, ...]:
    native, block = "txt_in", "txt_in.individual_token_refiner.blocks.{i}"
    embedding = "context_embedder.time_text_embed"
    return (
        rename("img_in.proj", "x_embedder.proj"),
        rename(f"{native}.input_embedder", "context_embedder.proj_in"),
        *_time(f"{native}.t_embedder", f"{embedding}.timestep_embedder"),
        *_pair(f"{native}.c_embedder", f"{embedding}.text_embedder", ("in_layer", "out_layer"), "linear_1", "linear_2"),
        *_attention(f"{block}.self_attn", f"{_REFINER}.attn", "to_out.0"),
        *_feed_forward(f"{block}.mlp", f"{_REFINER}.ff"),
        rename(f"{block}.adaLN_modulation.1", f"{_REFINER}.norm_out.linear"),
        *_stream("img", is_split=is_split),
        *_stream("txt", is_split=is_split),
        rename("final_layer.linear", "proj_out"),
        Rule(native="final_layer.adaLN_modulation.1", diffusers=("norm_out.linear",), step="swap"),
    )


_NAMES = Names(
    (
        *_common(is_split=False),
        *_time("time_in", "time_text_embed.timestep_embedder"),
        *_time("guidance_in", "time_text_embed.guidance_embedder"),
        *_pair("vector_in", "time_text_embed.text_embedder", ("in_layer", "out_layer")),
        Rule(
            native="single_blocks.{i}.linear1",
            diffusers=(*(f"{_SINGLE}.attn.to_{part}" for part in "qkv"), f"{_SINGLE}.proj_mlp"),
            step="stacked",
            heights=(1, 1, 1, None),
            rest=4,
            ratio=7,
        ),
        rename("single_blocks.{i}.linear2", f"{_SINGLE}.proj_out"),
        _both(
            rename("single_blocks.{i}.modulation.lin", f"{_SINGLE}.norm.linear"),
            "single_blocks.{i}.modulation.linear",
        ),
    )
)
"""Every linear layer and patch embedding of HunyuanVideo, text and image to video."""
_NAMES_1_5 = Names(
    (
        *_common(is_split=True),
        *_time("time_in", "time_embed.timestep_embedder"),
        *_time("time_r_in", "time_embed.timestep_embedder_r"),
        *_pair("vision_in.proj", "image_embedder", ("1", "3")),
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
