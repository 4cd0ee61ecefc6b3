"""The fields of PEFT's configuration that name modules: they must stand for what is in the file and nothing else.

PEFT begins an adapter anew, with a warning at best, in every module that its configuration names and the file lacks.

Source: peft 0.21 `tuners/tuners_utils.py`, `check_target_module_exists`: a name matches the module of that path and
every module whose path ends with a dot and the name; `utils/other.py`, `_set_trainable`: modules_to_save match the
end of a path, dot or not.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from ckpt_tools.adapters.adapter import Adapter, AdapterModule, F, Fields, Sourced, some_modules
from ckpt_tools.adapters.base.model import BaseModel, parents_of
from ckpt_tools.adapters.base.tied import EMBEDDINGS, HEADS
from ckpt_tools.adapters.ecosystems.peft.config_rules import matched
from ckpt_tools.adapters.families import family_of
from ckpt_tools.errors import UsageError


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
        raise UsageError(
            f"target_modules does not match {absent}, whose factors are here: PEFT would not load them",
            where="--config",
            hint="leave target_modules out (ckpt derives it), or leave the factors out: --exclude",
        )
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
        raise UsageError(
            "target_modules may match modules that --include and --exclude leave out: PEFT would initialise them",
            where="--config",
            hint="leave target_modules out: ckpt derives it",
        )
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
                hint="name those that are left: --config 'target_parameters=[…]'; or leave out the whole module",
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
        raise UsageError(
            f"modules_to_save does not name the modules whose tensors are whole: {shown}",
            where="--config",
            hint="leave it out: ckpt derives it from the tensors",
        )
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
            "ensure_weight_tying is true, and of the embedding and the head that is tied to it only one is here: PEFT "
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
            raise UsageError(
                f"{module.path!r} was trained in part: {absent[0]!r} is not among what was "
                "trained, and PEFT saves modules whole",
                where=base.source,
                hint="if its tensors are not needed, leave them out: --exclude",
            )


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
