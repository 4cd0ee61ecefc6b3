"""SD 1.x, SD 2.x, SDXL and Kolors: the names of the LDM U-Net and those of diffusers' UNet2DConditionModel.

LDM counts the blocks of a side through; diffusers counts resolutions, and inside each its layers. All have two layers
for each resolution (three on the way up). SDXL has three resolutions, the outermost without attention; SD has four, the
innermost without.

Source: github.com/Stability-AI/generative-models, sgm/modules/diffusionmodules/openaimodel.py; diffusers,
models/unets/unet_2d_condition.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from ckpt_tools.adapters.adapter import AdapterModule, F, Shape
from ckpt_tools.adapters.architectures.architecture import (
    CLIP,
    Architecture,
    ComfyUI,
    Conversion,
    Kohya,
    Part,
    Size,
    encoder,
)
from ckpt_tools.adapters.architectures.rule import Names, Rule, Spelling, rename, same
from ckpt_tools.adapters.families import shape_of

_LAYERS = 2
_RESNET = (
    ("in_layers.2", "conv1"),
    ("out_layers.3", "conv2"),
    ("emb_layers.1", "time_emb_proj"),
    ("skip_connection", "conv_shortcut"),
)
_ATTENTION = (
    "proj_in",
    "proj_out",
    *(f"transformer_blocks.{{t}}.{a}.{p}" for a in ("attn1", "attn2") for p in ("to_q", "to_k", "to_v", "to_out.0")),
    "transformer_blocks.{t}.ff.net.0.proj",
    "transformer_blocks.{t}.ff.net.2",
)


def _layers(side: str, first: int, block: str, count: int, *, attention: bool) -> list[Rule]:
    rules: list[Rule] = []
    for layer in range(count):
        native = f"{side}.{first + layer}"
        rules += [rename(f"{native}.0.{old}", f"{block}.resnets.{layer}.{new}") for old, new in _RESNET]
        if attention:
            rules += [rename(f"{native}.1.{name}", f"{block}.attentions.{layer}.{name}") for name in _ATTENTION]
    return rules


def _unet(resolutions: int, attentive: Collection[int]) -> tuple[Rule, ...]:
    """Return the rules of a U-Net with attention in some resolutions, of which 0 is the outermost."""
    rules = [
        rename("input_blocks.0.0", "conv_in"),
        rename("time_embed.0", "time_embedding.linear_1"),
        rename("time_embed.2", "time_embedding.linear_2"),
        rename("out.2", "conv_out"),
    ]
    for number in range(resolutions):
        first, block, has_attention = 1 + (_LAYERS + 1) * number, f"down_blocks.{number}", number in attentive
        rules += _layers("input_blocks", first, block, _LAYERS, attention=has_attention)
        if number < resolutions - 1:
            rules.append(rename(f"input_blocks.{first + _LAYERS}.0.op", f"{block}.downsamplers.0.conv"))
    for old, new in _RESNET:
        rules.append(rename(f"middle_block.0.{old}", f"mid_block.resnets.0.{new}"))
        rules.append(rename(f"middle_block.2.{old}", f"mid_block.resnets.1.{new}"))
    rules += [rename(f"middle_block.1.{name}", f"mid_block.attentions.0.{name}") for name in _ATTENTION]
    for number in range(resolutions):
        first, block, has_attention = (
            (_LAYERS + 1) * number,
            f"up_blocks.{number}",
            resolutions - 1 - number in attentive,
        )
        rules += _layers("output_blocks", first, block, _LAYERS + 1, attention=has_attention)
        if number < resolutions - 1:
            native = f"output_blocks.{first + _LAYERS}.{2 if has_attention else 1}.conv"
            rules.append(rename(native, f"{block}.upsamplers.0.conv"))
    return tuple(rules)


_SD = Names(_unet(4, range(3)))
_SDXL_RULES = (
    *_unet(3, (1, 2)),
    rename("label_emb.0.0", "add_embedding.linear_1"),
    rename("label_emb.0.2", "add_embedding.linear_2"),
)
_BLOCKS = Kohya(
    blocks=("input_blocks.", "middle_block.", "output_blocks."), outside=("input_blocks.0.",), takes_rank=True
)
_COMFYUI = ComfyUI(dotted=("unet.", ""), flat=("lycoris_", "lora_unet_"), has_processors=True)


def _skeleton(rules: tuple[Rule, ...]) -> frozenset[str]:
    return frozenset(rule.native for rule in rules if rule.native.endswith(".in_layers.2"))


def _part(names: Names) -> Part:
    return Part(component="unet", names=names, comfyui="diffusion_model", kohya=("lora_unet", "lycoris"))


def _conversions(*spellings: Spelling) -> tuple[Conversion, ...]:
    """Only SDXL's pipelines give diffusers' conversion the numbers that turn LDM's blocks into its own."""
    lacks = r"add_embedding\..*|encoder_hid_proj"
    return (Conversion(when="", prefixes=("lora_unet_",), spellings=spellings, lacks=lacks),)


def _cross(width: int) -> tuple[Size, ...]:
    return (Size(columns={".attn2.to_k": width, ".attn2.to_v": width}),)


def _sd(number: int, clip: str, width: int, *, is_linear: bool) -> Architecture:
    """SD 1.x and 2.x, whose names are the same: kohya trains them in diffusers' names."""
    return Architecture(
        name=f"sd{number}",
        title=f"SD {number}.x",
        parts=(_part(_SD), encoder("text_encoder", CLIP, clip, "lora_te", "lora_te1")),
        classes=("UNet2DConditionModel",),
        config={"use_linear_projection": is_linear},
        skeleton=_skeleton(_SD.rules),
        sizes=_cross(width),
        reader="ldm",
        conversions=_conversions("diffusers"),
        comfyui=_COMFYUI,
        kohya=Kohya(spelling="diffusers", blocks=_BLOCKS.blocks, outside=_BLOCKS.outside, takes_rank=True),
        model_spec="stable-diffusion-v1/lora" if number == 1 else "",
        base_version=f"sd_v{number}",
        implementation="diffusers",
        resolution="512x512" if number == 1 else "",
    )


SD1 = _sd(1, "clip_l", 768, is_linear=False)
SD2 = _sd(2, "clip_h", 1024, is_linear=True)
"""Source of the widths: config.json of their U-Nets."""

SDXL = Architecture(
    name="sdxl",
    title="SDXL",
    parts=(
        _part(Names(_SDXL_RULES)),
        encoder("text_encoder", CLIP, "clip_l", "lora_te1"),
        encoder("text_encoder_2", CLIP, "clip_g", "lora_te2"),
    ),
    classes=("UNet2DConditionModel",),
    config={"encoder_hid_dim_type": None},
    skeleton=_skeleton(_SDXL_RULES),
    sizes=_cross(2048),
    reader="ldm",
    conversions=_conversions("native", "diffusers"),
    comfyui=_COMFYUI,
    kohya=_BLOCKS,
    model_spec="stable-diffusion-xl-v1-base/lora",
    base_version="sdxl_base_v1-0",
    implementation="https://github.com/Stability-AI/generative-models",
)

KOLORS = Architecture(
    name="kolors",
    title="Kolors",
    parts=(_part(Names((*_SDXL_RULES, *same("encoder_hid_proj")))),),
    classes=("UNet2DConditionModel",),
    config={"encoder_hid_dim_type": "text_proj"},
    skeleton=_skeleton(_SDXL_RULES),
    is_told_by_names=False,  # its U-Net is SDXL's, with one layer more
    reader="ldm",
    conversions=_conversions("diffusers"),
    comfyui=None,
    kohya=None,
)

_KERNELS = (
    (r"(?:.*\.)?(?:conv_in|conv_out|conv1|conv2|(?:down|up)samplers\.\d+\.conv)", 3),
    (r"(?:.*\.)?conv_shortcut", 1),
    (r"input_blocks\.0\.0|out\.2|.*\.in_layers\.2|.*\.out_layers\.3|.*\.op|output_blocks\.\d+\.\d+\.conv", 3),
    (r".*\.skip_connection", 1),
)
"""Convolutions of the U-Nets by diffusers' names and the authors' → size of the kernel.
Source: diffusers 0.42 `models/resnet.py`, `models/unets/unet_2d_condition.py`; generative-models `openaimodel.py`."""


def conv_shape(module: AdapterModule[F]) -> Shape | None:
    """Return (out, in, k, k) of a convolution's weight where its factors are flat and do not show it, else None."""
    size = next((size for pattern, size in _KERNELS if re.fullmatch(pattern, module.path)), None)
    shape = shape_of(module)
    is_flat = all(len(each) <= 2 for each in module.shapes.values())
    if size is None or shape is None or len(shape) != 2 or not is_flat or shape[1] % (size * size):
        return None
    return shape[0], shape[1] // (size * size), size, size
