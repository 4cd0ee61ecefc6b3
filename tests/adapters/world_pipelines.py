"""LoRAs that diffusers wrote for the models of `world_models`, and what can happen to them on the way."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from adapters.world_adapters import Config, Damage, Tensors, change, drop, half, rename, swap, with_nan

TO = ["to_q", "to_k", "to_v", "to_out.0"]
LORA: Config = {"r": 2, "lora_alpha": 2, "target_modules": TO}

HEALTHY: Mapping[str, tuple[str, Config, bool]] = {
    "sd15": ("sd15", LORA, False),
    "sd15 with a header": ("sd15", LORA | {"lora_alpha": 6}, True),
    "sd15, convolutions": ("sd15", LORA | {"target_modules": ["conv1", "conv2", "proj_in"]}, True),
    "sana": ("sana", LORA, True),
    "sana, DoRA": ("sana", LORA | {"use_dora": True}, True),
    "wan": ("wan", LORA | {"target_modules": [*TO, "ffn.net.0.proj", "ffn.net.2"]}, True),
    "wan without a header": ("wan", LORA, False),
    "ltx": ("ltx", LORA, True),
    "cogvideox": ("cogvideox", LORA, True),
    "cogvideox, ranks": ("cogvideox", LORA | {"rank_pattern": {"to_q": 4}}, True),
    "hunyuan-video": ("hunyuan-video", LORA | {"target_modules": ["to_q", "to_k", "add_q_proj"]}, True),
    "lumina2": ("lumina2", LORA, False),
    "qwen-image": ("qwen-image", LORA | {"target_modules": [*TO, "img_mod.1", "txt_mlp.net.2"]}, True),
    "qwen-image without a header": ("qwen-image", LORA, False),
    "z-image": ("z-image", LORA, True),
    "hidream": ("hidream", LORA | {"target_modules": ["to_q", "to_k"]}, False),
    "ltx, biases of its own": ("ltx", LORA | {"lora_bias": True}, True),
}
"""Name → (model, PEFT's configuration, does the header say it?)."""


def header(key: str, value: object) -> Damage:
    """Another entry of the header's configuration."""

    def damage(_: Tensors, config: Config) -> None:
        assert config
        for name in [name for name in config if name.endswith(f".{key}")]:
            config[name] = value

    return damage


def of_kohya(tensors: Tensors, _: Config) -> None:
    """Names as kohya's tools write them, which no converter for this model reads."""
    for name in list(tensors):
        module, _, side = name.removeprefix("transformer.").rpartition(".lora_")
        tensors[f"lora_unet_{module.replace('.', '_')}.lora_{side}"] = tensors.pop(name)


DAMAGED: Mapping[str, tuple[str, Damage]] = {
    "sd15: prefix lost": ("sd15", rename("unet.", "")),
    "sd15: a transformer's prefix": ("sd15", rename("unet.", "transformer.")),
    "sd15: a block renamed": ("sd15", rename("mid_block", "middle_block")),
    "sd15: every B lost": ("sd15", drop("lora_B")),
    "sd15: one B lost": ("sd15", drop("mid_block.attentions.0.transformer_blocks.0.attn1.to_q.lora_B")),
    "sd15: A and B swapped": ("sd15", swap),
    "sd15: a kernel cut": ("sd15, convolutions", change("conv1.lora_A", lambda t: t[..., :1])),
    "sd15: names of PEFT": ("sd15", rename("unet.", "base_model.model.")),
    "sd15: rank in the header": ("sd15 with a header", header("r", 3)),
    "sd15: alpha 0 in the header": ("sd15 with a header", header("lora_alpha", 0)),
    "sana: A transposed": ("sana", change("lora_A", lambda t: t.T)),
    "sana: magnitudes lost": ("sana, DoRA", drop("magnitude")),
    "wan: prefix lost": ("wan", rename("transformer.", "")),
    "wan: feed-forward lost": ("wan", drop("ffn")),
    "wan: a block lost": ("wan", drop("blocks.1.")),
    "wan: a block too far": ("wan without a header", rename("blocks.1.", "blocks.9.")),
    "wan: not a number": ("wan", change("lora_B", with_nan)),
    "ltx: B cut": ("ltx", change("lora_B", half)),
    "ltx: dead": ("ltx", change("lora_B", torch.zeros_like, every=True)),
    "ltx: one dead": ("ltx", change("lora_B", torch.zeros_like)),
    "ltx: empty": ("ltx", change("lora_A", lambda t: t[:0])),
    "cogvideox: names of FLUX": ("cogvideox", rename("attn1", "attn")),
    "cogvideox: rank pattern lost": ("cogvideox, ranks", header("rank_pattern", {})),
    "hunyuan-video: A lost": ("hunyuan-video", drop("add_q_proj.lora_A")),
    "lumina2: width of another": ("lumina2", change("lora_A", lambda t: t[:, :8], every=True)),
    "lumina2: integers": ("lumina2", change("lora_A", lambda t: t.to(torch.int16), every=True)),
    "qwen-image: names of FLUX.1": ("qwen-image", rename("txt_mlp", "ff_context")),
    "qwen-image: other targets": ("qwen-image", header("target_modules", [*TO, "proj_out"])),
    "z-image: modules of two": ("z-image", rename("layers.0.attention.to_q", "layers.0.attention.qkv")),
    "hidream: prefix twice": ("hidream", rename("transformer.", "transformer.transformer.")),
    "ltx: kohya's names": ("ltx", of_kohya),
    "ltx: biases lost": ("ltx, biases of its own", drop("lora_B.bias")),
}  # fmt: skip
"""Name → (healthy LoRA, what happens to it)."""
