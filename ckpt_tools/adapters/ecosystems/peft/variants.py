"""Variants of PEFT's types whose factors alone do not say what the adapter does to a plain base model.

PEFT's own files carry them along; merged into a base, or under the names of another ecosystem, they would be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckpt_tools.adapters.adapter import Adapter, F, Sourced
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.read.sidecars import DORA_SCALE
from ckpt_tools.errors import UsageError
from ckpt_tools.text import escape_name

_CHANGED_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""Initialisations that take the factors out of the base weights: the adapter belongs to what is left of these.
Source: peft 0.21 `tuners/lora/layer.py`, `*_init`."""
_VERSION = re.compile(r"0\.(\d{1,6})\b")
_FIRST_STABLE_MINOR = 18
"""Of PEFT 0.x: before it, Cayley-Neumann gave other rotations. Source: peft 0.21 `tuners/oft/config.py`."""


_VARIANTS: Mapping[str, str] = {
    "init_lora_weights": "the base was changed before training, and the factors belong to the changed base",
    "use_qalora": "QALoRA pools the inputs before they meet the factors",
    "alora_invocation_tokens": "aLoRA acts only on the tokens behind its invocation",
    "layer_replication": "layers are replicated, so that the model is not the base's",
    "use_bdlora": "BD-LoRA's factors are block-diagonal",
    "arrow_config": "Arrow routes between several adapters",
    "kasa_config": "KaSA changes the base, and has a diagonal beside the factors",
    "monteclora_config": "MonteCLoRA samples around the factors",
    DORA_SCALE: "ckpt made its dora_scale for ComfyUI; other loaders compute something else with it",
}
_NOT_EXPORTED = ("use_bdlora", "arrow_config", "kasa_config", "monteclora_config")
"""Of these, ckpt does not write PEFT's files either."""


def variants_in(settings: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """Return (setting, reason) of everything in a configuration that the factors alone do not say."""
    return tuple((name, reason) for name, reason in _VARIANTS.items() if _is_variant(name, settings.get(name)))


def _is_variant(name: str, value: object) -> bool:
    if name == "init_lora_weights":
        return isinstance(value, str) and value.lower().startswith(_CHANGED_BASE)
    return bool(value)


def changes_base(adapter: Adapter[F]) -> bool:
    """Is the adapter known to be for what was left of the base when its factors were taken out?"""
    found = adapter.settings.get("init_lora_weights")
    return found is not None and _is_variant("init_lora_weights", found.value)


def refuse_foreign_shapes(adapter: Adapter[F]) -> None:
    """Refuse an adapter whose factors have shapes that nothing but PEFT understands."""
    for name in ("use_bdlora", DORA_SCALE):
        found = adapter.settings.get(name)
        if found is not None and found.value:
            raise _refusal(name, found, _VARIANTS[name])


def doubt_about(adapter: Adapter[F]) -> str | None:
    """Return what PEFT itself does not do exactly with such an adapter, for people."""
    found = adapter.settings.get("init_lora_weights")
    if found is None or not str(found.value).lower().startswith("pissa_niter"):
        return None
    return (
        f"init_lora_weights is {escape_name(str(found.value))}: PEFT decomposes the base again at every loading, by a "
        "random algorithm, and what it computes is near to what was trained, not the same"
    )


def refuse_carried(adapter: Adapter[F], what: str, hint: str) -> None:
    """Refuse types of PEFT's that ckpt carries and does not compute with: they cannot be `what`."""
    for family in map(family_of, adapter.modules):
        if family.is_carried:
            raise UsageError(f"an adapter of {family.title} cannot be {what}", hint=hint)


def refuse_variants(adapter: Adapter[F]) -> None:
    """Refuse an adapter that does not do what its factors say on a plain base model."""
    for name, reason in _VARIANTS.items():
        found = adapter.settings.get(name)
        if found is not None and _is_variant(name, found.value):
            raise _refusal(name, found, reason)
    neumann = adapter.settings.get("use_cayley_neumann")
    has_it = any("use_cayley_neumann" in family_of(module).peft_fields for module in adapter.modules)
    if has_it and neumann is not None and neumann.value is True:
        version = adapter.settings.get("peft_version", Sourced("", neumann.source))
        minor = _VERSION.match(str(version.value))
        is_early = not str(version.value) or (minor is not None and int(minor[1]) < _FIRST_STABLE_MINOR)
        if is_early:
            reason = "PEFT before 0.18 computed different rotations for Cayley-Neumann"
            raise _refusal("peft_version", Sourced(version.value or "missing", version.source), reason)


def _refusal(name: str, found: Sourced[object], reason: str) -> UsageError:
    if name == "init_lora_weights":
        hint = (
            "PEFT itself can load it; for PiSSA and the like its save_pretrained converts with "
            "path_initial_model_for_weight_conversion"
        )
    elif name == DORA_SCALE:
        hint = "export it again from its original source"
    else:
        hint = "PEFT itself can load it" + ("" if name in _NOT_EXPORTED else ": --to peft")
    return UsageError(f"{name} is {found.value!s}: {reason}", where=found.source, hint=hint)
