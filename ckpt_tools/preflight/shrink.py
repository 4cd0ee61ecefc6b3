"""A config.json cut down: fewer and narrower layers, with the proportions that parallelism depends on. Pure; no torch.

Kept are the ratio of heads to key-value heads (up to 8), that of experts to those a token goes to, the kinds of
layers, and everything that is no size. Keys are those of transformers' configs (5.23).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

NUM_LAYERS = 2
"""Layers that are left of a uniform stack."""
_MAX_LAYERS = 8
"""Layers that are left at most, where there are several kinds."""
_HEAD_DIM = 16
_MAX_RATIO = 8
_VOCAB = 256
_NUM_EXPERTS = 8
_STEP = 16
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim")
_HEAD_DIMS = ("head_dim", "d_kv", "kv_channels")
_WIDTH = re.compile(r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size)|d_ff|n_inner")
_MLA = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
_DEPTH = re.compile(
    r"(num_hidden_layers|num_layers|n_layers?|num_(decoder|encoder|single|refiner)_layers|(encoder|decoder)_layers|depth)"
)
_TOKEN = re.compile(r".*token(_id|_index)(_.*)?|.*_token_id|decoder_start_token_id")


def cut_depth(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with as few layers as show every kind of them."""
    values = copy.deepcopy(dict(config))
    for part in _nested(values):
        depths = {key: n for key, n in part.items() if _DEPTH.fullmatch(key) and type(n) is int and n > 0}
        for key, depth in depths.items():
            keep = _layers_to_keep(part, depth)
            part[key] = min(depth, keep)
            for name, value in part.items():
                if isinstance(value, list) and len(value) == depth:
                    part[name] = value[:keep]
        if type(part.get("first_k_dense_replace")) is int:
            part["first_k_dense_replace"] = min(1, part["first_k_dense_replace"])
    return values


def _layers_to_keep(part: Mapping[str, Any], depth: int) -> int:
    """Return how many of the first layers have one of every kind, as far as the config lists kinds."""
    keep = NUM_LAYERS
    for value in part.values():
        if isinstance(value, list) and len(value) == depth and all(isinstance(kind, str) for kind in value):
            keep = max(keep, max(value.index(kind) for kind in set(value)) + 1)
    return min(keep, _MAX_LAYERS)


def shrink_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` cut in depth and in width; whether a model comes of it is for a trial to say."""
    values = cut_depth(config)
    main = values.get("text_config")
    text = main if isinstance(main, dict) and _first(main, _HIDDEN) else values
    before, after = _shrink_width(text)
    for part in _nested(values):
        if part is not text:
            own = None if "embed_dim" in part else _first(part, _HIDDEN)
            for key, value in part.items():
                # What is joined to the text model must stay as wide as it.
                if before and value == before and key != own and ("hidden" in key or "dim" in key):
                    part[key] = after
            if own is not None and part is not values:
                _shrink_width(part)
    _shrink_tokens(values, text)
    for part in _nested(values):
        _shrink_experts(part)
    return values


def _shrink_width(part: dict[str, Any]) -> tuple[int, int]:
    """Narrow one model; return its hidden size before and after."""
    hidden_key = _first(part, _HIDDEN)
    heads_key = _first(part, _HEADS)
    if hidden_key is None or heads_key is None:
        return _shrink_product(part)
    hidden, heads = part[hidden_key], part[heads_key]
    kv_key = _first(part, _KV_HEADS)
    kv = part[kv_key] if kv_key else heads
    head_key = _first(part, _HEAD_DIMS)
    head_dim = part[head_key] if head_key else hidden // heads
    ratio = min(_MAX_RATIO, max(1, heads // max(1, kv)))
    new_kv = min(kv, 2)
    new_heads = new_kv * ratio
    new_head_dim = min(head_dim, _HEAD_DIM)
    for key in _HEADS:
        if type(part.get(key)) is int:
            part[key] = new_heads
    if kv_key:
        part[kv_key] = new_kv
    mla = [key for key in _MLA if type(part.get(key)) is int and part[key] > 0]
    for key in mla:
        part[key] = min(part[key], _HEAD_DIM)
    if head_key:
        part[head_key] = part.get("qk_rope_head_dim", new_head_dim) if mla else new_head_dim
    _shrink_rope(part, head_dim, new_head_dim)
    is_exact = hidden == heads * head_dim or mla
    new_hidden = new_heads * new_head_dim
    if not is_exact:
        new_hidden = _round(hidden * new_hidden / (heads * head_dim), _STEP)
    part[hidden_key] = new_hidden
    for key, value in part.items():
        if _WIDTH.fullmatch(key) and type(value) is int and value > 0:
            part[key] = _round(value * new_hidden / hidden, _STEP)
        elif key in ("word_embed_proj_dim", "embedding_size", "d_embed") and value == hidden:
            part[key] = new_hidden
    return hidden, new_hidden


def _shrink_product(part: dict[str, Any]) -> tuple[int, int]:
    """Narrow a model of diffusers, whose width is heads times their width, and perhaps said once more."""
    heads, width = part.get("num_attention_heads"), part.get("attention_head_dim")
    if "_class_name" not in part or type(heads) is not int or type(width) is not int:
        return 0, 0
    hidden, new = heads * width, min(heads, 2) * width
    part |= {key: new for key, value in part.items() if value == hidden}
    part["num_attention_heads"] = min(heads, 2)
    return hidden, new


def _shrink_rope(part: Mapping[str, Any], head_dim: int, new: int) -> None:
    """Cut what rotary embeddings list by the dims of a head."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = part.get(name)
        for values in _nested(rope) if isinstance(rope, dict) else ():
            for key, value in values.items():
                if key == "mrope_section" and isinstance(value, list) and head_dim % new == 0:
                    values[key] = [section * new // head_dim for section in value]
                elif isinstance(value, list) and len(value) == head_dim // 2:
                    values[key] = value[: new // 2]


def _shrink_experts(part: dict[str, Any]) -> None:
    key = _first(part, _EXPERTS)
    if key is None or part[key] <= _NUM_EXPERTS:
        return
    full = part[key]
    part[key] = _NUM_EXPERTS
    for name in _TOP_K:
        if type(part.get(name)) is int:
            part[name] = max(1, round(part[name] * _NUM_EXPERTS / full))
    if type(part.get("n_group")) is int and part["n_group"] > 1:
        part["n_group"], part["topk_group"] = 2, 1


def _shrink_tokens(values: dict[str, Any], text: dict[str, Any]) -> None:
    """Shrink the vocabulary, and give the tokens with a meaning places in it, each its own, from the end."""
    full = text.get("vocab_size")
    if type(full) is not int or full <= _VOCAB:
        return
    text["vocab_size"] = _VOCAB
    if values is not text and values.get("vocab_size") == full:
        values["vocab_size"] = _VOCAB
    places: dict[int, int] = {}

    def place(token: object) -> object:
        if type(token) is not int or token < 0 or (token < _VOCAB // 2 and token not in places):
            return token
        return places.setdefault(token, _VOCAB - 1 - len(places) % (_VOCAB // 2))

    for part in _nested(values):
        for key, value in part.items():
            if _TOKEN.fullmatch(key):
                part[key] = [place(token) for token in value] if isinstance(value, list) else place(value)


def describe_cut(config: Mapping[str, Any], cut: Mapping[str, Any]) -> str:
    """Say what was made smaller: "hidden_size 4096 → 32, num_hidden_layers 32 → 2"."""
    changes = []
    for name, (before, after) in _changes(config, cut):
        if type(before) is int and before != after and not _TOKEN.fullmatch(name):
            changes.append(f"{name} {before} → {after}")
    return ", ".join(dict.fromkeys(changes))


def _changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, tuple[object, object]]]:
    for key, value in a.items():
        other = b.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            yield from _changes(value, other)
        else:
            yield key, (value, other)


def _first(part: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if type(part.get(name)) is int and part[name] > 0), None)


def _round(value: float, step: int) -> int:
    return max(step, round(value / step) * step)


def _nested(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a config and the configs in it."""
    yield values
    for value in list(values.values()):
        if isinstance(value, dict):
            yield from _nested(value)
