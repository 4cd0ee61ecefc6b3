"""The tables of video models, held against diffusers' classes and its conversions of checkpoints and adapters."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from adapters.image_models import adapter, linears, lora, to_target
from adapters.video_models import MODELS
from torch import nn

from ckpt_tools.adapters.adapter import AdapterModule
from ckpt_tools.adapters.architectures import ARCHITECTURES
from ckpt_tools.adapters.architectures.of_base import model_family_of
from ckpt_tools.adapters.architectures.resolve import place, readings
from ckpt_tools.adapters.ecosystems.simulation import AdapterFile
from ckpt_tools.errors import UsageError

CONVERTERS = {
    "wan": "convert_wan_transformer_to_diffusers",
    "wan-vace": "convert_wan_transformer_to_diffusers",
    "hunyuan_video": "convert_hunyuan_video_transformer_to_diffusers",
    "ltx": "convert_ltx_transformer_checkpoint_to_diffusers",
    "ltx2": "convert_ltx2_transformer_to_diffusers",
}
_LAYERS = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Embedding


@cache
def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][1]()


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_has_a_row(name):
    family = ARCHITECTURES[MODELS[name][0]]
    layers = [path for path, module in model(name).named_modules() if isinstance(module, _LAYERS)]
    for path in layers:
        (found,) = readings(path, family)
        assert path in found.diffusers
        assert place(found.native, family).diffusers == found.diffusers
    shapes = {f"{path}.weight": tuple(model(name).get_submodule(path).weight.shape) for path in layers}
    assert model_family_of(shapes, {"_class_name": type(model(name)).__name__}).name == family.name
    assert family.name in model_family_of(shapes).possible


def as_written(name: str) -> dict[str, torch.Tensor]:
    """The model's weights and biases under the authors' names, by the tables."""
    family = ARCHITECTURES[MODELS[name][0]]
    modules = []
    for path in linears(model(name)):
        module = model(name).get_submodule(path)
        factors = {"diff": module.weight.detach()}
        if module.bias is not None:
            factors["diff_b"] = module.bias.detach()
        modules.append(AdapterModule(path=path, family="full", factors=factors))
    written = to_target(adapter(modules), "comfyui", architecture=family.name)
    ends = {".diff_b": ".bias", ".diff": ".weight"}
    native = {}
    for key, tensor in written.tensors.items():
        end = next(each for each in ends if key.endswith(each))
        path = key.removeprefix("diffusion_model.").removesuffix(end)
        native[f"{place(path, family).spelled('alias')}{ends[end]}"] = tensor
    return native


@pytest.mark.parametrize("name", CONVERTERS)
def test_table_agrees_with_diffusers_conversion_of_a_whole_checkpoint(name):
    from diffusers.loaders import single_file_utils

    # Its conversions have the width of HunyuanVideo's single blocks, and lack the modulations that LTX-2.3 adds.
    lacks = {"hunyuan_video": "single_", "ltx2": "prompt_adaln"}.get(name, "\0")
    native = {key: tensor for key, tensor in as_written(name).items() if lacks not in key}
    converted = getattr(single_file_utils, CONVERTERS[name])(dict(native))
    paths = [path for path in linears(model(name)) if lacks not in path]
    assert len(paths) > 20
    for path in paths:
        assert torch.equal(converted[f"{path}.weight"], model(name).get_submodule(path).weight), path
