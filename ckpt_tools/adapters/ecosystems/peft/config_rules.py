"""What PEFT's configuration asks for: which settings it refuses, which modules it wraps, with which rank.

Source: peft 0.21, config.py, tuners/*/config.py (`__post_init__`), tuners/tuners_utils.py
(`check_target_module_exists`), utils/other.py (`_set_trainable`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ckpt_tools.adapters.adapter import Shape
from ckpt_tools.adapters.ecosystems.peft.target_names import matched
from ckpt_tools.adapters.ecosystems.simulation import RejectedError
from ckpt_tools.adapters.families import Family
from ckpt_tools.adapters.read.sidecars import by_pattern, matches

Config = Mapping[str, object]
_HARMLESS = (True, "gaussian", "lycoris")
"""Values of init_lora_weights and init_weights with which a new adapter changes nothing."""


_NOT_FOR_PARAMETERS = ("use_dora", "lora_bias", "lora_dropout", "fan_in_fan_out", "velora_config", "kasa_config")


def check_config(config: Config, family: Family) -> None:
    """Refuse what PEFT refuses before it looks at a tensor.

    Raises:
        RejectedError: It raises.
    """
    target = config.get("target_modules")
    if config.get("layers_pattern") and config.get("layers_to_transform") is None:
        raise RejectedError("layers_pattern needs layers_to_transform")
    if family.peft_checks_layers and isinstance(target, str) and config.get("layers_to_transform") is not None:
        raise RejectedError("layers_to_transform cannot be used with a pattern in target_modules")
    if family.peft_either is not None:
        one, other, default = family.peft_either
        if bool(config.get(one, 0)) == bool(config.get(other, default)):
            raise RejectedError(f"just one of {one} and {other} must be set")
    bias = config.get("bias", "none")
    if family.peft_checks_bias and not (bias in ("none", "all") or str(bias).endswith("_only")):
        raise RejectedError(f"bias is {bias!r}")
    alpha = family.alpha_field
    if family.is_scaled and not _is_number(config.get(alpha, 8)):
        raise RejectedError(f"{alpha} is {config[alpha]!r}, not a number")
    if config.get("lora_bias") and config.get("use_dora"):
        raise RejectedError("it has no lora_bias for DoRA")
    wrong = next((name for name in _NOT_FOR_PARAMETERS if config.get(name)), None)
    if config.get("target_parameters") and wrong:
        raise RejectedError(f"target_parameters do not go with {wrong}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def has_targets(config: Config) -> bool:
    """Does the configuration say what is adapted? Else PEFT takes a table of its own, by the model's type."""
    return bool(config.get("target_modules") or config.get("target_parameters"))


def is_target(config: Config, path: str) -> bool | None:
    """Does PEFT put an adapter around a module? None where that depends on the model's classes ("all-linear").

    Args:
        config: adapter_config.json.
        path: Of the module in the base model.
    """
    excluded = config.get("exclude_modules")
    if isinstance(excluded, str) and matches(excluded, path, shown=excluded, where="exclude_modules", full=True):
        return False
    if isinstance(excluded, list) and matched(excluded, path):
        return False
    if any(
        matches(rf"(^|.*\.){name}($|\..*)", path, shown=name, where="modules_to_save") for name in saved_names(config)
    ):
        return False
    target = config.get("target_modules")
    found = matched(target, path)
    if not found or not isinstance(target, list) or path in target:
        return found
    layers = config.get("layers_to_transform")
    if layers is None or layers == []:
        return True
    index = _layer(path, config.get("layers_pattern"))
    return index is not None and index in (layers if isinstance(layers, list) else [layers])


def _layer(path: str, patterns: object) -> int | None:
    if not patterns:
        match = re.match(r".*?\.[^.]*\.(\d+)\.", path)
        return None if match is None else int(match[1])
    for pattern in [patterns] if isinstance(patterns, str) else patterns if isinstance(patterns, list) else []:
        parts = path.split(".")
        for at in range(1, len(parts) - 1):
            if parts[at].isdecimal() and _ends(".".join(parts[:at]), pattern):
                return int(parts[at])
    return None


def _ends(path: str, pattern: object) -> bool:
    return isinstance(pattern, str) and matches(
        rf"(?:.*\.)?(?:{pattern})", path, shown=pattern, where="layers_pattern", full=True
    )


def saved_names(config: Config) -> tuple[str, ...]:
    """Return the names in modules_to_save."""
    saved = config.get("modules_to_save")
    return tuple(name for name in saved if isinstance(name, str)) if isinstance(saved, list) else ()


def rank_of(config: Config, path: str) -> int:
    """Return the rank that a module's adapter gets.

    Raises:
        RejectedError: One that is no rank.
    """
    found, rank = by_pattern(config.get("rank_pattern"), path, where="rank_pattern")
    if not found:
        rank = config.get("r", 8)
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise RejectedError(f"the rank is {rank!r}")
    return rank


def expected(family: Family, config: Config, path: str, weight: Shape) -> tuple[Mapping[str, Shape | None], ...]:
    """Return the factors that PEFT makes for a module, in every way that the shape of its weight allows.

    Returns:
        Role → shape, None where several are right; () where that is not known.

    Raises:
        RejectedError: The configuration's rank is none.
    """
    if len(weight) not in (2, 3, 4, 5) or 0 in weight:
        return ()
    return family.peft_shapes(config, rank_of(config, path) if family.is_scaled else 0, weight)


def starts_idle(config: Config, family: Family) -> bool:
    """Does an adapter of a module that the file has nothing for change nothing?"""
    value = config.get(family.init_field, True)
    return any(value is each or value == each for each in _HARMLESS if isinstance(value, type(each)))


def expected_biases(config: Config, family: Family, names: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield the base's own biases that were trained along, under their names in the base."""
    if "bias" not in family.peft_fields:
        return
    bias = config.get("bias", "none")
    for name in names:
        module, _, parameter = name.rpartition(".")
        if parameter == "bias" and (bias == "all" or (bias != "none" and is_target(config, module))):
            yield name
