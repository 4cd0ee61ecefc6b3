"""Looks at a config.json before anything is built of it: names that reach a loader, numbers out of bounds. No torch.

Names are those that transformers' classes hand to a loader; bounds are some ten times what the largest published models
have: beyond them a small file costs any amount of memory or time.

Source: transformers 5.23: `models/timm_*`, `backbone_utils.consolidate_backbone_kwargs_to_config`,
`models/layoutlmv2`, `integrations/hub_kernels`, `modeling_utils._check_and_adjust_attn_implementation`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from ckpt_tools.errors import RefusedConfigError
from ckpt_tools.tables import read_rows

_LOADER_HINT = "ckpt loads nothing that a config points to; for code that you trust, use --factory pkg.mod:callable"
_NUMBER_HINT = "the file may be damaged: compare it with the config.json that the model was published with"
_MAX_DEPTH = 20  # Configs inside of configs
_MAX_ITEMS = 1_000_000  # Entries of one list or object: real ones list labels and layers
_MAX_EXPERT_LAYERS = 1_000_000  # Experts of all layers together: DeepSeek-V3 has 15 thousand


def check_config(config: Mapping[str, object], where: str) -> None:
    """Refuse a config that names what a loader would load, or whose numbers are absurd."""
    for path, part in _parts(config, where):
        for key, why in _find_loaders(part):
            what = f"the config is refused: {_name(path, key)}: {why}"
            raise RefusedConfigError(what, where=where, hint=_LOADER_HINT)
        for key, why in _find_absurd(part):
            what = f"the config is refused: {_name(path, key)}: {why}"
            raise RefusedConfigError(what, where=where, hint=_NUMBER_HINT)


def _name(path: tuple[str, ...], key: str) -> str:
    return ".".join(name[:100] for name in (*path, key))


def _parts(config: Mapping[str, object], where: str) -> Iterator[tuple[tuple[str, ...], Mapping[str, object]]]:
    """Yield a config and every object in it, lists of objects included, with its path."""
    waiting: list[tuple[tuple[str, ...], object]] = [((), config)]
    while waiting:
        path, value = waiting.pop()
        if not isinstance(value, (dict, list)):
            continue
        if len(path) > _MAX_DEPTH:
            what = f"the config is refused: nested more than {_MAX_DEPTH} levels deep"
            raise RefusedConfigError(what, where=where)
        if len(value) > _MAX_ITEMS:
            name = ".".join(path) or "the config"
            what = f"the config is refused: {name} has {len(value):,} entries, more than {_MAX_ITEMS:,}"
            raise RefusedConfigError(what, where=where)
        if isinstance(value, dict):
            yield path, value
            waiting += [((*path, key), item) for key, item in value.items()]
        else:
            waiting += [((*path, str(index)), item) for index, item in enumerate(value)]


_FAMILIES: Mapping[str, tuple[str, str]] = {
    "timm_wrapper": ("TimmWrapper", "timm builds the model, and loads and unpickles files that the config names"),
    "timm_backbone": ("TimmBackbone", "timm builds the model from a name, which can refer to a file or a download"),
    "layoutlmv2": ("LayoutLMv2", "detectron2 builds part of the model from settings that name files"),
}
"""model_type → how its classes begin, and why it is not built."""
_ATTENTION = frozenset(
    {"eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"}
    | {f"paged|{name}" for name in ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")}
)
_EXPERTS = frozenset({"eager", "batched_mm", "grouped_mm"})
_FETCHES = "transformers downloads such an implementation from the hub and runs it"
_IS_PATH = "libraries load the files that it names"
_DROPPED = ("auto_map", "trust_remote_code", "custom_pipelines")
"""Keys that only matter to those who run a model's own code; building ignores them."""


def without_code_keys(config: Mapping[str, object]) -> dict[str, object]:
    """Return `config` without the keys, at any depth, that point at a model's own code."""
    return {key: _without(value) for key, value in config.items() if key not in _DROPPED}


def _without(value: object) -> object:
    if isinstance(value, dict):
        return without_code_keys(value)
    return [_without(item) for item in value] if isinstance(value, list) else value


def _find_loaders(part: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the keys of one config, not those of configs in it, whose values reach a loader, and why."""
    yield from _families(part)
    for key, value in part.items():
        refuse = _KEYS.get(key)
        if refuse is not None and (why := refuse(value, part)):
            yield key, why
        elif key.endswith("_config") and isinstance(value, str):
            yield key, "it must be a mapping, not a name, which libraries would look up"


def _families(part: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    named = part.get("architectures")
    classes = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    for model_type, (prefix, why) in _FAMILIES.items():
        if part.get("model_type") == model_type:
            yield "model_type", f"{model_type}: {why}"
        elif any(name.startswith(prefix) for name in classes):
            yield "architectures", f"{prefix}…: {why}"


_Refusal = Callable[[object, Mapping[str, object]], str]
"""Takes the value and the config around it; returns why it is refused, or nothing."""


def _unless_in(allowed: frozenset[str]) -> _Refusal:
    def refuse(value: object, part: Mapping[str, object]) -> str:  # noqa: ARG001 - as all refusals
        values = value.values() if isinstance(value, dict) else [value]
        found = next((one for one in values if isinstance(one, str) and one not in allowed), None)
        return "" if found is None else f"{found}: {_FETCHES}"

    return refuse


def _anything(why: str) -> _Refusal:
    return lambda value, part: why if value else ""  # noqa: ARG005 - as all refusals


def _backbone(value: object, part: Mapping[str, object]) -> str:
    if not isinstance(value, str) or isinstance(part.get("backbone_config"), dict):
        return ""
    return f"{value}: transformers looks this name up as a path or on the hub, or passes it to timm"


def _timm_name(value: object, part: Mapping[str, object]) -> str:  # noqa: ARG001 - as all refusals
    if not isinstance(value, str) or not {":", "/"} & set(value):
        return ""
    return f"{value}: timm reads this name as a path or as a hub repository"


_KEYS: Mapping[str, _Refusal] = {
    **dict.fromkeys(
        ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"), _unless_in(_ATTENTION)
    ),
    **dict.fromkeys(
        ("experts_implementation", "_experts_implementation", "_experts_implementation_internal"), _unless_in(_EXPERTS)
    ),
    **dict.fromkeys(("kernel_config", "use_kernels", "kernel_mapping"), _anything(_FETCHES)),
    **dict.fromkeys(
        ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "index_path", "passages_path"),
        _anything(_IS_PATH),
    ),
    "backbone": _backbone,
    "model_args": _anything("timm gets these arguments and loads files that they name"),
    "architecture": _timm_name,
    "detectron2_config_args": _anything("detectron2 reads files that it names"),
}
"""Key → what refuses its value."""


@dataclass(frozen=True, slots=True)
class _Bound:
    """How small and how large the numbers of some keys may be."""

    what: str
    keys: re.Pattern[str]
    least: int
    most: int


_OTHER = _Bound("anything", re.compile(r"\w*"), -(10**40), 10**40)
"""Of keys that say no size: `model_max_length` is 10³⁰ in many a config, and others are infinite."""
_FREE = re.compile(
    r"model_max_length|\w*tokens?(_id|_ids|_index)?|\w*_(id|ids|index|theta|seed|params|parameters|version|eps|std|scale|factor)"
)
"""Keys that count nothing."""


def _find_absurd(part: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the keys of one config, not those of configs in it, whose numbers are out of bounds, and what is wrong."""
    for key, value in part.items():
        bound = _bound_of(key)
        for number in _numbers(value):
            if not (bound.least <= number <= bound.most or (bound is _OTHER and isinstance(number, float))):
                yield (
                    key,
                    f"{_shown(number)} is not a plausible number of {bound.what} ({bound.least:,} to {bound.most:,})",
                )
                break
    layers, experts = _most(part, "layers"), _most(part, "experts")
    if layers * experts > _MAX_EXPERT_LAYERS:
        yield "num_experts", f"{experts} experts in each of {layers} layers exceed the limit of {_MAX_EXPERT_LAYERS:,}"


def _bound_of(key: str) -> _Bound:
    """Return the bound of a key."""
    if _FREE.fullmatch(key):
        return _OTHER
    return next((bound for bound in _bounds() if bound.keys.fullmatch(key)), _OTHER)


@cache
def _bounds() -> tuple[_Bound, ...]:
    rows = read_rows(__package__, "bounds.tsv")
    return tuple(_Bound(row["what"], re.compile(row["keys"]), int(row["least"]), int(row["most"])) for row in rows)


def _numbers(value: object) -> Iterator[int | float]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item)


def _most(part: Mapping[str, object], what: str) -> int:
    found = [value for key, value in part.items() if type(value) is int and _bound_of(key).what == what]
    return max(found, default=0)


def _shown(number: int | float) -> str:  # noqa: PYI041 - they are told apart
    return f"{number:g}" if isinstance(number, float) or abs(number) >= 10**15 else f"{number:,}"
