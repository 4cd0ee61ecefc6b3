"""Adapters that PEFT made for toy models, random where training would have changed them, and what they mean."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from toys import Tensors, Toy

_LORA = {"r": 4, "lora_alpha": 3}
FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", _LORA),
    "DoRA": ("LoraConfig", _LORA | {"use_dora": True}),
    "LoHa": ("LoHaConfig", {"r": 2, "alpha": 3}),
    "LoKr": ("LoKrConfig", {"r": 2, "alpha": 3, "decompose_factor": 2}),
    "LoKr, full factors": ("LoKrConfig", {"r": 4096, "alpha": 4096, "decompose_factor": 4}),
    "OFT": ("OFTConfig", {"oft_block_size": 4, "use_cayley_neumann": False}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4, "boft_n_butterfly_factor": 1}),
}
"""Family → PEFT's class and settings."""
_IN_BLOCK = re.compile(r"\.\d+\.")
_USUALLY_FROZEN = re.compile(
    r"norm|_mod|modulation|embed|adaln|time_emb|gate|to_gate|proj_in|proj_out|conv|distilled", re.IGNORECASE
)


def targets(model: nn.Module, *, every: bool) -> list[str]:
    """Return attention and feed-forward layers of the blocks; or every linear layer and convolution."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | (nn.Conv2d if every else nn.Linear))
        and (every or (_IN_BLOCK.search(f".{name}.") and not _USUALLY_FROZEN.search(name)))
    ]


def train(toy: Toy, base: Path, family: str, directory: Path, *, every: bool = False) -> Tensors:
    """Save an adapter of the model in `base` as PEFT does; returns the weights that it makes of the model's."""
    import diffusers
    import peft

    kind, settings = FAMILIES[family]
    model = getattr(diffusers, toy.diffusers).from_pretrained(base)
    with warnings.catch_warnings(action="ignore"):
        adapted = peft.get_peft_model(
            model, getattr(peft, kind)(target_modules=targets(model, every=every), **settings)
        )
        torch.manual_seed(1)
        with torch.no_grad():
            for name, factor in adapted.named_parameters():
                if factor.requires_grad:
                    size = 0.05 if "oft" in name else 0.2
                    factor.add_(torch.randn_like(factor), alpha=size)
        adapted.save_pretrained(directory)
        merged = adapted.merge_and_unload()
    return dict(merged.state_dict())


def error(found: Tensors, meant: Tensors, base: Tensors) -> float | None:
    """Return the largest difference from what was trained, relative to the largest change; None if nothing changed."""
    names = [name for name in meant if not torch.equal(meant[name], base[name])]
    largest = max(float((meant[name] - base[name]).abs().max()) for name in names)
    if all(torch.equal(found[name], base[name]) for name in found):
        return None
    return max(float((found[name] - meant[name]).abs().max()) for name in found if name in meant) / largest
