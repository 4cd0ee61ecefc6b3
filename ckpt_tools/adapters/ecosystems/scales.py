"""The scale that a loader applies to each module, beside the one that was meant.

Source: ComfyUI, comfy/weight_adapter/lora.py (`calculate_weight`); kohya-ss/sd-scripts, networks/lora.py; diffusers
0.42, utils/peft_utils.py (`get_peft_kwargs`), loaders/lora_conversion_utils.py; peft 0.21, tuners/lora/layer.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from ckpt_tools.adapters.adapter import Adapter
from ckpt_tools.adapters.ecosystems.diffusers_loader import COMPONENTS, component_of, own_metadata
from ckpt_tools.adapters.ecosystems.loader_report import AdapterFile, Loader, Loading, ModuleScale
from ckpt_tools.adapters.ecosystems.peft.config_rules import Config, rank_of
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.read.sidecars import by_pattern
from ckpt_tools.adapters.settings import TENSOR_ALPHA
from ckpt_tools.checkpoint.entries import TensorEntry


def scales_of(adapter: Adapter[TensorEntry], tensors: Collection[str]) -> Iterator[ModuleScale]:
    """Yield the modules that a scale multiplies, where it is known."""
    for module in adapter.modules:
        family, rank = family_of(module), module.rank.value if module.rank is not None else 0
        if family.is_scaled and rank and module.alpha and module.alpha.value and math.isfinite(module.alpha.value):
            factors = tuple(entry.fqn for entry in module.factors.values())
            own = _alpha_of(factors, tensors) if module.alpha.source == TENSOR_ALPHA else None
            yield ModuleScale(
                path=module.target,
                field=family.alpha_field,
                factors=factors,
                rank=rank,
                alpha=module.alpha.value,
                source=module.alpha.source,
                meant=module.alpha.value / (math.sqrt(rank) if module.use_rslora else rank),
                tensor=own,
            )


def _alpha_of(factors: Sequence[str], tensors: Collection[str]) -> str | None:
    name = factors[0]
    while name:
        name = name.rpartition(".")[0]
        if f"{name}.alpha" in tensors:
            return f"{name}.alpha"
    return None


def factor_of(file: AdapterFile, loader: Loader, loading: Loading) -> float | None:
    """Say where a loader applies another scale than was meant; return how many times the meant one, of the worst.

    None where it loads no module whose scale is known.
    """
    used = [each for each in file.scales if any(name in loading.used for name in each.factors)]
    found = [(each, _applied(each, file, loader, loading) / each.meant) for each in used]
    for each, factor in found:
        if factor and not math.isclose(factor, 1, rel_tol=1e-4):  # of 0 more is said
            what = (
                f"{loader} applies {factor:.4g} times the trained change: alpha is {each.alpha:g} ({each.source}) "
                f"for rank {each.rank}, a scale of {each.meant:.4g}, and {loader} uses {factor * each.meant:.4g}"
            )
            target = "peft" if loader == "vllm" else loader
            hint = f"write the scale where {loader} reads it: ckpt export-lora SRC DST --to {target}"
            loading.misreads(each.path, what, hint)
    return max((factor for _, factor in found), key=_distance, default=None)


def _distance(factor: float) -> float:
    return abs(math.log(abs(factor))) if factor and math.isfinite(factor) else math.inf


_PEFT_DEFAULT = 8  # Alpha of a configuration that says none


def _applied(each: ModuleScale, file: AdapterFile, loader: Loader, loading: Loading) -> float:
    if loader in ("peft", "vllm"):
        return _configured(file.config or {}, each.path, each)
    own = each.alpha / each.rank if each.tensor in loading.used else 1.0
    return own if loader != "diffusers" else own * _in_diffusers(each, file, loading)


def _in_diffusers(each: ModuleScale, file: AdapterFile, loading: Loading) -> float:
    """Return what diffusers multiplies by beside the alpha of a tensor: by its header, else by the alphas of others."""
    target = next(module for name in each.factors for module in loading.used.get(name, ()))
    component, _, path = target.partition(".")
    if component not in COMPONENTS:
        component, path = component_of(file).removesuffix("."), target
    config = own_metadata(file, f"{component}.")
    if config is not None:
        return _configured(config, path, each)
    if not loading.spreads_alphas or each.tensor in loading.used:
        return 1.0
    alphas = Counter(other.alpha for other in file.scales if other.tensor in loading.used)
    return alphas.most_common(1)[0][0] / each.rank if alphas else 1.0


def _configured(config: Config, path: str, each: ModuleScale) -> float:
    """Return the scale of PEFT's configuration."""
    found, alpha = by_pattern(config.get("alpha_pattern"), path, where="alpha_pattern")
    alpha = alpha if found else config.get(each.field, _PEFT_DEFAULT)
    rank = rank_of(config, path)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        return math.nan
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
