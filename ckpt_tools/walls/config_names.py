"""Names in a config.json that transformers' classes hand to a loader. Pure; no torch.

Source: transformers 5.23: `models/timm_*`, `backbone_utils.consolidate_backbone_kwargs_to_config`,
`models/layoutlmv2`, `integrations/hub_kernels`, `modeling_utils._check_and_adjust_attn_implementation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

FAMILIES: Mapping[str, tuple[str, str]] = {
    "timm_wrapper": ("TimmWrapper", "timm builds the model, and loads and unpickles files that the config names"),
    "timm_backbone": ("TimmBackbone", "timm builds the model, by a name that may stand for a file or a download"),
    "layoutlmv2": ("LayoutLMv2", "detectron2 builds a part of it, from settings that name files"),
}
"""model_type → how its classes begin, and why it is not built."""
_ATTENTION = frozenset(
    {"eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"}
    | {f"paged|{name}" for name in ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")}
)
_EXPERTS = frozenset({"eager", "batched_mm", "grouped_mm"})
_FETCHES = "transformers fetches such an implementation from the hub and runs it"
_IS_PATH = "libraries load what it names"
_DROPPED = ("auto_map", "trust_remote_code", "custom_pipelines")
"""Keys that only matter to those who run a model's own code; building ignores them."""


def without_code_keys(config: Mapping[str, object]) -> dict[str, object]:
    """Return `config` without the keys, at any depth, that point at a model's own code."""
    return {key: _without(value) for key, value in config.items() if key not in _DROPPED}


def _without(value: object) -> object:
    if isinstance(value, dict):
        return without_code_keys(value)
    return [_without(item) for item in value] if isinstance(value, list) else value


def find_loaders(part: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the keys of one config, not those of configs in it, whose values reach a loader, and why."""
    yield from _families(part)
    for key, value in part.items():
        refuse = KEYS.get(key)
        if refuse is not None and (why := refuse(value, part)):
            yield key, why
        elif key.endswith("_config") and isinstance(value, str):
            yield key, "a name stands where a config belongs, and libraries would look it up"


def _families(part: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    named = part.get("architectures")
    classes = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    for model_type, (prefix, why) in FAMILIES.items():
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
    return f"{value}: transformers looks such a name up as a path or on the hub, or passes it to timm"


def _timm_name(value: object, part: Mapping[str, object]) -> str:  # noqa: ARG001 - as all refusals
    if not isinstance(value, str) or not {":", "/"} & set(value):
        return ""
    return f"{value}: timm reads such a name as a path or as a repository of the hub"


KEYS: Mapping[str, _Refusal] = {
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
    "model_args": _anything("timm takes these arguments, and loads files that they name"),
    "architecture": _timm_name,
    "detectron2_config_args": _anything("detectron2 reads files that it names"),
}
"""Key → what refuses its value."""
