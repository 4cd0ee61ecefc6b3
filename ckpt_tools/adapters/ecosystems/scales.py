"""The scale that a loader applies to each module, beside the one that was meant.

Source: ComfyUI, comfy/weight_adapter/lora.py (`calculate_weight`); kohya-ss/sd-scripts, networks/lora.py; diffusers
0.42, utils/peft_utils.py (`get_peft_kwargs`), loaders/lora_conversion_utils.py; peft 0.21, tuners/lora/layer.py.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import accumulate

from ckpt_tools.adapters.adapter import AdapterModule
from ckpt_tools.adapters.ecosystems.diffusers_loader import COMPONENTS, component_of, own_metadata
from ckpt_tools.adapters.ecosystems.loader_report import EXPORTS, AdapterFile, Loader, Loading
from ckpt_tools.adapters.ecosystems.peft.config_rules import Config, rank_of
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.read.sidecars import by_pattern
from ckpt_tools.adapters.settings import TENSOR_ALPHA
from ckpt_tools.checkpoint.entries import TensorEntry

Module = AdapterModule[TensorEntry]
_PEFT_DEFAULT = 8  # Alpha of a configuration that says none


def factor_of(file: AdapterFile, loader: Loader, loading: Loading) -> float | None:
    """Say where a loader applies another scale than was meant; return how many times the meant one, of the worst.

    None where it loads no module whose scale is known.
    """
    factors = []
    for module in file.modules:
        alpha, rank = _numbers(module)
        if not alpha or not rank or not any(entry.fqn in loading.used for entry in module.factors.values()):
            continue
        meant = alpha / (math.sqrt(rank) if module.use_rslora else rank)
        factor = _applied(module, file, loader, loading) / meant
        factors.append(factor)
        if factor and not math.isclose(factor, 1, rel_tol=1e-4):  # of 0 more is said
            source = module.alpha.source if module.alpha is not None else ""
            what = (
                f"{loader} applies {factor:.4g} times the trained change: alpha is {alpha:g} ({source}) for rank "
                f"{rank}, a scale of {meant:.4g}, and {loader} uses {factor * meant:.4g}"
            )
            target = EXPORTS.get(loader, loader)
            hint = f"write the scale where {loader} reads it: ckpt export-lora SRC DST --to {target}"
            loading.misreads(module.target, what, hint)
    return max(factors, key=_distance, default=None)


def _numbers(module: Module) -> tuple[float, int]:
    """Return alpha and rank; 0 for one that is not known, or scales nothing."""
    if module.alpha is None or module.rank is None or not family_of(module).is_scaled:
        return 0, 0
    return module.alpha.value if math.isfinite(module.alpha.value) else 0, module.rank.value


def _distance(factor: float) -> float:
    return abs(math.log(abs(factor))) if factor and math.isfinite(factor) else math.inf


def _applied(module: Module, file: AdapterFile, loader: Loader, loading: Loading) -> float:
    if loader in ("peft", "vllm", "sglang"):
        names = ("r", "lora_alpha") if loader == "sglang" else (file.config or ())  # SGLang has one scale for all
        return _configured({name: (file.config or {}).get(name) for name in names}, module.target, module)
    alpha, rank = _numbers(module)
    own = alpha / rank if _has_tensor(module, loading) else 1.0
    return own if loader != "diffusers" else own * _in_diffusers(module, file, loading)


def _has_tensor(module: Module, loading: Loading) -> bool:
    """Does the loader read the tensor with a module's alpha?"""
    parts = next(iter(module.factors.values())).fqn.split(".")
    is_there = any(f"{name}.alpha" in loading.used for name in accumulate(parts, "{}.{}".format))
    return is_there and module.alpha is not None and module.alpha.source == TENSOR_ALPHA


def _in_diffusers(module: Module, file: AdapterFile, loading: Loading) -> float:
    """Return what diffusers multiplies by beside the alpha of a tensor: by its header, else by the alphas of others."""
    target = next(each for entry in module.factors.values() for each in loading.used.get(entry.fqn, ()))
    component, _, path = target.partition(".")
    if component not in COMPONENTS:
        component, path = component_of(file).removesuffix("."), target
    config = own_metadata(file, f"{component}.")
    if config is not None:
        return _configured(config, path, module)
    if not loading.spreads_alphas or _has_tensor(module, loading):
        return 1.0
    alphas = Counter(_numbers(other)[0] for other in file.modules if _has_tensor(other, loading))
    return alphas.most_common(1)[0][0] / _numbers(module)[1] if alphas else 1.0


def _configured(config: Config, path: str, module: Module) -> float:
    """Return the scale of PEFT's configuration."""
    found, alpha = by_pattern(config.get("alpha_pattern"), path, where="alpha_pattern")
    alpha = alpha if found else config.get(family_of(module).alpha_field, _PEFT_DEFAULT)
    rank = rank_of(config, path)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        return math.nan
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
