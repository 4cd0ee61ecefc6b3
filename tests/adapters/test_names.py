"""The key maps of image and video models, held against diffusers' classes and its conversions of whole files."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from adapters.image_models import ALL
from names.keymaps import assert_same, backward, forward
from torch import nn

from ckpt_tools.adapters.architectures import ARCHITECTURES, candidates
from ckpt_tools.adapters.architectures.architecture import Architecture
from ckpt_tools.adapters.architectures.choose import model_family_of
from ckpt_tools.adapters.architectures.names import place
from ckpt_tools.checkpoint.names.keymap import KeyMap, load_key_maps, of_weights

CONVERTERS = {
    "sdxl": "convert_ldm_unet_checkpoint",
    "sd3": "convert_sd3_transformer_checkpoint_to_diffusers",
    "flux2": "convert_flux2_transformer_checkpoint_to_diffusers",
    "sana": "convert_sana_transformer_to_diffusers",
    "z_image": "convert_z_image_transformer_checkpoint_to_diffusers",
    "hidream": "convert_hidream_transformer_to_diffusers",
    "wan": "convert_wan_transformer_to_diffusers",
    "wan-vace": "convert_wan_transformer_to_diffusers",
    "hunyuan_video": "convert_hunyuan_video_transformer_to_diffusers",
    "ltx": "convert_ltx_transformer_checkpoint_to_diffusers",
    "ltx2": "convert_ltx2_transformer_to_diffusers",
}
"""Model → diffusers' conversion of a single file. Those of FLUX.1, Chroma and Lumina 2 have real widths written in."""
LOOKED_UP = {
    "sdxl": ("out.0.weight", "out.0.bias"),
    "sd3": ("pos_embed",),
    "sana": (
        *("pos_embed", "y_embedder.y_embedding", "attention_y_norm.weight", "final_layer.scale_shift_table"),
        *(f"blocks.{i}.scale_shift_table" for i in range(2)),
    ),
}
"""What the conversions look up beside layers."""
LACKING = {"hunyuan_video": "single_", "ltx2": "prompt_adaln"}
"""They have the width of HunyuanVideo's single blocks, and lack the modulations that LTX-2.3 adds."""
_LAYERS = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Embedding


@cache
def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ALL[name][1]()


def family(name: str) -> Architecture:
    return ARCHITECTURES[ALL[name][0]]


def layers(name: str) -> list[str]:
    return [path for path, module in model(name).named_modules() if isinstance(module, _LAYERS)]


def key_map(name: str) -> KeyMap:
    return of_weights([load_key_maps("comfyui")[each] for each in family(name).main.sections], title=name)


def weights(name: str, of: nn.Module | None = None) -> dict[str, torch.Tensor]:
    """The weights and biases of a model's layers."""
    inside = set(layers(name))
    return {key: tensor for key, tensor in (of or model(name)).state_dict().items() if key.rpartition(".")[0] in inside}


def native_weights(name: str, of: nn.Module) -> dict[str, torch.Tensor]:
    """A model's weights under the authors' names."""
    return forward(key_map(name), weights(name, of), dict(of.config))


@pytest.mark.parametrize("name", ALL)
def test_every_layer_has_one_reading_in_every_spelling(name: str) -> None:
    architecture, paths = family(name), layers(name)
    for path in paths:
        where = place(path, architecture)
        assert path in where.diffusers
        kohya, spellings = where.part.kohya[0], [f"{where.part.component}.{path}", where.native, where.spelled("alias")]
        spellings += [f"diffusion_model.{where.native}"]
        spellings += [f"{kohya}_{each.replace('.', '_')}" for each in (path, where.native, where.spelled("alias"))]
        assert {place(each, architecture).native for each in spellings} == {where.native}
    assert architecture.name in candidates(paths) or not architecture.is_told_by_names


@pytest.mark.parametrize("name", ALL)
def test_base_is_told_by_its_class_and_by_its_weights(name: str) -> None:
    shapes = {key: tuple(tensor.shape) for key, tensor in model(name).state_dict().items()}
    config = {**model(name).config, "_class_name": type(model(name)).__name__}
    assert model_family_of(shapes, config).name == family(name).name
    of_layers = {key: tuple(tensor.shape) for key, tensor in weights(name).items()}
    by_weights = {"sd1": ("sd1", "sd2"), "sd2": ("sd1", "sd2"), "kolors": (), "ltx": ("ltx", "ltx2")}
    assert model_family_of(of_layers).possible == by_weights.get(name, (family(name).name,))


@pytest.mark.parametrize("name", ALL)
def test_map_of_weights_leads_back(name: str) -> None:
    native = native_weights(name, model(name))
    assert key_map(name).knows(native)
    assert_same(backward(key_map(name), native, dict(model(name).config)), weights(name))


@pytest.mark.parametrize("name", CONVERTERS)
def test_map_of_weights_agrees_with_diffusers_conversion(name: str) -> None:
    from diffusers.loaders import single_file_utils

    own, mapped = weights(name), key_map(name)
    own = {key: tensor for key, tensor in own.items() if LACKING.get(name, "\0") not in key}
    if name == "hunyuan_video":  # it takes Tencent's names
        turned = [replace(line, spellings=line.spellings[::-1]) for line in mapped.section.lines]
        mapped = replace(mapped, section=replace(mapped.section, lines=tuple(turned)))
    native = forward(mapped, own, dict(model(name).config))
    native |= {key: torch.zeros(1, 64, 32) for key in LOOKED_UP.get(name, ())}
    convert = getattr(single_file_utils, CONVERTERS[name])
    prefix = "model.diffusion_model." if name == "sdxl" else ""
    converted = convert({f"{prefix}{key}": tensor for key, tensor in native.items()}, config=dict(model(name).config))
    assert len(own) > 20
    assert [key for key, tensor in own.items() if not torch.equal(converted[key], tensor)] == []
