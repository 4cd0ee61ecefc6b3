"""InvokeAI's conversion of an adapter's names, and its layers' changes of weights.

The base is the one that the user chose, since InvokeAI tells families by widths that toys do not have; its checks of
a format's names are asked. FLUX.1 is BFL's model, the others are diffusers'.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stubs import stub
from toy_models import resized

_LOADER = "invokeai.backend.model_manager.load.model_loaders.lora"
_PATCHES = "invokeai.backend.patches"
_MANAGER = "invokeai.backend.model_manager"
_CAST = "load/model_cache/torch_module_autocast/cast_to_device"
_OF_CONFIGS = {"identification_utils", "flux2_variant", "lora"}


def start(source: str) -> None:
    """Import its converters; everything else of it is made up."""
    root = Path(source)
    files = [root / f"{_LOADER.replace('.', '/')}.py", *(root / "invokeai/backend/patches").rglob("*.py")]
    files += [root / _MANAGER.replace(".", "/") / f"{name}.py" for name in ("taxonomy", "util/model_util", _CAST)]
    files += [root / _MANAGER.replace(".", "/") / f"configs/{name}.py" for name in _OF_CONFIGS]
    names = {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for file in files}
    stub(("invokeai", "onnxruntime", "picklescan"), keep=names)
    for name in sorted(names):  # their packages are made up, and look for nothing but these
        parent = name.rpartition(".")[0]
        while parent and parent not in names:
            __import__(parent)
            sys.modules[parent].__path__ = [str(root / parent.replace(".", "/"))]
            parent = parent.rpartition(".")[0]
    sys.modules[f"{_MANAGER}.configs.base"] = SimpleNamespace(Config_Base=object)  # type: ignore[assignment]


def load(toy: Any, job: dict[str, str]) -> dict[str, Any]:
    """Return the weights with the adapter applied, under the names of InvokeAI's model."""
    import torch
    from safetensors.torch import load_file

    if not toy.invokeai:
        raise NotImplementedError("InvokeAI has no such model")
    module = __import__(_LOADER, fromlist=["LoRALoader"])
    taxonomy = __import__(f"{_MANAGER}.taxonomy", fromlist=["BaseModelType"])
    _check_format(toy, load_file(job["file"]))
    for name in dir(module):
        if name.startswith("lora_model_from_flux"):
            inner = getattr(module, name)
            inner.__globals__.update(
                {k: resized(v, toy.widths) for k, v in inner.__globals__.items() if k.startswith("lora_layers_from")}
            )
    loader = object.__new__(module.LoRALoader)
    loader._model_base = taxonomy.BaseModelType(toy.invokeai)
    loader._torch_dtype = torch.float32
    config = SimpleNamespace(path=job["file"], format=taxonomy.ModelFormat.LyCORIS)
    patch = loader._load_model(config)
    if toy.invokeai == "flux2":  # as its node does it
        converters = __import__(f"{_PATCHES}.lora_conversions.flux_bfl_peft_lora_conversion_utils", fromlist=["_"])
        patch = converters.convert_bfl_lora_patch_to_diffusers(patch)
    weights = load_file(job["base"] if toy.invokeai == "flux" else next(Path(job["model"]).glob("*.safetensors")))
    own = {name.rpartition(".")[0].replace(".", "_"): name for name in weights if name.endswith(".weight")}
    for key, layer in patch.layers.items():
        path = key.removeprefix("lora_transformer-").removeprefix("lora_unet_")
        name = own.get(path, "") if path == key.removeprefix("lora_unet_") else f"{path}.weight"
        if name in weights:  # of others it warns
            old = {
                "weight": weights[name],
                **({"bias": bias} if (bias := weights.get(f"{name[:-7]}.bias")) is not None else {}),
            }
            for end, change in layer.get_parameters(old, weight=1.0).items():
                weights[f"{name[:-6]}{end}"] = old[end] + change
    return weights


def _check_format(toy: Any, tensors: dict[str, Any]) -> None:
    """Raise where its model manager takes the file for no LoRA of the family."""
    configs = __import__(f"{_MANAGER}.configs.lora", fromlist=["_"])
    mod = SimpleNamespace(load_state_dict=lambda *_: tensors, metadata=dict)
    name = {"z-image": "ZImage", "qwen-image": "QwenImage", "wan": "Wan"}.get(toy.invokeai, "SDXL")
    getattr(configs, f"LoRA_LyCORIS_{name}_Config")._validate_looks_like_lora(mod)  # noqa: SLF001
