"""What PEFT's configuration asks for: settings that it refuses, modules and parameters that it wraps, their ranks.

Source: peft 0.21, config.py, tuners/*/config.py (`__post_init__`), tuners/tuners_utils.py
(`check_target_module_exists`, `_inject_parameters`), tuners/lora/layer.py (`ParamWrapper`), utils/other.py
(`_set_trainable`), peft_model.py: the class of every task hands `input_ids` to the model's forward; transformers 5.23:
the signatures of the models' forward.

Letters: e experts, o outputs, i inputs, r rank.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

from ckpt_tools.adapters.adapter import Adapter, F, Shape, Sourced
from ckpt_tools.adapters.ecosystems.loader_report import Loading, RejectedError
from ckpt_tools.adapters.families import Family, family_of
from ckpt_tools.adapters.read.sidecars import ADAPTER_CONFIG, DORA_SCALE, by_pattern, matches
from ckpt_tools.errors import UsageError
from ckpt_tools.text import escape_name

Config = Mapping[str, object]
_HARMLESS = (True, "gaussian", "lycoris")
"""Values of init_lora_weights and init_weights with which a new adapter changes nothing."""
_NOT_FOR_PARAMETERS = ("use_dora", "lora_bias", "lora_dropout", "fan_in_fan_out", "velora_config", "kasa_config")
_TASKS = ("SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")
with open(os.path.join(os.path.dirname(__file__), "without_ids.txt"), encoding="utf-8") as _file:
    _WITHOUT_IDS = frozenset(_file.read().split())
"""transformers' types whose models take pictures or sound, and no input_ids."""
Levels = Mapping[int, Mapping[str, Shape]]  # Number of wrappers outside → role → shape
_MOST = 4
"""Parameters of one module that are tried in every order: which of them is the outer one, the model's class decides."""


def check_config(config: Config, family: Family) -> None:
    """Raise RejectedError for what PEFT refuses before it looks at a tensor."""
    target = config.get("target_modules")
    if config.get("layers_pattern") and config.get("layers_to_transform") is None:
        raise RejectedError("layers_pattern needs layers_to_transform")
    if family.peft_checks_layers and isinstance(target, str) and config.get("layers_to_transform") is not None:
        raise RejectedError("layers_to_transform cannot be used with a pattern in target_modules")
    if family.peft_either is not None:
        one, other, default = family.peft_either
        if bool(config.get(one, 0)) == bool(config.get(other, default)):
            raise RejectedError(f"exactly one of {one} and {other} must be set")
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
        raise RejectedError(f"target_parameters cannot be combined with {wrong}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_task(config: Config, model_type: str | None, loading: Loading) -> None:
    """Say what a task type does to a model; raise RejectedError if PEFT does not know it."""
    task = config.get("task_type")
    if task is None:
        return
    if task not in _TASKS:
        raise RejectedError(f"task_type is {task!r}, which is not one of {', '.join(_TASKS)}")
    if model_type is not None and model_type in _WITHOUT_IDS:
        what = f"task_type is {task}: PEFT calls the model with input_ids, which a {model_type} model does not accept"
        hint = "set task_type to null: PEFT then passes on the arguments that it receives"
        loading.misreads(ADAPTER_CONFIG, what, hint)


def has_targets(config: Config) -> bool:
    """Does the configuration say what is adapted? Else PEFT takes a table of its own, by the model's type."""
    return bool(config.get("target_modules") or config.get("target_parameters"))


def matched(target: object, module: str) -> bool | None:
    """Return True if PEFT's `target_modules` match a module; None where only the model tells ("all-linear")."""
    if isinstance(target, str):
        if target.lower() == "all-linear":
            return None
        return matches(target, module, shown=target, where="target_modules", full=True)
    if isinstance(target, list):
        return any(isinstance(name, str) and (module == name or module.endswith("." + name)) for name in target)
    return None


def is_target(config: Config, path: str) -> bool | None:
    """Does PEFT put an adapter around a module? None where that depends on the model's classes ("all-linear")."""
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
    """Return the rank that a module's adapter gets; raise RejectedError if it is not a rank."""
    found, rank = by_pattern(config.get("rank_pattern"), path, where="rank_pattern")
    if not found:
        rank = config.get("r", 8)
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise RejectedError(f"the rank is {rank!r}")
    return rank


def expected(family: Family, config: Config, path: str, weight: Shape) -> tuple[Mapping[str, Shape | None], ...]:
    """Return role → shape of the factors that PEFT makes for a module, in every way that its weight's shape allows.

    None stands for several right shapes, () for what is not known. Raise RejectedError as `rank_of`.
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


def wrapped_parameters(config: Config, base: Mapping[str, Shape]) -> dict[str, list[str]]:
    """Return module → its parameters that PEFT wraps."""
    wanted = config.get("target_parameters")
    found: dict[str, list[str]] = defaultdict(list)
    for name in base if isinstance(wanted, list) and wanted else ():
        if matched(wanted, name):
            module, _, parameter = name.rpartition(".")
            found[module].append(parameter)
    return found


def check_parameters(
    module: str, parameters: Sequence[str], levels: Levels, config: Config, base: Mapping[str, Shape], loading: Loading
) -> None:
    """Raise RejectedError if factors of a module's wrappers have other shapes than PEFT makes for its parameters."""
    lacking = [role for level in range(len(parameters)) for role in ("A", "B") if role not in levels.get(level, {})]
    if lacking:
        what = f"{len(lacking)} factors are missing of {len(parameters)} target_parameters: PEFT initialises them"
        loading.incomplete(module, what, "was the adapter saved completely?")
    if len(parameters) > _MOST:
        what = f"{len(parameters)} target_parameters of one module: their order is not known"
        loading.unchecked(module, what)
        return
    ways = [_ways(rank_of(config, f"{module}.{each}"), base[f"{module}.{each}"]) for each in parameters]
    if any(all(_agrees(levels.get(level, {}), way) for level, way in enumerate(order)) for order in permutations(ways)):
        return
    found = ", ".join(f"{role} {list(shape)}" for factors in levels.values() for role, shape in factors.items())
    wanted = ", ".join(f"{each} {list(base[f'{module}.{each}'])}" for each in parameters)
    raise RejectedError(f"size mismatch: {module} has {found}, and its target_parameters are {wanted}")


def _ways(r: int, weight: Shape) -> tuple[Mapping[str, Shape], ...]:
    """Return the shapes of A and B; stacked experts may be (e, i, o) or (e, o, i), which the class decides."""
    if len(weight) == 2:
        return ({"A": (r, weight[1]), "B": (weight[0], r)},)
    if len(weight) != 3:
        raise RejectedError(f"a parameter with {len(weight)} dims; PEFT wraps only those with 2 or 3")
    e, one, other = weight
    return ({"A": (r * e, one), "B": (other, r * e)}, {"A": (r * e, other), "B": (one, r * e)})


def _agrees(factors: Mapping[str, Shape], ways: Sequence[Mapping[str, Shape]]) -> bool:
    return any(all(way.get(role) == shape for role, shape in factors.items()) for way in ways)


# Variants of PEFT's types whose factors alone do not say what the adapter does to a plain base model.

_CHANGED_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""Initialisations that take the factors out of the base weights: the adapter belongs to what is left of these.
Source: peft 0.21 `tuners/lora/layer.py`, `*_init`."""
_VERSION = re.compile(r"0\.(\d{1,6})\b")
_FIRST_STABLE_MINOR = 18
"""Of PEFT 0.x: before it, Cayley-Neumann gave other rotations. Source: peft 0.21 `tuners/oft/config.py`."""


_VARIANTS: Mapping[str, str] = {
    "init_lora_weights": "the base was changed before training, and the factors belong to the changed base",
    "use_qalora": "QALoRA pools the inputs before they reach the factors",
    "alora_invocation_tokens": "aLoRA acts only on the tokens after its invocation",
    "layer_replication": "layers are replicated, so the model is not the base's",
    "use_bdlora": "BD-LoRA's factors are block-diagonal",
    "arrow_config": "Arrow routes between several adapters",
    "kasa_config": "KaSA changes the base, and adds a diagonal to the factors",
    "monteclora_config": "MonteCLoRA draws random samples around the factors",
    DORA_SCALE: "ckpt wrote its dora_scale for ComfyUI; other loaders compute something else from it",
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
        f"init_lora_weights is {escape_name(str(found.value))}: PEFT decomposes the base again at every load with a "
        "randomised algorithm, and the result is close to what was trained, not equal to it"
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
