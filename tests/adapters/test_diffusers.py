"""What is written for diffusers: accepted by its own loaders, and it changes the output by the right amount.

The oracle adds each module's change to the weights, in float64 on the side of the test. Both outputs then come from
the same float32 model. TOLERANCE is relative to the largest change of the output: a sum of float32 products, through a
handful of layers, against one that was rounded once into the weight.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters.image_models import COMPONENT, MODELS, adapter, apply_to_model, linears, lora, to_target
from safetensors.torch import save_file
from torch import nn

from ckpt_tools.adapters.adapter import Adapter, AdapterModule
from ckpt_tools.adapters.ecosystems.output import Written

TOLERANCE = 2e-4
MIXIN = {
    "flux1": "Flux", "flux2": "Flux2", "sd3": "SD3", "sdxl": "StableDiffusionXL", "sd1": "StableDiffusion",
    "chroma": "Flux", "qwen_image": "QwenImage", "z_image": "ZImage", "lumina2": "Lumina2", "sana": "Sana",
    "hidream": "HiDreamImage", "wan": "Wan", "hunyuan_video": "HunyuanVideo", "ltx": "LTXVideo", "ltx2": "LTX2",
    "cogvideox": "CogVideoX", "aura_flow": "AuraFlow", "cosmos": "Cosmos", "mochi": "Mochi1", "krea2": "Krea2",
    "kandinsky5": "Kandinsky", "ideogram4": "Ideogram4", "ernie_image": "ErnieImage",
}  # fmt: skip
MIXIN = {name: f"{begin}LoraLoaderMixin" for name, begin in MIXIN.items()}
"""Model → the class that loads its adapters."""


class Pipeline:
    """The least that diffusers' mixins ask of a pipeline."""

    lora_scale = 1.0
    hf_device_map = None

    def __init__(self, **components: object) -> None:
        self.components = components
        for name in ("text_encoder", "text_encoder_2"):
            setattr(self, name, None)
        for name, component in components.items():
            setattr(self, name, component)


def pipeline_of(mixin: str, **components: object) -> Any:
    """A pipeline that loads adapters as diffusers' mixin does."""
    import diffusers.loaders.lora_pipeline as pipelines

    encoders = {each: nn.Module() for each in ("text_encoder", "text_encoder_2")}
    return type("Loading", (Pipeline, getattr(pipelines, mixin)), {})(**(encoders | components))


def load(name: str, file: Path, *, file_name: str | None = None, **components: object) -> None:
    """Load a file as `pipe.load_lora_weights(directory)` would."""
    pipe = pipeline_of(MIXIN[name], **components)
    with warnings.catch_warnings(action="ignore"):
        pipe.load_lora_weights(str(file.parent), weight_name=file_name)


def save(written: Written, directory: Path) -> Path:
    file = directory / written.file
    save_file(dict(written.tensors), file, metadata=dict(written.metadata))
    return file


def check(name: str, modules: list[AdapterModule[torch.Tensor]], written: Written, tmp_path: Path) -> None:
    """The loaded adapter changes the output like the changed weights do."""
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    base = make()
    expected = copy.deepcopy(base)
    apply_to_model(expected, modules)
    load(name, save(written, tmp_path), **{COMPONENT[name]: base})
    torch.manual_seed(1)
    given = inputs()
    with torch.no_grad():
        got = base(**given, return_dict=False)[0]
        want = expected(**given, return_dict=False)[0]
        base.disable_lora()
        before = base(**given, return_dict=False)[0]
    change = (want - before).abs().max()
    assert change > 1e-3
    assert (got - want).abs().max() <= TOLERANCE * change


def all_modules(name: str, **options: object) -> list[AdapterModule[torch.Tensor]]:
    torch.manual_seed(2)
    model = MODELS[name][0]()
    return [lora(path, shape, **options) for path, shape in linears(model).items()]


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_diffusers_adapter_of_every_layer_changes_output_by_its_delta(name: str, tmp_path: Path) -> None:
    modules = all_modules(name)
    written = to_target(adapter(modules), "diffusers")
    assert written.file == "pytorch_lora_weights.safetensors"
    assert not any("alpha" in key for key in written.tensors)
    check(name, modules, written, tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_diffusers_ranks_and_alphas_that_differ_keep_their_scales(name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    shapes = linears(MODELS[name][0]())
    if name == "sdxl":  # some of its hundreds of layers
        shapes = {path: shape for path, shape in shapes.items() if path.startswith(("mid", "up_blocks.0", "conv"))}
    modules = [lora(path, shape, rank=2 + i % 3, alpha=1.0 + i % 4) for i, (path, shape) in enumerate(shapes.items())]
    check(name, modules, to_target(adapter(modules), "diffusers"), tmp_path)


@pytest.mark.full(but=["flux1"])
@pytest.mark.parametrize("name", MODELS)
def test_diffusers_dora_changes_output_by_its_delta(name: str, tmp_path: Path) -> None:
    modules = [
        module for module in all_modules(name, dora=True) if module.factors["A"].ndim == 2 or "conv1" in module.path
    ]
    check(name, modules, to_target(adapter(modules), "diffusers"), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("target", ["kohya", "comfyui"])
@pytest.mark.parametrize("name", MODELS)
def test_native_names_come_back_through_diffusers_names_unchanged(name: str, target: str, tmp_path: Path) -> None:
    modules = [module for module in all_modules(name) if target == "kohya" or "up_blocks" not in module.path]
    native = to_target(adapter(modules), target)
    read = read_back(native, "kohya" if target == "kohya" else "comfyui")
    check(name, modules, to_target(read, "diffusers", architecture=name), tmp_path)


def read_back(written: Written, convention: str) -> Adapter[torch.Tensor]:
    """Read kohya's or ComfyUI's tensors, by hand."""
    from ckpt_tools.adapters.adapter import Sourced

    grouped: dict[str, dict[str, torch.Tensor]] = {}
    roles = {
        "lora_down.weight": "A", "lora_up.weight": "B", "lora_A.weight": "A", "lora_B.weight": "B",
        "dora_scale": "magnitude", "alpha": "alpha",
    }  # fmt: skip
    for key, tensor in written.tensors.items():
        suffix = next(each for each in roles if key.endswith("." + each))
        grouped.setdefault(key[: -len(suffix) - 1], {})[roles[suffix]] = tensor
    modules = []
    for path, factors in grouped.items():
        rank = factors["A"].shape[0]
        alpha = factors.pop("alpha", torch.tensor(float(rank)))
        modules.append(
            AdapterModule(
                path=path, family="lora", factors=factors, rank=Sourced(rank, "A"), alpha=Sourced(float(alpha), "alpha")
            )
        )
    return adapter(modules, convention)


def clip(*, with_projection: bool) -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=20, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        projection_dim=32, max_position_embeddings=8, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return (CLIPTextModelWithProjection if with_projection else CLIPTextModel)(config).eval()


def encoder_modules(model: nn.Module, component: str, kinds: tuple[str, ...]) -> list[AdapterModule[torch.Tensor]]:
    """Loras of some layers, named as older transformers did, with `text_model.`; ranks that differ."""
    return [
        lora(f"{component}.{path if path.startswith('text_model') else 'text_model.' + path}", shape, rank=2 + i % 2)
        for i, (path, shape) in enumerate(linears(model).items())
        if path.endswith(kinds)
    ]


@pytest.mark.parametrize("through", ["diffusers", "kohya", "comfyui"])
@pytest.mark.parametrize("kinds", [("q_proj", "fc1"), ("fc1", "fc2")], ids=["attention and mlp", "mlp alone"])
def test_text_encoders_of_sdxl_change_by_their_delta(kinds: tuple[str, ...], through: str, tmp_path: Path) -> None:
    torch.manual_seed(4)
    bases = {"text_encoder": clip(with_projection=False), "text_encoder_2": clip(with_projection=True)}
    unet = MODELS["sdxl"][0]()
    modules = [module for name, model in bases.items() for module in encoder_modules(model, name, kinds)]
    unet_module = lora("mid_block.attentions.0.proj_in", linears(unet)["mid_block.attentions.0.proj_in"])
    given = adapter([*modules, unet_module])
    if through != "diffusers":
        given = read_back(to_target(given, through), through)
    written = to_target(given, "diffusers")
    expected = {name: copy.deepcopy(model) for name, model in bases.items()}
    for module in modules:
        component, _, path = module.path.partition(".")
        model = expected[component]
        path = path if hasattr(model, "text_model") else path.removeprefix("text_model.")
        apply_to_model(model, [replace(module, path=path)])
    tokens = torch.tensor([[0, 5, 7, 1]])
    with torch.no_grad():
        before = {name: model(tokens)[0] for name, model in bases.items()}
    load("sdxl", save(written, tmp_path), unet=unet, **bases)
    for name, model in bases.items():
        with torch.no_grad():
            got, want = model(tokens)[0], expected[name](tokens)[0]
        change = (want - before[name]).abs().max()
        assert change > 1e-3
        assert (got - want).abs().max() <= TOLERANCE * change
