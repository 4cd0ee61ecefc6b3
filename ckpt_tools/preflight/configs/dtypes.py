"""Names of dtypes in configs."""

from __future__ import annotations

_NAMES = {
    "bf16": ("bf16", "bfloat16", "b16"),
    "f16": ("f16", "fp16", "float16", "half", "16"),
    "f32": ("f32", "fp32", "float32", "float", "full", "32"),
}
_BY_NAME = {name: short for short, names in _NAMES.items() for name in names}


def dtype_name(text: str | None) -> str | None:
    """Return bf16, f16 or f32 for any of their names; None for others, `no` and nothing."""
    return None if text is None else _BY_NAME.get(text.strip().lower().removeprefix("torch."))
