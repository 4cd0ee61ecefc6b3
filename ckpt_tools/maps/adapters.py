"""What adapters call their tensors: the beginnings that no base model's names have."""

from __future__ import annotations

import re

FACTOR = (
    r"(?:^|[._])(?:lora_|hada_|lokr_|boft_|oft_|dora_scale|vera_|ia3_|randlora_|fourierft_|hra_u|shira_|bone_"
    r"|trainable_tokens_)"
)
"""Pattern of what stands in the name of a factor: LoRA's family, and kinds that are only recognised."""
_FACTOR = re.compile(FACTOR)


def is_factor(name: str) -> bool:
    """Is this the name of an adapter's own tensor, in the form of any library?"""
    return _FACTOR.search(name) is not None
