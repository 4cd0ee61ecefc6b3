"""Fields of PEFT's configurations: which there are, and which ckpt works out itself.

Source: peft 0.21 `tuners/{lora,loha,lokr,oft,boft}/config.py`, `config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

PEFT_TYPES: Mapping[str, str] = {"lora": "LORA", "loha": "LOHA", "lokr": "LOKR", "oft": "OFT", "boft": "BOFT"}
"""Family → `peft_type`."""

_COMMON = (
    "task_type auto_mapping peft_version base_model_name_or_path revision inference_mode target_modules "
    "exclude_modules layers_to_transform layers_pattern modules_to_save"
)
_LYCORIS = "r alpha rank_pattern alpha_pattern rank_dropout module_dropout use_effective_conv2d init_weights"
FIELDS: Mapping[str, frozenset[str]] = {
    "LORA": frozenset(
        f"{_COMMON} r lora_alpha lora_dropout fan_in_fan_out bias use_rslora init_lora_weights rank_pattern "
        "alpha_pattern megatron_config megatron_core trainable_token_indices loftq_config eva_config corda_config "
        "lora_ga_config use_dora velora_config alora_invocation_tokens use_qalora qalora_group_size monteclora_config "
        "layer_replication lora_bias target_parameters use_bdlora arrow_config kasa_config ensure_weight_tying".split()
    ),
    "LOHA": frozenset(f"{_COMMON} {_LYCORIS}".split()),
    "LOKR": frozenset(f"{_COMMON} {_LYCORIS} decompose_both decompose_factor rank_dropout_scale".split()),
    "OFT": frozenset(
        f"{_COMMON} r oft_block_size module_dropout fan_in_fan_out bias init_weights coft eps block_share "
        "use_cayley_neumann num_cayley_neumann_terms".split()
    ),
    "BOFT": frozenset(
        f"{_COMMON} boft_block_size boft_block_num boft_n_butterfly_factor boft_dropout fan_in_fan_out bias "
        "init_weights".split()
    ),
}
_OWN = (
    "peft_type base_model_name_or_path task_type inference_mode r lora_alpha alpha rank_pattern alpha_pattern "
    "target_modules exclude_modules layers_to_transform layers_pattern target_parameters modules_to_save bias"
)
OWN_FIELDS = frozenset(_OWN.split())
"""Worked out from the tensors; what a configuration beside them says is only taken where it agrees."""


def has_field(peft_type: str, name: str) -> bool:
    """Has PEFT's configuration of this type a field of this name?"""
    return name in FIELDS.get(peft_type, ())
