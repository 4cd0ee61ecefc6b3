"""What `load_lora_adapter` of any diffusers model does: adapters of families without tables, held against the base.

Source: diffusers 0.42, loaders/peft.py (`PeftAdapterMixin.load_lora_adapter`), loaders/lora_pipeline.py
(`lora_state_dict` of the mixins: what is not under diffusers' own names is converted first, by rules of each family).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from ckpt_tools.adapters.adapter import Shape
from ckpt_tools.adapters.base.model import parents_of
from ckpt_tools.adapters.ecosystems.peft.config_rules import Config, expected, is_target, rank_of
from ckpt_tools.adapters.ecosystems.simulation import AdapterFile, Loading, RejectedError
from ckpt_tools.adapters.families import FAMILIES
from ckpt_tools.adapters.read.sidecars import DIFFUSERS_KEY

_FOREIGN = ("diffusion_model.", "model.diffusion_model.", "lora_unet_", "lora_transformer_", "lora_te", "lycoris_")
"""Beginnings that the pipelines' converters look for."""
_ENCODER = re.compile(r"text_encoder(?:_\d)?\.")
_KEY = re.compile(
    r"(?P<module>.+)\.(?:lora_(?P<side>[AB])\.weight|lora_B\.(?P<bias>bias)|lora_(?P<magnitude>magnitude)_vector)"
)


def applies(file: AdapterFile) -> bool:
    """Are the base's modules known, and the names such as no pipeline converts?"""
    return file.base is not None and not any(
        name.startswith(_FOREIGN) or name.endswith(".alpha") for name in file.tensors
    )


def load(file: AdapterFile, loading: Loading) -> None:
    """Apply the rules that all models share; raise RejectedError where diffusers raises."""
    if not applies(file):
        what = "diffusers' conversions differ by model family, and ckpt has no tables for this one"
        loading.unchecked(file.file, what, "give the base model with --base")
        return
    wrong = next((name for name in file.tensors if "lora" not in name), None)
    if wrong is not None:
        raise RejectedError(f"{wrong} does not contain 'lora'")
    component = _component(file)
    inside = {name.removeprefix(component): name for name in file.tensors if name.startswith(component)}
    for name in file.tensors:
        if _ENCODER.match(name):
            loading.use(name, name.rpartition(".lora")[0])
            what = "modules of a text encoder, which the base model does not hold"
            loading.needs_base(name, what)
        elif not name.startswith(component):
            loading.ignored[name] = f"the name does not begin with {component}"
    _load_inside(inside, file, _metadata(file, component), loading)


def _component(file: AdapterFile) -> str:
    if file.base_class is not None:
        return "unet." if file.base_class.startswith("UNet") else "transformer."
    return "unet." if any(name.startswith("unet.") for name in file.tensors) else "transformer."


def _metadata(file: AdapterFile, component: str) -> Config | None:
    if DIFFUSERS_KEY not in file.metadata:
        return None
    document = metadata_of(file)
    if not isinstance(document, dict):
        raise RejectedError("its lora_adapter_metadata is not a JSON object")
    return {key.removeprefix(component): value for key, value in document.items() if key.startswith(component)}


def metadata_of(file: AdapterFile) -> object:
    """Return what diffusers' own header holds, or None; raise RejectedError if it is not JSON."""
    try:
        return json.loads(file.metadata.get(DIFFUSERS_KEY, "null"))
    except (ValueError, RecursionError):
        raise RejectedError("its lora_adapter_metadata is not JSON") from None


def _load_inside(keys: Mapping[str, str], file: AdapterFile, config: Config | None, loading: Loading) -> None:
    base = file.base or {}
    modules = parents_of(base)
    if keys and not any(".lora_B." in key for key in keys):
        raise RejectedError("it finds no rank: there is no lora_B")
    if keys and config is not None and not config:
        raise RejectedError("its header has no configuration of this model: PEFT's defaults (rank 8) are used")
    found: dict[str, dict[str, Shape]] = {}
    for key, name in keys.items():
        hit = _KEY.fullmatch(key)
        if hit is None or hit["module"] not in modules:
            loading.ignored[name] = "the base model has no such module" if hit else "the suffix is not diffusers'"
            continue
        loading.use(name, hit["module"])
        role = hit["side"] or ("B_bias" if hit["bias"] else "magnitude")
        found.setdefault(hit["module"], {})[role] = file.tensors[name].shape
    is_dora = any("magnitude" in factors for factors in found.values())
    has_bias = any("B_bias" in factors for factors in found.values())
    for path, factors in found.items():
        own: Config = {"r": factors.get("B", (0, 0))[-1 if len(factors.get("B", ())) < 2 else 1]}
        settings = {**(own if config is None else config), "use_dora": is_dora, "lora_bias": has_bias}
        _check(path, factors, settings, base, loading)
    if config is not None:
        loading.say_scale("lora_alpha", config.get("lora_alpha"))
        missing = sorted(m for m in modules if f"{m}.weight" in base and m not in found and is_target(config, m))
        if missing and found:
            loading.incomplete(
                missing[0],
                f"the header's target_modules name {len(missing)} modules that the file has no tensors for",
                "was the adapter saved completely?",
            )


def _check(
    path: str, factors: Mapping[str, Shape], config: Config, base: Mapping[str, Shape], loading: Loading
) -> None:
    weight = base.get(f"{path}.weight")
    if weight is None:
        raise RejectedError(f"{path} has no weight that PEFT could adapt")
    rank_of(config, path)
    ways = [way for way in expected(FAMILIES["lora"], config, path, weight) if "A" in way and "B" in way]
    for way in ways[:1]:  # of a Linear or a convolution: diffusers' models have no other order of dims
        for role, shape in factors.items():
            right = way.get(role)
            if right is not None and right != shape:
                raise RejectedError(f"size mismatch: {role} of {path} is {list(shape)}, the model's is {list(right)}")
        if len(weight) > 2:
            _check_kernel(path, factors, weight)
        lacking = sorted(way.keys() - factors.keys())
        if lacking:
            what = f"the file lacks {', '.join(lacking)} of a module, which is initialised instead"
            loading.incomplete(path, what, "was the adapter saved completely?")


def _check_kernel(path: str, factors: Mapping[str, Shape], weight: Shape) -> None:
    """Hold the factors of an ungrouped convolution against its kernel."""
    down, up = factors.get("A"), factors.get("B")
    if down is not None and down[1:] != weight[1:]:
        raise RejectedError(f"size mismatch: A of {path} is {list(down)}, the weight's is {list(weight)}")
    if up is not None and up[0] != weight[0]:
        raise RejectedError(f"size mismatch: B of {path} is {list(up)}, the weight's is {list(weight)}")
