"""OpenRLHF's options, whose names changed: `--ring_attn_size` became `--ds.ring_attn_size`, and so on."""

from __future__ import annotations

from ckpt_tools.preflight.rules.rule import Case, Setting

_NEW_NAMES = {
    "zero_stage": "ds.zero_stage",
    "ring_attn_size": "ds.ring_attn_size",
    "packing_samples": "ds.packing_samples",
    "param_dtype": "ds.param_dtype",
    "adam_offload": "ds.adam_offload",
    "load_in_4bit": "ds.load_in_4bit",
    "lora_rank": "ds.lora.rank",
    "disable_ds_ckpt": "ckpt.disable_ds",
    "load_checkpoint": "ckpt.load_enable",
    "gradient_checkpointing": "model.gradient_checkpointing_enable",
}


def flag(case: Case, name: str) -> Setting | None:
    """Return an option of an OpenRLHF command line by its old name, in whichever spelling the line has."""
    for spelling in (name, _NEW_NAMES.get(name, name)):
        found = case.get(spelling)
        if found is not None:
            return Setting(key=f"--{spelling}", value=found.value)
    return None


def option(beside: Setting, name: str) -> str:
    """Return an option's name in the spelling of another one on the same line."""
    return f"--{_NEW_NAMES.get(name, name) if '.' in beside.key else name}"
