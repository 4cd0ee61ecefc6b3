"""A cluster's run collapsed to this machine: a small mesh of the same kind, and what of the spec a smoke run tries.

Whatever is collapsed, replaced or left out becomes a sentence: a green smoke run proves no more than what it ran.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_tools.checkpoint.layout import AXES, FSDP_AXIS, Mesh
from ckpt_tools.checkpoint.names.match_architecture import EXPERT_COUNTS
from ckpt_tools.models.config import config_path, read_config
from ckpt_tools.options.smoke import ADAPTERS
from ckpt_tools.preflight.smoke import SmokeOptions
from ckpt_tools.preflight.spec import ParallelSpec, strategy_on
from ckpt_tools.text import escape_name

# A config.json cut down: fewer and narrower layers, with the proportions that parallelism depends on. Pure; no torch
# Kept are the ratio of heads to key-value heads (up to 8), that of experts to those a token goes to, the kinds of
# layers, and everything that is no size. Keys are those of transformers' configs (5.23).

NUM_LAYERS = 2  # Layers that are left of a uniform stack
_MAX_LAYERS = 8  # layers that are left at most, where there are several kinds
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
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
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
    key = _first(part, EXPERT_COUNTS)
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


MAX_RANKS = 4  # Ranks of a smoke run on this machine
_KEPT = 2  # ranks along an axis that is kept
_IMPORTANCE = (FSDP_AXIS, "tp", "dp_replicate")
"""Which axes are kept when there are not ranks enough for all, most telling first."""
_NOT_RUN = {
    "cp": "context parallelism",
    "pp": "pipeline stages",
    "ep": "expert parallelism",
    "sp": "sequence parallelism",
}
_DTYPES = ("bf16", "f16", "f32")
_ALL = ("all-linear", "all")
_PLAIN = re.compile(r"\w+(\.\w+)*", re.ASCII)
"""A module's name or the end of it; anything else is a pattern of the trainer's."""
_NOT_TRIED = {
    "deepspeed": "DeepSpeed distributes the model, but the smoke run tests FSDP2",
    "other": "the smoke run tests FSDP2, but this config uses another engine",
    "none": "the model is not distributed: there is one process",
}
"""Engine → why no smoke run tries it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collapsed:
    """What a smoke run of a spec will be, and what of the spec it does not try; or why there is none."""

    options: SmokeOptions | None
    notes: tuple[str, ...]
    why_not: str = ""


def collapse_mesh(mesh: Mesh, *, max_ranks: int = MAX_RANKS) -> tuple[Mesh, tuple[str, ...]]:
    """Return a mesh of the same kinds of axes on at most `max_ranks` ranks, and what became of every changed axis."""
    sizes = dict(mesh.axes)
    shard = sizes.get(FSDP_AXIS, 1)
    notes = []
    others = [axis for axis in ("cp", "ep") if sizes.get(axis, 1) > 1]
    if others and shard == 1:
        # FSDP cuts over dp_shard × cp × ep: without ranks of its own it still cuts.
        shard = math.prod(sizes[axis] for axis in others)
        notes.append(
            f"FSDP shards over the {shard} ranks of {' and '.join(others)}; the smoke run uses {FSDP_AXIS}={_KEPT}"
        )
    wanted = {FSDP_AXIS: shard, "tp": sizes.get("tp", 1), "dp_replicate": sizes.get("dp_replicate", 1)}
    kept: dict[str, int] = {}
    ranks = 1
    for axis in _IMPORTANCE:
        if wanted[axis] > 1 and ranks * _KEPT <= max_ranks:
            kept[axis] = _KEPT
            ranks *= _KEPT
    collapsed = [f"{axis}={sizes[axis]} to {_KEPT}" for axis in kept if sizes.get(axis, 1) > _KEPT]
    if collapsed:
        notes.append(f"the mesh {mesh} is reduced: {', '.join(collapsed)}")
    dropped = [axis for axis in _IMPORTANCE if wanted[axis] > 1 and axis not in kept]
    if dropped:
        left = ", ".join(f"{axis}={sizes[axis]}" for axis in dropped)
        notes.append(f"without {left}: {max_ranks} ranks are not enough for every axis")
    for axis, what in _NOT_RUN.items():
        if sizes.get(axis, 1) > 1:
            notes.append(f"without {axis}={sizes[axis]}: the smoke run does not test {what}")
    order = [axis for axis in ("dp_replicate", FSDP_AXIS, "tp") if axis in kept]
    return Mesh(tuple((axis, kept[axis]) for axis in order) or ((FSDP_AXIS, 1),)), tuple(notes)


def collapse_spec(spec: ParallelSpec, *, model: str, source: str | None, blocks: Sequence[str] = ()) -> Collapsed:
    """Return the smoke run that comes nearest to a spec on this machine; without a `source` weights are random."""
    if spec.engine in _NOT_TRIED:
        return Collapsed(options=None, notes=(), why_not=_NOT_TRIED[spec.engine])
    notes: list[str] = []
    if spec.engine == "fsdp1":
        notes.append("FSDP1 is tested as its equivalent in FSDP2")
    whole = spec.mesh
    if whole is None:
        whole = _likely_mesh(spec)
        notes.append(f"the mesh is not known; {whole} is tested instead")
    if spec.engine == "ddp" and whole.size("dp_replicate") == 1 and whole.size(FSDP_AXIS) > 1:
        whole = Mesh(tuple(("dp_replicate" if name == FSDP_AXIS else name, size) for name, size in whole.axes))
    mesh, collapsed = collapse_mesh(whole)
    notes += collapsed
    strategy = strategy_on(spec, mesh)
    if spec.strategy is not None and strategy.removesuffix("_zero2") != spec.strategy:
        notes.append(f"{spec.strategy} becomes {strategy} on {mesh}")
    if type(spec.reshard_after_forward) is int:
        notes.append(f"reshard_after_forward={spec.reshard_after_forward} is tested as true")
    notes += _not_tried(spec)
    if blocks and spec.wrap_classes and set(spec.wrap_classes) != set(blocks):
        notes.append(f"the wrapped classes are {_names(blocks)}, not {_names(spec.wrap_classes)}")
    param = _dtype(spec.param_dtype, "computing", notes)
    reduce = _dtype(spec.reduce_dtype, "averaging gradients", notes)
    lora, adapter, targets = _adapter(spec, notes)
    options = SmokeOptions(
        source=source,
        model=model,
        mesh=str(mesh),
        device="cpu",
        strategy=strategy,
        steps=2,
        param_dtype=param,
        reduce_dtype=reduce,
        lora=lora,
        adapter=adapter,
        target=targets,
        quantize=_quantize(spec, lora, notes),
        timeout_s=60.0,
    )
    return Collapsed(options=options, notes=tuple(notes))


def _likely_mesh(spec: ParallelSpec) -> Mesh:
    """Return a mesh with the axes that the config names, where the number of ranks is not known or does not fit."""
    sizes = {name: _KEPT if size == -1 else size for name, size in spec.axes.items() if name in AXES and name != "ep"}
    axes = tuple((name, size) for name, size in sizes.items() if size > 1)
    return Mesh(axes or (("dp_replicate" if spec.engine == "ddp" else FSDP_AXIS, _KEPT),))


def _not_tried(spec: ParallelSpec) -> list[str]:
    notes = []
    if spec.framework == "torchtitan":
        notes.append("the transformers model is tested, not torchtitan's own")
    if spec.offload_params or spec.offload_optimizer:
        notes.append("offloading is not tested: everything is in host memory here")
    if spec.activation_checkpointing:
        notes.append("activation checkpointing is not tested")
    if spec.wrap_min_num_params is not None:
        notes.append("wrapping by number of parameters is not tested: layers are wrapped")
    if not spec.wraps_blocks:
        notes.append("layers are wrapped; in the run the model is one FSDP group")
    optimizer = (spec.optimizer or "adamw").lower()
    if not optimizer.startswith("adamw") or "8bit" in optimizer or "4bit" in optimizer:
        notes.append(f"the optimizer {escape_name(spec.optimizer or '')} is not tested: AdamW is used instead")
    return notes


def _dtype(value: str | None, name: str, notes: list[str]) -> str:
    if value is None:
        return "keep"
    if value in _DTYPES:
        return value
    notes.append(f"{name} in {escape_name(value)} is not tested")
    return "keep"


def _names(classes: Sequence[str]) -> str:
    return ", ".join(map(escape_name, classes))


def _adapter(spec: ParallelSpec, notes: list[str]) -> tuple[bool, str, tuple[str, ...]]:
    """Return whether adapters are trained, of which kind, and on which layers (globs; none for all)."""
    if spec.adapter is None:
        return False, "lora", ()
    if importlib.util.find_spec("peft") is None:
        notes.append("the adapter is not tested, because peft is not installed; the whole model is trained")
        return False, "lora", ()
    kind = spec.adapter.kind
    if kind not in ADAPTERS or (spec.quantize == "nf4" and kind not in ("lora", "dora")):
        notes.append(f"a LoRA adapter is tested instead of {escape_name(kind)}")
        kind = "lora"
    named = tuple(name for name in spec.adapter.targets if name not in _ALL)
    # ai-toolkit's are parts of the names of its own models, which need not be those of diffusers.
    if any(_PLAIN.fullmatch(name) is None or spec.framework == "ai-toolkit" for name in named):
        notes.append("adapters are on all linear layers, not only on the chosen ones")
        return True, kind, ()
    return True, kind, tuple(glob for name in named for glob in (name, f"**.{name}"))


def _quantize(spec: ParallelSpec, lora: bool, notes: list[str]) -> str | None:
    if spec.quantize is None:
        return None
    if spec.quantize == "nf4" and lora and importlib.util.find_spec("bitsandbytes") is not None:
        return "nf4"
    notes.append(f"quantising to {escape_name(spec.quantize)} is not tested: the frozen weights are unquantised")
    return None


def write_cuts(model: str, directory: str) -> tuple[str, ...]:
    """Write cut-down configs of a model, the smallest first, and return their directories."""
    config = read_config(model).values
    paths = []
    for name, cut in (("narrow", shrink_config(config)), ("shallow", cut_depth(config))):
        path = os.path.join(directory, name)
        os.makedirs(path, exist_ok=True)
        with open(config_path(path), "w", encoding="utf-8") as file:
            json.dump(cut, file)
        paths.append(path)
    return tuple(paths)


def describe_chosen(model: str, chosen: str) -> str:
    """Say how the config in `chosen` differs from the model's."""
    return describe_cut(read_config(model).values, read_config(chosen).values)
