"""Builds every model of transformers on the meta device, in several configs, and observes what its tensors are called.

Nothing here knows an architecture by heart, but for the few values without which some do not build.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.models.auto import modeling_auto
from transformers.utils import logging

from ckpt_tools.checkpoint.formats._json import parse_json
from ckpt_tools.preflight.shrink_run import cut_depth

AUTO: dict[str, Any] = {
    "base": modeling_auto.MODEL_MAPPING_NAMES,
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "backbone": modeling_auto.MODEL_FOR_BACKBONE_MAPPING_NAMES,
}
"""How composite models choose the class of a part, by its config's model_type."""
_NEEDED = {
    "vocab_size": 64,
    "prediction_length": 8,
    "head_dim": 16,
    "use_timm_backbone": False,
    "is_decoder": True,
    "ctc_loss_reduction": "sum",
    "num_key_value_heads": 4,
}
"""Tried, one after another, for a class that does not build from its default config."""
_LAYERS = re.compile(r"(.*_)?(n_layers?|layers|depth|blocks|num_hidden_layers|n_block)|num_.*(layers|blocks)")
_SWITCH = re.compile(
    r".*(_rank|experts?|kernel(_size)?|_freq|_step|first_k.*|interval|_every.*|nextn.*|mtp.*|register.*|type_vocab_size|num_groups)"
)
"""Numbers whose absence (0 or none) may leave weights out."""
_WIDTH = re.compile(r"word_embed_proj_dim|embedding_size")
"""Widths that bring a projection along where they differ from the model's."""
_CHOICES = {
    "feed_forward_proj": ("relu", "gated-gelu"),
    "position_embedding_type": ("absolute", "relative_key", "rotary"),
    "feat_extract_norm": ("group", "layer"),
    "norm_type": ("layer_norm", "rms_norm"),
    "position_embeddings_type": ("relative", "rotary", "relative_key"),
}
_FORMS: dict[str, dict[str, object]] = {
    "Zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": True,
        "use_shared_mlp_adapter": True,
    },
    "MusicgenForC": {"text_encoder": {"model_type": "t5", "d_model": 1024}},
    "MusicgenMelodyForC": {"text_encoder": {"model_type": "t5", "d_model": 1024}},
}
"""Beginning of a class's name → what must change together, for names that no single change adds or takes away."""
FORM = "a form of its own"
"""Label of what was observed of `_FORMS`."""
_MAX_VARIANTS = 60


@dataclass(slots=True)
class Part:
    """A model inside a model."""

    path: str
    """Module path."""
    kind: str
    """Class name."""
    config: str
    """Path of its config in the whole's ("" for the same one)."""
    auto: str = ""
    """Which of `AUTO` chose the class; empty when it is always this one."""


@dataclass(slots=True)
class Observed:
    """What one build showed."""

    names: tuple[str, ...]
    """The state dict's names."""
    open_lists: frozenset[str]
    """Paths of containers whose children are counted (module lists, uniform sequences)."""


@dataclass(slots=True)
class Architecture:
    """Everything that was seen of one class."""

    name: str
    model_type: str
    base_prefix: str
    parts: list[Part]
    observed: list[tuple[str, Observed]]
    """(field that was changed, "" for none; "FIELD+" where it is a count that was increased) → what was built."""
    ties: list[tuple[str, str, bool, str, str]]
    """(scope, config path of the switch, its default, target, source)."""
    rules: list[tuple[str, str]]
    """(module path, key of transformers' conversion mapping)."""
    ignored_unexpected: list[str]
    ignored_missing: list[str]
    defaults: dict[str, int] = field(default_factory=dict)
    """Path of a count in the config → its default."""
    aliases: dict[str, str] = field(default_factory=dict)


def architectures() -> list[str]:
    """Return the names of all model classes that transformers exports."""
    logging.set_verbosity(50)
    found = []
    for name in sorted(set(dir(transformers))):
        if name.islower() or name.startswith(("_", "Auto", "PreTrained", "Rag")):
            continue
        kind = getattr(transformers, name, None)
        if (
            isinstance(kind, type)
            and issubclass(kind, PreTrainedModel)
            and kind.config_class is not None
            and "pretrained" not in name.lower()
        ):
            found.append(name)
    return found


def build(kind: type[PreTrainedModel], values: dict | None) -> PreTrainedModel:
    """Build on the meta device."""
    assert kind.config_class is not None
    config = kind.config_class() if values is None else kind.config_class.from_dict(copy.deepcopy(values))
    with torch.device("meta"), transformers.initialization.no_init_weights():
        return kind(config)


def observe(name: str) -> Architecture:
    """Build one class in its default config and in variants of it."""
    torch.set_grad_enabled(False)
    kind = getattr(transformers, name)
    values, model = _first_build(kind)
    config = model.config
    parts = list(_parts(model))
    inside = tuple(part.config for part in parts if part.config)
    first = _observe(model)
    observed = [("", first)]
    with suppress(Exception):  # as deep as it is, for kinds of layers that come late
        observed.append(("", _observe(build(kind, _plain(kind.config_class())))))
    defaults: dict[str, int] = {}
    original = _plain(kind.config_class())
    for label, variant in _variants(values, inside):
        with suppress(Exception):  # a config that does not build says nothing
            seen = _observe(build(kind, variant))
            if seen.names != first.names:
                observed.append((label, seen))
    for start, form in _FORMS.items():
        if name.startswith(start):
            observed.append((FORM, _observe(build(kind, values | form))))
    for path, value in _leaves(original):
        if type(value) is int and _LAYERS.fullmatch(path.rpartition(".")[2]):
            defaults[path] = value
    aliases: dict[str, list[str]] = {}
    for alias, own in getattr(kind.config_class, "attribute_map", {}).items():
        aliases.setdefault(own, []).append(alias)
    return Architecture(
        name=name,
        model_type=getattr(kind.config_class, "model_type", ""),
        base_prefix=model.base_model_prefix or "",
        parts=parts,
        observed=observed,
        ties=list(_ties(model, parts, config)),
        rules=_rules(model),
        ignored_unexpected=sorted(_ignored(model, "unexpected", parts)),
        ignored_missing=sorted(_ignored(model, "missing", parts)),
        defaults=defaults,
        aliases={own: "|".join(sorted(others)) for own, others in aliases.items()},
    )


def _first_build(kind: type[PreTrainedModel]) -> tuple[dict, PreTrainedModel]:
    candidates: list[dict] = []
    try:
        values = _plain(kind.config_class())  # type: ignore[misc]
    except Exception:
        values = {}
    candidates.append(cut_depth(values))
    candidates.append(values)
    for key, value in _NEEDED.items():
        candidates.append(_filled(cut_depth(values), {key: value}))
    candidates.append(_filled(cut_depth(values), _NEEDED))
    resnet = {"backbone": None, "backbone_config": _plain(transformers.ResNetConfig()), "use_timm_backbone": False}
    candidates.append(cut_depth(values) | resnet)
    error: Exception | None = None
    for candidate in candidates:
        try:
            return candidate, build(kind, candidate)
        except Exception as problem:
            error = error or problem
    assert error is not None
    raise error


def _plain(config: PreTrainedConfig) -> dict:
    found = parse_json(config.to_json_string(use_diff=False).encode(), what="the config", where=None, infinite=True)
    assert isinstance(found, dict)
    return found


def _filled(values: dict, needed: dict) -> dict:
    filled = copy.deepcopy(values)
    for part in _dicts(filled):
        for key, value in needed.items():
            if (key in part and (part[key] is None or isinstance(value, bool))) or part is filled:
                part[key] = value
    return filled


def _dicts(values: dict) -> Iterator[dict]:
    yield values
    for key, value in values.items():
        if isinstance(value, dict) and key.endswith("config"):
            yield from _dicts(value)


def _leaves(values: dict, path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        here = f"{path}{key}"
        if isinstance(value, dict) and key.endswith("config"):
            yield from _leaves(value, here + ".")
        else:
            yield here, value


def _variants(values: dict, inside: tuple[str, ...]) -> Iterator[tuple[str, dict]]:
    """Yield (field, config) with one field changed."""
    count = 0
    for path, value in _leaves(values):
        if any(path.startswith(part + ".") for part in inside):
            continue  # that part has its own table
        key = path.rpartition(".")[2]
        for label, other in _others(path, key, value):
            if count >= _MAX_VARIANTS:
                return
            count += 1
            variant = copy.deepcopy(values)
            target = variant
            *parents, last = path.split(".")
            for parent in parents:
                target = target[parent]
            target[last] = other
            if label.endswith("+"):
                _lengthen(target, value)
            yield label, variant


def _others(path: str, key: str, value: object) -> Iterator[tuple[str, object]]:
    if key in ("return_dict", "output_attentions", "output_hidden_states", "use_cache", "torchscript", "chunk_size"):
        return
    if isinstance(value, bool):
        yield path, not value
    elif isinstance(value, int):
        if _LAYERS.fullmatch(key):
            yield f"{path}+", value + 1
        if _SWITCH.fullmatch(key):
            yield path, 0
            yield path, None
            yield path, 2
        if _WIDTH.fullmatch(key):
            yield path, 2 * value
    elif value is None and _SWITCH.fullmatch(key):
        yield path, 8
        yield path, 2
    elif isinstance(value, str):
        for choice in _CHOICES.get(key, ()):
            if choice != value:
                yield path, choice
    elif isinstance(value, list) and value and all(isinstance(item, str) for item in value) and key == "layer_types":
        for item in sorted(set(value)):
            yield path, [item] * len(value)
    elif value in ([], None) and key in ("mlp_only_layers", "moe_layers"):
        yield path, [0]


def _lengthen(target: dict, depth: int) -> None:
    for key, item in target.items():
        if isinstance(item, list) and len(item) == depth and item:
            target[key] = [*item, item[-1]]


def _observe(model: nn.Module) -> Observed:
    names = tuple(sorted(model.state_dict()))
    lists: set[str] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        children = [child for _, child in module.named_children()]
        if not children or not all(key.isdecimal() for key, _ in module.named_children()):
            continue
        alike = len({type(child) for child in children}) == 1
        counted = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        inside = any(path.startswith(outer + ".") for outer in lists)
        if (counted and (alike or not inside)) or (
            alike and len(children) > 1 and any(child._modules for child in children)  # noqa: SLF001
        ):
            lists.add(path)
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (nn.ParameterList, nn.ParameterDict)):
            lists.add(path)
    return Observed(names, frozenset(lists))


def _parts(model: PreTrainedModel) -> Iterator[Part]:
    """Yield the outermost models inside the model that transformers exports as models of their own."""
    taken: list[str] = []
    for path, module in model.named_modules():
        if not path or not isinstance(module, PreTrainedModel) or any(path.startswith(p + ".") for p in taken):
            continue
        kind = type(module)
        if getattr(transformers, kind.__name__, None) is not kind:
            continue
        where = _config_path(model.config, module.config, type(model.config))
        if where is None:
            continue
        taken.append(path)
        auto = ""
        if where and _is_auto(type(model.config), where):
            model_type = module.config.model_type
            for label, names in AUTO.items():
                chosen = names.get(model_type)
                if kind.__name__ == chosen or (isinstance(chosen, tuple) and kind.__name__ in chosen):
                    auto = label
                    break
        yield Part(path, kind.__name__, where, auto)


def _config_path(root: object, config: object, kind: type) -> str | None:
    if config is root:
        return ""
    for key in getattr(kind, "sub_configs", {}) or {}:
        part = getattr(root, key, None)
        if part is None:
            continue
        if part is config:
            return key
        deeper = _config_path(part, config, type(part))
        if deeper is not None:
            return f"{key}.{deeper}" if deeper else key
    return None


def _is_auto(kind: type, path: str) -> bool:
    first, _, rest = path.partition(".")
    declared = (getattr(kind, "sub_configs", {}) or {}).get(first)
    if declared is AutoConfig:
        return True
    return bool(rest) and isinstance(declared, type) and _is_auto(declared, rest)


def _own_models(model: PreTrainedModel, parts: list[Part]) -> Iterator[tuple[str, PreTrainedModel]]:
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, PreTrainedModel) and not any(
            path == part.path or path.startswith(part.path + ".") for part in parts
        ):
            yield path, module


def _ties(
    model: PreTrainedModel, parts: list[Part], config: PreTrainedConfig
) -> Iterator[tuple[str, str, bool, str, str]]:
    for path, module in _own_models(model, parts):
        keys: object = module._tied_weights_keys  # noqa: SLF001
        if not isinstance(keys, dict):
            continue
        where = _config_path(config, module.config, type(config)) or ""
        switch = f"{where}.tie_word_embeddings" if where else "tie_word_embeddings"
        default = bool(getattr(module.config, "tie_word_embeddings", False))
        for target, source in keys.items():
            yield path, switch, default, target, source


def _rules(model: PreTrainedModel) -> list[tuple[str, str]]:
    """Return (module path, mapping key), in the order in which transformers applies them."""
    from transformers import conversion_mapping

    found: list[tuple[str, str]] = []
    asked: list[str] = []
    original = conversion_mapping.get_checkpoint_conversion_mapping

    def recording(key: str):
        mapping = original(key)
        if mapping is not None:
            asked.append(key)
            for transform in mapping:
                transform_keys[id(transform)] = key
                kept.append(transform)
        return mapping

    transform_keys: dict[int, str] = {}
    kept: list[object] = []
    conversion_mapping.get_checkpoint_conversion_mapping = recording
    try:
        transforms = get_model_conversion_mapping(model)
    finally:
        conversion_mapping.get_checkpoint_conversion_mapping = original
    for transform in transforms:
        scope = transform.scope_prefix
        entry = ("" if scope is None else scope or ".", transform_keys[id(transform)])
        if entry not in found:
            found.append(entry)
    return found


def _ignored(model: PreTrainedModel, what: str, parts: list[Part]) -> set[str]:
    patterns: set[str] = set()
    for _, module in _own_models(model, parts):
        patterns |= set(getattr(type(module), f"_keys_to_ignore_on_load_{what}", None) or ())
    if what == "unexpected":
        own = [name for name, _ in model.named_buffers()]
        if any(name.endswith("rotary_emb.inv_freq") for name in own):
            patterns.add(r"rotary_emb\.inv_freq")
        if any(name.endswith("position_ids") for name in own):
            patterns.add(r"(^|\.)position_ids$")
    return patterns
