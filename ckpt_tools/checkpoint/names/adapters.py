"""What adapters call their tensors: the beginnings that no base model's names have."""

from __future__ import annotations

import re

FACTOR = (
    r"(?:^|[._])(?:lora_|lycoris_|hada_|lokr_|boft_|oft_|dora_scale|vera_|ia3_|randlora_|fourierft_|hra_u|shira_|bone_"
    r"|trainable_tokens_|ln_tuning_|adamss_|beft_|c3a_|deft_|delora_|frod_|glora_|gralora_|hira_|lily_|miss_block|osf_"
    r"|peanut_|poly_lora|poly_router|psoft_|pvera_|road_|supertuning_|tinylora_|unilora_|vblora_|waveft_)"
)
"""Pattern of what stands in the name of a factor: LoRA's family, and kinds that are only recognised."""
_FACTOR = re.compile(FACTOR)


def is_factor(name: str) -> bool:
    """Is this the name of an adapter's own tensor, in the form of any library?"""
    return _FACTOR.search(name) is not None
