"""Role of a factor → the end of its tensor's name, by ecosystem.

Source: peft 0.21 utils/save_and_load.py; lycoris-lora 4.1 modules/*.py; diffusers 0.42 utils/state_dict_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ckpt_tools.adapters.adapter import Family

_LOHA = {role: f"hada_{role}" for role in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")}
_LOKR = {role: f"lokr_{role}" for role in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")}

PEFT: Mapping[Family, Mapping[str, str]] = MappingProxyType(
    {
        "lora": {
            "A": "lora_A.weight",
            "B": "lora_B.weight",
            "B_bias": "lora_B.bias",
            "A_embedding": "lora_embedding_A",
            "B_embedding": "lora_embedding_B",
            "magnitude": "lora_magnitude_vector",
        },
        "loha": _LOHA,
        "lokr": _LOKR,
        "oft": {"R": "oft_R.weight", "R_embedding": "oft_embedding_R.weight"},
        "boft": {"R": "boft_R", "s": "boft_s"},
    }
)
"""As `PeftModel.save_pretrained` writes them; diffusers takes them over for transformers and U-Nets."""

TEXT_ENCODER: Mapping[Family, Mapping[str, str]] = MappingProxyType(
    {"lora": {"A": "lora_linear_layer.down.weight", "B": "lora_linear_layer.up.weight"}}
)
"""diffusers' text encoders: with PEFT's names an adapter of the MLP alone is not recognised."""

LYCORIS: Mapping[Family, Mapping[str, str]] = MappingProxyType(
    {
        "lora": {
            "A": "lora_down.weight",
            "B": "lora_up.weight",
            "mid": "lora_mid.weight",
            "magnitude": "dora_scale",
        },
        "loha": {**_LOHA, "magnitude": "dora_scale"},
        "lokr": {**_LOKR, "magnitude": "dora_scale"},
        "oft": {"blocks": "oft_blocks", "rescale": "rescale"},
        "boft": {"blocks": "oft_blocks", "rescale": "rescale"},
        "full": {"diff": "diff", "diff_b": "diff_b"},
    }
)
"""kohya, LyCORIS and ComfyUI; beside them an `alpha`."""
