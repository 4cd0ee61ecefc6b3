"""From named tensors to modules: which factors belong together, what is the base model's, what nobody knows. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ckpt_tools.adapters.adapter import SAVED, Adapter, AdapterModule, Convention, FamilyName, Sourced
from ckpt_tools.adapters.families import FAMILIES
from ckpt_tools.adapters.read.keys import Key, parse_key
from ckpt_tools.description.checkpoint import TensorEntry
from ckpt_tools.errors import UnreadableError

_GENERIC = ("alpha", "magnitude", "rescale", "diff_b")
"""Roles that come beside those of a family."""
_WRAPPERS = re.compile(r"\.(?:base_layer|original_module|token_adapter)(?=\.)")
_MAX_SAVED_EMBEDDINGS = 2
"""PEFT saves `base_layer.weight` of targeted embeddings, of which a model has two."""


class Named(NamedTuple):
    """A tensor of the source, and what its name says."""

    name: str
    """Without root and wrappers."""
    key: Key | None
    """None when it is none of an adapter's."""
    entry: TensorEntry


def assemble(
    named: Sequence[Named],
    *,
    convention: Convention,
    is_training: bool,
    trained: Collection[str] | None,
    bias: object,
    path: str,
    all_names: Sequence[str] | None = None,
) -> Adapter[TensorEntry]:
    """Put the tensors of one adapter together, with those that carry no adapter's name.

    Alphas that are tensors stay factors of the role "alpha": their values are not known from headers. `trained` are the
    names that the optimizer has state for, None without one. `all_names` are those of all the source's tensors where
    `named` is a selection: they tell whether it has a base model. Raise UnreadableError for two tensors of one factor.
    """
    is_live = any(item.key is not None and item.key.adapter is not None for item in named)
    strong = {(item.key.path, item.key.family) for item in named if item.key is not None and not item.key.is_weak}
    strong |= {(path, "") for path, _ in strong}
    groups: dict[tuple[str, int], dict[str, tuple[Key, TensorEntry]]] = defaultdict(dict)
    plain: list[Named] = []
    for item in named:
        if item.key is None or (item.key.is_weak and not _counts(item.key, strong, is_live, is_training)):
            plain.append(item)
            continue
        key = _with_shape(item.key, item.entry)
        group = groups[(key.path, -1 if key.family == SAVED else key.nesting)]
        if key.role in group:
            raise UnreadableError(
                f"two tensors would be the factor {key.role} of {key.path!r}: "
                f"{group[key.role][1].fqn!r} and {item.entry.fqn!r}",
                where=path,
                hint="leave one of them out: --exclude GLOB",
            )
        group[key.role] = (key, item.entry)
    _spread(groups)
    modules: list[AdapterModule[TensorEntry]] = []
    unknown: list[str] = []
    for (module_path, nesting), group in sorted(groups.items()):
        modules += _modules(module_path, nesting, group, unknown, path)
    adapted = {module.path for module in modules if not module.is_saved}
    saved, base = _split_plain(plain, adapted, convention, is_live, is_training, trained, bias, all_names)
    if saved is None:
        unknown += [item.entry.fqn for item in plain]
    else:
        modules += _saved(saved)
    if not modules:
        raise UnreadableError("no adapter here: only names that a base model may have as well", where=path)
    return Adapter(
        modules=tuple(sorted(modules, key=lambda module: (module.path, module.nesting, module.family))),
        convention=convention,
        unknown=tuple(unknown),
        is_training_state=is_training,
        base_shapes={_WRAPPERS.sub("", item.name): known_shape(item.entry) for item in base},
        base_tensors={_WRAPPERS.sub("", item.name): item.entry for item in base},
    )


def without_wrappers(name: str) -> str:
    """Return a tensor's name as the plain model has it, without PEFT's wrappers."""
    return _WRAPPERS.sub("", name)


def known_shape(entry: TensorEntry) -> tuple[int, ...]:
    """Return the shape of a base model's parameter; () for quantised ones, which are stored in another."""
    name = entry.dtype.name
    return entry.shape if entry.dtype.is_float or name == "I8" or name.startswith("F8") else ()


def _counts(key: Key, strong: Collection[tuple[str, FamilyName]], is_live: bool, is_training: bool) -> bool:
    """Does a name that a base model could have belong to the adapter?"""
    if FAMILIES[key.family].is_carried:
        return (key.path, key.family) in strong
    if is_live:
        return False
    return (key.path, "") in strong or (key.role in ("diff", "diff_b") and not (is_training and "." in key.path))


def _spread(groups: dict[tuple[str, int], dict[str, tuple[Key, TensorEntry]]]) -> None:
    """Give each module what all modules of its family share, and stands once; of prompts there are no others."""
    shared = groups.get(("", 0), {})
    users = [
        group
        for (path, _), group in groups.items()
        if path and {key.family for key, _ in shared.values()} & {key.family for key, _ in group.values()}
    ]
    for group in users:
        group.update(shared)
    if users:
        del groups[("", 0)]


def _with_shape(key: Key, entry: TensorEntry) -> Key:
    """LyCORIS names the blocks of OFT and BOFT alike: the number of dims tells."""
    if key.role != "blocks" or len(entry.shape) != 4:
        return key
    return replace(key, family="boft")


def _modules(
    path: str, nesting: int, group: Mapping[str, tuple[Key, TensorEntry]], unknown: list[str], source: str
) -> list[AdapterModule[TensorEntry]]:
    if nesting < 0:
        return [AdapterModule(path=path, family=SAVED, factors={role: entry for role, (_, entry) in group.items()})]
    families = sorted({key.family for role, (key, _) in group.items() if role not in _GENERIC})
    own = [family for family in families if FAMILIES[family].is_own]
    if len(own) > 1:
        raise UnreadableError(
            f"{path!r} has factors of {' and '.join(own)}",
            where=source,
            hint="these are two adapters: choose one with --include and --exclude",
        )
    factors: dict[FamilyName, dict[str, TensorEntry]] = defaultdict(dict)
    for role, (key, entry) in group.items():
        if role not in _GENERIC:
            factors[key.family][role] = entry
        elif role == "diff_b":
            factors["full"][role] = entry
        elif own:
            factors[own[0]][role] = entry
        elif role == "alpha" and families:
            factors["full"][role] = entry  # LyCORIS writes one beside a full difference, where it means nothing
        else:
            unknown.append(entry.fqn)
    return [
        AdapterModule(path=path, family=family, factors=roles, rank=_rank(family, roles, nesting), nesting=nesting)
        for family, roles in factors.items()
    ]


def _rank(family: FamilyName, factors: Mapping[str, TensorEntry], nesting: int) -> Sourced[int] | None:
    """Return the rank that the shapes say; factors of a stack of experts do not say it."""
    for role, dim in FAMILIES[family].rank_dims(factors).items():
        entry = factors.get(role)
        if entry is None or len(entry.shape) < 2:
            continue
        if nesting or not entry.shape[dim]:
            return None
        where = "columns" if dim else "rows"
        return Sourced(entry.shape[dim], f"{role} has {entry.shape[dim]} {where}")
    return None


def _split_plain(
    plain: Sequence[Named],
    adapted: Collection[str],
    convention: Convention,
    is_live: bool,
    is_training: bool,
    trained: Collection[str] | None,
    bias: object,
    all_names: Sequence[str] | None,
) -> tuple[list[Named] | None, list[Named]]:
    """Divide what is no factor into trained tensors and the base model's; None where it can be neither."""
    if adapted == {""}:  # a prompt, beside which nothing of the base is wrapped
        return [], list(plain)
    names = [item.name for item in plain] if all_names is None else all_names
    num_wrapped = sum(name.endswith(".base_layer.weight") for name in names)
    if is_live or (convention == "peft" and num_wrapped > _MAX_SAVED_EMBEDDINGS):
        if is_live and not any(map(_is_frozen, names)):
            return list(plain), []  # a state dict without frozen parameters: whatever is there was trained
        is_saved = _trained_with(trained, bias, adapted)
        return [i for i in plain if is_saved(i.name)], [i for i in plain if not is_saved(i.name)]
    if convention == "peft":
        return list(plain), []
    if is_training:
        return [], list(plain)
    return None, []


def _is_frozen(name: str) -> bool:
    """Has a state dict such a name only with the base model? Wrapped weights are frozen, their biases need not be."""
    if ".original_module." in name:
        return True
    return ".base_layer." in name and not name.endswith(".bias") and parse_key(name) is None


def _trained_with(trained: Collection[str] | None, bias: object, adapted: Collection[str]) -> Callable[[str], bool]:
    """Return whether a parameter beside the factors was trained: by the optimizer's state, else by PEFT's `bias`."""

    def is_saved(name: str) -> bool:
        if ".original_module." in name:
            return False
        if trained is not None:
            return name in trained
        stem, _, leaf = _WRAPPERS.sub("", name).rpartition(".")
        is_own = isinstance(bias, str) and bias.endswith("_only") and stem in adapted
        return leaf == "bias" and (bias == "all" or is_own)

    return is_saved


def _saved(items: Iterable[Named]) -> list[AdapterModule[TensorEntry]]:
    groups: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
    for item in items:
        path, _, role = _WRAPPERS.sub("", item.name).rpartition(".")
        groups[path][role] = item.entry
    return [AdapterModule(path=path, family=SAVED, factors=factors) for path, factors in groups.items()]
