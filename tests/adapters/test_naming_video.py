"""Adapters of video models, held against diffusers' conversions and loaders."""

from __future__ import annotations

import copy

import pytest
import torch
from adapters.image_models import ALL, adapter, delta, linears, lora, to_target
from adapters.test_names import model
from safetensors import safe_open
from safetensors.torch import save_file

from ckpt_tools import api
from ckpt_tools.adapters.adapter import AdapterModule, Sourced
from ckpt_tools.adapters.architectures import ARCHITECTURES
from ckpt_tools.errors import UsageError


def same_changes(converted: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    """Does every converted pair add what the module did?"""
    for path, change in want.items():
        a, b = (converted[f"transformer.{path}.lora_{side}.weight"].double() for side in "AB")
        if not torch.allclose(b @ a, change, atol=1e-6):
            return False
    return len(converted) == 2 * len(want)


@pytest.mark.parametrize("target", ["comfyui", "kohya"])
def test_adapters_of_wan_are_what_diffusers_converts(target):
    from diffusers.loaders import lora_conversion_utils as conversions

    name = {"comfyui": "_convert_non_diffusers_wan_lora_to_diffusers", "kohya": "_convert_musubi_wan_lora_to_diffusers"}
    modules = [lora(path, shape) for path, shape in linears(model("wan")).items() if path.startswith("blocks.")]
    written = to_target(adapter(modules), target, architecture="wan")
    converted = getattr(conversions, name[target])(dict(written.tensors))
    assert same_changes(converted, {module.path: delta(module) for module in modules})


def test_adapters_of_ltx2_are_what_diffusers_converts():
    from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_ltx2_lora_to_diffusers

    modules = [lora(path, shape, rank=2) for path, shape in linears(model("ltx2")).items()]
    written = to_target(adapter(modules), "comfyui", architecture="ltx2").tensors
    names = {".lora_up.weight": ".lora_B.weight", ".lora_down.weight": ".lora_A.weight"}
    pairs = {
        key.replace(old, new): tensor for key, tensor in written.items() for old, new in names.items() if old in key
    }
    assert same_changes(
        _convert_non_diffusers_ltx2_lora_to_diffusers(pairs), {module.path: delta(module) for module in modules}
    )


def test_musubis_names_of_hunyuan_video_go_in_and_out():
    torch.manual_seed(0)
    for name in ("hunyuan_video", "hunyuan_video_1_5"):
        family = ARCHITECTURES[name]
        modules = [lora(path, shape) for path, shape in linears(model(name)).items() if "blocks.0" in path]
        written = to_target(adapter(modules), "kohya", architecture=name).tensors
        block = "lora_unet_double_blocks_0"
        expected = {f"{block}_img_mlp_fc1", f"{block}_txt_mod_linear"}
        is_split = name == "hunyuan_video_1_5"
        expected |= {f"{block}_img_attn_{part}" for part in "qkv"} if is_split else {f"{block}_img_attn_qkv"}
        assert expected <= {key.partition(".")[0] for key in written}
        assert not any("img_mlp_0" in key or (is_split and "img_attn_qkv" in key) for key in written)
        back = to_target(
            adapter(
                [
                    AdapterModule(
                        path=path,
                        family="lora",
                        factors={"A": written[f"{path}.lora_down.weight"], "B": written[f"{path}.lora_up.weight"]},
                        rank=Sourced(len(written[f"{path}.lora_down.weight"]), "A"),
                        alpha=Sourced(float(written[f"{path}.alpha"]), "alpha"),
                    )
                    for path in dict.fromkeys(key.partition(".")[0] for key in written)
                ],
                "kohya",
            ),
            "diffusers",
            architecture=family.name,
        ).tensors
        assert same_changes(dict(back), {module.path: delta(module) for module in modules})


def test_models_that_a_target_does_not_have_are_refused_by_name():
    modules = [lora("transformer_blocks.0.attn1.to_q", (16, 16)), lora("patch_embed.text_proj", (16, 8))]
    for target, who in (("comfyui", "ComfyUI"), ("kohya", "musubi-tuner")):
        with pytest.raises(UsageError, match=rf"{who}.* CogVideoX"):
            to_target(adapter(modules), target, architecture="cogvideox")
    with pytest.raises(UsageError, match=r"musubi-tuner.* LTX-2"):
        to_target(adapter([lora("patchify_proj", (16, 4))]), "kohya", architecture="ltx2")


MIXINS = {"wan": "Wan", "hunyuan_video_1_5": "HunyuanVideo", "ltx": "LTXVideo", "ltx2": "LTX2"}


def loads_in_diffusers(name: str, tensors: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    """Does the pipeline's own loader add to every module what was trained?"""
    from diffusers.loaders import lora_pipeline

    pipeline = getattr(lora_pipeline, f"{MIXINS[name]}LoraLoaderMixin")
    target = copy.deepcopy(model(name))
    try:
        converted = pipeline.lora_state_dict(
            {key: tensor.clone() for key, tensor in tensors.items()}
        )  # scales in place
        if not all("lora" in key for key in converted):
            return False
        target.load_lora_adapter(converted, network_alphas=None, prefix="transformer", adapter_name="a")
    except (ValueError, KeyError, IndexError, RuntimeError):
        return False
    layers = {path: target.get_submodule(path) for path in want}
    return all(
        hasattr(layer, "lora_A") and torch.allclose(layer.get_delta_weight("a").double(), want[path], atol=1e-5)
        for path, layer in layers.items()
    )


def ways_to_say(name: str, modules: list[AdapterModule[torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    """The adapter in the names that tools give it: way → tensors."""
    family = ARCHITECTURES[ALL[name][0]]
    comfyui = dict(to_target(adapter(modules), "comfyui", architecture=family.name).tensors)
    bare = {}
    for key in comfyui:
        if key.endswith(".lora_down.weight"):
            path = key.removesuffix(".lora_down.weight")
            down, up = comfyui[key], comfyui[f"{path}.lora_up.weight"]
            bare |= {
                f"{path}.lora_A.weight": down,
                f"{path}.lora_B.weight": up * (comfyui[f"{path}.alpha"] / len(down)),
            }
    ways = {"comfyui": comfyui, "bare": bare, "without prefix": {key.partition(".")[2]: bare[key] for key in bare}}
    if family.kohya is not None:
        ways["kohya"] = dict(to_target(adapter(modules), "kohya", architecture=family.name).tensors)
    return ways


@pytest.mark.full(but=["attn1-wan", "attn2.add_k_proj-wan"])
@pytest.mark.parametrize(
    ("part", "name"),
    [
        *((part, name) for part in ("blocks", "time_embed", "") for name in MIXINS),
        *(("attn1", name) for name in MIXINS if name != "hunyuan_video_1_5"),
        ("attn2.add_k_proj", "wan"),  # without add_v_proj, beside which the conversion expects it
    ],
)
def test_verdicts_are_those_of_diffusers_pipelines(part, name, tmp_path):
    torch.manual_seed(0)
    shapes = linears(model(name))
    modules = [lora(path, shapes[path], rank=3) for path in shapes if part in path and "refiner" not in path]
    assert modules
    want = {module.path: delta(module) for module in modules}
    model(name).save_pretrained(tmp_path / "base")
    for way, tensors in ways_to_say(name, modules).items():
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / "x.safetensors")
        verdict = api.check_lora(tmp_path / "x.safetensors", base=tmp_path / "base", loaders=["diffusers"]).verdict
        assert (verdict == "loads") is loads_in_diffusers(name, tensors, want), way


FOREIGN = {
    "diffusion-pipe": ("hunyuan_video", "transformer.double_blocks.0.{}_attn_qkv", "lora_A", "lora_B", ("img", "txt")),
    "VideoX-Fun": ("wan", "lora_unet__blocks_0_cross_attn_{}", "lora_down", "lora_up", ("k", "v", "q", "o")),
}
"""Tool → family, its names, and what they are of."""


@pytest.mark.parametrize("tool", FOREIGN)
def test_names_of_other_trainers_are_read(tool, tmp_path):
    family, name, down, up, parts = FOREIGN[tool]
    rows = 60 if family == "hunyuan_video" else 20
    tensors = {}
    for part in parts:
        tensors[f"{name.format(part)}.{down}.weight"] = torch.randn(2, 20)
        tensors[f"{name.format(part)}.{up}.weight"] = torch.randn(rows, 2)
    save_file(tensors, tmp_path / "x.safetensors")
    result = api.check_lora(tmp_path / "x.safetensors", loaders=["comfyui"])
    assert (result.architecture, result.verdict) == (family, "loads")
    made = api.export_lora(tmp_path / "x.safetensors", tmp_path / "peft", to="peft", alpha=2)
    with safe_open(tmp_path / "peft" / "adapter_model.safetensors", "pt") as file:
        names = {key.removeprefix("base_model.model.").partition(".lora_")[0] for key in file.keys()}  # noqa: SIM118
    assert made.ok
    assert names <= set(linears(model(family)))  # diffusers' own: of no other model does PEFT know these
