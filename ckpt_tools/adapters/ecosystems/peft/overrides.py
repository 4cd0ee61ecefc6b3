"""Settings that the user gives: `--config FIELD=VALUE`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ckpt_tools.adapters.adapter import Sourced
from ckpt_tools.adapters.families import PEFT_TYPES
from ckpt_tools.errors import UsageError

_INFERRED = ("peft_type", "inference_mode", "rank_pattern", "alpha_pattern", "lora_alpha", "alpha")
"""Not to be given: tensors, or other options, say them."""


_TEXT = ("peft_version", "revision", "task_type", "base_model_name_or_path", "bias", "megatron_core")
"""Fields that are text, even where it looks like a number."""


def parse_overrides(given: Sequence[str]) -> Mapping[str, Sourced[object]]:
    """Return field → value; a value is JSON where it is any, else text.

    Raises:
        UsageError: No such field in PEFT, or one that is worked out.
    """
    found: dict[str, Sourced[object]] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"{text!r} is not FIELD=VALUE", where="--config")
        if name in ("lora_alpha", "alpha"):
            raise UsageError(f"{name} has an option of its own", where="--config", hint=f"--alpha {value}")
        if name in _INFERRED or not any(name in family.peft_fields for family in PEFT_TYPES.values()):
            what = "is worked out from the tensors" if name in _INFERRED else "is not a field of PEFT's configuration"
            raise UsageError(f"{name} {what}", where="--config")
        if name in found:
            raise UsageError(f"{name} is given twice", where="--config")
        found[name] = Sourced(value if name in _TEXT else _value(value), "--config")
    return found


def _value(text: str) -> object:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _refuse(text: str) -> object:
    raise ValueError(text)
