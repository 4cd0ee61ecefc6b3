"""vLLM's reading of PEFT's directories: its checks of the configuration, its names, its scale.

What needs a GPU (its layers) is left out: the factors that it has read are multiplied here, for the modules that a
model of the base's names has.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stubs import stub

_OWN = ("lora_model", "lora_weights", "peft_helper", "utils")
_EXPECTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head")
"""Layers of vLLM's Llama and its relatives that take an adapter: the linear ones, and `embedding_modules`."""
_LARGEST_RANK = 512


def start(source: str) -> None:
    """Import its LoRA modules; everything else of it is made up."""
    stub(("vllm",), keep=("vllm", "vllm.lora", *(f"vllm.lora.{name}" for name in _OWN)))
    sys.path.insert(0, source)
    import vllm.utils.torch_utils as torch_utils

    torch_utils.PIN_MEMORY = False


def load(_: Any, job: dict[str, str]) -> dict[str, Any]:
    """Return the base's weights with the adapter applied."""
    from safetensors.torch import load_file
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    directory = str(Path(job["file"]).parent)
    helper = PEFTHelper.from_local_dir(directory, None)
    helper.validate_legal(SimpleNamespace(max_lora_rank=_LARGEST_RANK))
    more = ("experts",) if "experts" in job["base"] else ()
    found = LoRAModel.from_local_checkpoint(directory, {*_EXPECTED, *more}, helper, lora_model_id=1, device="cpu")
    if any(name.endswith((".experts", ".experts.base_layer")) for name in found.loras):
        raise NotImplementedError("its layers for fused experts need a GPU")
    weights = load_file(job["base"])
    for name, lora in found.loras.items():
        lora.optimize()
        key = f"{name}.weight"
        if key in weights:
            change = lora.lora_b @ lora.lora_a
            weights[key] += change.T if change.shape != weights[key].shape else change
    for name, saved in found.modules_to_save.items():
        weights[f"{name}.weight"] = saved.weight
    return weights
