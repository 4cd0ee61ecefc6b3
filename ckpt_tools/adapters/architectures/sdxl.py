"""SDXL: the names of the LDM U-Net and those of diffusers' UNet2DConditionModel.

LDM counts the blocks of a side through; diffusers counts resolutions, and inside each its layers. SDXL has three
resolutions of two layers (three on the way up); the outermost has no attention. SD 1.5 has four, with attention in the
outermost: its names are not in this table, on purpose.

Source: github.com/Stability-AI/generative-models, sgm/modules/diffusionmodules/openaimodel.py; diffusers,
models/unets/unet_2d_condition.py.
"""

from __future__ import annotations

import re

from ckpt_tools.adapters.adapter import AdapterModule, F, Shape
from ckpt_tools.adapters.architectures.architecture import CLIP, Architecture, Part, encoder
from ckpt_tools.adapters.architectures.rule import Names, Rule, rename
from ckpt_tools.adapters.families import shape_of

_RESOLUTIONS = 3
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


def _down(resolution: int) -> list[Rule]:
    first, block = 1 + (_LAYERS + 1) * resolution, f"down_blocks.{resolution}"
    rules = _layers("input_blocks", first, block, _LAYERS, attention=resolution > 0)
    if resolution < _RESOLUTIONS - 1:
        rules.append(rename(f"input_blocks.{first + _LAYERS}.0.op", f"{block}.downsamplers.0.conv"))
    return rules


def _up(resolution: int) -> list[Rule]:
    first, block = (_LAYERS + 1) * resolution, f"up_blocks.{resolution}"
    is_last = resolution == _RESOLUTIONS - 1
    rules = _layers("output_blocks", first, block, _LAYERS + 1, attention=not is_last)
    if not is_last:
        rules.append(rename(f"output_blocks.{first + _LAYERS}.2.conv", f"{block}.upsamplers.0.conv"))
    return rules


def _middle() -> list[Rule]:
    rules: list[Rule] = []
    for old, new in _RESNET:
        rules.append(rename(f"middle_block.0.{old}", f"mid_block.resnets.0.{new}"))
        rules.append(rename(f"middle_block.2.{old}", f"mid_block.resnets.1.{new}"))
    rules += [rename(f"middle_block.1.{name}", f"mid_block.attentions.0.{name}") for name in _ATTENTION]
    return rules


_NAMES = Names(
    (
        rename("input_blocks.0.0", "conv_in"),
        rename("time_embed.0", "time_embedding.linear_1"),
        rename("time_embed.2", "time_embedding.linear_2"),
        rename("label_emb.0.0", "add_embedding.linear_1"),
        rename("label_emb.0.2", "add_embedding.linear_2"),
        *(rule for resolution in range(_RESOLUTIONS) for rule in _down(resolution)),
        *_middle(),
        *(rule for resolution in range(_RESOLUTIONS) for rule in _up(resolution)),
        rename("out.2", "conv_out"),
    )
)
"""Every linear layer and convolution of SDXL's U-Net."""

SDXL = Architecture(
    name="sdxl",
    title="SDXL",
    parts=(
        Part(component="unet", names=_NAMES, comfyui="diffusion_model", kohya=("lora_unet", "lycoris")),
        encoder("text_encoder", CLIP, "clip_l", "lora_te1"),
        encoder("text_encoder_2", CLIP, "clip_g", "lora_te2"),
    ),
    model_spec="stable-diffusion-xl-v1-base/lora",
    base_version="sdxl_base_v1-0",
    implementation="https://github.com/Stability-AI/generative-models",
)

_KERNELS = (
    (r"(?:.*\.)?(?:conv_in|conv_out|conv1|conv2|(?:down|up)samplers\.\d+\.conv)", 3),
    (r"(?:.*\.)?conv_shortcut", 1),
    (r"input_blocks\.0\.0|out\.2|.*\.in_layers\.2|.*\.out_layers\.3|.*\.op|output_blocks\.\d+\.\d+\.conv", 3),
    (r".*\.skip_connection", 1),
)
"""Convolutions of SDXL's UNet by diffusers' names and the authors' → size of the kernel.
Source: diffusers 0.42 `models/resnet.py`, `models/unets/unet_2d_condition.py`; generative-models `openaimodel.py`."""


def conv_shape(module: AdapterModule[F]) -> Shape | None:
    """Return (out, in, k, k) of a convolution's weight where its factors are flat and do not show it, else None."""
    size = next((size for pattern, size in _KERNELS if re.fullmatch(pattern, module.path)), None)
    shape = shape_of(module)
    is_flat = all(len(each) <= 2 for each in module.shapes.values())
    if size is None or shape is None or len(shape) != 2 or not is_flat or shape[1] % (size * size):
        return None
    return shape[0], shape[1] // (size * size), size, size
