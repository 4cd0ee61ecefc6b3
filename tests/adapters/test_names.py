"""The key maps and tables of image and video models, compared with diffusers' classes, conversions and pipelines."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from adapters.image_models import ALL, MODELS, OF_DIFFUSERS, adapter, delta, linears, lora
from arrays import to_array
from names.keymaps import assert_same, backward, forward
from torch import nn

from ckpt_tools.adapters.adapter import AdapterModule
from ckpt_tools.adapters.architectures import ARCHITECTURES, candidates
from ckpt_tools.adapters.architectures.architecture import Architecture
from ckpt_tools.adapters.architectures.choose import choose_families, model_family_of
from ckpt_tools.adapters.architectures.names import place
from ckpt_tools.adapters.check import simulate
from ckpt_tools.adapters.ecosystems.loader_report import AdapterFile
from ckpt_tools.adapters.ecosystems.place_modules import in_native, place_all
from ckpt_tools.adapters.read.opening import entry_of
from ckpt_tools.checkpoint.names.keymap import KeyMap, load_key_maps, of_weights

CONVERTERS = {
    "sdxl": "convert_ldm_unet_checkpoint", "sd3": "convert_sd3_transformer_checkpoint_to_diffusers",
    "flux2": "convert_flux2_transformer_checkpoint_to_diffusers", "sana": "convert_sana_transformer_to_diffusers",
    "z_image": "convert_z_image_transformer_checkpoint_to_diffusers",
    "hidream": "convert_hidream_transformer_to_diffusers", "wan": "convert_wan_transformer_to_diffusers",
    "wan-vace": "convert_wan_transformer_to_diffusers",
    "hunyuan_video": "convert_hunyuan_video_transformer_to_diffusers",
    "ltx": "convert_ltx_transformer_checkpoint_to_diffusers", "ltx2": "convert_ltx2_transformer_to_diffusers",
}  # fmt: skip
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
    if name in MODELS:  # a part of the weights is evidence of nothing: other models have them as well
        part = {f"{path}.weight": shape for path, shape in linears(model(name)).items() if "attn" in path}
        assert name in model_family_of(part).possible
    by_weights = {"sd1": ("sd1", "sd2"), "sd2": ("sd1", "sd2"), "kolors": (), "ltx": ("ltx", "ltx2")}
    by_weights |= dict.fromkeys(OF_DIFFUSERS, ())
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


# diffusers' conversions of LoRAs, and its pipelines

PIPELINES = {
    "sd1": "StableDiffusionPipeline", "sdxl": "StableDiffusionXLPipeline", "qwen_image": "QwenImagePipeline",
    "z_image": "ZImagePipeline", "sana": "SanaPipeline", "hidream": "HiDreamImagePipeline",
    "lumina2": "Lumina2Pipeline", "wan": "WanPipeline", "hunyuan_video": "HunyuanVideoPipeline",
    "hunyuan_video_1_5": "HunyuanVideoPipeline", "ltx": "LTXPipeline", "ltx2": "LTX2Pipeline",
    "cogvideox": "CogVideoXPipeline",
}  # fmt: skip
"""Family → the pipeline that loads it. Chroma's conversion has the real widths written in."""
PARTS = {"wan": ("blocks", "time_embed", "attn2.add_k_proj"), "ltx2": ("time_embed", "attn1"), "ltx": ("blocks",)}
"""Family → parts of the model that are adapted by themselves; of all all are, too."""


def spellings(name: str, modules: list[AdapterModule[torch.Tensor]]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield the adapter as other tools would write it, rightly or not."""
    arrays = adapter(modules).with_factors(lambda module, role: to_array(module.factors[role]))
    native = [each.module for each in in_native(place_all(arrays, ARCHITECTURES[name]), as_lora=lambda each: each)]
    component = f"{ARCHITECTURES[name].main.component}."
    prefixes = (component, "lora_unet_") if component == "unet." else (component, "", "diffusion_model.", "lora_unet_")
    for prefix, down, alpha, some in itertools.product(prefixes, "AD", (False, True), (modules, native)):
        pair = ("lora_A", "lora_B") if down == "A" else ("lora_down", "lora_up")
        tensors = {}
        for module in some:
            path = prefix + (module.path.replace(".", "_") if prefix.endswith("_") else module.path)
            for role, end in zip("AB", pair, strict=True):
                tensors[f"{path}.{end}.weight"] = torch.as_tensor(module.factors[role])
            if alpha:
                tensors[f"{path}.alpha"] = torch.tensor(float(module.alpha.value if module.alpha else 1))
        yield f"{prefix} {pair[0]} {alpha} {'native' if some is native else 'diffusers'}", tensors


def changed_by_diffusers(name: str, model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What diffusers' pipeline adds to each module; nothing where it raises."""
    import diffusers

    model = copy.deepcopy(model)
    pipeline = getattr(diffusers, PIPELINES[name])
    nothing = dict.fromkeys(("text_encoder", "text_encoder_2", "hf_device_map"))
    fields = {**nothing, "components": {}, ARCHITECTURES[name].main.component: model}
    kind = type("Bare", (pipeline,), {**fields, "__init__": lambda _: None, "__getattr__": object.__getattribute__})
    try:
        with warnings.catch_warnings(action="ignore"):
            kind().load_lora_weights(dict(tensors))
    except (ValueError, KeyError, RuntimeError, TypeError, IndexError):
        return {}
    layers = {path: layer for path, layer in model.named_modules() if getattr(layer, "lora_A", None)}
    return {path: layer.get_delta_weight("default_0").detach() for path, layer in layers.items()}


LDM_BY_CHANCE = ("lora_unet_ lora_down False native", "lora_unet_ lora_down True native")
"""LDM's names of SD, which nobody writes: diffusers converts the few that have no number in them."""
BY_CHANCE = {("z_image", " lora_down True native"), *itertools.product(("sd1",), LDM_BY_CHANCE)}


@pytest.mark.full(but=["-hidream", "attn2.add_k_proj-wan"])
@pytest.mark.parametrize(("part", "name"), [(part, name) for name in PIPELINES for part in (*PARTS.get(name, ()), "")])
def test_diffusers_loads_what_the_verdict_says(part: str, name: str) -> None:
    """Whatever spelling: the modules that diffusers changes are those that check-lora expects it to change."""
    torch.manual_seed(0)
    model = ALL[name][1]()
    shapes = {  # PEFT adapts no convolution of groups; of a U-Net some blocks are enough
        path: shape
        for path, shape in linears(model).items()
        if not any(each in path for each in ("conv_depth", "refiner_blocks"))
        and part in path
        and (not name.startswith("sd") or path.startswith(("mid_block", "conv_in", "time_emb")))
    }
    modules = [lora(path, shape, rank=2, alpha=2.0) for path, shape in shapes.items()]
    is_loaded = False
    for label, tensors in spellings(name, modules):
        if (name, label) in BY_CHANCE:
            continue
        got = changed_by_diffusers(name, model, tensors)
        entries = {key: entry_of(key, to_array(tensor)) for key, tensor in tensors.items()}
        report = simulate(
            AdapterFile(file="x.safetensors", tensors=entries, is_named=True, architecture=name), "diffusers"
        )
        expected = {path.partition(".")[2] for path in report.matched} if report.loads else set()
        assert expected == set(got), label
        is_loaded |= expected == set(shapes)
        for module in modules:
            if module.path in got:
                torch.testing.assert_close(got[module.path].double(), delta(module), rtol=1e-4, atol=1e-5, msg=label)
    assert is_loaded


def flux1_blocks(double: int, single: int, width: int) -> dict[str, tuple[int, int]]:
    paths = [f"transformer_blocks.{i}.attn.add_q_proj" for i in range(double)]
    paths += [f"single_transformer_blocks.{i}.attn.to_q" for i in range(single)]
    return dict.fromkeys(paths, (width, width))


@pytest.mark.parametrize(
    ("shapes", "families"),
    [
        (flux1_blocks(19, 38, 3072), ("flux1", "chroma")),  # by their depth and width
        (flux1_blocks(20, 40, 3072), ("hunyuan_video",)),
        (flux1_blocks(19, 37, 3072), ()),
        (flux1_blocks(19, 38, 2048), ()),
        (
            {"layers.0.attention.wq": (64, 64), "layers.0.feed_forward.w1": (64, 64)},
            ("llm",),
        ),  # Llama as torchtitan has it
        ({"layers.0.feed_forward.w1": (64, 64)}, ()),  # Z-Image's as well
        ({"layers.0.attention.to_q": (64, 64)}, ("z_image",)),
        ({"layers.0.attention.qkv": (192, 64)}, ("z_image",)),
        ({"layers.0.attention.qkv": (3840, 2304)}, ("lumina2",)),
        ({"unet.down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k": (320, 768)}, ("sd1",)),
        ({"unet.down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k": (320, 1024)}, ("sd2",)),
        ({"transformer_blocks.0.attn1.to_q": (64, 64), "transformer_blocks.0.norm1.linear": (384, 64)}, ()),  # CogView4
        ({"transformer_blocks.0.attn.to_q": (64, 64), "transformer_blocks.0.img_mod.1": (384, 64)}, ("qwen_image",)),
    ],
)
def test_families_are_told_by_names_and_shapes(shapes: dict[str, tuple[int, int]], families: tuple[str, ...]) -> None:
    assert choose_families(adapter(lora(path, shape) for path, shape in shapes.items()), base=None) == families


def test_mlps_of_a_text_encoder_in_kohyas_names_load_in_diffusers() -> None:
    """Under PEFT's names diffusers does not recognise an adapter of these alone."""
    module = lora("lora_te_text_model_encoder_layers_0_mlp_fc1", (32, 16))
    ends = {"lora_down.weight": module.factors["A"], "lora_up.weight": module.factors["B"]}
    entries = {f"{module.path}.{end}": entry_of(end, to_array(tensor)) for end, tensor in ends.items()}
    file = AdapterFile(file="x.safetensors", tensors=entries, is_named=True, architecture="sd1")
    assert simulate(file, "diffusers").is_whole
