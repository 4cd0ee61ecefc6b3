"""From named tensors to modules: which factors belong together, what is the base model's, what nobody knows. Pure."""

from __future__ import annotations

import os
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpt_tools.adapters.adapter import SAVED, Adapter, AdapterModule, Convention, FamilyName, Sourced
from ckpt_tools.adapters.families import FAMILIES
from ckpt_tools.adapters.families.family import Style
from ckpt_tools.adapters.families.peft_only import Carried
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.errors import UnreadableError
from ckpt_tools.text import natural_key

_GENERIC = ("alpha", "magnitude", "rescale", "diff_b")  # Roles that come beside those of a family
_WRAPPERS = re.compile(r"\.(?:base_layer|original_module|token_adapter)(?=\.)")
_MAX_SAVED_EMBEDDINGS = 2  # PEFT saves `base_layer.weight` of targeted embeddings, of which a model has two


class NamedFactor(NamedTuple):
    """A tensor of the source, and what its name says."""

    name: str  # Without root and wrappers
    key: Key | None  # None when it is none of an adapter's
    entry: TensorEntry


def assemble(
    named: Sequence[NamedFactor],
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
    plain: list[NamedFactor] = []
    for item in named:
        if item.key is None or (item.key.is_weak and not _counts(item.key, strong, is_live, is_training)):
            plain.append(item)
            continue
        key = item.key
        if key.role == "blocks" and len(item.entry.shape) == 4:  # which LyCORIS names alike for OFT and BOFT
            key = replace(key, family="boft")
        group = groups[(key.path, -1 if key.family == SAVED else key.nesting)]
        if key.role in group:
            what = (
                f"two tensors would be the factor {key.role} of {key.path!r}: "
                f"{group[key.role][1].fqn!r} and {item.entry.fqn!r}"
            )
            raise UnreadableError(what, where=path, hint="leave one of them out: --exclude GLOB")
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
        modules=tuple(sorted(modules, key=lambda each: (natural_key(each.path), each.nesting, each.family))),
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


def _modules(
    path: str, nesting: int, group: Mapping[str, tuple[Key, TensorEntry]], unknown: list[str], source: str
) -> list[AdapterModule[TensorEntry]]:
    if nesting < 0:
        return [AdapterModule(path=path, family=SAVED, factors={role: entry for role, (_, entry) in group.items()})]
    families = sorted({key.family for role, (key, _) in group.items() if role not in _GENERIC})
    own = [family for family in families if FAMILIES[family].is_own]
    if len(own) > 1:
        hint = "these are two adapters: choose one with --include and --exclude"
        raise UnreadableError(f"{path!r} has factors of {' and '.join(own)}", where=source, hint=hint)
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
    plain: Sequence[NamedFactor],
    adapted: Collection[str],
    convention: Convention,
    is_live: bool,
    is_training: bool,
    trained: Collection[str] | None,
    bias: object,
    all_names: Sequence[str] | None,
) -> tuple[list[NamedFactor] | None, list[NamedFactor]]:
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


def _saved(items: Iterable[NamedFactor]) -> list[AdapterModule[TensorEntry]]:
    groups: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
    for item in items:
        path, _, role = _WRAPPERS.sub("", item.name).rpartition(".")
        groups[path][role] = item.entry
    return [AdapterModule(path=path, family=SAVED, factors=factors) for path, factors in groups.items()]


# From tensor names to (module path, family, role): the suffixes of every convention. Pure.
#
# Source: peft 0.21 `tuners/*/layer.py`, `utils/save_and_load.py`; lycoris-lora 4.1 `modules/*.py` (`weight_list`);
# diffusers 0.42 `loaders/lora_conversion_utils.py`; kohya-ss `networks/lora.py`; torchtune `modules/peft/lora.py`.

_NAME = r"(?:\.(?P<adapter>[^.]+))?"
"""PEFT's adapter name: there in a model's own state dict, absent in a saved adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What a tensor's name says."""

    path: str  # Module path, or a flattened name; "" for what all modules share
    family: FamilyName
    """Of the factor; "lora" for roles that several families have, until the module's other factors decide."""
    role: str  # As in `adapter.py`; "alpha" for the scalar
    style: Style
    adapter: str | None = None  # PEFT's adapter name, when the tensor's name has it
    nesting: int = 0  # Number of `base_layer` in front of the suffix
    is_weak: bool = False  # The suffix alone does not prove an adapter: a base model may have such names as well


_WEAK_ROWS: tuple[tuple[str, FamilyName, str], ...] = (
    (r"alpha", "lora", "alpha"),
    (r"rescale", "oft", "rescale"),
    (r"magnitude", "lora", "magnitude"),
    (r"(?:diff|w_norm)", "full", "diff"),
    (r"(?:diff_b|b_norm)", "full", "diff_b"),
)
"""LyCORIS' suffixes that a base model's names may have as well."""


_Rule = tuple[re.Pattern[str], Style, FamilyName, str]


def _rule(suffix: str, style: Style, family: FamilyName, role: str, path: str = ".+") -> _Rule:
    return re.compile(rf"(?P<path>{path})\.{suffix}"), style, family, role


def _strong() -> Iterator[_Rule]:
    """Yield the suffixes of the families' tables; of one that several have, the first family's."""
    weak = [re.compile(suffix) for suffix, _, _ in _WEAK_ROWS]
    seen: set[str] = set()
    for name, family in FAMILIES.items():
        if isinstance(family, Carried):
            continue
        for style, pattern, role in family.also_read:
            yield _rule(pattern, style, name, role)
        for role, suffix in family.peft_names.items():
            head, dot, rest = suffix.partition(".")
            seen.add(suffix)
            yield _rule(f"{head}{_NAME}{re.escape(dot + rest)}", "peft", name, role)
        for role, suffix in family.lycoris_names.items():
            if suffix not in seen and not any(pattern.fullmatch(suffix) for pattern in weak):
                seen.add(suffix)
                path = r"(?:lycoris|lora)_[^.]+|diffusion_model\..+" if family.needs_own_paths else ".+"
                yield _rule(re.escape(suffix), "lycoris", name, role, path)


def _of_carried(family: Carried, *, weak: bool) -> Iterator[_Rule]:
    """Yield rules whose role is the name's end, without the adapter's name: `head` and `rest`."""
    anywhere = r"(?:(?:.+\.)?base_model|(?P<path>.+))\." if family.root else r"(?P<path>)(?:.+\.)?"
    for front, names in ((r"(?P<path>.+)\.", family.names), (anywhere, family.shared)):
        for head, rest in names:
            if (head in family.weak) is weak:
                parts = rf"(?P<head>{head}){_NAME}" + (rf"(?P<rest>\.{rest})" if rest else "(?P<rest>)")
                yield re.compile(front + parts), "peft", family.name, ""
    for style, pattern, role in family.also_read if not weak else ():
        yield re.compile(rf"(?P<path>)(?:.+\.)?{pattern}"), style, family.name, role


_CARRIED = [family for family in FAMILIES.values() if isinstance(family, Carried)]
_STRONG = [*_strong(), *(rule for family in _CARRIED for rule in _of_carried(family, weak=False))]
_WEAK = [
    *(_rule(suffix, "lycoris", family, role) for suffix, family, role in _WEAK_ROWS),
    *(rule for family in _CARRIED for rule in _of_carried(family, weak=True)),
]
_PROCESSOR = re.compile(r"(?P<path>.+)\.processor\.(?P<part>\w+)_lora\.(?P<side>down|up)\.weight")
"""Attention processors of old diffusers: the module is named by the processor's attribute."""
_SAVED = re.compile(r"(?P<path>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<role>.+)")
_BASE_LAYERS = re.compile(r"(?:\.base_layer)+$")

with open(os.path.join(os.path.dirname(__file__), "refused.toml"), "rb") as _file:
    _REFUSED: Mapping[str, Mapping[str, str]] = tomllib.load(_file)
_QUICK = re.compile(
    r"lora|hada_|lokr_|oft_|dora_scale|trainable_tokens_delta|\.adapter|\.(?:alpha|rescale|magnitude|diff|w_norm|diff_b|b_norm)$|modules_to_save|"
    r"\.[ab][12]\.weight$|"
    + "|".join(["prefix_task_", *(family.marker for family in FAMILIES.values() if family.is_carried)])
)
"""Whatever `parse_key` accepts contains one of these; base names, of which there are many, mostly do not."""


def parse_key(name: str) -> Key | None:
    """Return what a name says of an adapter, or None; root, wrappers and `base_model.model.` are off already."""
    if not _QUICK.search(name):
        return None
    saved = _SAVED.fullmatch(name)
    if saved:
        return Key(path=saved["path"], family="saved", role=saved["role"], style="peft", adapter=saved["adapter"])
    processor = _PROCESSOR.fullmatch(name)
    if processor:
        part = "to_out.0" if processor["part"] == "to_out" else processor["part"]
        role = "A" if processor["side"] == "down" else "B"
        return Key(path=f"{processor['path']}.{part}", family="lora", role=role, style="diffusers-old")
    for table in (_STRONG, _WEAK):
        for pattern, style, family, role in table:
            match = pattern.fullmatch(name)
            if match is None:
                continue
            parts = match.groupdict()
            path = parts["path"] or ""
            nested = _BASE_LAYERS.search(path)
            nesting = 0 if nested is None else nested[0].count(".")
            return Key(
                path=path if nested is None else path[: nested.start()],
                family=family,
                role=role or f"{parts['head']}{parts['rest']}",
                style=style,
                adapter=parts.get("adapter"),
                nesting=nesting,
                is_weak=table is _WEAK,
            )
    return None


_TRAINING_ONLY = re.compile(r".+\.(?:lora_velora_embed|ranknum)(?:\..+)?")
"""VeLoRA's: what its backward pass compresses activations with. AdaLoRA's: the rank that its configuration has."""


def is_for_training(name: str) -> bool:
    """Does a tensor of an adapter serve its training alone? What the adapter computes is the same without it."""
    return ("velora" in name or "ranknum" in name) and _TRAINING_ONLY.fullmatch(name) is not None


_QUICK_SURE = re.compile(r"lora_[adm]|prompt_encoder|adaption_|internal_xlora|oft_r")
"""Whatever is surely refused contains one of these."""


def refused_kind(name: str, *, sure: bool) -> str | None:
    """Return the kind of a recognised, unsupported adapter; with `sure` only by names that no base model has."""
    if sure and not _QUICK_SURE.search(name):
        return None
    table = _REFUSED["surely"] if sure else {**_REFUSED["surely"], **_REFUSED["perhaps"]}
    return next((kind for kind, pattern in table.items() if re.fullmatch(pattern, name)), None)
