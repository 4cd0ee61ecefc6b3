"""HiDream-I1 and -E1: ComfyUI and diffusers' HiDreamImageTransformer2DModel have the authors' names.

Source: github.com/HiDream-ai/HiDream-I1, hi_diffusers/models/transformers/transformer_hidream_image.py; ComfyUI,
comfy/ldm/hidream/model.py; diffusers, models/transformers/transformer_hidream_image.py.
"""

from __future__ import annotations

from ckpt_tools.adapters.architectures.architecture import (
    PEFT_PAIR,
    Architecture,
    ComfyUI,
    Conversion,
    transformer,
)
from ckpt_tools.adapters.architectures.rule import Names, same

_SWIGLU = ("w1", "w2", "w3")


def _block(block: str, *streams: str) -> tuple[str, ...]:
    inner = f"{block}.{{i}}.block"
    return (
        f"{inner}.adaLN_modulation.1",
        *(f"{inner}.attn1.{name}{end}" for end in streams for name in ("to_q", "to_k", "to_v", "to_out")),
        f"{inner}.ff_i.gate",  # no linear layer, but a matrix of the base
        *(f"{inner}.ff_i.{part}{name}" for part in ("", "shared_experts.", "experts.{e}.") for name in _SWIGLU),
    )


_NAMES = Names(
    same(
        "x_embedder.proj",
        *(f"t_embedder.timestep_embedder.linear_{number}" for number in (1, 2)),
        *(f"p_embedder.pooled_embedder.linear_{number}" for number in (1, 2)),
        "caption_projection.{i}.linear",
        *_block("double_stream_blocks", "", "_t"),
        *(f"double_stream_blocks.{{i}}.block.ff_t.{name}" for name in _SWIGLU),
        *_block("single_stream_blocks", ""),
        "final_layer.linear",
        "final_layer.adaLN_modulation.1",
    )
)

HIDREAM = Architecture(
    name="hidream",
    title="HiDream",
    parts=(transformer(_NAMES),),
    classes=("HiDreamImageTransformer2DModel",),
    conversions=(
        Conversion(
            when="diffusion_model",
            prefixes=("diffusion_model.",),
            suffixes=(*PEFT_PAIR, "lora_B.bias", "lora_magnitude_vector"),
        ),
    ),
    comfyui=ComfyUI(dotted=("transformer.",), flat=("lycoris_",)),
    kohya=None,
    implementation="https://github.com/HiDream-ai/HiDream-I1",
)
