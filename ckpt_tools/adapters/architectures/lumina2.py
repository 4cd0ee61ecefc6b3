"""Lumina-Image 2.0: Alpha-VLLM's NextDiT and diffusers' Lumina2Transformer2DModel.

Queries have three times as many heads as keys and values have: a third of the rows each.

Source: github.com/Alpha-VLLM/Lumina-Image-2.0, models/model.py; diffusers, models/transformers/transformer_lumina2.py,
loaders/single_file_utils.py (`convert_lumina2_to_diffusers`) and loaders/lora_conversion_utils.py.
"""

from __future__ import annotations

from ckpt_tools.adapters.architectures.architecture import (
    PEFT_PAIR,
    Architecture,
    ComfyUI,
    Conversion,
    Kohya,
    Size,
    transformer,
)
from ckpt_tools.adapters.architectures.rule import Names, Rule, rename

BLOCKS = ("noise_refiner", "context_refiner", "layers")
_CAPTION = "time_caption_embed"


def _block(block: str) -> tuple[Rule, ...]:
    names = tuple(f"{block}.{{i}}.attn.{name}" for name in ("to_q", "to_k", "to_v"))
    rules = (
        Rule(
            native=f"{block}.{{i}}.attention.qkv",
            diffusers=names,
            step="stacked",
            heights=(1, None, None),
            rest=1 / 3,
            ratio=5 / 3,
        ),
        rename(f"{block}.{{i}}.attention.out", f"{block}.{{i}}.attn.to_out.0"),
        *(rename(f"{block}.{{i}}.feed_forward.w{n}", f"{block}.{{i}}.feed_forward.linear_{n}") for n in (1, 2, 3)),
    )
    if block == "context_refiner":
        return rules
    return (*rules, rename(f"{block}.{{i}}.adaLN_modulation.1", f"{block}.{{i}}.norm1.linear"))


_NAMES = Names(
    (
        rename("x_embedder", "x_embedder"),
        rename("t_embedder.mlp.0", f"{_CAPTION}.timestep_embedder.linear_1"),
        rename("t_embedder.mlp.2", f"{_CAPTION}.timestep_embedder.linear_2"),
        rename("cap_embedder.1", f"{_CAPTION}.caption_embedder.1"),
        *(rule for block in BLOCKS for rule in _block(block)),
        rename("final_layer.adaLN_modulation.1", "norm_out.linear_1"),
        rename("final_layer.linear", "norm_out.linear_2"),
    )
)

LUMINA2 = Architecture(
    name="lumina2",
    title="Lumina-Image 2.0",
    parts=(transformer(_NAMES),),
    classes=("Lumina2Transformer2DModel",),
    # Source: its config.json.
    sizes=(Size(columns={".attn.to_q": 2304}, last={"layers": 25}),),
    conversions=(
        Conversion(
            when=r"^diffusion_model\.",
            prefixes=("diffusion_model.",),
            suffixes=PEFT_PAIR,
            lacks=r"(?!(?:noise_refiner|context_refiner|layers)\.).*",
            others="raise",
            needs_blocks=True,
        ),
    ),
    comfyui=ComfyUI(),
    kohya=Kohya(blocks=(*(f"{block}." for block in BLOCKS), "final_layer.")),
    model_spec="lumina-2/lora",
    implementation="https://github.com/Alpha-VLLM/Lumina-Image-2.0",
)
