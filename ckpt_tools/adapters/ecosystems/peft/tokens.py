"""What PEFT does with the rows of trained tokens.

Source: peft 0.21 `tuners/trainable_tokens/layer.py`, `utils/other.py` (`set_additional_trainable_modules`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from ckpt_tools.adapters.adapter import TOKENS, AdapterModule, Sourced
from ckpt_tools.adapters.base.tied import HEADS
from ckpt_tools.adapters.ecosystems.simulation import AdapterFile, Loading, RejectedError
from ckpt_tools.adapters.families import Family
from ckpt_tools.adapters.families.tokens import beyond, indices_of, why_wrong
from ckpt_tools.adapters.read.keys import Key
from ckpt_tools.adapters.read.sidecars import ADAPTER_CONFIG
from ckpt_tools.description.checkpoint import TensorEntry


def why_no_tokens(
    key: Key, rows: TensorEntry, config: Mapping[str, object], family: Family, file: AdapterFile, loading: Loading
) -> str | None:
    """Return why rows do not go into the model; None when they do as far as the configuration tells, and for factors.

    Raise RejectedError where they do not fit the configuration or the base.
    """
    if key.family != TOKENS:
        return None
    if (family.name == TOKENS) != (key.role == "tokens"):
        return f"peft_type is {config.get('peft_type')}"
    module = AdapterModule(path=key.path, family=TOKENS, factors={key.role: rows})
    indices = indices_of(module, {name: Sourced(value, ADAPTER_CONFIG) for name, value in config.items()})
    if indices is None:
        return "the configuration names no tokens of its module"
    if (
        key.role == "beside"
        and isinstance(config.get("trainable_token_indices"), list)
        and key.path.rpartition(".")[2] in HEADS
    ):
        return "a list of trainable_token_indices is for the input embedding alone"
    if problem := why_wrong(module, indices.value):
        raise RejectedError(f"{key.path}: {problem}")
    weight = (file.base or {}).get(f"{key.path}.weight") or (sys.maxsize, *rows.shape[1:])
    if rows.shape[1:] != weight[1:]:
        raise RejectedError(f"size mismatch: {key.path} has {list(weight)}, its rows are {list(rows.shape)}")
    if problem := beyond(module, indices.value, weight):
        loading.needs(key.path, f"{problem}. PEFT refuses it unless the model is resized before")
    return None
