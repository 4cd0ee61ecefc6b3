"""SGLang's reading of PEFT's directories: its checks of the configuration, its names, its joined factors, its scale.

What needs a GPU (its buffers and layers) is left out: the factors that it has joined are put where its buffers would
have them, and multiplied here, for the modules that a model of the base's names has.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stubs import stub

_OWN = ("layers", "layers.utils", "layers.utils.common", "lora", "lora.lora", "lora.lora_config", "lora.utils")
_PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "o_proj": ("o_proj",),
    "down_proj": ("down_proj",),
    "lm_head": ("lm_head",),
    "embed_tokens": ("embed_tokens",),
}
"""Layers of its Llama and its relatives that take an adapter → the base's modules that they hold."""


def start(source: str) -> None:
    """Import its LoRA modules; everything else of it is made up."""
    stub(("sglang",), keep=("sglang", "sglang.srt", *(f"sglang.srt.{name}" for name in _OWN)))
    sys.path.insert(0, source)


def load(_: Any, job: dict[str, str]) -> dict[str, Any]:
    """Return the base's weights with the adapter applied."""
    from safetensors.torch import load_file
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_config import LoRAConfig
    from sglang.srt.lora.utils import get_normalized_target_modules

    weights = load_file(job["base"])
    config = LoRAConfig(str(Path(job["file"]).parent), base_vocab_size=len(weights["model.embed_tokens.weight"]))
    if config.use_dora:
        raise ValueError("it does not support DoRA")
    targets = get_normalized_target_modules(config.target_modules)
    targets = {*_PARTS} if targets == {"all"} else targets
    layers = 1 + max(int(number) for number in re.findall(r"layers\.(\d+)\.", " ".join(weights)))
    adapter = LoRAAdapter("", config, SimpleNamespace(num_hidden_layers=layers), None, None)
    adapter.initialize_weights_from_tensors(load_file(job["file"]))
    for number, layer in enumerate(adapter.layers):
        for target, (down, up) in _buffers(layer.weights, targets):
            _apply(weights, rf"(?:.*\.)?layers\.{number}\.(?:.*\.)?", target, down, up, adapter)
    for target, (down, up) in _buffers(adapter.embedding_layers, targets):
        _apply(weights, r"(?:.*\.)?", target, down, up, adapter)
    return weights


def _buffers(found: dict[str, Any], targets: set[str]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield what its buffers of one layer hold: the last tensor of a target and side."""
    from sglang.srt.lora.utils import get_target_module_name

    sides: dict[str, dict[bool, Any]] = {}
    for name, tensor in found.items():
        if "experts" in name:
            raise NotImplementedError("its layers for experts need a GPU")
        sides.setdefault(get_target_module_name(name, targets), {})["lora_A" in name or "embedding_A" in name] = tensor
    for target, pair in sides.items():
        if target not in _PARTS:
            raise NotImplementedError(f"get_hidden_dim not implemented for {target}")
        if len(pair) == 2:  # without the other half its buffer holds zeros
            yield target, (pair[True], pair[False])


def _apply(weights: dict[str, Any], root: str, target: str, down: Any, up: Any, adapter: Any) -> None:
    parts, rank, row = _PARTS[target], adapter.config.r, 0
    assert down.shape[0] == rank * len(parts), f"{target}: LoRA buffer shape does not match {[*down.shape]}"
    assert up.shape[1] == rank, f"{target}: LoRA buffer shape does not match {[*up.shape]}"
    for number, part in enumerate(parts):
        name = next(name for name in weights if re.fullmatch(rf"{root}{part}\.weight", name))
        weight = weights[name]
        height = weight.shape[1] if part == "embed_tokens" else weight.shape[0]
        change = adapter.scaling * up[row : row + height] @ down[rank * number : rank * (number + 1)]
        weights[name] = weight + (change.T if part == "embed_tokens" else change)
        row += height
    assert row == up.shape[0], f"{target}: LoRA buffer shape does not match {[*up.shape]}"
