"""What `PeftModel.from_pretrained` does with an adapter's files.

Source: peft 0.21, peft_model.py, utils/save_and_load.py, tuners/tuners_utils.py (`check_target_module_exists`).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_tools.adapters.adapter import SAVED, TOKENS, AdapterModule, Shape, Sourced
from ckpt_tools.adapters.base.model import base_path, parents_of
from ckpt_tools.adapters.base.tied import HEADS
from ckpt_tools.adapters.ecosystems.loader_report import AdapterFile, Loading, RejectedError
from ckpt_tools.adapters.ecosystems.peft import config_rules as rules
from ckpt_tools.adapters.ecosystems.peft.config_rules import Config
from ckpt_tools.adapters.ecosystems.peft.files import ROOT
from ckpt_tools.adapters.families import FAMILIES, PEFT_TYPES, Family
from ckpt_tools.adapters.families.tokens import beyond, indices_of, why_wrong
from ckpt_tools.adapters.read.assemble import Key, is_for_training, parse_key
from ckpt_tools.adapters.read.sidecars import ADAPTER_CONFIG, PEFT_FILE
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.errors import CkptError
from ckpt_tools.sandbox.check_config import check_config as check_model_config
from ckpt_tools.sandbox.child import Child, Here, build_in_sandbox
from ckpt_tools.text import escape_name, first_few

if TYPE_CHECKING:
    from torch import nn

_WRAPPED = ".base_layer"  # Ends the path of what PEFT wraps
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
    rules.check_task(config, file.base_type, loading)
    if family.is_carried:
        ask(file, config, loading)
        return
    rules.check_config(config, family)
    if not rules.has_targets(config):
        what = "target_modules is not set: PEFT uses its own table, or refuses a model that is not in it"
        loading.misreads(ADAPTER_CONFIG, what, "write them with ckpt export-lora SRC DST --to peft")
    if family.is_scaled:
        alpha = family.alpha_field
        if alpha not in config:
            what = f"{alpha} is missing, and PEFT silently uses 8"
            loading.misreads(ADAPTER_CONFIG, what, "write it with ckpt export-lora SRC DST --alpha VALUE")
        loading.say_scale(alpha, config.get(alpha))
    if file.base is not None and file.base_class is None and _is_converted(config, file.base):
        what = "PEFT rewrites adapters of experts for the stacked ones of transformers 5, which is not simulated"
        loading.unchecked(ADAPTER_CONFIG, what)
        return
    config = _with_tied(config, file)
    wrapped = rules.wrapped_parameters(config, file.base or {})
    found, levels = _match(file, config, family, wrapped, loading)
    _check_saved(file, config)
    if "trainable_token_indices" in family.peft_fields:
        _check_tokens(file, config)
    if file.base is None:
        what = "without --base the modules' paths and target_modules are not checked against the model"
        loading.needs_base(file.file, what)
        return
    for path, parameters in wrapped.items():
        rules.check_parameters(path, parameters, levels.get(path, {}), config, file.base, loading)
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
    if any(module.endswith(each) for each in rules.saved_names(config)):
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
    if not rules.has_targets(config) or rules.is_target(config, key.path) is not False:
        return None
    if is_wrapped and config.get("target_parameters"):
        return None
    return "the configuration does not target its module, so it is silently not loaded"


def _why_not_plain(inner: str, shape: Shape, file: AdapterFile, config: Config) -> str | None:
    """Return why a tensor of the base's own does not go into the model; None when it does, as trained biases do.

    Source: peft 0.21 `utils/save_and_load.py`: what is no factor is loaded by its name in the model, in
    which targets are wrapped.
    """
    holder, _, parameter = inner.rpartition(".")
    module = holder.removesuffix(_WRAPPED)
    is_sure = rules.has_targets(config) and not config.get("target_parameters")
    is_wrapped = rules.is_target(config, module) if is_sure else None
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
    rank = rules.rank_of(config, base_path(key.path))
    if shape[dim] != rank and len(shape) == 2:
        raise RejectedError(f"size mismatch: {name} is {list(shape)}, the configuration's rank is {rank}")


def _check_resized(inner: str, shape: Shape, file: AdapterFile, loading: Loading) -> None:
    """A saved module may have other rows than the base's, as long as the user resizes the model first."""
    there = None if file.base is None else file.base.get(inner)
    if there is None or there == shape:
        return
    if len(there) != len(shape) or there[1:] != shape[1:]:
        raise RejectedError(f"size mismatch: {inner} is {list(shape)}, the base model's is {list(there)}")
    what = f"it has {shape[0]} rows, the base model's {there[0]}: PEFT refuses it unless the model is resized first"
    loading.needs(inner, what)


def _check_saved(file: AdapterFile, config: Config) -> None:
    """PEFT looks up every tensor of a saved module, and raises KeyError when one is not there."""
    names = rules.saved_names(config)
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
        if rules.matched(parameters, name) and rules.is_target(config, name.rpartition(".")[0]):
            raise RejectedError(f"{name} is in target_parameters, and its module in target_modules")


def _check_shapes(
    path: str, factors: Mapping[str, Shape], family: Family, config: Config, base: Mapping[str, Shape], loading: Loading
) -> None:
    """Hold a module's factors against those that PEFT would make for it."""
    weight = base.get(f"{base_path(path)}.weight")
    if weight is None:
        return
    ways = rules.expected(family, config, path, weight)
    if not ways or any(_agrees(factors, way, is_whole=True) for way in ways):
        return
    way = max(ways, key=lambda way: (len(way.keys() & factors.keys()), _agrees(factors, way, is_whole=False)))
    for role, shape in factors.items():
        right = way.get(role)
        if right is not None and right != shape:
            raise RejectedError(f"size mismatch: {role} of {path} is {list(shape)}, PEFT creates {list(right)}")
    for problem, roles in (("lacks", way.keys() - factors.keys()), ("has", factors.keys() - way.keys())):
        if roles:
            what = (
                f"the file {problem} {', '.join(sorted(roles))} of a module under this configuration: PEFT "
                + ("initialises it" if problem == "lacks" else "ignores it")
                + " (a warning at most)"
            )
            loading.incomplete(path, what, "is it the configuration of this adapter, and was it saved completely?")


def _agrees(factors: Mapping[str, Shape], way: Mapping[str, Shape | None], *, is_whole: bool) -> bool:
    if is_whole and factors.keys() != way.keys():
        return False
    return all(way.get(role) in (None, shape) for role, shape in factors.items())


def _say_missing(
    base: Mapping[str, Shape], found: Mapping[str, object], family: Family, config: Config, loading: Loading
) -> None:
    """Name targets that the file has nothing for, which PEFT gives adapters of their own."""
    if not rules.has_targets(config):
        return
    modules = parents_of(base)
    parents = {module.rpartition(".")[0] for module in modules}
    used = {base_path(path) for path in found}
    idle = sorted(m for m in modules if m not in used and m not in parents and rules.is_target(config, m))
    if not idle:
        return
    is_idle = rules.starts_idle(config, family)
    lost = _lost(idle, used)
    shown = first_few(lost or idle)
    if not is_idle or lost:
        anew = "which change nothing" if is_idle else "with random values, as init_weights requests"
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
    if not rules.has_targets(config):
        return
    there = {name.removeprefix(ROOT).replace(f"{_WRAPPED}.", ".") for name in file.tensors}
    missing = sorted(name for name in rules.expected_biases(config, family, base) if name not in there)
    if missing:
        what = (
            f"bias is {config.get('bias')!r}, and the file lacks {len(missing)} of the base model's biases: PEFT "
            "silently keeps the base's"
        )
        loading.incomplete(missing[0], what, "was the adapter saved completely?")


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
        return "a list of trainable_token_indices applies only to the input embedding"
    if problem := why_wrong(module, indices.value):
        raise RejectedError(f"{key.path}: {problem}")
    weight = (file.base or {}).get(f"{key.path}.weight") or (sys.maxsize, *rows.shape[1:])
    if rows.shape[1:] != weight[1:]:
        raise RejectedError(f"size mismatch: {key.path} has {list(weight)}, its rows are {list(rows.shape)}")
    if problem := beyond(module, indices.value, weight):
        loading.needs(key.path, f"{problem}. PEFT refuses it unless the model is resized first")
    return None


# Of a type that ckpt carries the installed PEFT says it: asked in a sandboxed child, without data.
#
# PEFT gives the base model its adapters on the meta device, and takes the names and shapes of the file.

_SETTLED: Config = {"inference_mode": True, "prompt_tuning_init": "RANDOM"}
"""With other values PEFT reads what the configuration names: tokenizers, other adapters."""
_TRAINED = re.compile(r"\.default(?:\.|$)|\.modules_to_save\.")
_NAMED = re.compile(r"\.default(?=\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftQuestion:
    """What the child is asked."""

    base: str  # Text of the base's config.json
    config: str  # Text of adapter_config.json
    shapes: Mapping[str, Shape]  # Name in PEFT's file → shape


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftAnswer:
    """What PEFT says."""

    refused: str = ""  # On what it raises
    unknown: str = ""  # What it does not tell without data
    missing: tuple[str, ...] = ()  # Names in the model that the file has nothing for, and which PEFT begins anew
    ignored: tuple[str, ...] = ()  # Names in the file that PEFT has no place for


def ask(file: AdapterFile, config: Config, loading: Loading) -> None:
    """Ask PEFT; raise RejectedError where it raises."""
    for name in file.tensors:
        key = parse_key(name.removeprefix("base_model.model."))
        loading.use(name, (key.path if key is not None else "") or name.rpartition(".")[0] or "prompt_encoder")
    if file.base is None:
        loading.needs_base(file.file, "without --base, ckpt cannot query PEFT for what it loads")
        return
    if any(importlib.util.find_spec(name) is None for name in ("peft", "transformers", "torch")):
        loading.unchecked(file.file, "PEFT, which checks this type, is not installed: pip install 'ckpt-tools[hf]'")
        return
    shapes = {name: entry.shape for name, entry in file.tensors.items()}
    plain = {key: value for key, value in file.base_config.items() if key != "quantization_config"}
    try:
        check_model_config(plain, "the base's config.json")
        job = PeftQuestion(base=json.dumps(plain), config=json.dumps({**config}), shapes=shapes)
        with Child(f"{__name__}:answer", job, PeftAnswer, does="asks PEFT", sandboxed=True) as child:
            found = child.result()
    except CkptError as error:
        loading.unchecked(file.file, f"PEFT could not be queried: {error.what}")
        return
    if found.refused:
        raise RejectedError(found.refused)
    if found.unknown:
        loading.unchecked(file.file, f"not known: {found.unknown}")
    for name in found.ignored:
        del loading.used[name]
        loading.ignored[name] = "PEFT has no parameter for it"
    if found.missing:
        loading.incomplete(
            ADAPTER_CONFIG,
            f"the file does not have {len(found.missing)} tensors that PEFT creates for this configuration "
            f"({first_few(found.missing)}): PEFT initialises them (a warning at most)",
            "is it the configuration of this adapter, and was it saved completely?",
        )


def answer(job: PeftQuestion, here: Here) -> PeftAnswer:
    """Build the model on meta, and have PEFT load the names; what `load` calls in a child."""
    import peft  # noqa: F401 - before the sandbox closes
    import torch

    from ckpt_tools.models.recipe_of import recipe_of

    recipe = recipe_of(json.loads(job.base), "the base's config.json")
    build_in_sandbox(here, subject=recipe.title, where="the base's config.json", foreign=())
    with torch.device("meta"):
        model = recipe.build()
    return judge(model, json.loads(job.config), job.shapes)


def judge(model: nn.Module, config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> PeftAnswer:
    """Return what PEFT says of an adapter for a model on the meta device, which it wraps."""
    import torch

    peft: Any = importlib.import_module("peft")
    settled = {name: value for name, value in _SETTLED.items() if name in config or name == "inference_mode"}
    try:
        with torch.device("meta"):
            own = peft.PeftConfig.from_peft_type(**{**config, **settled})
            wrapped = peft.get_peft_model(model, own)
            given = {name: torch.empty(tuple(shape)) for name, shape in shapes.items()}
        result = peft.set_peft_model_state_dict(wrapped, given)
    except NotImplementedError:
        return PeftAnswer(unknown="what PEFT makes of this adapter without the values of the weights")
    except Exception as error:  # noqa: BLE001 - whatever PEFT raises, it raises for the user, too
        return PeftAnswer(refused=f"{type(error).__name__}: {_first_line(error)}")
    if own.is_prompt_learning:
        return _judge_prompt(model, own, set(shapes))
    state = wrapped.state_dict(keep_vars=True)
    lacking = {name for name in result.missing_keys if not is_for_training(name)}
    there = {id(state[name]) for name in state if name not in lacking}  # what modules share has several names
    missing = [name for name in lacking if _TRAINED.search(name) and id(state.get(name)) not in there]
    ignored = {form for name in result.unexpected_keys for form in (name, _NAMED.sub("", name))}
    return PeftAnswer(missing=tuple(sorted(missing)), ignored=tuple(name for name in shapes if name in ignored))


def _judge_prompt(model: Any, own: Any, names: set[str]) -> PeftAnswer:  # noqa: ANN401 - PEFT's configuration
    """PEFT has loaded the embeddings; whether they are as wide as the model's shows when it runs."""
    if own.peft_type not in ("PROMPT_TUNING", "P_TUNING", "CPT"):
        return PeftAnswer(unknown=f"whether the tensors of {own.peft_type.value} fit the base's attention and tasks")
    width = model.get_input_embeddings().weight.shape[1]
    if own.token_dim != width:
        return PeftAnswer(refused=f"token_dim is {own.token_dim}, the base's embeddings have {width}")
    return PeftAnswer(ignored=tuple(sorted(names - {"prompt_embeddings"})))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return escape_name(lines[-1 if isinstance(error, RuntimeError) else 0])
