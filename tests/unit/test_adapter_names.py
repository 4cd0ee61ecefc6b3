import re
from importlib.resources import files

from ckpt_tools.adapters.families import FAMILIES
from ckpt_tools.adapters.families.peft_only import CARRIED
from ckpt_tools.checkpoint.names import is_factor

_GENERIC = {"rescale", "diff", "diff_b"}
"""LyCORIS' names that a base model may have as well."""


def test_is_factor_knows_every_familys_names_and_no_base_models():
    own = {
        f"{'lycoris_q' if family.needs_own_paths else 'model.layers.0.q_proj'}.{name}"
        for family in FAMILIES.values()
        for name in (*family.peft_names.values(), *family.lycoris_names.values())
        if name not in _GENERIC
    }
    assert [name for name in own if not is_factor(name)] == []
    carried = [family for family in CARRIED if family.root]  # prompts have names of their own
    assert [family.name for family in carried if not is_factor(f"q_proj.{family.names[-1][0]}")] == []
    words = set(re.findall(r"\w+", (files("ckpt_tools.checkpoint.names") / "transformers.txt").read_text()))
    assert [word for word in words if is_factor(word)] == []
    assert [name for name in ("lora_unet_x.alpha", "x.base_layer.weight", "soft_cap") if is_factor(name)] == [
        "lora_unet_x.alpha"
    ]
