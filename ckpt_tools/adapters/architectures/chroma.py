"""Chroma: FLUX.1's blocks without modulations, which a layer of their own computes for all of them.

Source: ComfyUI, comfy/ldm/chroma/model.py; diffusers, models/transformers/transformer_chroma.py.
"""

from __future__ import annotations

from ckpt_tools.adapters.architectures.architecture import Architecture, ComfyUI, Kohya, transformer
from ckpt_tools.adapters.architectures.flux1 import COMFYUI, SHARED, SIZE
from ckpt_tools.adapters.architectures.rule import Names, embedder, same

_GUIDANCE = "distilled_guidance_layer"
_NAMES = Names(
    (
        *SHARED,
        *same(f"{_GUIDANCE}.in_proj", f"{_GUIDANCE}.out_proj"),
        *embedder(f"{_GUIDANCE}.layers.{{i}}", f"{_GUIDANCE}.layers.{{i}}"),
    )
)

CHROMA = Architecture(
    name="chroma",
    title="Chroma",
    parts=(transformer(_NAMES),),
    classes=("ChromaTransformer2DModel",),
    sizes=(SIZE,),
    reader="flux1",
    comfyui=ComfyUI(dotted=COMFYUI.dotted, flat=COMFYUI.flat, lacks=(_GUIDANCE,)),
    kohya=Kohya(blocks=("double_blocks.", "single_blocks.")),
    model_spec="chroma/lora",
    implementation="https://huggingface.co/lodestones/Chroma",
)
