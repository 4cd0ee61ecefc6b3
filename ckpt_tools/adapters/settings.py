"""What is known of an adapter beyond its factors: alphas, ranks of stacked experts, PEFT's settings; and from where."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from ckpt_tools.adapters.adapter import Adapter, AdapterModule, Convention, Sourced
from ckpt_tools.adapters.read.sidecars import ASSUMED, DIFFUSERS_HEADER, Sidecars, by_pattern
from ckpt_tools.description.checkpoint import TensorEntry
from ckpt_tools.errors import UnreadableError

_UNIT_SCALE: Mapping[Convention, str] = {
    "diffusers": "diffusers' convention: alpha = rank where none is written",
    "ai-toolkit": "ai-toolkit's convention: alpha = rank where none is written",
    "comfyui": "ComfyUI's convention: scale 1 where no alpha is written",
    "kohya": "kohya's convention: scale 1 where no alpha is written",
}
"""Whose loaders take a missing alpha for a scale of 1. PEFT's do not: they take 8."""
_STACK = "experts"
"""What transformers calls the module of all experts, which holds parameters and is no layer."""
F = TypeVar("F")
ReadScalar = Callable[[TensorEntry], float | None]
"""Returns the number that a tensor of one element holds."""
Fields = Mapping[str, Sourced[object]]


def add_settings(adapter: Adapter[TensorEntry], sidecars: Sidecars, read_scalar: ReadScalar) -> Adapter[TensorEntry]:
    """Add what sidecars, headers and scalar tensors say; what nothing says stays None.

    Raises:
        UnreadableError: A setting of an impossible type.
    """
    components = {module.path.partition(".")[0] for module in adapter.modules} & sidecars.components.keys()
    settings: Fields = sidecars.peft
    if len(components) == 1 and not settings:
        settings = sidecars.components[next(iter(components))]
    settings = {name: found for name, found in settings.items() if found.value is not None}
    if sidecars.assumed is not None:
        settings[ASSUMED] = Sourced(sidecars.assumed, f"header {ASSUMED}")
    modules = [replace(module, parameter=parameter) for module, parameter in _parameters(adapter, settings)]
    modules = [_with_rank(module, adapter, settings) for module in modules]
    done = []
    for module in modules:
        component = sidecars.components.get(module.path.partition(".")[0])
        done.append(_with_alpha(module, component or settings, adapter.convention, sidecars, read_scalar))
    return _with_targets(replace(adapter, modules=tuple(done), settings=settings))


def _with_targets(adapter: Adapter[TensorEntry]) -> Adapter[TensorEntry]:
    """Name the parameters that the modules change, where the base's shapes told and no configuration does."""
    named = sorted({m.parameter and f"{m.path}.{m.parameter}" for m in adapter.modules if m.parameter != "weight"})
    if not named or "" in named or "target_parameters" in adapter.settings:
        return adapter
    found: Sourced[object] = Sourced(named, "shapes of the base model's parameters")
    return replace(adapter, settings={**adapter.settings, "target_parameters": found})


def settle_parameters(adapter: Adapter[TensorEntry], shapes: Mapping[str, tuple[int, ...]]) -> Adapter[TensorEntry]:
    """Say which parameter each module changes where only the base model tells, and what the settings say of that one.

    Args:
        adapter: As read.
        shapes: Of the base model's parameters, those of stacked experts among them.
    """
    held = replace(adapter, base_shapes=shapes)
    modules = []
    for module, parameter in _parameters(held, adapter.settings):
        settled = module
        if module.parameter == "weight" and parameter == "":
            settled = replace(module, parameter="", rank=None)
        elif parameter and parameter != module.parameter and module.parameter in ("", "weight"):
            settled = _with_rank(replace(module, parameter=parameter), held, adapter.settings)
            alpha = _alpha_beside(settled, adapter.settings, adapter.convention, Sidecars())
            settled = replace(settled, alpha=alpha or module.alpha)
        modules.append(settled)
    return _with_targets(adapter.with_modules(tuple(modules)))


def _parameters(adapter: Adapter[TensorEntry], settings: Fields) -> Iterator[tuple[AdapterModule[TensorEntry], str]]:
    """Say which parameter each module changes: the weight, or one of those that PEFT wraps one by one."""
    wanted = settings.get("target_parameters")
    names = (
        [name for name in wanted.value if isinstance(name, str)] if wanted and isinstance(wanted.value, list) else []
    )
    children: dict[str, list[str]] = defaultdict(list)
    for name in adapter.base_shapes:
        parent, _, leaf = name.rpartition(".")
        children[parent].append(leaf)
    nested = {module.path for module in adapter.modules if module.nesting}
    for module in adapter.modules:
        if module.family != "lora" or "A" not in module.factors:
            yield module, "weight"
            continue
        targets = [name.rpartition(".") for name in names]
        found = [leaf for parent, _, leaf in targets if parent and f".{module.path}".endswith(f".{parent}")]
        own = children.get(module.path, [])
        if not found and (module.path in nested or (own and "weight" not in own)):
            found = own
        if not found:
            is_stack = module.path.rpartition(".")[2] == _STACK and not own
            yield module, "" if module.path in nested or is_stack else "weight"
            continue
        if len(found) > 1:
            shapes = {leaf: adapter.base_shapes.get(f"{module.path}.{leaf}") for leaf in found}
            found = [leaf for leaf, shape in shapes.items() if shape is not None and _fits(module, shape)]
        yield module, found[0] if len(found) == 1 else ""


def _fits(module: AdapterModule[TensorEntry], shape: tuple[int, ...]) -> bool:
    """Can the factors change a parameter of this shape? Source: peft 0.21, `ParamWrapper.update_layer`."""
    if "A" not in module.factors or "B" not in module.factors:
        return False
    down, up = module.factors["A"].shape, module.factors["B"].shape
    if len(down) != 2 or len(up) != 2 or len(shape) not in (2, 3):
        return False
    if len(shape) == 2:
        return (up[0], down[1]) == shape
    return {up[0], down[1]} == set(shape[1:]) and shape[0] > 0 and down[0] % shape[0] == 0


def _with_rank(
    module: AdapterModule[TensorEntry], adapter: Adapter[TensorEntry], settings: Fields
) -> AdapterModule[TensorEntry]:
    """The factors of stacked experts have rank × experts rows: the base or the configuration tells."""
    if module.parameter == "weight":
        if module.family == "lokr" and module.rank is None:
            return replace(module, rank=_config_rank(module, settings))
        return module
    shape = adapter.base_shapes.get(f"{module.path}.{module.parameter}")
    if shape is not None and _fits(module, shape):
        rank = module.factors["A"].shape[0] // (shape[0] if len(shape) == 3 else 1)
        return replace(module, rank=Sourced(rank, f"A has {module.factors['A'].shape[0]} rows for {shape[0]} experts"))
    return replace(module, rank=_config_rank(module, settings))


def _config_rank(module: AdapterModule[F], settings: Fields) -> Sourced[int] | None:
    """Return the rank that PEFT's configuration gives a module."""
    path = module.path if module.parameter == "weight" else f"{module.path}.{module.parameter}"
    patterns = settings.get("rank_pattern")
    if patterns is not None:
        found, value = by_pattern(patterns.value, path, where="rank_pattern")
        if not found and patterns.source == DIFFUSERS_HEADER:  # its patterns are those of one model of the pipeline
            found, value = by_pattern(patterns.value, path.partition(".")[2], where="rank_pattern")
        if found:
            return Sourced(_whole(value, "rank_pattern"), f"rank_pattern of {patterns.source}")
    rank = settings.get("r")
    return None if rank is None or not rank.value else Sourced(_whole(rank.value, "r"), rank.source)


def config_rank(module: AdapterModule[F], settings: Fields) -> int | None:
    """Return the rank that the settings give a module, whatever its tensors have; None where they do not say."""
    found = _config_rank(module, settings)
    return None if found is None else found.value


def _whole(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UnreadableError(f"{name} is {value!s}, not a whole number")
    return value


def _with_alpha(
    module: AdapterModule[TensorEntry],
    settings: Fields,
    convention: Convention,
    sidecars: Sidecars,
    read_scalar: ReadScalar,
) -> AdapterModule[TensorEntry]:
    rslora = settings.get("use_rslora")
    if rslora is not None and not isinstance(rslora.value, bool):
        raise UnreadableError(f"use_rslora is {rslora.value!s}, neither true nor false")
    factors = dict(module.factors)
    entry = factors.pop("alpha", None)
    module = replace(module, factors=factors, use_rslora=module.family == "lora" and bool(rslora and rslora.value))
    if entry is not None:
        value = read_scalar(entry)
        if value is None:
            raise UnreadableError(
                f"alpha {entry.fqn!r} is {entry.dtype.name} of shape {list(entry.shape)}, not one number"
            )
        return replace(module, alpha=Sourced(value, "tensor alpha"))
    if module.family in ("full", "saved", "oft", "boft"):
        return module
    return replace(module, alpha=_alpha_beside(module, settings, convention, sidecars))


def _alpha_beside(
    module: AdapterModule[TensorEntry], settings: Fields, convention: Convention, sidecars: Sidecars
) -> Sourced[float] | None:
    name = "lora_alpha" if module.family == "lora" else "alpha"
    path = module.path if module.parameter == "weight" else f"{module.path}.{module.parameter}"
    path = path.partition(".")[2] if path.partition(".")[0] in sidecars.components else path
    patterns = settings.get("alpha_pattern")
    if patterns is not None:
        found, value = by_pattern(patterns.value, path, where="alpha_pattern")
        if found:
            return Sourced(_number(value, "alpha_pattern"), f"alpha_pattern of {patterns.source}")
    alpha = settings.get(name)
    if alpha is not None and alpha.value:  # 0 is what verl writes where it does not know
        return Sourced(_number(alpha.value, name), alpha.source)
    kernel = module.factors.get("A")
    is_conv = kernel is not None and len(kernel.shape) > 2 and math.prod(kernel.shape[2:]) > 1
    trainer = sidecars.conv_alpha if is_conv and sidecars.conv_alpha is not None else sidecars.alpha
    if trainer is not None and convention != "ai-toolkit":
        return trainer
    reason = _UNIT_SCALE.get(convention)
    if reason is None or module.rank is None:
        return None
    return Sourced(float(module.rank.value), reason)


def said_zero(module: AdapterModule[F], adapter: Adapter[F]) -> str | None:
    """Return what says an alpha of 0, which is taken for "not known" (verl#5325), but which loaders multiply by."""
    found = adapter.settings.get("lora_alpha" if module.family == "lora" else "alpha")
    is_zero = found is not None and isinstance(found.value, int | float) and found.value == 0
    return found.source if found is not None and is_zero else None


def _number(value: object, name: str) -> float:
    try:
        if not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    except OverflowError:  # a whole number beyond every float
        pass
    raise UnreadableError(f"{name} is {value!s}, not a number")
