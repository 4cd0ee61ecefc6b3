"""ComfyUI: its model classes, its key map, its patches."""

from __future__ import annotations

import sys
from typing import Any

from stubs import stub

_PREFIX = "diffusion_model."
_ABSENT = ("torchsde", "kornia", "av", "comfy_aimdo", "comfy_kitchen", "sentencepiece", "torchvision", "torchaudio")


def start(source: str) -> None:
    """Import it, for the CPU."""
    stub((*_ABSENT, "spandrel", "alembic", "simpleeval"))
    sys.path.insert(0, source)
    sys.argv = ["comfyui", "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()


def _model(toy: Any) -> Any:
    import comfy.supported_models
    import torch

    settings = getattr(comfy.supported_models, toy.comfyui)(dict(toy.unet))
    return settings.get_model({}, "", device=torch.device("cpu"))


def native(toy: Any) -> dict[str, Any]:
    """Return random weights of the toy model, under the authors' names."""
    import torch

    torch.manual_seed(0)
    model = _model(toy)
    shapes = {
        name.removeprefix(_PREFIX): tensor.shape
        for name, tensor in model.state_dict().items()
        if name.startswith(_PREFIX)
    }
    found = {toy.of_authors(name): torch.randn(shape) / 4 for name, shape in shapes.items()}
    assert {*model.model_config.process_unet_state_dict(dict(found))} == {*shapes}, "renames are not ComfyUI's"
    return found


def load(toy: Any, job: dict[str, str]) -> dict[str, Any] | None:
    """Return the weights with the adapter applied, as ComfyUI's node LoraLoader does it at strength 1."""
    import comfy.lora
    import comfy.lora_convert
    import comfy.model_patcher
    import comfy.utils
    import torch

    if not toy.comfyui:
        raise NotImplementedError("ComfyUI has no such model")
    model = _model(toy)
    base = comfy.utils.load_torch_file(job["base"])
    own = model.model_config.process_unet_state_dict(dict(base))
    model.diffusion_model.load_state_dict(own, strict=True)
    adapter = comfy.lora_convert.convert_lora(comfy.utils.load_torch_file(job["file"], safe_load=True))
    patches = comfy.lora.load_lora(adapter, comfy.lora.model_lora_keys_unet(model, {}))
    patcher = comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))
    patcher.add_patches(patches, 1.0)
    for key, wanted in patcher.patches.items():
        weight = comfy.utils.get_attr(model, key)
        new = comfy.lora.calculate_weight(wanted, weight.detach().clone().float(), key)
        weight.data.copy_(new)
    state = model.diffusion_model.state_dict()
    return {toy.of_authors(name): state[name] for name in own}
