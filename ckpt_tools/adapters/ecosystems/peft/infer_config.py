"""What an adapter's configuration must be, from its tensors and from what is known beside them. Pure.

Every value says where it comes from. What the tensors do not tell, and what changes the result, is asked for: a wrong
alpha or a wrong kind of rotation gives an adapter that loads, and does something else.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from ckpt_tools.adapters.adapter import TOKENS, Adapter, AdapterModule, F, Fields, Sourced, some_modules
from ckpt_tools.adapters.base.model import BaseModel, parents_of
from ckpt_tools.adapters.base.tied import EMBEDDINGS, HEADS
from ckpt_tools.adapters.ecosystems.peft.config_rules import matched
from ckpt_tools.adapters.families import FAMILIES, PEFT_TYPES, Family, family_of
from ckpt_tools.adapters.families.family import MERGE_HINT
from ckpt_tools.adapters.families.tokens import fields_of
from ckpt_tools.errors import UsageError
from ckpt_tools.sandbox import wire

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
_TRAINING_ONLY = ("velora_config",)  # Fields that ask for tensors which only training needs, and which are not exported


def infer_config(adapter: Adapter[F], *, base: BaseModel | None = None, base_model: str | None = None) -> Fields:
    """Return PEFT's configuration for an adapter with alphas, under the module paths of its base."""
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
        what = "the source has trained modules, but no adapter factors"
        raise UsageError(what, hint="`ckpt gather` extracts tensors from a checkpoint")
    for family in map(FAMILIES.__getitem__, counts):
        if family.peft_type is None:
            raise UsageError(f"PEFT has no format for {family.title}s ({counts[family.name]} modules)", hint=MERGE_HINT)
    if len(counts) > 1:
        what = f"a PEFT adapter has one type, but this one has {' and '.join(sorted(counts))}"
        raise UsageError(what, hint="export them one by one, with --include and --exclude")
    return FAMILIES[next(iter(counts))]


def _as_written(adapter: Adapter[F], family: Family, base_model: str | None) -> Fields:
    """Return the configuration of a type that ckpt carries as PEFT wrote it."""
    settings = {name: found for name, found in adapter.settings.items() if not name.startswith("ckpt_")}
    if "peft_type" not in settings:
        what = f"the tensors of {family.title} do not show its configuration"
        raise UsageError(what, hint="put the adapter_config.json of the training run beside the source")
    if adapter.omitted:
        what = f"{family.title} adapters must be written whole: their configuration is copied as it is"
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
            what = f"the rank of {module.path!r} is not known: its factors do not show it"
            raise UsageError(what, hint="give the rank of the training run: --config r=VALUE")
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
            ", ".join(sources[:_MAX_SHOWN]) if rest else "the same for all modules",
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


# The fields of PEFT's configuration that name modules: they must stand for what is in the file and nothing else.
#
# PEFT begins an adapter anew, with a warning at best, in every module that its configuration names and the file lacks.
#
# Source: peft 0.21 `tuners/tuners_utils.py`, `check_target_module_exists`: a name matches the module of that path and
# every module whose path ends with a dot and the name; `utils/other.py`, `_set_trainable`: modules_to_save match the
# end of a path, dot or not.


def refuse_parameters(path: str) -> UsageError:
    """Return the error that it is not known which parameters the factors change."""
    return UsageError(
        "the factors belong to parameters of modules (PEFT's target_parameters), and it is not recorded which",
        where=path,
        hint="give the base, whose shapes show it: --base DIR; or, as in the training run, --config r=VALUE and "
        '--config \'target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]\'',
    )


def target_fields(adapter: Adapter[F], modules: Sequence[AdapterModule[F]], base: BaseModel | None) -> Fields:
    """Return target_modules and target_parameters, and the fields that go with them."""
    parameters = sorted({module.target for module in modules if module.parameter != "weight"})
    # Below a `base_layer` lies what PEFT adapts along with the module around it.
    adapted = sorted({m.path for m in modules if m.parameter == "weight" and ".base_layer." not in m.path})
    known = adapter.settings.get("target_parameters")
    config: Fields = {}
    if parameters:
        if known is None:
            raise refuse_parameters(parameters[0])
        config["target_parameters"] = _parameters_left(modules, known) if adapter.omitted else known
    if not adapted:
        config["target_modules"] = Sourced([], "only parameters are adapted")
        return config
    settled = adapter.settings.get("target_modules")
    if settled is not None and settled.source == "--config" and not _covers(settled.value, adapted):
        absent = next(path for path in adapted if not _covers(settled.value, [path]))
        what = f"target_modules does not match {absent}, whose factors are here: PEFT would not load them"
        hint = "leave target_modules out (ckpt derives it), or leave the factors out: --exclude"
        raise UsageError(what, where="--config", hint=hint)
    omitted = adapter.omitted - set(adapted)
    if base is not None:
        suffixes = minimal_suffixes(adapted, parents_of(base.shapes) | omitted)
        if suffixes is not None:
            config["target_modules"] = Sourced(
                list(suffixes), f"proven to match exactly these modules of {base.source}"
            )
        else:
            pattern = exact_pattern(adapted)
            config["target_modules"] = Sourced(
                pattern, f"no list of names matches exactly these modules of {base.source}"
            )
    elif settled is not None and _covers(settled.value, adapted) and not _covers_any(settled.value, omitted):
        config["target_modules"] = settled
        for name in ("exclude_modules", "layers_to_transform", "layers_pattern"):
            if name in adapter.settings:
                config[name] = adapter.settings[name]
    elif settled is not None and settled.source == "--config":
        what = "target_modules may match modules that --include and --exclude leave out: PEFT would initialise them"
        raise UsageError(what, where="--config", hint="leave target_modules out: ckpt derives it")
    elif _covers_any(list(adapted), omitted):
        config["target_modules"] = Sourced(exact_pattern(adapted), "no list of names matches only these modules")
    else:
        config["target_modules"] = Sourced(list(adapted), "paths of the adapted modules")
    return config


def _parameters_left(modules: Sequence[AdapterModule[F]], known: Sourced[object]) -> Sourced[object]:
    """Name the parameters whose factors are still here by their whole paths: shorter names stand for others as well."""
    targets = [name.rpartition(".") for name in known.names]
    groups: dict[str, list[AdapterModule[F]]] = {}
    for module in modules:
        if module.parameter != "weight":
            groups.setdefault(module.path, []).append(module)
    names: set[str] = set()
    for path, group in groups.items():
        leaves = {module.parameter for module in group}
        if "" in leaves:
            leaves = {leaf for parent, _, leaf in targets if parent and f".{path}".endswith(f".{parent}")}
        if len(leaves) != len(group):
            raise UsageError(
                f"factors of {len(group)} parameters of {path!r} are here, and target_parameters names "
                f"{len(leaves)}: it is not known which were left out",
                where=path,
                hint="name the remaining ones: --config 'target_parameters=[…]'; or leave out the whole module",
            )
        names |= {f"{path}.{leaf}" for leaf in leaves}
    return Sourced(sorted(names), f"{known.source}, without what was left out")


def _covers_any(target: object, omitted: Collection[str]) -> bool:
    """May PEFT's target_modules match one of these?"""
    return any(matched(target, path) in (True, None) for path in omitted)


def _covers(target: object, adapted: Collection[str]) -> bool:
    return all(matched(target, path) in (True, None) for path in adapted)


def saved_fields(adapter: Adapter[F], modules: Sequence[AdapterModule[F]], base: BaseModel | None) -> Fields:
    """Return modules_to_save and bias: modules that were trained whole, and biases trained beside an adapter."""
    adapted = {module.path for module in modules}
    saved = [module for module in adapter.modules if module.is_saved]
    biases = [module.path for module in saved if set(module.factors) == {"bias"}]
    # Of an adapted module PEFT saves an embedding's weight along with the factors.
    whole = [module for module in saved if module.path not in adapted and module.path not in biases]
    config: Fields = {}
    family = family_of(modules[0])
    known = adapter.settings.get("bias")
    if known is not None and known.value not in (None, "none") and (biases or not adapter.omitted):
        config["bias"] = known
    elif "bias" in family.peft_fields:
        kind = f"{family.name}_only" if set(biases) <= adapted else "all"
        config["bias"] = Sourced(kind, "trained biases") if biases else Sourced("none", "no sign of trained biases")
    settled = adapter.settings.get("modules_to_save")
    paths = [module.path for module in whole]
    _check_tied(adapter, paths)
    if settled is not None and settled.source == "--config" and (not whole or not _saves(settled.names, paths)):
        shown = some_modules(whole) if whole else "none"
        what = f"modules_to_save does not name the modules whose tensors are whole: {shown}"
        raise UsageError(what, where="--config", hint="leave it out: ckpt derives it from the tensors")
    if not whole:
        config["modules_to_save"] = Sourced(None, "no modules are trained whole")
    elif settled is not None and adapter.omitted and isinstance(settled.value, list):
        config["modules_to_save"] = _saved_left(adapter, settled, paths, base)
    elif settled is not None and isinstance(settled.value, list) and _saves(settled.names, paths):
        _check_complete(settled, paths, base)
        config["modules_to_save"] = settled
    elif "peft_type" in adapter.settings:
        # PEFT's own choice: embeddings that were resized are saved, and are no modules_to_save.
        config["modules_to_save"] = settled or Sourced(None, adapter.settings["peft_type"].source)
    else:
        _check_whole(whole, base)
        names = minimal_saved(paths, parents_of(base.shapes) if base is not None else ())
        config["modules_to_save"] = (
            Sourced(list(names), "modules whose tensors are whole")
            if names is not None
            # PEFT loads tensors under the base's own names into the base.
            else Sourced(None, "no list of names matches only the modules; their tensors go into the base's own")
        )
    return config


def _saved_left(
    adapter: Adapter[F], settled: Sourced[object], paths: Collection[str], base: BaseModel | None
) -> Sourced[object]:
    """Keep of modules_to_save what is still here; what it never named stays a tensor for the base's own."""
    names = [name for name in settled.names if name]
    left = [path for path in paths if path.endswith(tuple(names)) or _saves(names, [path])]
    others = adapter.omitted - set(left)
    if base is not None:
        found = minimal_saved(left, parents_of(base.shapes) | others)
    else:
        found = None if any(each.endswith(path) for each in others for path in left) else tuple(sorted(left))
    return Sourced(list(found) if found else None, f"{settled.source}, without what was left out")


def _check_tied(adapter: Adapter[F], saved: Collection[str]) -> None:
    """With ensure_weight_tying PEFT wants the tensors of the embedding and of the head that is tied to it."""
    known = adapter.settings.get("ensure_weight_tying")
    ends = {path.rpartition(".")[2] for path in saved}
    if known is None or known.value is not True or not ends & {*EMBEDDINGS, *HEADS}:
        return
    if not (ends & set(EMBEDDINGS) and ends & set(HEADS)):
        raise UsageError(
            "ensure_weight_tying is true, but only one of the embedding and the head tied to it is here: PEFT "
            "would not load the adapter",
            where=known.source,
            hint="take them from a state dict that has both (get_model_state_dict without ignore_frozen_params, "
            "PEFT's save_pretrained)",
        )


def _check_complete(settled: Sourced[object], saved: Collection[str], base: BaseModel | None) -> None:
    """PEFT fails where modules_to_save stands for a module of the base whose tensors are not there."""
    names = [name for name in settled.names if name]
    holders = {name.rpartition(".")[0] for name in base.shapes} if base is not None else set()
    for path in sorted(holders):
        if path.endswith(tuple(names)) and path not in saved and not any(path.startswith(f"{own}.") for own in saved):
            raise UsageError(
                f"modules_to_save of {settled.source} names {path}, whose tensors are not here",
                where=path,
                hint="was the adapter saved completely? If this module was not trained, name only the others: "
                "--config 'modules_to_save=[…]'",
            )


def _check_whole(whole: Sequence[AdapterModule[F]], base: BaseModel | None) -> None:
    """PEFT loads every parameter of a module in modules_to_save, or fails."""
    for module in whole:
        own = [name for name in (base.shapes if base else ()) if name.startswith(f"{module.path}.")]
        absent = [name for name in own if name[len(module.path) + 1 :] not in module.factors]
        if absent and base is not None:
            what = (
                f"{module.path!r} was trained only in part: {absent[0]!r} was not trained, and PEFT saves whole modules"
            )
            raise UsageError(what, where=base.source, hint="if its tensors are not needed, leave them out: --exclude")


def _saves(names: Collection[str], whole: Collection[str]) -> bool:
    """Do the names of modules_to_save stand for all modules that are saved whole?"""
    return all(any(name and f".{name}." in f".{path}." for name in names) for path in whole)


def minimal_suffixes(adapted: Collection[str], modules: Collection[str]) -> tuple[str, ...] | None:
    """Return the shortest names (sorted) that match the paths in `adapted` and no other one of the model's `modules`.

    None when no list can do it, because an adapted path is the end of another module's path.
    """
    ends: dict[str, set[str]] = {}
    leaves = {path.rpartition(".")[2] for path in adapted}
    for module in modules:
        parts = module.split(".")
        if parts[-1] not in leaves:
            continue
        for start in range(len(parts)):
            ends.setdefault(".".join(parts[start:]), set()).add(module)
    wanted = set(adapted)
    chosen: set[str] = set()
    for path in sorted(wanted):
        parts = path.split(".")
        suffixes = (".".join(parts[start:]) for start in reversed(range(len(parts))))
        found = next((suffix for suffix in suffixes if ends.get(suffix, set()) <= wanted), None)
        if found is None:
            return None
        chosen.add(found)
    return tuple(sorted(chosen))


def exact_pattern(adapted: Collection[str]) -> str:
    """Return a regular expression for the adapted modules alone: PEFT matches one against whole paths."""
    return "|".join(re.escape(path).replace(r"\-", "-") for path in sorted(adapted))


def minimal_saved(saved: Collection[str], modules: Collection[str]) -> tuple[str, ...] | None:
    """Return names for modules_to_save: whole paths, or a last component that matches exactly the same modules.

    Without known `modules` whole paths have to do. None when a whole path is the end of another module's.
    """
    wanted = set(saved)
    chosen = set()
    for path in sorted(wanted):
        names = (path.rpartition(".")[2], path) if modules else (path,)
        found = next((name for name in names if all(m in wanted for m in modules if m.endswith(name))), None)
        if found is None:
            return None
        chosen.add(found)
    return tuple(sorted(chosen))
