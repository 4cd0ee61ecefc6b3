"""What an adapter's configuration must be, from its tensors and from what is known beside them. Pure.

Every value says where it comes from. What the tensors do not tell, and what changes the result, is asked for: a wrong
alpha or a wrong kind of rotation gives an adapter that loads, and does something else.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

from ckpt_tools.adapters.adapter import TOKENS, Adapter, AdapterModule, F, Fields, Sourced
from ckpt_tools.adapters.base.model import BaseModel
from ckpt_tools.adapters.ecosystems.peft.targets import (
    exact_pattern,
    refuse_parameters,
    saved_fields,
    target_fields,
)
from ckpt_tools.adapters.families import FAMILIES, PEFT_TYPES, Family
from ckpt_tools.adapters.families.family import MERGE_HINT
from ckpt_tools.adapters.families.tokens import fields_of
from ckpt_tools.errors import UsageError
from ckpt_tools.processes import wire

_MAX_SHOWN = 3
_OWN_FIELDS = """
    peft_type base_model_name_or_path task_type inference_mode r lora_alpha alpha rank_pattern alpha_pattern
    target_modules exclude_modules layers_to_transform layers_pattern target_parameters modules_to_save bias
    token_indices trainable_token_indices
"""
"""Worked out from the tensors; what a configuration beside them says is only taken where it agrees."""
_INFERRED = ("peft_type", "inference_mode", "rank_pattern", "alpha_pattern", "lora_alpha", "alpha")
"""Not to be given: tensors, or other options, say them."""
_TEXT = ("peft_version", "revision", "task_type", "base_model_name_or_path", "bias", "megatron_core")
"""Fields that are text, even where it looks like a number."""
_TRAINING_ONLY = ("velora_config",)
"""Fields that ask for tensors which only training needs, and which are not exported."""


def infer_config(adapter: Adapter[F], *, base: BaseModel | None = None, base_model: str | None = None) -> Fields:
    """Return PEFT's configuration for an adapter with alphas, under the module paths of its base.

    Raise UsageError where one configuration cannot express it, or what changes the result is not known.
    """
    family = _only_family(adapter)
    if family.is_carried:
        return _as_written(adapter, family, base_model)
    modules = [module for module in adapter.modules if module.family == family.name]
    config: Fields = {"peft_type": Sourced(family.peft_type, f"factors {', '.join(sorted(modules[0].factors))}")}
    config |= _identity(adapter, base, base_model)
    if family.is_scaled:
        config |= _ranks_and_alphas(adapter, family, modules)
    config |= family.peft_config(adapter, modules, base.shapes if base else {})
    config |= fields_of(adapter, family.peft_fields)
    config |= target_fields(adapter, modules, base)
    config |= saved_fields(adapter, modules, base)
    for name, found in adapter.settings.items():
        if name not in config and name not in (*_OWN_FIELDS.split(), *_TRAINING_ONLY) and name in family.peft_fields:
            config[name] = found
    config["inference_mode"] = Sourced(True, "an exported adapter is not being trained")
    known = {"peft_type", *family.peft_fields}
    return {name: found for name, found in config.items() if name in known or found.value is not None}


def _only_family(adapter: Adapter[F]) -> Family:
    counts = Counter(module.family for module in adapter.modules if not module.is_saved)
    if len(counts) > 1:
        counts.pop(TOKENS, None)
    if not counts:
        raise UsageError(
            "there are trained modules here, but no factors of an adapter",
            hint="`ckpt gather` extracts tensors from a checkpoint",
        )
    for family in map(FAMILIES.__getitem__, counts):
        if family.peft_type is None:
            raise UsageError(f"PEFT has no form for {family.title}s ({counts[family.name]} modules)", hint=MERGE_HINT)
    if len(counts) > 1:
        raise UsageError(
            f"an adapter of PEFT has one type, but here are {' and '.join(sorted(counts))}",
            hint="export them one by one, with --include and --exclude",
        )
    return FAMILIES[next(iter(counts))]


def _as_written(adapter: Adapter[F], family: Family, base_model: str | None) -> Fields:
    """Return the configuration of a type that ckpt carries as PEFT wrote it."""
    settings = {name: found for name, found in adapter.settings.items() if not name.startswith("ckpt_")}
    if "peft_type" not in settings:
        raise UsageError(
            f"the tensors of {family.title} do not show its configuration",
            hint="put the adapter_config.json of the training run beside the source",
        )
    if adapter.omitted:
        what = f"of an adapter of {family.title} ckpt writes all modules: its configuration is copied as it is"
        raise UsageError(what, hint="leave out --include and --exclude")
    if family.name == "prompt" and any(module.is_saved for module in adapter.modules):
        what = "modules were trained whole beside a prompt, which ckpt does not write under PEFT's names"
        raise UsageError(what, hint="save it with PEFT itself (save_pretrained)")
    if base_model is not None:
        settings["base_model_name_or_path"] = Sourced(base_model, "--base-model")
    return settings | {"inference_mode": Sourced(True, "an exported adapter is not being trained")}


def _identity(adapter: Adapter[F], base: BaseModel | None, base_model: str | None) -> Fields:
    config: Fields = {}
    settings = adapter.settings
    if base_model is not None:
        config["base_model_name_or_path"] = Sourced(base_model, "--base-model")
    else:
        config["base_model_name_or_path"] = settings.get("base_model_name_or_path", Sourced(None, "not recorded"))
    task = settings.get("task_type")
    if task is None and "peft_type" in settings:
        config["task_type"] = Sourced(None, f"{settings['peft_type'].source} has none")
        return config
    task = task or (base.task_type if base else None)
    config["task_type"] = _with_its_head(task, adapter) if task else Sourced(None, "not recorded")
    return config


_HEADS: Mapping[str, tuple[str, ...]] = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
"""Task type → modules that PEFT takes for trained, whatever modules_to_save says. Source: peft 0.21 `peft_model.py`."""


def _with_its_head(task: Sourced[object], adapter: Adapter[F]) -> Sourced[object]:
    """PEFT does not load an adapter of such a task without its head."""
    heads = _HEADS.get(task.value) if isinstance(task.value, str) else None
    if heads is None or any(module.is_saved and module.path.endswith(heads) for module in adapter.modules):
        return task
    what = f"for {task.value} PEFT requires a trained {' or '.join(heads)}, but there is none here"
    if task.source == "--config":
        raise UsageError(what, where="--config", hint="leave task_type out: PEFT loads the adapter without one")
    return Sourced(None, f"{what} ({task.source})")


def _ranks_and_alphas(adapter: Adapter[F], family: Family, modules: Sequence[AdapterModule[F]]) -> Fields:
    """Put the most frequent rank and alpha in front, and the others into patterns that match one module each."""
    if any(not module.parameter for module in modules) and (whole := _configured(adapter, modules)):
        return whole
    ranks: dict[str, Sourced[int]] = {}
    alphas: dict[str, Sourced[float]] = {}
    for module in modules:
        path = module.target
        if not module.parameter and "target_parameters" not in adapter.settings:
            raise refuse_parameters(module.path)
        if module.rank is None:
            raise UsageError(
                f"the rank of {module.path!r} is not known: its factors do not show it",
                hint="give the one of the training run: --config r=VALUE",
            )
        ranks[path] = module.rank
        if module.alpha is not None:
            alphas[path] = module.alpha
    config: Fields = {}
    for key, patterns, values in (("r", "rank_pattern", ranks), (family.alpha_field, "alpha_pattern", alphas)):
        counts = Counter(found.value for found in values.values())
        # The first of the most frequent ones in the order of the modules; what is alike is said alike.
        common = counts.most_common(1)[0][0]
        first = next(found for found in values.values() if found.value == common)
        rest = {path: found for path, found in values.items() if found.value != common}
        few = f" in {counts[common]} of {len(values)} modules" if rest else ""
        config[key] = Sourced(_plain(common), first.source + few)
        sources = sorted({found.source for found in rest.values()})
        config[patterns] = Sourced(
            {f"^{exact_pattern([path])}": _plain(found.value) for path, found in rest.items()},
            ", ".join(sources[:_MAX_SHOWN]) if rest else "all modules are alike",
        )
    if "use_rslora" in family.peft_fields:
        rslora = {module.use_rslora for module in modules}
        if len(rslora) > 1:
            raise UsageError("some modules use use_rslora and some do not, but PEFT has one setting for all")
        known = adapter.settings.get("use_rslora")
        config["use_rslora"] = Sourced(rslora.pop(), known.source if known else "alpha is the numerator of alpha/r")
    return config


def _configured(adapter: Adapter[F], modules: Sequence[AdapterModule[F]]) -> Fields:
    """Return ranks and alphas as the training run's configuration has them; {} where that has none by name."""
    # Which of a module's parameters has which factors, and so which pattern, the base model alone would tell.
    settings = adapter.settings
    patterns = [settings[name] for name in ("rank_pattern", "alpha_pattern") if name in settings]
    if not any(found.value for found in patterns) or not {"r", "lora_alpha"} <= settings.keys():
        return {}
    given = {m.alpha for m in modules if m.alpha is not None and m.alpha.source == "--alpha"}
    config: Fields = {name: settings[name] for name in ("r", "rank_pattern") if name in settings}
    if given:
        config |= {"lora_alpha": given.pop(), "alpha_pattern": Sourced({}, "--alpha")}
    else:
        config |= {name: settings[name] for name in ("lora_alpha", "alpha_pattern") if name in settings}
    config["use_rslora"] = settings.get("use_rslora", Sourced(False, "alpha is the numerator of alpha/r"))
    return config


def _plain(value: float) -> float:
    """PEFT writes alphas as whole numbers where they are."""
    return int(value) if float(value).is_integer() else value


def parse_overrides(given: Sequence[str]) -> Mapping[str, Sourced[object]]:
    """Return field → value; a value is JSON where it is any, else text."""
    found: dict[str, Sourced[object]] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"{text!r} is not FIELD=VALUE", where="--config")
        if name in ("lora_alpha", "alpha"):
            raise UsageError(f"{name} has an option of its own", where="--config", hint=f"--alpha {value}")
        if name in _INFERRED or not any(name in family.peft_fields for family in PEFT_TYPES.values()):
            what = (
                "is derived from the tensors"
                if name in _INFERRED
                else "is not a field of PEFT's configuration that ckpt knows"
            )
            raise UsageError(f"{name} {what}", where="--config")
        if name in found:
            raise UsageError(f"{name} is given twice", where="--config")
        found[name] = Sourced(value if name in _TEXT else _value(value), "--config")
    return found


def live_settings(config: Mapping[str, object]) -> Mapping[str, Sourced[object]]:
    """Return field → value of a configuration that a process in training has."""
    return {name: Sourced(value, "live peft_config") for name, value in json.loads(wire.dumps(config)).items()}


def _value(text: str) -> object:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _refuse(text: str) -> object:
    raise ValueError(text)
