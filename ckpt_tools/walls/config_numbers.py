"""Bounds of the numbers in a config.json: beyond them a small file costs any amount of memory or time. Pure; no torch.

Bounds are some ten times what the largest published models have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MAX_DEPTH = 20
"""Configs inside of configs."""
MAX_ITEMS = 1_000_000
"""Entries of one list or object: real ones list labels and layers."""
MAX_EXPERT_LAYERS = 1_000_000
"""Experts of all layers together: DeepSeek-V3 has 15 thousand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """How small and how large the numbers of some keys may be."""

    what: str
    keys: re.Pattern[str]
    least: int
    most: int


def _bound(what: str, least: int, most: int, keys: str) -> Bound:
    return Bound(what=what, keys=re.compile(keys), least=least, most=most)


BOUNDS = (
    _bound(
        "layers", 0, 2_000, r"(\w*_)?(num_)?(\w+_)?layers|n_layers?|depths?|num_(hidden_)?groups|num_blocks|n_blocks"
    ),
    _bound("experts", 0, 16_384, r"\w*num_(\w+_)?experts|n_(routed|shared)_experts|n_experts"),
    _bound("heads", 0, 16_384, r"(\w+_)?(num_)?(\w+_)?heads|n_heads?|n_head_kv"),
    _bound("words", 0, 50_000_000, r"(\w+_)?vocab(ulary)?_size(_\w+)?|num_hash_buckets"),
    _bound("labels", 0, 5_000_000, r"num_labels|num_classes|n_classes"),
    _bound(
        "positions", -1, 2**31, r"(\w+_)?max_(\w+_)?(position(s|_embeddings)?|len|length|seq_len)|n_positions|n_ctx"
    ),
    _bound("pixels", 0, 65_536, r"(\w+_)?(image|patch|crop|tile)_size"),
    _bound(
        "width",
        -1,
        4_194_304,
        r"(\w+_)?(hidden_size|size|dims?|width|channels|rank|model|inner|embd|ff|kv|state|filters)s?",
    ),
    _bound("count", -1, 16_777_216, r"(num|n)_\w+"),
)
"""The first that matches a key holds for it; other keys have `OTHER`."""
OTHER = _bound("anything", -(10**40), 10**40, r"\w*")
"""Of keys that say no size: `model_max_length` is 10³⁰ in many a config, and others are infinite."""
_FREE = re.compile(
    r"model_max_length|\w*tokens?(_id|_ids|_index)?|\w*_(id|ids|index|theta|seed|params|parameters|version|eps|std|scale|factor)"
)
"""Keys that count nothing."""


def find_absurd(part: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the keys of one config, not those of configs in it, whose numbers are out of bounds, and what is wrong."""
    for key, value in part.items():
        bound = bound_of(key)
        for number in _numbers(value):
            if not (bound.least <= number <= bound.most or (bound is OTHER and isinstance(number, float))):
                yield key, f"{_shown(number)} is no sensible number of {bound.what} ({bound.least:,} to {bound.most:,})"
                break
    layers, experts = _most(part, "layers"), _most(part, "experts")
    if layers * experts > MAX_EXPERT_LAYERS:
        yield "num_experts", f"{experts} experts in each of {layers} layers are more than {MAX_EXPERT_LAYERS:,}"


def bound_of(key: str) -> Bound:
    """Return the bound of a key."""
    if _FREE.fullmatch(key):
        return OTHER
    return next((bound for bound in BOUNDS if bound.keys.fullmatch(key)), OTHER)


def _numbers(value: object) -> Iterator[int | float]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item)


def _most(part: Mapping[str, object], what: str) -> int:
    found = [value for key, value in part.items() if type(value) is int and bound_of(key).what == what]
    return max(found, default=0)


def _shown(number: int | float) -> str:  # noqa: PYI041 - they are told apart
    return f"{number:g}" if isinstance(number, float) or abs(number) >= 10**15 else f"{number:,}"
