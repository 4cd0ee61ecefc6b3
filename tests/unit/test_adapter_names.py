import re
from importlib.resources import files

from ckpt_tools.adapters.families import FAMILIES
from ckpt_tools.maps import is_factor

_GENERIC = {"rescale", "diff", "diff_b"}
"""LyCORIS' names that a base model may have as well."""


def test_is_factor_knows_every_familys_names_and_no_base_models():
    own = {
        name for family in FAMILIES.values() for name in (*family.peft_names.values(), *family.lycoris_names.values())
    }
    assert [name for name in own - _GENERIC if not is_factor(f"model.layers.0.q_proj.{name}")] == []
    words = set(re.findall(r"\w+", (files("ckpt_tools.maps") / "transformers.txt").read_text()))
    assert [word for word in words if is_factor(word)] == []
    assert [name for name in ("lora_unet_x.alpha", "x.base_layer.weight", "soft_cap") if is_factor(name)] == [
        "lora_unet_x.alpha"
    ]
