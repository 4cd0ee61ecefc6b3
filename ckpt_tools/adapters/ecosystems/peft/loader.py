"""What `PeftModel.from_pretrained` does with an adapter's files.

Source: peft 0.21, peft_model.py, utils/save_and_load.py, tuners/tuners_utils.py (`check_target_module_exists`).
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from ckpt_tools.adapters.adapter import SAVED, TOKENS, AdapterModule, Shape, Sourced
from ckpt_tools.adapters.base.model import base_path, parents_of
from ckpt_tools.adapters.base.tied import HEADS
from ckpt_tools.adapters.ecosystems.peft import asked
from ckpt_tools.adapters.ecosystems.peft.config_rules import (
    Config,
    check_config,
    check_parameters,
    check_task,
    expected,
    expected_biases,
    has_targets,
    is_target,
    matched,
    rank_of,
    saved_names,
    starts_idle,
    wrapped_parameters,
)
from ckpt_tools.adapters.ecosystems.peft.files import ROOT
from ckpt_tools.adapters.ecosystems.simulation import AdapterFile, Loading, RejectedError
from ckpt_tools.adapters.families import FAMILIES, PEFT_TYPES, Family
from ckpt_tools.adapters.families.tokens import beyond, indices_of, why_wrong
from ckpt_tools.adapters.read.assemble import Key, parse_key
from ckpt_tools.adapters.read.sidecars import ADAPTER_CONFIG, PEFT_FILE
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.text import first_few

_WRAPPED = ".base_layer"
"""Ends the path of what PEFT wraps."""
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")
_SAVED_COPY = re.compile(r"\.(?:modules_to_save|original_module)\.")
_STACKED = re.compile(r"\.experts\.\w+$")
_OF_EXPERTS = frozenset({"w1", "w2", "w3", "gate_proj", "up_proj", "down_proj", "gate_up_proj", "input_linear"})


def load(file: AdapterFile, loading: Loading) -> None:
    """Apply PEFT's rules; raise RejectedError where it raises."""
    config = file.config
    if config is None:
        raise RejectedError(f"there is no {ADAPTER_CONFIG} beside it")
    if file.file != PEFT_FILE:
        raise RejectedError(f"it looks for {PEFT_FILE}, but this is {file.file}")
    kind = config.get("peft_type")
    family = PEFT_TYPES.get(str(kind))
    if family is None:
        raise RejectedError(f"peft_type is {kind!r}")
    check_task(config, file.base_type, loading)
    if family.is_carried:
        asked.load(file, config, loading)
        return
    check_config(config, family)
    if not has_targets(config):
        loading.misreads(
            ADAPTER_CONFIG,
            "target_modules is not set: PEFT uses a table of its own, or refuses a model that is not in it",
            "ckpt export-lora SRC DST --to peft writes them",
        )
    if family.is_scaled:
        alpha = family.alpha_field
        if alpha not in config:
            loading.misreads(
                ADAPTER_CONFIG,
                f"{alpha} is missing, and PEFT silently uses 8",
                "ckpt export-lora SRC DST --alpha VALUE writes it",
            )
        loading.say_scale(alpha, config.get(alpha))
    if file.base is not None and file.base_class is None and _is_converted(config, file.base):
        what = "PEFT rewrites adapters of experts for the stacked ones of transformers 5, which is not simulated"
        loading.unchecked(ADAPTER_CONFIG, what)
        return
    config = _with_tied(config, file)
    wrapped = wrapped_parameters(config, file.base or {})
    found, levels = _match(file, config, family, wrapped, loading)
    _check_saved(file, config)
    if "trainable_token_indices" in family.peft_fields:
        _check_tokens(file, config)
    if file.base is None:
        loading.needs_base(
            file.file, "without --base the modules' paths and target_modules are not checked against the model"
        )
        return
    for path, parameters in wrapped.items():
        check_parameters(path, parameters, levels.get(path, {}), config, file.base, loading)
    for path, factors in found.items():
        _check_shapes(path, factors, family, config, file.base, loading)
    _say_missing(file.base, found, family, config, loading)
    _say_biases(file, file.base, family, config, loading)


def _is_converted(config: Config, base: Mapping[str, Shape]) -> bool:
    """Source: peft 0.21 `utils/transformers_weight_conversion.py`."""
    targets = config.get("target_modules")
    leaves = {str(name).rpartition(".")[2] for name in targets} if isinstance(targets, list) else set()
    return bool(leaves & _OF_EXPERTS) and any(_STACKED.search(name) for name in base)


def _with_tied(config: Config, file: AdapterFile) -> Config:
    """A tied head shares the factors of its embedding with ensure_weight_tying, and the rows of its trained tokens."""
    targets = config.get("target_modules")
    has_head = any(name.startswith(f"{ROOT}lm_head.lora_") for name in file.tensors)
    if f"{ROOT}lm_head.trainable_tokens_delta" in file.tensors:
        targets = targets.split("|") if isinstance(targets, str) else targets
    elif not config.get("ensure_weight_tying") or not has_head:
        return config
    if not isinstance(targets, list):
        return config
    return {**config, "target_modules": [*targets, "lm_head"]}


def _match(
    file: AdapterFile, config: Config, family: Family, wrapped: Mapping[str, Sequence[str]], loading: Loading
) -> tuple[dict[str, dict[str, Shape]], dict[str, dict[int, dict[str, Shape]]]]:
    """Return module → role → shape; and, where parameters are wrapped, module → level → role → shape."""
    modules = parents_of(file.base) if file.base is not None else None
    found: dict[str, dict[str, Shape]] = defaultdict(dict)
    levels: dict[str, dict[int, dict[str, Shape]]] = defaultdict(lambda: defaultdict(dict))
    for name, head in file.tensors.items():
        key = parse_key(name.removeprefix(ROOT))
        if not name.startswith(ROOT):
            loading.ignored[name] = f"the name does not begin with {ROOT}"
            continue
        if key is None or key.family == SAVED:
            _match_plain(name, head.shape, file, config, loading)
            continue
        reason = why_no_tokens(key, head, config, family, file, loading)
        if reason is None and key.role != "beside":
            reason = _why_not(key, family, config, is_wrapped=key.path in wrapped or file.base is None)
        if reason is None and key.path in wrapped and key.nesting >= len(wrapped[key.path]):
            reason = f"target_parameters name {len(wrapped[key.path])} parameters of its module"
        if reason is None and modules is not None and base_path(key.path) not in modules:
            reason = "the base model has no such module"
        if reason is not None:
            loading.ignored[name] = reason
            continue
        loading.use(name, key.path)
        if key.path in wrapped:
            levels[key.path][key.nesting][key.role] = head.shape
            continue
        if key.role != "beside":
            found[key.path][key.role] = head.shape
        if family.peft_checks_rank and (file.base is not None or not config.get("target_parameters")):
            _check_rank(name, key, head.shape, config)
    return found, levels


def _match_plain(name: str, shape: Shape, file: AdapterFile, config: Config, loading: Loading) -> None:
    """Say what becomes of a tensor of the base's own."""
    inner = name.removeprefix(ROOT)
    if (twin := _SAVED_COPY.sub(".", inner)) != inner and f"{ROOT}{twin}" in file.tensors:
        loading.use(name, twin.rpartition(".")[0])  # bias="all" writes a saved bias under three names
        return
    module = inner.rpartition(".")[0]
    if any(module.endswith(each) for each in saved_names(config)):
        _check_resized(inner, shape, file, loading)
        loading.use(name, module)
    elif (reason := _why_not_plain(inner, shape, file, config)) is not None:
        loading.ignored[name] = reason
    else:
        loading.use(name, module.removesuffix(_WRAPPED))


def _why_not(key: Key, family: Family, config: Config, *, is_wrapped: bool) -> str | None:
    """Why a factor does not go into the model; None when it does, as far as the configuration tells."""
    if key.adapter not in (None, "default"):
        return f"its name contains the adapter {key.adapter!r}, but PEFT loads it as 'default'"
    if key.style != "peft":
        return "the suffix is not PEFT's"
    if key.family != family.name:
        return f"peft_type is {config.get('peft_type')}"
    switch = next((field for field, role, _ in family.peft_switches if role == key.role), None)
    if switch is not None and config.get(switch) is not True:
        return f"{switch} is not set" + (": a DoRA loses its magnitude" if key.role == "magnitude" else "")
    if not has_targets(config) or is_target(config, key.path) is not False:
        return None
    if is_wrapped and config.get("target_parameters"):
        return None
    return "the configuration does not target its module, so that it is silently not loaded"


def _why_not_plain(inner: str, shape: Shape, file: AdapterFile, config: Config) -> str | None:
    """Return why a tensor of the base's own does not go into the model; None when it does, as trained biases do.

    Source: peft 0.21 `utils/save_and_load.py`: what is no factor is loaded by its name in the model, in
    which targets are wrapped.
    """
    holder, _, parameter = inner.rpartition(".")
    module = holder.removesuffix(_WRAPPED)
    is_wrapped = None if config.get("target_parameters") or not has_targets(config) else is_target(config, module)
    if is_wrapped is not None and is_wrapped != holder.endswith(_WRAPPED):
        if is_wrapped:
            return "its module is a target, whose own tensors PEFT keeps under base_layer"
        return "its module is not a target, and has no base_layer"
    if file.base is None:
        return None
    if f"{module}.{parameter}" not in file.base:
        return "the base model has no such tensor, and modules_to_save does not name it"
    if file.base[f"{module}.{parameter}"] != shape:
        raise RejectedError(f"size mismatch: {inner} is {list(shape)}, the base model's differs")
    return None


def _check_rank(name: str, key: Key, shape: Shape, config: Config) -> None:
    dim = FAMILIES[key.family].rank_dims((key.role,)).get(key.role)
    if dim is None:
        return
    if len(shape) < 2 or 0 in shape:
        raise RejectedError(f"size mismatch: {name} is {list(shape)}, which is not the shape of a factor")
    rank = rank_of(config, base_path(key.path))
    if shape[dim] != rank and len(shape) == 2:
        raise RejectedError(f"size mismatch: {name} is {list(shape)}, the configuration's rank is {rank}")


def _check_resized(inner: str, shape: Shape, file: AdapterFile, loading: Loading) -> None:
    """A saved module may have other rows than the base's, as long as the user resizes the model first."""
    there = None if file.base is None else file.base.get(inner)
    if there is None or there == shape:
        return
    if len(there) != len(shape) or there[1:] != shape[1:]:
        raise RejectedError(f"size mismatch: {inner} is {list(shape)}, the base model's is {list(there)}")
    loading.needs(
        inner,
        f"it has {shape[0]} rows, the base model's {there[0]}: PEFT refuses it unless the model is resized before",
    )


def _check_saved(file: AdapterFile, config: Config) -> None:
    """PEFT looks up every tensor of a saved module, and raises KeyError when one is not there."""
    names = saved_names(config)
    plain = {name.removeprefix(ROOT) for name in file.tensors}
    for name in file.base or {}:
        path = name.rpartition(".")[0]
        while path:
            if any(path.endswith(each) for each in names) and name not in plain:
                raise RejectedError(f"modules_to_save has {path}, but the file has no {ROOT}{name}")
            path = path.rpartition(".")[0]
    if names and not any(name.rpartition(".")[0].endswith(each) for name in plain for each in names):
        parents = {name.rpartition(".")[0] for name in plain}
        if not any(f".{each}." in f".{parent}." for parent in parents for each in names):
            raise RejectedError(f"modules_to_save is {', '.join(names)}, but the file has none of them")


def _check_tokens(file: AdapterFile, config: Config) -> None:
    tokens = "trainable_tokens_delta"
    if config.get("trainable_token_indices") and not any(tokens in name for name in file.tensors):
        raise RejectedError(f"trainable_token_indices is set, but the file has no {tokens}")
    parameters = config.get("target_parameters")
    for name in (file.base or {}) if isinstance(parameters, list) else ():
        if matched(parameters, name) and is_target(config, name.rpartition(".")[0]):
            raise RejectedError(f"{name} is in target_parameters, and its module in target_modules")


def _check_shapes(
    path: str, factors: Mapping[str, Shape], family: Family, config: Config, base: Mapping[str, Shape], loading: Loading
) -> None:
    """Hold a module's factors against those that PEFT would make for it."""
    weight = base.get(f"{base_path(path)}.weight")
    if weight is None:
        return
    ways = expected(family, config, path, weight)
    if not ways or any(_agrees(factors, way, is_whole=True) for way in ways):
        return
    way = max(ways, key=lambda way: (len(way.keys() & factors.keys()), _agrees(factors, way, is_whole=False)))
    for role, shape in factors.items():
        right = way.get(role)
        if right is not None and right != shape:
            raise RejectedError(f"size mismatch: {role} of {path} is {list(shape)}, PEFT makes {list(right)}")
    for problem, roles in (("lacks", way.keys() - factors.keys()), ("has", factors.keys() - way.keys())):
        if roles:
            loading.incomplete(
                path,
                f"the file {problem} {', '.join(sorted(roles))} of a module under this configuration: PEFT "
                + ("initialises it" if problem == "lacks" else "ignores it")
                + " (a warning at most)",
                "is it the configuration of this adapter, and was it saved completely?",
            )


def _agrees(factors: Mapping[str, Shape], way: Mapping[str, Shape | None], *, is_whole: bool) -> bool:
    if is_whole and factors.keys() != way.keys():
        return False
    return all(way.get(role) in (None, shape) for role, shape in factors.items())


def _say_missing(
    base: Mapping[str, Shape], found: Mapping[str, object], family: Family, config: Config, loading: Loading
) -> None:
    """Name targets that the file has nothing for, which PEFT gives adapters of their own."""
    if not has_targets(config):
        return
    modules = parents_of(base)
    parents = {module.rpartition(".")[0] for module in modules}
    used = {base_path(path) for path in found}
    idle = sorted(m for m in modules if m not in used and m not in parents and is_target(config, m))
    if not idle:
        return
    is_idle = starts_idle(config, family)
    lost = _lost(idle, used)
    shown = first_few(lost or idle)
    if not is_idle or lost:
        anew = "which change nothing" if is_idle else "of random numbers, as init_weights says"
        loading.incomplete(
            ADAPTER_CONFIG,
            f"the configuration targets {len(idle)} modules that the file has no tensors for ({shown}): PEFT gives "
            f"them new adapters, {anew}, and warns of missing keys",
            "was the adapter saved completely? If so, name its layers in layers_to_transform or exclude_modules",
        )
        return
    loading.needs(
        ADAPTER_CONFIG,
        f"target_modules also matches {len(idle)} modules that the file has no tensors for, such as {idle[0]}: if the "
        "model's class has them, PEFT gives them new adapters, which change nothing",
    )


def _lost(idle: Sequence[str], used: Collection[str]) -> list[str]:
    """Return those that every class of the model has: beside used ones, or of their kind in other layers."""
    roots = {path.partition(".")[0] for path in used}
    leaves = {path.rpartition(".")[2] for path in used}
    return [
        path
        for path in idle
        if path.partition(".")[0] in roots or (_INDEX.search(path) and path.rpartition(".")[2] in leaves)
    ]


def _say_biases(file: AdapterFile, base: Mapping[str, Shape], family: Family, config: Config, loading: Loading) -> None:
    if not has_targets(config):
        return
    there = {name.removeprefix(ROOT).replace(f"{_WRAPPED}.", ".") for name in file.tensors}
    missing = sorted(name for name in expected_biases(config, family, base) if name not in there)
    if missing:
        loading.incomplete(
            missing[0],
            f"bias is {config.get('bias')!r}, and the file lacks {len(missing)} of the base model's biases: PEFT "
            "silently keeps the base's",
            "was the adapter saved completely?",
        )


# What PEFT does with the rows of trained tokens.
#
# Source: peft 0.21 `tuners/trainable_tokens/layer.py`, `utils/other.py` (`set_additional_trainable_modules`).


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
