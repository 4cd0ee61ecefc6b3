"""sd-scripts' and musubi-tuner's networks, and LyCORIS, which both load for what their own networks lack.

The networks look for modules by their class and name: a tree of layers with these names and classes stands for the
model. The weights are those that the forward uses, found by a unit input for each column.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

from stubs import stub

_ABSENT = (
    "torchvision",
    "cv2",
    "xformers",
    "flash_attn",
    "sageattention",
    "apex",
    "av",
    "easydict",
    "ftfy",
    "imagesize",
)
_PLAIN = ("lora_up.weight", "lora_down.weight", "alpha")


def start(source: str) -> None:
    """Let it be imported; "" is LyCORIS, which is installed."""
    stub((*_ABSENT, "toml", "voluptuous", "open_clip"))
    for directory in (source, str(Path(source) / "src")) if source else ():
        sys.path.insert(0, directory)


def load(toy: Any, job: dict[str, str]) -> dict[str, Any]:
    """Return the weights with the adapter applied, under the names of the file `base`."""
    import torch
    from safetensors.torch import load_file

    base, adapter = load_file(job["names"]), load_file(job["file"])
    model = _tree(base, toy.kohya["blocks"])
    if job["place"] == "lycoris":
        from lycoris.kohya import create_network_from_weights

        network, _ = create_network_from_weights(1.0, None, None, None, model, weights_sd=dict(adapter))
        network.load_state_dict(adapter, strict=False)
        network.apply_to(None, model, False, True)
        return {name: _effective(model, name, each) for name, each in base.items()}
    module = importlib.import_module(toy.kohya["module"])
    if toy.kohya["source"] == "musubi":
        from musubi_tuner.utils.lora_utils import load_safetensors_with_lora_and_fp8

        if not toy.kohya.get("merges"):
            device = torch.device("cpu")
            return load_safetensors_with_lora_and_fp8(job["names"], [adapter], [1.0], False, device)
        network = module.create_arch_network_from_weights(1.0, adapter, unet=model, for_inference=True)
        network.merge_to(None, model, adapter, device="cpu")
    else:
        encoders = [torch.nn.Module()]
        network, own = module.create_network_from_weights(1.0, job["file"], None, encoders, model, for_inference=True)
        network.merge_to(encoders, model, own, torch.float32, "cpu")
    return {**base, **model.state_dict()}


def reads(kohya: dict[str, Any], names: list[str]) -> bool:
    """Have the script's own networks a place for tensors of these names? LyCORIS is its other way, where it has one."""
    ends = {name.partition(".")[2] for name in names}
    return ends <= {*_PLAIN} or not kohya.get("lycoris", True)


def _tree(base: dict[str, Any], classes: dict[str, str]) -> Any:
    """Return modules with the names and tensors of a state dict."""
    from torch import nn

    modules: dict[str, Any] = {"": nn.Module()}
    for name, tensor in base.items():
        path, _, end = name.rpartition(".")
        steps = path.split(".") if path else []
        for depth in range(len(steps)):
            here, parent = ".".join(steps[: depth + 1]), ".".join(steps[:depth])
            if here not in modules:
                modules[here] = _module(base, here, classes)
                modules[parent].add_module(steps[depth], modules[here])
        modules[path].register_parameter(end, nn.Parameter(tensor.clone(), requires_grad=False))
    return modules[""]


def _module(base: dict[str, Any], path: str, classes: dict[str, str]) -> Any:
    from torch import nn

    weight = base.get(f"{path}.weight")
    if weight is not None and weight.ndim == 2:
        return nn.Linear(weight.shape[1], weight.shape[0], bias=f"{path}.bias" in base)
    if weight is not None and weight.ndim in (4, 5):
        kind = nn.Conv2d if weight.ndim == 4 else nn.Conv3d
        return kind(weight.shape[1], weight.shape[0], tuple(weight.shape[2:]), bias=f"{path}.bias" in base)
    name = next((name for pattern, name in classes.items() if re.fullmatch(pattern, path)), "Part")
    return type(name, (nn.Module,), {})()


def _effective(model: Any, name: str, weight: Any) -> Any:
    """Return the weight that a layer's forward multiplies with."""
    import torch

    path, _, end = name.rpartition(".")
    module = model.get_submodule(path)
    if end != "weight" or weight.ndim < 2:
        return weight
    columns = weight[0].numel()
    units = torch.eye(columns).reshape(columns, *weight.shape[1:])
    with torch.no_grad():
        found = module(units) - module(torch.zeros_like(units))
    return found.reshape(columns, weight.shape[0]).T.reshape(weight.shape)
